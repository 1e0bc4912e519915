"""Five steps of real training on a CPU with the starter, on each kind of task (tools: tests/tools/test_rollouts.py)."""

import json
from pathlib import Path

import pytest

from vipfast import Config, Trainer
from vipfast.resolve import resolve
from vipfast.rewards.choose import choose_reward
from vipfast.rewards.grader import Grader

SAMPLES = Path(__file__).parent / "data" / "datasets"
SMALL = dict(
    allocator="uniform", prompts_per_step=2, rollouts_per_prompt=8, steps=5, heldout_prompts=0, eval_every=0, max_new_tokens=8,
    sample_rollouts=2, device="cpu", threads=1,
)  # fmt: skip


def train(tmp_path, **options):
    config = resolve(Config(**SMALL | options, output_dir=str(tmp_path / "run")), ask_torch=False).config
    trainer = Trainer(config)
    assert trainer.run() == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(config.steps + 1))
    assert all(line["budget/rollouts"] == 16 and line["reward/errors"] == 0 for line in lines[1:])
    return trainer, lines[1:]


@pytest.mark.parametrize(
    ("name", "verifier"), [("gsm8k.jsonl", "maths"), ("dapo_math.jsonl", "maths"), ("livecodebench.jsonl", "code")]
)
def test_five_steps_on_a_dataset(name, verifier, tmp_path):
    trainer, lines = train(tmp_path, task=str(SAMPLES / name))
    assert all(line["reward/unscored"] == 0 and 0.0 <= line["reward/mean"] <= 1.0 for line in lines)
    assert any(note.startswith("layout: ") and note.endswith(f"graded as {verifier}") for note in trainer.notes)


def test_five_steps_on_a_procedural_task(tmp_path):
    options = "{min_terms: 2, max_terms: 2, max_digits: 1}"
    trainer, lines = train(tmp_path, task="reasoning_gym:chain_sum", task_size=64, task_options=options, heldout_prompts=4)
    assert len(trainer.task.heldout) == 4 and all(line["reward/unscored"] == 0 for line in lines)
    assert lines[-1]["eval/mean@8"] is not None and lines[-1]["eval/maj@8"] is not None
    assert all(0.0 <= line["reward/mean"] <= 1.0 for line in lines)


@pytest.mark.parametrize(
    "name",
    sorted(
        path.name for path in SAMPLES.iterdir() if path.name not in ("gsm8k.jsonl", "dapo_math.jsonl", "livecodebench.jsonl")
    ),
)
def test_two_steps_on_every_other_layout(name, tmp_path):
    train(tmp_path, task=str(SAMPLES / name), steps=2)


def test_a_program_that_passes_some_tests_earns_its_share(tmp_path):
    """Whatever the starter writes, the loop takes rewards between 0 and 1 of --code-reward rate."""
    code = choose_reward(Config(code_reward="rate"), "code")
    tests = {"kind": "stdin", "tests": [{"input": "1", "output": "1"}, {"input": "2", "output": "4"}]}
    grader = Grader(code, None)
    try:
        (verdict,) = code(["```python\nprint(input())\n```"], [None], [tests])
        assert verdict.reward == 0.5 and grader.reward_range.holds(0.5)
    finally:
        grader.close()
