"""How many tokens rollouts under way still need, and how long that takes.

Finished rollouts alone tell little: those that end first are the short ones, and as long as all are running none has ended.
"""

import time
from collections.abc import Sequence

import numpy as np

from vipfast.engine.base import Engine, Finished, Request

KNOWN = 4096
"""Lengths of as many rollouts that have ended are remembered, over steps and evaluations."""

_lengths: list[int] = []


class Flow:
    """The rollouts of a step, or of an evaluation's share of this process.

    Args:
        total: rollouts to come in all, asked for or not yet.
        longest: most tokens of a rollout (--max-new-tokens); None where the engine does not say.
    """

    def __init__(self, total: int, longest: int | None = None):
        self.total, self.longest = total, longest
        self.running: dict[tuple[int, int], int] = {}  # (slot, index) -> decode steps before it was asked for
        self.steps = self.ended = self._tokens = 0
        self._start: float | None = None

    @classmethod
    def of(cls, engine: Engine, total: int) -> "Flow":
        """With the length limit of ``engine``."""
        sampling = getattr(engine, "sampling", None)
        longest = getattr(engine, "max_new_tokens", None) or getattr(sampling, "max_new_tokens", None)
        return cls(total, longest)

    def ask(self, requests: Sequence[Request]) -> None:
        """Rollouts are asked for; the clock starts with the first."""
        self._start = self._start or time.monotonic()
        for request in requests:
            for index in range(request.first_index, request.first_index + request.count):
                self.running[request.slot, index] = self.steps

    def advance(self, engine: Engine) -> list[Finished]:
        """What the next step of ``engine`` finishes; nothing where nothing is pending."""
        if not engine.pending:
            return []
        finished = engine.step()
        self.step(finished)
        if not engine.pending:
            self.running.clear()  # what the engine has lost does not run either
        return finished

    def step(self, finished: Sequence[Finished]) -> None:
        """Every rollout that was running has a token more; those in ``finished`` have ended."""
        self.steps += 1
        for row in finished:
            self.running.pop((row.slot, row.index), None)
            self._tokens += len(row.tokens)
            _lengths.append(len(row.tokens))
        self.ended += len(finished)
        if len(_lengths) > 2 * KNOWN:
            del _lengths[:-KNOWN]

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at the speed so far; None before the first token.

        Tokens to come over tokens a second; or, where a few long rollouts remain, which fill no batch, their decode steps.
        """
        ages_r = np.maximum(self.steps - np.array(list(self.running.values()), np.int64), 0)
        tokens = self._tokens + int(ages_r.sum())
        if not tokens or not self.steps:
            return None
        seconds = time.monotonic() - self._start
        known = np.array(_lengths[-KNOWN:])
        rest_r = np.zeros(len(ages_r))
        for age in np.unique(ages_r):
            rest_r[ages_r == age] = remaining(int(age), known, self.longest)
        waiting = max(self.total - self.ended - len(ages_r), 0)
        to_come = rest_r.sum() + waiting * np.concatenate([known, ages_r + rest_r]).mean()
        return float(max(to_come / tokens, rest_r.max(initial=0) / self.steps) * seconds)


def remaining(age: int, known: np.ndarray, longest: int | None) -> float:
    """Tokens that a rollout of ``age`` tokens is expected to need yet.

    Args:
        known: lengths of rollouts that have ended; the mean of the longer ones counts. Where none is longer, what has lasted
            so long is expected to last as long again.
        longest: bound of its length, or None.
    """
    longer = known[known > age]
    rest = float(longer.mean()) - age if len(longer) else float(max(age, 1))
    return rest if longest is None else min(rest, max(longest - age, 0))
