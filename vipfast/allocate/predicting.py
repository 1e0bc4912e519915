"""What allocators with a predictor share: remember what was predicted, judge it by the step's counts, learn, be saved."""

import numpy as np

from vipfast.errors import CheckpointError
from vipfast.predict.base import Predictor
from vipfast.predict.diagnostics import Watch, diagnose
from vipfast.predict.rows import reward_counts
from vipfast.types import PromptBatch, Tally


class Predicting:
    """``predictor``: learns once per step, after the update; None for a rule that needs none, which then keeps no state.

    ``watch`` tells the user of one that is no help; ``counts`` makes a tally into what is learned (``predict.rows``).
    """

    counts = staticmethod(reward_counts)

    def __init__(self, predictor: Predictor | None, watch: Watch | None = None):
        self.predictor, self.watch = predictor, watch
        self._planned: tuple[list[str], list[str], np.ndarray, int] | None = None

    def remember(self, prompts: PromptBatch, predicted_B: np.ndarray) -> None:
        """Note the step's predictions, float64 [B].

        Raises:
            ValueError: one of them is no probability; the message names the prompt.
        """
        bad_B = ~((predicted_B >= 0) & (predicted_B <= 1))
        if bad_B.any():
            q = int(np.argmax(bad_B))
            raise ValueError(
                f"predictor {self.predictor.name}: expects prompt {prompts.uids[q]!r} to be solved with probability "
                f"{predicted_B[q]}, which must lie in [0, 1] ({int(bad_B.sum())} of {len(bad_B)} prompts)"
            )
        self._planned = (prompts.uids, [prompt.text for prompt in prompts.prompts], predicted_B, prompts.step)

    def learn(self, tally: Tally) -> dict[str, float | None]:
        """Judge the step's predictions against its counts, then update the predictor.

        Returns:
            predict/brier, log_loss, corr and slope on the prompts planned, before the update (``diagnostics.diagnose``);
            nothing without a predictor.
        """
        if self.predictor is None:
            return {}
        assert self._planned is not None and self._planned[0] == tally.uids, "learn takes the tally of the step just planned"
        uids, texts, predicted_B, step = self._planned
        self._planned = None
        successes_B, trials_B = self.counts(tally)
        metrics = diagnose(predicted_B, successes_B, trials_B)
        if self.watch is not None:
            self.watch.see(predicted_B, successes_B, trials_B)
        self.predictor.update(uids, texts, successes_B, trials_B, step)
        return metrics

    def state_dict(self) -> dict:
        """The predictor's state and its name, and what the watch keeps; taken between steps (after ``learn``)."""
        if self.predictor is None:
            return {}
        watched = {} if self.watch is None else {f"watch_{name}": value for name, value in self.watch.state_dict().items()}
        return {"predictor": self.predictor.name, **self.predictor.state_dict(), **watched}

    def load_state_dict(self, state: dict) -> None:
        """Raises: CheckpointError where the state is another predictor's."""
        if self.predictor is None:
            assert not state, "a rule without a predictor keeps no state"
            return
        if state.get("predictor") != self.predictor.name:
            raise CheckpointError(
                f"--predictor {self.predictor.name}: the checkpoint holds the state of predictor {state.get('predictor')!r}; "
                "resume with that predictor, or start a new run"
            )
        watched = {key.removeprefix("watch_"): value for key, value in state.items() if key.startswith("watch_")}
        if self.watch is not None:
            self.watch.load_state_dict(watched)
        own = {key: value for key, value in state.items() if key != "predictor" and not key.startswith("watch_")}
        self.predictor.load_state_dict(own)
