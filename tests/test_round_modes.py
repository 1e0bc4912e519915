"""--round-mode in a whole run: early trains as rounds that wait do, streaming trains too, a dry run tells what they need."""

import json
from dataclasses import replace

import pytest

from vipfast import Config, Trainer
from vipfast.dry_run import plan
from vipfast.resolve import resolve

# What is computed from the sampler's own log-probs may differ in float32's last digits, since decoding batches differ in shape.
SAMPLED = (
    "train/loss",
    "train/grad_norm",
    "policy/entropy",
    "policy/ratio_raw_mean",
    "policy/ratio_raw_max",
    "policy/sync_gap",
)


def run(folder, mode, **changes):
    config = Config(
        steps=2, prompts_per_step=16, heldout_prompts=16, eval_every=0, checkpoint_every=0, threads=1, device="cpu",
        round_mode=mode, output_dir=str(folder / mode), **changes,
    )  # fmt: skip
    assert Trainer(config).run() == 0
    lines = [json.loads(line) for line in (folder / mode / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/", "memory/"))} for line in lines]


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    return run(tmp_path_factory.mktemp("runs"), "barrier")


def test_early_trains_as_rounds_that_wait(tmp_path, waiting):
    for line, expected in zip(run(tmp_path, "early"), waiting, strict=True):
        for name in expected:
            if name in SAMPLED and expected[name] is not None:
                assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
            else:
                assert line[name] == expected[name], name


def test_streaming_trains_on_the_whole_budget(tmp_path, waiting):
    lines = run(tmp_path, "streaming")
    for line, expected in zip(lines[1:], waiting[1:], strict=True):
        same = ("budget/rollouts", "alloc/rounds", "alloc/counts_min", "alloc/counts_max", "alloc/survivors")
        assert [line[name] for name in same] == [expected[name] for name in same] and line["budget/rollouts"] == 128
        assert line["alloc/tied_share"] is None and line["policy/sync_gap"] < 1e-4
    # Nothing but time decides otherwise, and the engine's is counted in tokens.
    (tmp_path / "again").mkdir()
    assert run(tmp_path / "again", "streaming") == lines


@pytest.mark.parametrize(
    "mode, at_once", [("barrier", "128 of a round"), ("early", "512 of a step"), ("streaming", "512 of a step")]
)
def test_dry_run_tells_the_same_rounds_and_how_many_rollouts_may_be_decoded_at_once(mode, at_once):
    config = resolve(Config(device="cpu"), ask_torch=False).config
    waiting, chosen = plan(config), plan(replace(config, round_mode=mode))
    assert [table.rows for table in chosen[:3]] == [table.rows for table in waiting[:3]]
    assert any(at_once in note for note in chosen[3].notes)
