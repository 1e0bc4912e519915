"""Rounds that do not wait, on several ranks: each decides over the prompts at home there, with its share of the budget."""

import warnings
from collections.abc import Callable, Generator, Sequence

import numpy as np

from vipfast.allocate.base import Allocator, Counts
from vipfast.placement import Placement
from vipfast.types import PromptBatch, StepPlan, Tally


class Apart:
    """Behaves as the given allocator does on the prompts at home on this rank, and asks for nothing elsewhere.

    Homes and shares are fixed before anything is sampled, and the shares add up to the budget, so no rank ever waits for
    another within a step. The counts are those of several smaller steps, not those of one process.

    Args:
        make: makes an allocator without barrier that learns nothing from step to step; called on every rank.
        placement: says where prompts are at home.
    """

    barrier = False

    def __init__(self, make: Callable[[], Allocator], placement: Placement):
        with warnings.catch_warnings():
            if placement.ranks.rank:  # what the schedule warns of is told once
                warnings.simplefilter("ignore")
            self.allocator = make()
        self.placement = placement
        assert not self.allocator.barrier
        self.name, self.budget_kind = self.allocator.name, self.allocator.budget_kind

    def rounds(self, prompts: PromptBatch, budget: int) -> Generator[Counts, Tally, StepPlan]:
        """The plan tells of this rank's prompts alone; ``joined`` puts the ranks' together."""
        home_B, here, B = self.placement.dealt(prompts.uids), self.placement.home, len(prompts)
        own = np.flatnonzero(home_B == here)
        share = shares(budget, np.bincount(home_B, minlength=self.placement.num_homes))[here]
        if not len(own):
            return StepPlan.plain([np.zeros(B, np.int64)])
        rounds = self.allocator.rounds(PromptBatch([prompts.prompts[q] for q in own], prompts.step, prompts.seed), int(share))
        counts_b = next(rounds)
        while True:
            counts_B = np.zeros(B, np.int64)
            counts_B[own] = counts_b
            tally = yield counts_B
            try:
                counts_b = rounds.send(tally.of(own))
            except StopIteration as stop:
                return stop.value.among(own, B)

    def learn(self, tally: Tally) -> dict[str, float | None]:
        """Nothing is learned."""
        return {}

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        assert not state, "these rules keep no state"


def shares(budget: int, num_prompts_G: np.ndarray) -> np.ndarray:
    """int64 [G], the budget of each home: in proportion to its prompts, rounded so that they add up to the budget."""
    ends = np.cumsum(num_prompts_G) * budget // max(int(num_prompts_G.sum()), 1)
    return np.diff(ends, prepend=0)


def joined(plans: Sequence[StepPlan]) -> StepPlan:
    """The plan of the step from those of its homes, each with zeros for the others' prompts."""
    rounds = max(len(plan.asked_KB) for plan in plans)
    padded = lambda rows: np.pad(rows, ((0, rounds - len(rows)), (0, 0)))  # noqa: E731
    asked_KB = sum(padded(plan.asked_KB) for plan in plans)
    use_KB = np.any([padded(plan.use_KB & (plan.asked_KB > 0)) for plan in plans], axis=0)
    survivors = [plan.note.get("alloc/survivors") for plan in plans]
    note = {**plans[0].note, "alloc/survivors": sum(filter(None, survivors)), "alloc/tied_share": None}
    return StepPlan.plain(list(asked_KB), use_KB=use_KB, note=note)
