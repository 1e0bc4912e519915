"""What a reward function gives, and what becomes of it: a verdict per completion, then columns of grades."""

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vipfast.errors import RewardError

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Verdict:
    """What a verifier found of one completion.

    Attributes: ``reward`` a finite number, or None for "cannot be graded"; ``answer`` the extracted answer in one spelling per
    value, for maj@k (None: none found); ``timed_out`` whether grading was given up after its time limit; ``error`` what went
    wrong where grading itself failed (a worker that died): unscored, counted, and after --max-reward-errors in a row the end;
    ``others`` what further rewards gave (rewards/combined.py), None: unscored, and with it the rollout.
    """

    reward: float | None
    answer: str | None = None
    timed_out: bool = False
    error: str | None = None
    others: tuple[float | None, ...] = ()


Reward = Callable[[list[str], list[Any], list[dict]], Sequence[float | None | Verdict]]
"""(completions, answers, metadata) -> per completion one finite number, None or NaN for "cannot be graded", or a Verdict.

Attributes it may have:
    reward_range: ``types.RewardRange``, a promise of where its numbers lie; ``--round-mode early`` makes use of it.
    has_answers: True where its verdicts carry answers, so that maj@k means something.
    beside: True where it waits for other processes and may be called from several threads at once: it then runs beside
        generation.
    check_golds: (prompts, seed) -> notes, called on the verifier before anything is loaded; raises DataError where nothing
        could be graded.
    close: called once nothing is graded any more.
    wants: names of further columns to be called with, as keywords, one value per completion (``rewards.shapes.shown``):
        "prompts", the prompt as it was given, a text or chat messages; "raw", the completion as it was sampled, without the
        opening tag of a thought that is put before the graded text where the prompt opened it; "ids", its token ids.
    names, weights: of several rewards in one (``rewards.combined.Combined``).
"""


@dataclass(frozen=True, eq=False)
class Grades:
    """Grades of n rollouts. ``reward`` float64 [n] is what the loss sees, ``verified`` float64 [n] the verifier's part of it,
    by which success and allocation go; NaN is unscored, in both alike. ``answer``: list [n] of str or None."""

    reward: np.ndarray
    verified: np.ndarray
    answer: list[str | None]

    @classmethod
    def plain(cls, rewards: Sequence[float]) -> "Grades":
        """Grades of a single reward function without extracted answers."""
        values = np.asarray(rewards, np.float64)
        return cls(values, values, [None] * len(values))


def verdicts(values, wanted: int) -> list[Verdict]:
    """What a reward function returned for ``wanted`` completions, as a verdict of each; NaN is None.

    Raises:
        RewardError: a wrong number of values, a value that is no number, or one beyond float32.
    """
    if isinstance(values, dict | str | bytes | set):
        raise RewardError(f"the reward returned a {type(values).__name__}; return a list with one float or None per completion")
    if not hasattr(values, "__len__") or len(values) != wanted:
        got = f"{len(values)} values" if hasattr(values, "__len__") else f"a {type(values).__name__}"
        several = f"{wanted} completion{'s' * (wanted != 1)}"
        raise RewardError(f"the reward returned {got} for {several}; return a list with one float or None each")
    return [_verdict(value) for value in values]


def _verdict(value) -> Verdict:
    if isinstance(value, Verdict):
        reward = _number(value.reward)
        return value if reward == value.reward else replace(value, reward=reward)
    return Verdict(_number(value))


def _number(value) -> float | None:
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and not (hasattr(value, "item") and np.ndim(value) == 0):
        raise RewardError(f"the reward returned {value!r}; return one float, or None for 'cannot be graded', per completion")
    # Stored as float32: what overflows there would reach the loss as an infinity.
    if value > _LARGEST or value < -_LARGEST:
        raise RewardError("the reward returned a number beyond ±3.4e38; return finite numbers, or None for 'cannot be graded'")
    return None if value != value else float(value)
