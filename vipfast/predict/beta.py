"""Predictor ``beta``: a prompt's own history, nothing else. Jeffreys prior; old counts lose weight with age (``history``)."""

from collections.abc import Sequence

import numpy as np

from vipfast.predict.base import Prediction
from vipfast.predict.history import History
from vipfast.predict.pool import Pool
from vipfast.predict.rows import distinct


class Beta:
    """Args: ``pool_uids``, to tell a changed pool on resume; ``drift``, variance a logit gains per step of age."""

    name = "beta"
    PRIOR = 0.5

    def __init__(self, pool_uids: Sequence[str] = (), drift: float = 0.01):
        self.history, self.pool = History(drift), Pool(pool_uids)
        self._step = 0

    def predict(self, uids: Sequence[str], texts: Sequence[str]) -> Prediction:
        """See ``Predictor.predict``."""
        k, n, _ = self.history.aged(uids, self._step + 1)
        return Prediction.of_beta(k + self.PRIOR, n - k + self.PRIOR)

    def update(self, uids: Sequence[str], texts: Sequence[str], successes: np.ndarray, trials: np.ndarray, step: int) -> None:
        """See ``Predictor.update``."""
        batch = distinct(uids, texts, successes, trials)
        self._step = step
        self.history.add(batch.uids, batch.successes, batch.trials, 0.0, step)

    def state_dict(self) -> dict:
        """step int, and those of history and pool."""
        return {"step": self._step, **self.history.state_dict(), **self.pool.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """See ``Predictor.load_state_dict``."""
        self._step = int(state["step"])
        self.history.load_state_dict(state)
        self.pool.load_state_dict(state, self.history.uids)
