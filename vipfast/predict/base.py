"""What a predictor must do: say how likely each prompt is to be solved, and learn from counts."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Prediction(NamedTuple):
    """What is expected of B prompts before sampling; p is a prompt's unknown success probability. All float64 [B].

    ``signal`` = mean (1 - mean) - variance is the utility a plan is made of: the less is known of p, the less it is.
    """

    mean: np.ndarray  # E[p]
    variance: np.ndarray  # Var[p], >= 0
    signal: np.ndarray  # E[p (1 - p)], >= 0

    @classmethod
    def of_nodes(cls, p_BQ: np.ndarray, weight_BQ: np.ndarray) -> "Prediction":
        """From Q possible values of each prompt's p and their probabilities (rows add up to 1)."""
        mean = (weight_BQ * p_BQ).sum(1)
        return cls(mean, (weight_BQ * (p_BQ - mean[:, None]) ** 2).sum(1), (weight_BQ * (p_BQ * (1 - p_BQ))).sum(1))

    @classmethod
    def of_beta(cls, alpha_B: np.ndarray, beta_B: np.ndarray) -> "Prediction":
        """Where p ~ Beta(alpha, beta): E[p (1 - p)] = alpha beta / (s (s + 1)) with s = alpha + beta."""
        total = alpha_B + beta_B
        signal = alpha_B * beta_B / (total * (total + 1))
        return cls(alpha_B / total, signal / total, signal)


class Predictor(Protocol):
    """Observations are keyed by prompt_uid, so a reordered or grown dataset still matches; equal texts share an embedding.

    Counts may be fractions (``rows.reward_counts``). A state is a flat dict of str to int, float, list of str, or array, and
    restores bit for bit. The order of a batch changes no bit either.
    """

    name: str

    def predict(self, uids: Sequence[str], texts: Sequence[str]) -> Prediction:
        """What is expected of these prompts in the next step.

        Raises:
            ValueError: an embedding is not finite; the message names the prompt.
        """

    def update(self, uids: Sequence[str], texts: Sequence[str], successes: np.ndarray, trials: np.ndarray, step: int) -> None:
        """Learn ``successes`` out of ``trials`` [B] (scored rollouts) of ``step``; prompts without any are skipped.

        Raises:
            ValueError: counts that cannot be, or an embedding that is not finite; the message names the prompt.
        """

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state: dict) -> None:
        """Warns where the state comes from another pool: prompts are matched by uid, those without results keep the prior."""
