"""What an allocator must do: decide, possibly in rounds, how many rollouts each prompt of a step deserves."""

from collections.abc import Generator
from typing import Protocol

import numpy as np

from vipfast.types import PromptBatch, StepPlan, Tally

Counts = np.ndarray
"""int64 [B]: rollouts to start now for each prompt; zeros allowed."""


class Allocator(Protocol):
    """A generator, so that each rule reads like its paper's algorithm box.

    ``barrier``: True, resumed when nothing is pending; False, whenever rollouts have come back. The tally then holds whole
    groups (what was asked of a prompt at once), in the order they were asked for and at most one more of each prompt at a time;
    ``Tally.so_far`` holds everything that is back. The generator returns when nothing is pending any more.
    ``budget_kind``: "exact" (the counts must add up to the budget; the caller checks) or "cap" (at most the budget, counted in
    a unit of the allocator's own, which it answers for).
    """

    name: str
    barrier: bool
    budget_kind: str

    def rounds(self, prompts: PromptBatch, budget: int) -> Generator[Counts, Tally, StepPlan]:
        """Yield counts, receive the Tally of all rollouts so far, return the plan of the finished step."""

    def learn(self, tally: Tally) -> dict[str, float | None]:
        """After the step, from counts (k, n), never from rates. Returns metrics to log (e.g. predict/brier)."""

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state: dict) -> None: ...
