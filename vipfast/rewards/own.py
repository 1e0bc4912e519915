"""A reward of your own by name, ``--reward module:function``, run in worker processes so that what hangs or dies in it costs
its time limit and not the run. Nothing of it is imported in the trainer."""

import importlib
import math
import os
import sys
from collections.abc import Callable
from numbers import Real
from typing import Any

from vipfast.errors import UsageError
from vipfast.rewards.base import Verdict
from vipfast.rewards.pool import Outcome, Pool
from vipfast.types import RewardRange


class Own:
    """Calls (completions, answers, metadata) -> [float, None or Verdict], one completion at a time (``rewards.base.Reward``).

    What raises, takes longer than its limit or returns anything else than one finite number or None leaves its rollout
    unscored, with the error named. Calls are dealt to several workers, so a reward must not count on what an earlier one kept.

    Args:
        name: "module:function", importable as in the folder the run was started from.
        workers: calls at a time.
        timeout_s: seconds a call may take.

    Raises:
        UsageError: there is no such module or function.
    """

    beside = True

    def __init__(self, name: str, *, workers: int, timeout_s: float):
        self.timeout_s = timeout_s
        self.pool = Pool("vipfast.rewards.own:child", (name, os.getcwd()), workers=workers, timeout_s=timeout_s)
        try:
            low_high_binary, self.has_answers = self.pool.facts()
        except RuntimeError as error:
            self.pool.close()
            raise UsageError(
                f"--reward {name}: cannot be used ({error}); give maths, code, exact, task, or an importable module:function"
            ) from error
        self.reward_range = low_high_binary and RewardRange(*low_high_binary)

    def close(self) -> None:
        self.pool.close()

    def __call__(self, completions: list[str], answers: list, metadata: list[dict]) -> list[Verdict]:
        return [self._verdict(outcome) for outcome in self.pool.map(zip(completions, answers, metadata))]

    def _verdict(self, outcome: Outcome) -> Verdict:
        if outcome.gave_up == "time":
            return Verdict(None, timed_out=True, error=f"a call longer than --reward-timeout {self.timeout_s:g} s")
        if outcome.error is not None or outcome.gave_up is not None:
            return Verdict(None, error=outcome.error or "MemoryError")
        return Verdict(*outcome.value)


def child(name: str, folder: str) -> Callable:
    """In the worker: the user's function, which takes and gives single values."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module, _, function = name.partition(":")
    reward = getattr(importlib.import_module(module), function)
    if not callable(reward):
        raise TypeError(f"{function} is a {type(reward).__name__}, no function")

    def call(completion: str, answer, metadata: dict) -> tuple[float | None, str | None]:
        value = _single(reward([completion], [answer], [metadata]))
        return (_number(value.reward), value.answer) if isinstance(value, Verdict) else (_number(value), None)

    promised = getattr(reward, "reward_range", None)
    promised = promised and (promised.low, promised.high, promised.binary)
    call.facts = promised, bool(getattr(reward, "has_answers", False))
    return call


def _single(values) -> Any:
    if isinstance(values, dict | str | bytes | set) or not hasattr(values, "__len__"):
        raise TypeError(f"it returned a {type(values).__name__}; return a list with one float or None per completion")
    if len(values) != 1:
        raise ValueError(f"it returned {len(values)} values for 1 completion; return one float or None each")
    return values[0]


def _number(value) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real) and not (hasattr(value, "item") and getattr(value, "ndim", 1) == 0):
        raise TypeError(f"it returned {value!r}; return one float, or None for 'cannot be graded', per completion")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"it returned {number}; return finite numbers, or None for 'cannot be graded'")
    return number
