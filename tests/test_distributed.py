"""torchrun with two gloo processes: the run of one process to 1e-9; stops and errors reach all; a lost process is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs_together import RUNS, asks_to_stop, config, watched
from safetensors.torch import load_file

from vipfast import Trainer
from vipfast.distributed import ALONE, Ranks
from vipfast.errors import RankError, RewardError

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
DIFFERENT = ("time/", "speed/", "memory/", "backend", "train/padding_share")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of one process and of two; the single ones first, since one of them is gone on with by two."""
    folder = tmp_path_factory.mktemp("runs")
    singles = {name: [] for name in ("uniform", "vip", "vigor")}
    for name, texts in singles.items():
        assert watched(Trainer(config(folder, name)), texts).run() == 0
    assert watched(Trainer(config(folder, "vip-joined-fsdp")), [], asks_to_stop(0)).run() == 3
    script = Path(__file__).with_name("runs_together.py")
    done = subprocess.run([*TORCHRUN, script, folder], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (folder / "told").exists(), done.stdout + done.stderr
    (folder / "single.json").write_text(json.dumps(singles))
    (folder / "output").write_text(done.stdout + done.stderr)
    return folder


def ranks(folder):
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def lines(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(DIFFERENT)} for line in found]


def assert_equal(run, single):
    weights, others = load_file(run / "final/model.safetensors"), load_file(single / "final/model.safetensors")
    assert weights.keys() == others.keys()
    assert max(float((weights[name] - others[name]).abs().max()) for name in others) < 1e-9
    for ours, theirs in zip(lines(run), lines(single), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == (pytest.approx(value, rel=0, abs=1e-9) if isinstance(value, float) else value), name


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_make_the_run_of_one(folder, name):
    single = folder / name.split("-")[0]
    assert_equal(folder / name, single)
    assert any(line["train/trained_rollouts"] for line in lines(folder / name)[1:])
    files = {str(path.relative_to(single)) for path in single.rglob("*") if path.is_file()}
    if name.endswith("fsdp"):
        files |= {f"checkpoints/step-{step}/optimizer-0000{rank}-of-00002.safetensors" for step in (0, 3) for rank in (0, 1)}
    assert {str(path.relative_to(folder / name)) for path in (folder / name).rglob("*") if path.is_file()} == files
    for path in single.glob("rollouts/*.parquet"):
        assert (folder / name / "rollouts" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", RUNS)
def test_ranks_sample_different_texts_and_together_those_of_one(folder, name):
    here, there = (rank["texts"][name] for rank in ranks(folder))
    assert here and there and not set(here) & set(there)
    single = json.loads((folder / "single.json").read_text())[name.split("-")[0]]
    assert sorted(here + there) == sorted(single) and len(set(single)) == len(single)


def test_shards_sum_in_float32_too(folder):
    """Another reduction of gloo's than in float64; the texts are the same, so are the weights but for rounding."""
    assert [rank["codes"]["float32"] for rank in ranks(folder)] == [0, 0]
    ours, theirs = (load_file(folder / name / "final/model.safetensors") for name in ("uniform-float32-fsdp", "uniform"))
    assert max(float((ours[name].double() - theirs[name]).abs().max()) for name in theirs) < 2e-3
    assert lines(folder / "uniform-float32-fsdp")[1]["train/grad_norm"] == pytest.approx(
        lines(folder / "uniform")[1]["train/grad_norm"], rel=1e-3
    )


@pytest.mark.parametrize("mode", ["early", "streaming"])
def test_rounds_that_do_not_wait_are_decided_on_each_rank_within_the_budget(folder, mode):
    assert [rank["codes"][mode] for rank in ranks(folder)] == [0, 0]
    steps = lines(folder / f"vigor-{mode}")[1:]
    assert [step["budget/rollouts"] for step in steps] == [24] * 3 and {step["alloc/rounds"] for step in steps} == {2}
    assert any(step["train/trained_rollouts"] for step in steps)


def test_a_signal_to_one_rank_stops_all_and_two_or_one_go_on(folder):
    for rank in ranks(folder):
        assert rank["codes"]["stopped"] == 3 and rank["codes"]["resumed"] == rank["codes"]["resharded"] == 0
    assert "SIGTERM after step 2" in (folder / "output").read_text()
    assert_equal(folder / "vigor-stopped-fsdp", folder / "vigor")
    assert_equal(folder / "vigor-resharded-fsdp", folder / "vigor")
    assert Trainer(config(folder, "vigor-alone"), resume=True).run() == 0
    assert_equal(folder / "vigor-alone", folder / "vigor")


def test_a_run_of_one_goes_on_with_two(folder):
    assert [rank["codes"]["joined"] for rank in ranks(folder)] == [0, 0]
    assert_equal(folder / "vip-joined-fsdp", folder / "vip")


def test_each_rank_keeps_its_own_half_of_the_moments(folder):
    sizes = [{}, {}]
    for rank in (0, 1):
        file = folder / f"vigor-fsdp/checkpoints/step-3/optimizer-0000{rank}-of-00002.safetensors"
        sizes[rank] = {name: len(rows) for name, rows in load_file(file).items()}
    assert sizes[0] and all(0 <= rows - sizes[1].get(name, 0) <= 1 for name, rows in sizes[0].items())
    state = torch.load(folder / "vigor-fsdp/checkpoints/step-3/state.pt", weights_only=True)
    assert sum(x.nbytes for x in state.values()) < 100_000  # no moments


def test_a_disk_that_fills_under_one_ranks_shard_stops_all_and_leaves_the_last_checkpoint(folder):
    for rank in ranks(folder):
        assert "the disk is full, so the shard of rank 1 was not saved" in rank["full"] and "step-0 is intact" in rank["full"]
    assert [path.name for path in (folder / "full-fsdp/checkpoints").iterdir()] == ["step-0"]


def test_an_error_of_one_rank_is_every_ranks(folder):
    first, second = (rank["raised"] for rank in ranks(folder))
    assert first == second and "values for" in first


def test_a_killed_rank_ends_the_others_with_a_message(folder):
    output = (folder / "output").read_text()
    assert output.count("rank 0 of 2 stops: another process") == 1 and "--resume" in output
    assert output.count("Traceback (most recent call last)") == 1  # torchrun's own report
    told, code = (folder / "told").read_text().split()
    assert code == "1" and 0 < float(told) - float((folder / "killed").read_text()) < 60
    assert [line["step"] for line in lines(folder / "killed-run")] == [0, 1]


def test_a_process_alone_hands_back_what_it_is_given():
    assert (ALONE.rank, ALONE.size) == (0, 1)
    assert ALONE.broadcast(1) == 1 and ALONE.gather(1) == ALONE.together(lambda: 1) == [1] and ALONE.decided(lambda: 1) == 1
    assert ALONE.exchange(["x"]) == ["x"] and ALONE.first_to_say("x") and ALONE.first_to_say("x")
    with pytest.raises(RewardError):
        ALONE.decided(_broken)


def test_only_torchruns_own_variables_make_ranks():
    stray = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}
    assert Ranks(stray).size == 1
    assert (Ranks({**stray, "TORCHELASTIC_RUN_ID": "none"}).rank, Ranks({**stray, "TORCHELASTIC_RUN_ID": "none"}).size) == (
        3,
        8,
    )


def test_a_lost_connection_is_named_and_nothing_else_is(monkeypatch):
    outlived = []
    monkeypatch.setattr("vipfast.distributed._outlive_sigterm", lambda: outlived.append(True))  # this process must not
    two = Ranks({"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    with pytest.raises(RankError, match="rank 0 of 2 stops.*--resume"), two.losses_named():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
    for text in ("shapes do not match", "Cannot use ReduceOp.PREMUL_SUM with Gloo"):
        with pytest.raises(RuntimeError, match=text) as caught, two.losses_named():
            raise RuntimeError(text)
        assert type(caught.value) is RuntimeError
    assert outlived == [True]
    with pytest.raises(RewardError), two.losses_named():
        _broken()


def _broken():
    raise RewardError("the request to the grading server timed out")
