"""Rewards in workers as a run has them: named in the options, graded beside generation, logged by part, gone at the end."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from vipfast import Config, Trainer
from vipfast.errors import DataError, RewardError, UsageError
from vipfast.tasks.arithmetic import load_pool
from vipfast.telemetry.metrics import unknown

pytestmark = pytest.mark.filterwarnings("ignore:--allocator vigor")
ROOT = Path(__file__).resolve().parents[2]
MINE = """
import time
def few_ones(completions, answers, metadata):
    return [-text.count("1") / 10 for text in completions]
def slow(completions, answers, metadata):
    time.sleep(100)
"""


EMBEDDED = """
import sys
from vipfast.config import Config
from vipfast.tasks.base import load_task
class Bytes:
    chat_template = None
    def __call__(self, texts, add_special_tokens):
        return type("Ids", (), {"input_ids": [list(text.encode()) for text in texts]})()
load_task(Config(), Bytes())
assert not {f"vipfast.rewards.{name}" for name in ("pool", "worker", "maths", "equal", "own")} & set(sys.modules)
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """What the starter can do in GSM8K's layout, in a folder with a module of rewards."""
    rows = [{"question": p.text, "answer": f"We do it.\n#### {p.answer}"} for p in load_pool("train")[:400:5]]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return "sums.jsonl"


def small(task, name, **changes) -> Config:
    defaults = dict(
        task=task, steps=5, prompts_per_step=4, rollouts_per_prompt=8.0, vigor_num_rounds=2, heldout_prompts=4, eval_every=0,
        checkpoint_every=0, threads=1, device="cpu", reward_workers=2, output_dir=name,
    )  # fmt: skip
    return Config(**{**defaults, **changes})


def lines(folder):
    found = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/", "memory/"))} for line in found]


def workers():
    return [child for child in psutil.Process().children(recursive=True) if "worker.py" in " ".join(child.cmdline())]


def test_five_steps_by_a_verifier_and_a_further_reward_are_the_same_each_time(task):
    for name in ("a", "b"):
        run = Trainer(small(task, name, reward=("maths", "mine:few_ones"), reward_weights=(2.0, 1.0)))
        assert run.grader.beside and run.run() == 0 and not workers()
    assert lines("a") == lines("b")
    for line in lines("a")[1:]:
        assert not unknown(line) and line["reward/unscored"] == 0
        assert line["reward/verified"] == pytest.approx(line["reward/part/maths"])
        parts = 2 * line["reward/part/maths"] + line["reward/part/mine:few_ones"]
        assert line["reward/mean"] == pytest.approx(parts, abs=1e-6)
    assert any(line["reward/part/maths"] > 0 and line["reward/part/mine:few_ones"] < 0 for line in lines("a")[1:])
    assert all(line["eval/maj@8"] is not None for line in (lines("a")[0], lines("a")[-1]))


def test_a_reward_that_never_returns_costs_its_limit_and_stops_the_run_with_a_checkpoint(task):
    run = Trainer(small(task, "slow", reward=("mine:slow",), reward_timeout=0.1, max_reward_errors=3, heldout_prompts=0))
    with pytest.raises(RewardError, match="3 times in a row"):
        run.run()
    assert not workers() and (Path("slow") / "checkpoints" / "step-0").is_dir()


def test_the_embedded_task_starts_no_worker_and_imports_nothing_for_it():
    subprocess.run([sys.executable, "-c", EMBEDDED], check=True, cwd=ROOT)


def test_golds_that_are_no_answers_are_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    rows = [{"question": f"{i}?", "answer": f"We see at once that this holds, since {i} is what it is."} for i in range(40)]
    path = tmp_path / "prose.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr("vipfast.trainer.load_policy", lambda config: pytest.fail("a model was loaded"))
    with pytest.raises(DataError, match="--answer-field: .*cannot be graded against"):
        Trainer(small(str(path), str(tmp_path / "out"), reward=("maths",)))
    with pytest.raises(UsageError, match="--reward nowhere:f: cannot be used"):
        Trainer(small(str(path), str(tmp_path / "out"), reward=("nowhere:f",)))
    gc.collect()  # a trainer that was never built holds no worker
    assert not workers()


def test_prompts_from_python_may_be_graded_by_name_and_not_by_two_at_once(task):
    prompts = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(40)]
    run = Trainer(small("arithmetic", "named", steps=1, reward=("maths",)), prompts=prompts)
    assert type(run.task.reward).__name__ == "Maths" and run.run() == 0
    own = lambda completions, answers, metadata: [0.0] * len(completions)  # noqa: E731
    with pytest.raises(DataError, match="--reward maths: reward= was given in Python too"):
        Trainer(small("arithmetic", "two", reward=("maths",)), prompts=prompts, reward=own)
    with pytest.raises(DataError, match="without a reward"):
        Trainer(small("arithmetic", "none", reward=("task", "maths")), prompts=prompts)
