"""What a predictor must do: say how likely each prompt is to be solved, and learn from counts."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Predictor(Protocol):
    """Observations are keyed by prompt_uid, so a reordered or grown dataset still matches; equal texts share an embedding.

    A state is a flat dict of str to int, float, list of str, or array, and restores bit for bit.
    """

    name: str

    def predict(self, uids: Sequence[str], texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns: float64 [B] expected success probability, float64 [B] expected signal E[p (1-p)]."""

    def update(self, uids: Sequence[str], texts: Sequence[str], successes: np.ndarray, trials: np.ndarray, step: int) -> None:
        """Learn ``successes`` out of ``trials`` (int64 [B], scored rollouts) of ``step``; prompts without any are skipped."""

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state: dict) -> None: ...
