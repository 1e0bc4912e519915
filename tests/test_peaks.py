"""Peak memory by phase is the phase's own, and is told once."""

import types

import pytest

from vipfast.telemetry import peaks
from vipfast.telemetry.peaks import CLEAR, Peaks

MB = 2**20


@pytest.mark.skipif(not CLEAR.exists(), reason="only Linux starts a process's peak anew")
def test_a_cpus_phases_are_measured_apart():
    measured = Peaks("cpu")
    block = bytearray(300 * MB)
    del block
    measured.mark("generate")
    block = bytearray(100 * MB)
    del block
    measured.mark("update")
    measured.mark("sync")
    assert 290 * MB < measured.used["generate"] < 400 * MB and 90 * MB < measured.used["update"] < 200 * MB
    assert measured.used["sync"] < 50 * MB
    assert measured.highest() == measured.start + measured.used["generate"]


def test_a_gpus_phases_are_its_allocators_peaks(monkeypatch):
    import torch

    state = types.SimpleNamespace(peak=0, resets=0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: state.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(state, "resets", state.resets + 1))
    measured = Peaks("cuda")
    for phase, peak in (("load", 5e9), ("evaluate", 7e9), ("generate", 6e9), ("evaluate", 4e9), ("save", 3e9)):
        state.peak = peak
        measured.mark(phase)
    assert measured.used == {"load": 5e9, "evaluate": 7e9, "generate": 6e9, "save": 3e9} and state.resets == 6
    text = measured.table(1, {"always": 1e9, "load": 4e9, "generate": 8e9, "logprob": 2e8, "evaluate": 9e6})
    assert text.splitlines() == [
        "memory, step 1         used   expected",
        "  load              5.00 GB    4.00 GB",
        "  generate          6.00 GB    8.00 GB",
        "  logprob                 -    0.20 GB",
        "  evaluate          7.00 GB    9.00 MB",
        "  save              3.00 GB          -",
    ]
    state.peak = 9e9
    measured.mark("update")
    assert "update" not in measured.used and state.resets == 6 and measured.highest() == 9e9


def test_where_peaks_cannot_start_anew_they_are_all_of_the_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(peaks, "CLEAR", tmp_path / "none")
    given = iter([100, 150, 170, 170])
    monkeypatch.setattr(peaks, "peak_bytes", lambda device: next(given))
    measured = Peaks("cpu")
    measured.mark("load")
    measured.mark("generate")
    assert measured.used == {"load": 50, "generate": 70} and measured.highest() == 170


def test_a_run_tells_expected_and_used_after_its_first_step(tmp_path, capsys):
    from vipfast import Config, Trainer

    config = Config(
        steps=2, prompts_per_step=4, rollouts_per_prompt=4.0, vigor_num_rounds=2, heldout_prompts=8, eval_every=0,
        checkpoint_every=0, threads=1, device="cpu", output_dir=str(tmp_path / "run"), updates_per_step=2,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="only 2 of --prompts-per-step 4") as warned:
        assert Trainer(config).run() == 0
    assert len(warned) == 1
    told = capsys.readouterr().out.splitlines()
    (at,) = [i for i, line in enumerate(told) if line.startswith("memory, step 1 ")]
    phases = ["load", "generate", "logprob", "update", "sync", "evaluate", "save"]
    rows = [line.split() for line in told[at + 1 : at + 1 + len(phases)]]
    assert told[at].split()[3:] == ["used", "expected"] and [row[0] for row in rows] == phases
    assert [row for row in rows if "-" in row] == [["save", *rows[-1][1:3], "-"]], "all was measured, all but saving expected"
    end = at + 1 + len(phases)
    assert told[end].startswith("  besides: ") and told[at - 1].split()[0] == "1" and told[end + 1].split()[0] == "2"
