"""VIP: variance-informed predictive allocation (arXiv 2602.01601, sections 4 and 5).

Before sampling, a predictor says what signal each prompt is expected to give; the exact solver spends the budget where the
gradient's variance falls most; afterwards the predictor learns from the counts. Differences from the paper: the signal is E[p
(1-p)] under the predictor's posterior (for the paper's own predictor that is p (1-p)), and the allocation is the exact integer
optimum.
"""

from collections.abc import Generator

import numpy as np

from vipfast.allocate import solver
from vipfast.allocate.base import Counts
from vipfast.errors import CheckpointError
from vipfast.predict.base import Predictor
from vipfast.predict.diagnostics import diagnose
from vipfast.types import PromptBatch, StepPlan, Tally


class Vip:
    """Args: ``predictor``; ``objective``, a key of ``solver.OBJECTIVES``; ``low``, ``high``, bounds on a prompt's rollouts."""

    name = "vip"
    barrier = True
    budget_kind = "exact"

    def __init__(self, predictor: Predictor, objective: str, low: int, high: int):
        self.predictor, self.low, self.high = predictor, low, high
        self.objective = solver.OBJECTIVES[objective]
        self._planned: tuple[list[str], list[str], np.ndarray, int] | None = None

    def rounds(self, prompts: PromptBatch, budget: int) -> Generator[Counts, Tally, StepPlan]:
        """One round. See ``vipfast.allocate.base.Allocator``."""
        uids, texts = prompts.uids, [prompt.text for prompt in prompts.prompts]
        predicted_B, signal_B = self.predictor.predict(uids, texts)
        counts_B = solver.solve(signal_B, budget, self.low, self.high, prompts.ties_B, self.objective)
        self._planned = (uids, texts, predicted_B, prompts.step)
        yield counts_B
        note = {
            "alloc/ceiling": solver.ceiling(signal_B),
            "alloc/var_ratio_expected": solver.variance_ratio(signal_B, counts_B, self.objective),
            "alloc/at_min": float((counts_B == self.low).mean()),
            "alloc/at_max": float((counts_B == self.high).mean()),
        }
        return StepPlan.plain([counts_B], note=note, predicted_B=predicted_B)

    def learn(self, tally: Tally) -> dict[str, float | None]:
        """Judge the step's predictions against its counts, then update the predictor.

        Returns:
            predict/brier, log_loss, corr and slope on the prompts planned, before the update (``diagnostics.diagnose``).
        """
        assert self._planned is not None and self._planned[0] == tally.uids, "learn takes the tally of the step just planned"
        uids, texts, predicted_B, step = self._planned
        self._planned = None
        metrics = diagnose(predicted_B, tally.successes, tally.scored)
        self.predictor.update(uids, texts, tally.successes, tally.scored, step)
        return metrics

    def state_dict(self) -> dict:
        """The predictor's state and its name; taken between steps (after ``learn``)."""
        return {"predictor": self.predictor.name, **self.predictor.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Raises: CheckpointError where the state is another predictor's."""
        if state.get("predictor") != self.predictor.name:
            raise CheckpointError(
                f"--predictor {self.predictor.name}: the checkpoint holds the state of predictor {state.get('predictor')!r}; "
                "resume with that predictor, or start a new run"
            )
        self.predictor.load_state_dict({key: value for key, value in state.items() if key != "predictor"})
