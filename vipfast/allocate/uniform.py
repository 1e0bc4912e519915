"""The baseline: every prompt gets the same number of rollouts, within one."""

from collections.abc import Generator

import numpy as np

from vipfast.allocate.base import Counts
from vipfast.types import PromptBatch, StepPlan, Tally


class Uniform:
    """Spends any budget exactly: C // B rollouts each, and one more for a seeded choice of C mod B prompts."""

    name = "uniform"
    barrier = True
    budget_kind = "exact"

    def rounds(self, prompts: PromptBatch, budget: int) -> Generator[Counts, Tally, StepPlan]:
        """One round. See ``vipfast.allocate.base.Allocator``."""
        share, extra = divmod(budget, len(prompts))
        counts_B = np.full(len(prompts), share, np.int64)
        counts_B[np.argsort(prompts.ties_B, kind="stable")[:extra]] += 1
        yield counts_B
        return StepPlan.plain([counts_B], note={"alloc/ceiling": None, "alloc/var_ratio_expected": None})

    def learn(self, tally: Tally) -> dict[str, float | None]:
        """Nothing to learn."""
        return {}

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        assert not state, "uniform keeps no state"
