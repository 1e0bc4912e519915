"""VIP: variance-informed predictive allocation (arXiv 2602.01601, sections 4 and 5).

Before sampling, a predictor says what signal each prompt is expected to give; the exact solver spends the budget where the
gradient's variance falls most; afterwards the predictor learns from the counts. Differences from the paper: the signal is E[p
(1-p)] under the predictor's posterior (for the paper's own predictor that is p (1-p)), the allocation is the exact integer
optimum, and the budget can be counted in expected tokens.
"""

from collections.abc import Generator
from typing import Any

import numpy as np

from vipfast import xp
from vipfast.allocate import solver
from vipfast.allocate.base import Counts
from vipfast.allocate.objective import find_objective
from vipfast.allocate.predicting import Predicting
from vipfast.allocate.tokens import Lengths, solve_tokens
from vipfast.predict.base import Predictor
from vipfast.predict.diagnostics import Watch
from vipfast.types import PromptBatch, StepPlan, Tally


class Vip(Predicting):
    """VIP over any predictor.

    Args:
        predictor: gives success probability and signal of each prompt, as NumPy or CuPy arrays.
        objective: a name for ``find_objective``.
        low, high: bounds on a prompt's rollouts.
        lengths: given, the budget counts expected tokens.
        arrays: numpy, or cupy to plan on the GPU (``xp.choose``).
    """

    name = "vip"
    barrier = True

    def __init__(
        self, predictor: Predictor, objective: str, low: int, high: int, lengths: Lengths | None = None, arrays: Any = np
    ):
        super().__init__(predictor, Watch(predictor.name))
        self.low, self.high, self.lengths, self.arrays = low, high, lengths, arrays
        self.objective = find_objective(objective)
        self.budget_kind = "exact" if lengths is None else "cap"

    def rounds(self, prompts: PromptBatch, budget: int) -> Generator[Counts, Tally, StepPlan]:
        """One round. See ``vipfast.allocate.base.Allocator``."""
        uids, texts = prompts.uids, [prompt.text for prompt in prompts.prompts]
        expected = self.predictor.predict(uids, texts)
        counts_B, predicted_B, signal_B, cost_B = self._plan(prompts, expected.mean, expected.signal, budget)
        self.remember(prompts, predicted_B)
        yield counts_B
        note = {
            "alloc/ceiling": solver.ceiling(signal_B),
            "alloc/var_ratio_expected": solver.variance_ratio(signal_B, counts_B, self.objective, cost_B),
            "alloc/at_min": float((counts_B == self.low).mean()),
            "alloc/at_max": float((counts_B == self.high).mean()),
        }
        if self.lengths is not None:
            note["budget/tokens_expected"] = float(cost_B @ counts_B) * self.lengths.mean or None
        return StepPlan.plain([counts_B], note=note, predicted_B=predicted_B)

    def _plan(self, prompts: PromptBatch, predicted_B, signal_B, budget: int) -> tuple[np.ndarray, ...]:
        """Counts, predictions, signals and costs of a rollout, all [B] on the host; of a GPU's there is one transfer."""
        bounds = self.low, self.high, prompts.ties_B, self.objective
        if self.lengths is None:
            cost_B = np.ones(len(prompts))
            with xp.scope(self.arrays):
                counts_B = solver.solve(self.arrays.asarray(signal_B), budget, *bounds)
            counts_B, predicted_B, signal_B = xp.to_host(counts_B, predicted_B, signal_B)
            solver.check_utilities(signal_B)  # a GPU could not raise
        else:
            cost_B = self.lengths.costs(prompts.uids)
            predicted_B, signal_B = xp.to_host(predicted_B, signal_B)
            counts_B = solve_tokens(signal_B, cost_B, budget, *bounds)
        return counts_B, predicted_B, signal_B, cost_B

    def learn(self, tally: Tally) -> dict[str, float | None]:
        """See ``Predicting.learn``; with a budget in tokens, the step's lengths are learned too."""
        if self.lengths is not None:
            self.lengths.update(tally)
        return super().learn(tally)

    def state_dict(self) -> dict:
        """See ``Predicting.state_dict``; lengths are kept under names of their own."""
        lengths = {} if self.lengths is None else self.lengths.state_dict()
        return {**super().state_dict(), **{f"length_{name}": value for name, value in lengths.items()}}

    def load_state_dict(self, state: dict) -> None:
        """Raises: CheckpointError where the state is another predictor's."""
        lengths = {name.removeprefix("length_"): value for name, value in state.items() if name.startswith("length_")}
        if self.lengths is not None:
            self.lengths.load_state_dict(lengths)
        super().load_state_dict({name: value for name, value in state.items() if not name.startswith("length_")})
