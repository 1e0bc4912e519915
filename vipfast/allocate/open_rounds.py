"""VIGOR's rounds without the wait for the slowest rollout: a prompt goes on while rollouts of its round are still pending.

``Early`` makes the very decisions of rounds that wait, each as soon as nothing pending can change it; where a reward function
promises no range, a prompt with rollouts pending may still come to any variance. ``Streaming`` is a variant of the paper's
rule: its cut is a running quantile. Both start the same counts in the same rounds as rounds that wait, ``Early`` for the same
prompts, whatever the order in which rollouts finish.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vipfast.allocate.base import Counts
from vipfast.allocate.score import BOUNDS, SCORES
from vipfast.allocate.solver import rounded
from vipfast.types import Tally

NOBODY = np.zeros(0, np.int64)


class Round(NamedTuple):
    """``draws`` rollouts for each of ``active`` prompts, and one more for the best ``extra`` of them."""

    active: int
    draws: int
    extra: int


class OpenRounds:
    """Where every prompt of a step stands.

    Args:
        rounds: of the schedule, K of them.
        cut: how many of so many prompts stay after a round.
        ties_B: uint64 [B], seeded keys; of two equal scores the lower key ranks first.
        score: a key of ``SCORES``.

    Attributes: ``asked_KB`` int64 [K, B], rollouts started in each round; ``at_B`` int64 [B], the last round each prompt is in.
    """

    def __init__(self, rounds: list[Round], cut: Callable[[int], int], ties_B: np.ndarray, score: str):
        self.rounds, self.cut, self.score, self.bounds = rounds, cut, SCORES[score], BOUNDS[score]
        self._by_ties = np.argsort(ties_B, kind="stable")
        self.asked_KB = np.zeros((len(rounds), len(ties_B)), np.int64)
        self.at_B = np.zeros(len(ties_B), np.int64)

    def start(self) -> Counts:
        """The first round, which looks at nothing."""
        self.asked_KB[0, self._by_ties] = self.rounds[0].draws + (np.arange(len(self._by_ties)) < self.rounds[0].extra)
        return self.asked_KB[0].copy()

    def resume(self, tally: Tally) -> Counts:
        """int64 [B], rollouts to start now, by what is back."""
        self._look(tally)
        counts_B = np.zeros(len(self.at_B), np.int64)
        for round_, following in enumerate(self.rounds[1:]):
            # One round at a time: a group is a round, so that rewards are merged as where rounds wait.
            slots, extra = self._choose(round_, counts_B == 0)
            if not len(slots):
                continue
            self.at_B[slots] = round_ + 1
            self.asked_KB[round_ + 1, slots] = counts_B[slots] = following.draws + extra
            self._moved(tally, slots)
        stalled = not (counts_B.any() or tally.pending.any() or self.done(tally))
        assert not stalled, "a round whose rollouts are all back must be decided"
        return counts_B

    def done(self, tally: Tally) -> bool:
        """Whether every round is asked for in full and back."""
        return not tally.pending.any() and all(self._num_in(t) == round_.active for t, round_ in enumerate(self.rounds))

    def survivors(self) -> np.ndarray:
        """int64 [n], the prompts of the last round."""
        return np.flatnonzero(self.at_B == len(self.rounds) - 1)

    def tied_share(self, tally: Tally) -> float | None:
        """alloc/tied_share of the finished step, where it means something."""
        return None

    def _members(self, round_: int) -> np.ndarray:
        """int64 [n], prompts whose last round so far is ``round_``, by their keys."""
        return self._by_ties[self.at_B[self._by_ties] == round_]

    def _num_in(self, round_: int) -> int:
        """Prompts that have come to ``round_``, including those that went on."""
        return int(np.count_nonzero(self.at_B >= round_))

    def _look(self, tally: Tally) -> None:
        raise NotImplementedError

    def _choose(self, round_: int, free_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Prompts [n] of ``round_`` that go on now, out of ``free_B`` bool [B], and what the next round gives each beside its
        draws, int64 [n].
        """
        raise NotImplementedError

    def _moved(self, tally: Tally, slots: np.ndarray) -> None:
        """``slots`` have gone on to their next rounds."""


class Early(OpenRounds):
    """Every prompt of a round has a lowest and a highest score that it may still come to. One goes on when fewer others than
    there are places may come before it at worst, and when it is as certain whether it is among the ``extra`` best.

    A prompt that has gone on takes one of the places, so nobody need know where it would have ranked. One that may yet come
    from the round before counts as coming before everybody: with most schedules its new rollouts can bring it anywhere.
    """

    def __init__(self, rounds: list[Round], cut: Callable[[int], int], ties_B: np.ndarray, score: str):
        super().__init__(rounds, cut, ties_B, score)
        B = len(ties_B)
        self._low_B, self._high_B = np.zeros(B), np.full(B, np.inf)
        self._first_B = np.zeros(B)  # scores after the first round
        self._merged_B, self._back_B = np.full(B, -1), np.full(B, -1)
        self._dirty = np.zeros(len(rounds), bool)  # rounds of which something new is known

    def _look(self, tally: Tally) -> None:
        merged_B, back_B = tally.asked - tally.pending, tally.asked - tally.so_far.pending
        changed = np.flatnonzero((merged_B != self._merged_B) | (back_B != self._back_B))
        self._merged_B, self._back_B = merged_B, back_B
        score_B = rounded(self.score(tally))
        first = changed[merged_B[changed] == self.asked_KB[0, changed]]
        self._first_B[first] = score_B[first]
        # Whole groups alone are merged so that no order of arrival moves a bit, as ranks of equals need.
        whole = tally.pending[changed] == 0
        self._low_B[changed[whole]] = self._high_B[changed[whole]] = score_B[changed[whole]]
        self._bound(tally, changed[~whole], tally.so_far.pending[changed[~whole]])
        self._dirty[self.at_B[changed]] = True

    def _bound(self, tally: Tally, slots: np.ndarray, pending: np.ndarray) -> None:
        self._low_B[slots], self._high_B[slots] = self.bounds(tally.so_far, slots, pending, len(self.rounds))

    def _choose(self, round_: int, free_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not self._dirty[round_]:
            return NOBODY, NOBODY
        following = self.rounds[round_ + 1]
        absent = self.rounds[round_].active - self._num_in(round_)
        places = following.active - self._num_in(round_ + 1) - absent
        if places <= 0:
            return NOBODY, NOBODY
        slots = self._members(round_)
        low, high = self._low_B[slots], self._high_B[slots]
        left = following.extra - int(np.count_nonzero(self.asked_KB[round_ + 1] > following.draws))
        best = _surely_best(low, high, left - absent)
        sure = _surely_best(low, high, places) & (best | _surely_not_best(low, high, left))
        self._dirty[round_] = (sure & ~free_B[slots]).any()
        sure &= free_B[slots]
        return slots[sure], best[sure].astype(np.int64)

    def _moved(self, tally: Tally, slots: np.ndarray) -> None:
        self._dirty[self.at_B[slots]] = True
        new = self.asked_KB[self.at_B[slots], slots]
        asked = slots[new > 0]
        if len(asked):
            self._bound(tally, asked, tally.so_far.pending[asked] + new[new > 0])

    def tied_share(self, tally: Tally) -> float | None:
        """Share of the prompts kept after the first round whose score the best dropped one has too."""
        if len(self.rounds) == 1:
            return None
        self._look(tally)  # those dropped may have come back last
        kept_B = self.at_B > 0
        return float(np.mean(self._first_B[kept_B] == self._first_B[~kept_B].max(initial=-np.inf)))


class Streaming(OpenRounds):
    """Of what a round has started, as many whole groups' worth are back as its returned rollouts make up, and the share of the
    prompts that the paper keeps of as many may have gone on: the best by (score of what is back, key), finished or not.

    So the cut is a running quantile over all prompts that are in the round, no prompt waits for its own slowest rollout, and
    one with long rollouts is not left behind for them. The allocation depends on the order in which rollouts finish.
    """

    def _look(self, tally: Tally) -> None:
        self._score_B = rounded(self.score(tally.so_far))
        self._back_B = tally.so_far.asked - tally.so_far.pending

    def _choose(self, round_: int, free_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        draws, following = self.rounds[round_].draws, self.rounds[round_ + 1]
        earlier = sum(self.rounds[t].draws for t in range(round_))
        back = np.clip(self._back_B[self.at_B >= round_] - earlier, 0, draws)
        groups = int(back.sum()) // draws if draws else len(back)
        gone_on = self._num_in(round_ + 1)
        room = (self.cut(groups) if groups else 0) - gone_on
        if room <= 0:
            return NOBODY, NOBODY
        slots = self._members(round_)
        slots = slots[free_B[slots]]
        slots = slots[np.argsort(-self._score_B[slots], kind="stable")[:room]]
        return slots, (gone_on + np.arange(len(slots)) < following.extra).astype(np.int64)


def _surely_best(low: np.ndarray, high: np.ndarray, places: int) -> np.ndarray:
    """bool [n], who is among the best ``places`` whatever scores in [low, high] turn out; of equals the first ranks first."""
    if places <= 0 or places >= len(low):
        return np.full(len(low), places > 0)
    rival = np.argsort(-high, kind="stable")[places]
    return (low > high[rival]) | ((low == high[rival]) & (np.arange(len(low)) < rival))


def _surely_not_best(low: np.ndarray, high: np.ndarray, places: int) -> np.ndarray:
    """bool [n], who is not among the best ``places`` whatever scores in [low, high] turn out."""
    if places <= 0 or places > len(low):
        return np.full(len(low), places <= 0)
    judge = np.argsort(-low, kind="stable")[places - 1]
    return (low[judge] > high) | ((low[judge] == high) & (judge < np.arange(len(low))))
