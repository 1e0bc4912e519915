"""What a reward function gives, and what becomes of it: a verdict per completion, then columns of grades."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


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
"""(completions, answers, metadata) -> per completion one finite number, None for "cannot be graded", or a Verdict.

Attributes it may have:
    reward_range: ``types.RewardRange``, a promise of where its numbers lie; ``--round-mode early`` makes use of it.
    has_answers: True where its verdicts carry answers, so that maj@k means something.
    beside: True where it waits for other processes and may be called from several threads at once: it then runs beside
        generation.
    check_golds: (prompts, seed) -> notes, called on the verifier before anything is loaded; raises DataError where nothing
        could be graded.
    close: called once nothing is graded any more.
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
