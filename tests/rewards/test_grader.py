"""A reward's failures are unscored and counted, its contract is enforced, and nothing else is swallowed."""

import numpy as np
import pytest

from vipfast.engine.base import Finished
from vipfast.errors import RewardError
from vipfast.rewards import exact
from vipfast.rewards.base import Verdict
from vipfast.rewards.combined import Combined
from vipfast.rewards.grader import Grader
from vipfast.tasks import arithmetic
from vipfast.types import ZERO_ONE, Finish, Prompt, RewardRange, Tally


class Decoder:
    def batch_decode(self, tokens, skip_special_tokens):
        return ["".join(map(chr, row)) for row in tokens]


def finished(*texts, finish=Finish.STOP):
    return [Finished(0, i, np.array(list(map(ord, t))), np.zeros(len(t), np.float32), finish) for i, t in enumerate(texts)]


def grade(reward, rows, **kwargs):
    grader = Grader(reward, Decoder(), **kwargs)
    grades = grader.grade([Prompt("u", "p", np.array([1]), "gold", {"level": 3})] * len(rows), rows)
    return grades.reward, grader


def test_reward_sees_texts_answers_and_metadata():
    seen = []
    values, _ = grade(lambda c, a, m: seen.append((c, a, m)) or [1.0, 0.5], finished("x", "yz"))
    assert values.tolist() == [1.0, 0.5] and seen == [(["x", "yz"], ["gold"] * 2, [{"level": 3}] * 2)]


def test_one_raise_of_four_leaves_that_sample_unscored_and_counted():
    def reward(completions, answers, metadata):
        if "bad" in completions:
            raise OSError("disk")
        return [1.0] * len(completions)

    values, grader = grade(reward, finished("a", "bad", "b", "c"))
    assert np.isnan(values[1]) and values[[0, 2, 3]].tolist() == [1, 1, 1] and grader.num_errors == 1


def test_none_and_nan_are_unscored_numpy_numbers_are_fine():
    values, grader = grade(lambda c, a, m: np.array([np.nan, 1.0, 0.0]), finished("a", "b", "c"))
    assert np.isnan(values[0]) and values[1:].tolist() == [1, 0] and grader.num_errors == 0
    assert np.isnan(grade(lambda c, a, m: [None], finished("a"))[0][0])


@pytest.mark.parametrize(
    "returned",
    [
        [1.0],
        [1.0] * 3,
        1.0,
        None,
        ["right", "wrong"],
        [float("inf"), 0.0],
        [1e39, 0],
        [0, -(10**400)],
        [[1], [0]],
        {1: 0, 2: 1},
        "10",
    ],
)
def test_a_broken_contract_stops_with_a_message(returned):
    with pytest.raises(RewardError, match="the reward returned"):
        grade(lambda c, a, m: returned, finished("a", "b"))


def test_errors_in_a_row_stop_the_run_and_a_success_resets_the_row():
    def reward(completions, answers, metadata):
        if completions != ["ok"]:
            raise KeyError("answer")
        return [1.0]

    grader = Grader(reward, Decoder(), max_errors=4)
    prompts = [Prompt("u", "p", np.array([1]))] * 7
    grader.grade(prompts, finished("x", "x", "x", "ok", "x", "x", "x"))
    with pytest.raises(RewardError, match=r"4 times in a row \(--max-reward-errors\).*KeyError.*--resume"):
        grader.grade(prompts[:1], finished("x"))


def test_engine_errors_are_unscored_and_never_reach_the_reward():
    values, _ = grade(lambda c, a, m: pytest.fail("called"), finished("a", finish=Finish.ERROR))
    assert np.isnan(values).all()


@pytest.mark.parametrize("truncated,value", [("grade", 1.0), ("mask", 1.0), ("zero", 0.0)])
def test_truncated_zero_overrides_the_grade(truncated, value):
    assert grade(lambda c, a, m: [1.0], finished("a", finish=Finish.LENGTH), truncated=truncated)[0].tolist() == [value]


def test_keyboard_interrupt_is_not_a_reward_failure():
    def reward(completions, answers, metadata):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grade(reward, finished("a"))


def test_a_reward_that_equals_the_threshold_is_a_success():
    # 0.7 in float32 is less than 0.7, so rewards stay float64 until they are stored
    values, _ = grade(lambda c, a, m: [0.7, 0.3], finished("a", "b"))
    tally = Tally.empty(["u"])
    tally.add(0, values, 0.7, 0, 0)
    assert tally.successes[0] == 1 and values.dtype == np.float64


def test_a_reward_is_held_to_the_range_it_promises():
    reward = lambda c, a, m: [float(text) if text else None for text in c]  # noqa: E731 - an attribute is set on it
    assert grade(reward, finished("7"))[1].reward_range is None
    reward.reward_range = RewardRange(-1, 2)
    assert grade(reward, finished("2", "-1", "0.5", ""))[0][:3].tolist() == [2, -1, 0.5]
    with pytest.raises(RewardError, match="returned 3, outside its own reward_range RewardRange"):
        grade(reward, finished("1", "3"))
    reward.reward_range = ZERO_ONE
    with pytest.raises(RewardError, match="returned 0.5, outside"):
        grade(reward, finished("0.5"))
    assert exact.reward.reward_range == arithmetic.reward.reward_range == ZERO_ONE


def test_truncated_zeros_widen_a_range_without_zero():
    reward = lambda c, a, m: [3.0] * len(c)  # noqa: E731 - an attribute is set on it
    reward.reward_range = RewardRange(3, 5, binary=True)
    values, grader = grade(reward, finished("a", finish=Finish.LENGTH), truncated="zero")
    assert values.tolist() == [0.0] and grader.reward_range == RewardRange(0, 5)
    assert grade(reward, finished("a"))[1].reward_range == RewardRange(3, 5, binary=True)
    for low, high in ((1, 1), (2, 1), (0, float("inf"))):
        with pytest.raises(ValueError, match="finite low < high"):
            RewardRange(low, high)


@pytest.mark.parametrize("binary_at", [None, 0.5])
def test_what_any_reward_cannot_grade_counts_for_no_one(binary_at):
    row = {"a": (1.0, 0.5), "b": (1.0, None), "c": (None, 0.5), "d": (0.0, 0.5)}
    parts = [("verifier", 1.0), ("other", 2.0)]
    rewards = [lambda c, a, m, i=i: [Verdict(row[text][i]) for text in c] for i in range(2)]
    combined = Combined([(name, reward, weight) for reward, (name, weight) in zip(rewards, parts)])
    grader = Grader(combined, Decoder(), binary_at=binary_at)
    grades = grader.grade([Prompt("u", "p", np.array([1]), "gold", {})] * 4, finished(*row))
    np.testing.assert_array_equal(grades.reward, [2.0, np.nan, np.nan, 1.0])
    np.testing.assert_array_equal(grades.verified, [1.0, np.nan, np.nan, 0.0])
    assert grader.part_sums().tolist() == [[1.0, 2.0], [1.0, 2.0]], "nor for the parts' means"
