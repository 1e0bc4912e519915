"""What a run hands back: a truth, an exit code, scores, rows and folders."""

import json
import os
import signal
import subprocess
import sys

import pytest

from vipfast import Config, Trainer
from vipfast.run_result import DONE, STOPPED, RunResult


@pytest.fixture
def config(tmp_path):
    return Config(
        device="cpu", threads=1, steps=2, prompts_per_step=4, rollouts_per_prompt=2, allocator="uniform", heldout_prompts=4,
        eval_samples=2, eval_every=0, max_new_tokens=4, output_dir=str(tmp_path / "r"),
    )  # fmt: skip


def test_a_run_that_ends_is_true_and_tells_what_it_left(config, tmp_path):
    result = Trainer(config).run()
    assert result and result == DONE and result.ended == "done"
    assert (result.run, result.final, result.best) == tuple(tmp_path / f"r{part}" for part in ("", "/final", "/best"))
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert result.history == rows and [row["step"] for row in rows] == [0, 1, 2]
    assert result.scores == {name: rows[-1][f"eval/{name}"] for name in ("mean@2", "pass@2", "maj@2")}
    assert repr(result).startswith(f"RunResult(done, {tmp_path}/r, mean@2 ")


def test_a_run_that_is_stopped_is_false_and_has_the_scores_of_before(config, tmp_path):
    calls = []

    def reward(completions, answers, metadata):
        calls.append(len(completions))
        if len(calls) == 6:  # in a step: two calls are trials and the check of the sampler, the evaluation comes before
            os.kill(os.getpid(), signal.SIGTERM)
        return [float(len(text) % 2) for text in completions]

    result = Trainer(Config(**{**vars(config), "steps": 50}), reward=reward).run()
    assert not result and result == STOPPED and result.ended == "stopped" and result.final is None
    assert 0 < result.history[-1]["step"] < 50 and set(result.scores) == {"mean@2", "pass@2", "maj@2"}


def test_nothing_evaluated_nothing_scored(tmp_path):
    result = RunResult(STOPPED, tmp_path / "gone")
    assert (result.scores, result.history, result.best, result.final) == ({}, [], None, None)
    assert repr(result) == f"RunResult(stopped, {tmp_path}/gone)"


@pytest.mark.parametrize("code", [DONE, STOPPED])
def test_the_shell_gets_the_exit_code(code):
    told = f"import sys; from vipfast.run_result import RunResult; sys.exit(RunResult({code}, '.'))"
    assert subprocess.run([sys.executable, "-c", told], check=False).returncode == code
