"""A run that learns nothing says so once it is no chance, with the likely cause; what is only hard or young is left alone."""

import json
import re

import numpy as np
import pytest

from vipfast import Config, Trainer
from vipfast.errors import DeadRunError
from vipfast.telemetry.health import Health, example
from vipfast.telemetry.samples import COLUMNS

pytestmark = pytest.mark.filterwarnings("ignore:--allocator vigor")


def line(step, mean=0.0, **changes):
    """A step's line; by default 512 rollouts that all got ``mean``."""
    usual = {
        "step": step, "budget/rollouts": 512, "reward/mean": mean, "reward/unscored": 0, "signal/frac_wasted_rollouts": 1.0,
        "signal/frac_all_one": 0.0, "rollout/truncated_frac": 0.1, "train/trained_rollouts": 0, "policy/entropy": None,
    }  # fmt: skip
    return usual | {name.replace("__", "/"): value for name, value in changes.items()}


def learning(step, mean=0.3, entropy=0.7):
    changes = {"signal/frac_wasted_rollouts": 0.5, "train/trained_rollouts": 200, "policy/entropy": entropy}
    return line(step, mean, **changes)


def told(lines):
    """{step: what was said} of a run's lines."""
    health = Health()
    said = {row["step"]: health.add(row) for row in lines}
    return {step: text for step, text in said.items() if text}, health


def many(make, count=60, first=1):
    return [make(step) for step in range(first, first + count)]


@pytest.mark.parametrize(
    "lines, first, cause",
    [
        (many(lambda s: line(s, None, reward__unscored=512)), 3, "scored no rollout for 3 steps.*answers or metadata"),
        (many(line), 10, "of the 5120 rollouts of 10 steps got the reward 0; perhaps it looks for another form"),
        (many(lambda s: line(s, 0.5)), 10, "got the reward 0.5; perhaps"),
        (many(lambda s: line(s, 1.0, signal__frac_all_one=1.0)), 10, "the task is solved, or the reward accepts anything"),
        (many(lambda s: line(s, 0.1 * (s % 3))), 10, "differed in no prompt's group.*at the prompt alone"),
        (many(lambda s: line(s, rollout__truncated_frac=1.0)), 10, "length limit; --max-new-tokens is too small"),
        (
            many(lambda s: line(s, 0.2, rollout__truncated_frac=1.0, signal__frac_wasted_rollouts=0.6)),
            10,
            "length limit",
        ),  # --truncated mask: rewards differ, and none of the rollouts is in the update
        ([learning(1, entropy=0.002), *many(lambda s: line(s, 0.1 * (s % 2)), first=2)], 11, r"copies \(entropy 0.002\)"),
        (
            [*many(learning, 3), *many(line, first=4)],
            8,
            "none of the 2560.*before the mean was 0.3; the policy.*--learning-rate",
        ),
    ],
    ids=["unscored", "all-0", "constant", "all-1", "by-prompt", "truncated", "masked", "entropy", "fallen"],
)
def test_what_is_wrong_is_told_with_its_cause_and_then_rarely(lines, first, cause):
    said, health = told(lines)
    assert re.search(cause, said[first]), said[first]
    assert list(said) == [step for step in (first, first + 10, first + 30) if step <= len(lines)]
    assert health.dead


def hard(successes, rollouts=512, seed=0, steps=300):
    """A run whose every rollout succeeds with a small probability, each in a group of its own."""
    draws = np.random.default_rng(seed).binomial(rollouts, successes, steps)
    return [
        learning(step, won / rollouts) | {"budget/rollouts": rollouts} if won else line(step, budget__rollouts=rollouts)
        for step, won in enumerate(draws, 1)
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("successes, rollouts", [(1 / 300, 512), (1 / 500, 512), (1 / 30, 32)])
def test_a_hard_task_with_few_successes_is_left_alone(successes, rollouts, seed):
    assert told(hard(successes, rollouts, seed))[0] == {}


def test_a_short_or_broken_silence_is_left_alone():
    assert told(many(lambda s: line(s, None, reward__unscored=512), 2))[0] == {}
    assert told(many(line, 9))[0] == {}
    assert told(many(lambda s: line(s, budget__rollouts=16), 31))[0] == {}  # 496 rollouts
    assert told([line(step) if step % 10 else learning(step, 1 / 512) for step in range(1, 100)])[0] == {}
    assert told([{"step": 0, "eval/mean@8": 0.2}])[0] == {}


def test_one_step_with_signal_brings_it_back_to_life():
    said, health = told([*many(line, 12), learning(13)])
    assert list(said) == [10] and health.dead is None


LIMITED, COPIED = {"rollout/truncated_frac": 1.0}, {"policy/entropy": 0.002}
TRUNCATED = "all 5120 rollouts of the last 10 steps ran into the length limit; --max-new-tokens is too small"
COPIES = r"for 10 steps the rollouts of a prompt have been all but copies \(entropy 0.002\).*lower --learning-rate"


@pytest.mark.parametrize(
    "changes, text",
    [(LIMITED, TRUNCATED), (COPIED, COPIES), (LIMITED | COPIED, f"{TRUNCATED}.*; {COPIES}")],
    ids=["truncated", "copies", "both"],
)
def test_what_harms_a_run_that_still_learns_is_told_once_it_lasts_and_then_rarely(changes, text):
    said, health = told([*many(learning, 3), *many(lambda s: learning(s) | changes, first=4)])
    assert list(said) == [13, 23, 43] and re.match(text, said[13]), said
    assert health.dead is None, "--stop-when-dead does not end it"


@pytest.mark.parametrize("changes", [LIMITED, COPIED], ids=["truncated", "copies"])
def test_what_harms_for_a_few_steps_or_rollouts_is_left_alone(changes):
    def broken(step):
        return learning(step) | (changes if step % 10 else {})

    assert told(many(broken))[0] == {}
    assert told(many(lambda s: learning(s) | changes | {"budget/rollouts": 16}, 31))[0] == {}  # 496 rollouts
    assert told(many(lambda s: learning(s) | {"rollout/truncated_frac": 0.99, "policy/entropy": 0.011}))[0] == {}


def test_a_step_without_an_update_leaves_the_entropy_as_it_was():
    said, _ = told(many(lambda s: learning(s) | COPIED if s % 3 else line(s)))
    assert list(said) == [10, 20, 40]


def test_a_run_that_learns_nothing_any_more_says_that_at_once_and_no_more():
    said, health = told([*many(lambda s: learning(s) | LIMITED, 12), *many(lambda s: line(s) | LIMITED, first=13)])
    dead = {step: text for step, text in said.items() if "nothing has been learned since step 12" in text}
    assert list(said)[:1] == [10] and list(dead) == list(said)[1:] == [17, 27, 47] and health.dead


def test_one_that_reads_the_earlier_lines_first_says_the_same():
    lines = [*many(lambda s: learning(s) | LIMITED, 12), *many(line, first=13)]
    whole, _ = told(lines)
    for cut in (1, 5, 11, 20):
        resumed = Health()
        for row in lines[:cut]:
            resumed.add(json.loads(json.dumps(row)))
        assert {row["step"]: text for row in lines[cut:] if (text := resumed.add(row))} == {
            step: text for step, text in whole.items() if step > cut
        }


def test_the_example_is_short_and_beside_its_gold_answer():
    rows = [dict(zip(COLUMNS, ("u", "p", "x\n" * 300, answer, 0.0, 0, 0, "stop"))) for answer in (None, "42")]
    assert re.fullmatch(r"\. E\.g\. the completion 'x⏎x.{116}…', where the gold answer is '42'", example(rows))
    assert example([]) == "" and "gold" not in example(rows[:1])


def small(folder, **changes) -> Config:
    defaults = dict(
        steps=4, prompts_per_step=4, rollouts_per_prompt=8.0, vigor_num_rounds=2, heldout_prompts=4, eval_every=0,
        checkpoint_every=0, threads=1, device="cpu", output_dir=str(folder),
    )  # fmt: skip
    return Config(**{**defaults, **changes})


def nothing(completions, answers, metadata):
    return [None] * len(completions)


def exactly(completions, answers, metadata):
    return [float(text.strip() == answer) for text, answer in zip(completions, answers)]


def test_a_run_says_it_beside_an_example(tmp_path, capsys):
    assert Trainer(small(tmp_path / "r"), reward=nothing).run() == 0
    said = [text for text in capsys.readouterr().out.splitlines() if text.startswith("warning: nothing has been learned")]
    assert len(said) == 1 and re.search(
        "since step 0: the reward has scored no rollout for 3 steps.*gold answer is '.+'", said[0]
    )


def test_stop_when_dead_ends_the_run_saved_and_it_goes_on_once_mended(tmp_path, capsys):
    with pytest.raises(DeadRunError, match=r"--stop-when-dead: nothing has been learned.*All is saved.*reward=…, resume=True"):
        Trainer(small(tmp_path / "r", steps=9, stop_when_dead=True), reward=nothing).run()
    assert (tmp_path / "r" / "checkpoints" / "step-3" / "COMPLETE").is_file()
    mended = Trainer(small(tmp_path / "r", steps=5, stop_when_dead=True), reward=exactly, resume=True)
    assert mended.run() == 0 and mended.step == 5
    with pytest.raises(DeadRunError):
        Trainer(small(tmp_path / "r", steps=9, stop_when_dead=True), reward=nothing, resume=True).run()
    assert Trainer(small(tmp_path / "r", steps=9), reward=nothing, resume=True).run() == 0


def test_the_default_run_has_nothing_to_say(tmp_path, capsys):
    assert Trainer(small(tmp_path / "r", steps=12, stop_when_dead=True)).run() == 0
    assert "nothing has been learned" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_a_ruined_policy_is_told_by_its_learning_rate(tmp_path):
    config = small(tmp_path / "r", steps=20, prompts_per_step=16, learning_rate=1.0, stop_when_dead=True)
    with pytest.raises(DeadRunError, match="none of the .* earned anything, before the mean was .*lower --learning-rate"):
        Trainer(config).run()
