"""A run that cannot fit main memory is refused before its model is loaded, by a dry run in the same words."""

import re

import pytest

from vipfast import Config, Trainer, cli, cpu_fit, main_memory, memory
from vipfast.errors import UsageError

SMALL = dict(
    steps=1, prompts_per_step=8, rollouts_per_prompt=6.0, allocator="uniform", heldout_prompts=16, eval_every=0, threads=1,
    device="cpu",
)  # fmt: skip


def machine(monkeypatch, total, free=None):
    monkeypatch.setattr(main_memory, "total_bytes", lambda: total)
    monkeypatch.setattr(main_memory, "free_bytes", lambda: total if free is None else free)


def flags(options):
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_dry_run_and_run_refuse_alike_and_name_what_helps(tmp_path, monkeypatch, capsys):
    machine(monkeypatch, 500_000_000)
    options = {**SMALL, "output_dir": str(tmp_path / "run")}
    assert cli.main([*flags(options), "--dry-run"]) == 2
    out, planned = capsys.readouterr()
    assert "0.50 GB of main memory, 0.50 GB of it free: most is taken in update" in out
    assert cli.main(flags(options)) == 2
    told = capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    for error in (planned, told):
        assert re.search(
            r"^error: --device cpu: this run is expected to take 0\.\d\d GB of main memory in its phase update \(", error
        )
        assert "and there are 0.50 GB of main memory" in error
        assert "a lower --micro-batch-tokens (8192), --gradient-checkpointing, --lora-rank 32, or a smaller model" in error


def test_a_run_that_fits_the_machine_but_not_what_is_free_is_warned_and_goes_on(tmp_path, monkeypatch, capsys):
    machine(monkeypatch, 10**12, free=10**8)
    options = {**SMALL, "steps": 0, "output_dir": str(tmp_path / "run")}
    assert cli.main([*flags(options), "--dry-run"]) == 0
    assert "warning: --device cpu: this run is expected to take" in capsys.readouterr().out
    trainer = Trainer(Config(**options))
    (warning,) = [note for note in trainer.notes if note.startswith("warning: --device cpu")]
    assert "1000.00 GB of main memory, 0.10 GB of it free; what helps" in warning
    machine(monkeypatch, 10**12)
    assert not [note for note in Trainer(Config(**options)).notes if "main memory" in note]


def test_a_step_of_more_rollouts_than_fit_names_the_options_of_rollouts(monkeypatch, capsys):
    machine(monkeypatch, 25 * 10**9)
    asked = flags({**SMALL, "prompts_per_step": 4096, "rollouts_per_prompt": 512, "max_new_tokens": 400})
    assert cli.main([*asked, "--dry-run"]) == 2
    out, error = capsys.readouterr()
    assert "in its phase generate (KV cache" in error
    assert "a lower --prompts-per-step (4096), a lower --rollouts-per-prompt (512), a lower --max-new-tokens (400)" in error
    assert "25.00 GB of main memory" in out and "25.00 GB of main memory" in error


def test_every_process_of_a_machine_counts(monkeypatch):
    phases = {"always": {"weights": 1e9}, "load": {"weights": 1e9}, "update": {"activations": 2e9}}
    machine(monkeypatch, 5 * 10**9)
    config = Config(device="cpu")
    assert cpu_fit.refusal(config, phases) is None
    monkeypatch.setattr(cpu_fit, "join", lambda: type("Ranks", (), {"size": 2}))
    needed = memory.size(2 * (3e9 + memory.PROCESS_BYTES))
    assert f"expected to take {needed} of main memory in 2 processes in its phase update" in cpu_fit.refusal(config, phases)


def test_a_resumed_run_which_fitted_is_not_asked_again(tmp_path, monkeypatch):
    options = {**SMALL, "output_dir": str(tmp_path / "run")}
    assert Trainer(Config(**options)).run() == 0
    machine(monkeypatch, 10**8)
    with pytest.raises(UsageError, match="--device cpu: this run is expected"):
        Trainer(Config(**{**options, "output_dir": str(tmp_path / "new")}))
    assert Trainer(Config(**{**options, "steps": 2}), resume=True).run() == 0
