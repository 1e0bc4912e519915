"""Which ranks generate a prompt's rollouts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vipfast.allocate.tokens import Lengths
from vipfast.distributed import ALONE, Ranks
from vipfast.partition import karmarkar_karp
from vipfast.types import Tally


class Placement:
    """Gives prompts a home, where homes expect like numbers of tokens: count times expected length.

    A home is a rank, or the ranks over which the engine splits the model, which all do the same; the first of them ``leads``:
    its rewards are the home's, and its rows. A prompt keeps its home over all rounds of a step, since its keys and values are
    cached there. Every rank comes to the same homes, from the same counts and lengths.

    Args:
        ranks: all of them.
        tensor_parallel: ranks of a home, which follow one another; divides their number.
    """

    def __init__(self, ranks: Ranks, tensor_parallel: int = 1):
        self.ranks, self.tensor_parallel, self.lengths = ranks, tensor_parallel, Lengths()
        self.home, self.num_homes = ranks.rank // tensor_parallel, ranks.size // tensor_parallel
        self._peers = ranks.split(tensor_parallel)
        self.leads = self._peers.rank == 0

    def agreed(self, work: Callable[[], Any]) -> Any:
        """What ``work`` gives on the rank that leads, which alone runs it, or the error it raises there: on all at home."""
        return self._peers.decided(work)

    def homes(self, uids: Sequence[str], counts_B: np.ndarray, home_B: np.ndarray) -> np.ndarray:
        """Place prompts that are asked for and have no home yet.

        Args:
            uids: [B].
            counts_B: int64 [B], rollouts asked for now.
            home_B: int64 [B], home of each prompt, -1 where it has none.

        Returns:
            int64 [B], ``home_B`` with the new homes.
        """
        new = np.flatnonzero((counts_B > 0) & (home_B < 0))
        home_B = home_B.copy()
        if self.num_homes == 1 or not len(new):
            home_B[new] = 0
            return home_B
        tokens_B = counts_B * self.lengths.costs(uids)
        placed = home_B >= 0
        load = np.bincount(home_B[placed], tokens_B[placed], minlength=self.num_homes)
        # The heaviest part of the new prompts goes to the home with least to do.
        home_B[new] = np.argsort(load, kind="stable")[karmarkar_karp(tokens_B[new], self.num_homes)]
        return home_B

    def dealt(self, uids: Sequence[str]) -> np.ndarray:
        """int64 [B], homes given before any counts are known, as if all prompts were to get the same."""
        return self.homes(uids, np.ones(len(uids), np.int64), np.full(len(uids), -1))

    def learn(self, tally: Tally) -> None:
        """Learn the step's lengths; a process alone has nothing to place."""
        if self.ranks.size > 1:
            self.lengths.update(tally)

    def state_dict(self) -> dict:
        """Empty for a process alone."""
        return self.lengths.state_dict() if self.ranks.size > 1 else {}

    def load_state_dict(self, state: dict) -> None:
        """A state saved by a process alone is empty, and lengths are learned anew."""
        if state:
            self.lengths.load_state_dict(state)


HERE = Placement(ALONE)
"""Everything on this process."""
