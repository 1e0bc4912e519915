"""How good a step's predictions were, on the prompts planned, before the predictor learned from them; and when to say so."""

import warnings

import numpy as np

INSIDE = (1e-9, 1 - 1e-9)
"""A probability this close to 0 or 1 still has a finite logarithm in float64."""


def diagnose(predicted_B: np.ndarray, successes_B: np.ndarray, trials_B: np.ndarray) -> dict[str, float | None]:
    """Scores of predicted success probabilities against counts; every prompt with trials weighs the same.

    Args:
        predicted_B: float64 [B] in [0, 1].
        successes_B, trials_B: int64 or float64 [B] (``rows.reward_counts``).

    Returns:
        ``predict/brier`` and ``predict/log_loss`` per rollout (less is better), ``predict/corr`` (Pearson, with the observed
        rates) and ``predict/slope`` (logistic regression of outcomes on the predicted logit; below 1 is overconfident).
        None where undefined: nothing scored, no spread, or outcomes that a threshold separates perfectly.
    """
    seen = trials_B > 0
    p, n, k = predicted_B[seen], trials_B[seen].astype(np.float64), successes_B[seen].astype(np.float64)
    if not len(p):
        return {"predict/brier": None, "predict/log_loss": None, "predict/corr": None, "predict/slope": None}
    rate = k / n
    inside = np.clip(p, *INSIDE)
    spread = p.std() > 1e-12 and rate.std() > 0
    return {
        "predict/brier": float(np.mean(rate * (1 - p) ** 2 + (1 - rate) * p**2)),
        "predict/log_loss": log_loss(p, rate),
        "predict/corr": float(np.corrcoef(p, rate)[0, 1]) if spread else None,
        "predict/slope": calibration_slope(np.log(inside) - np.log1p(-inside), rate) if spread else None,
    }


def log_loss(predicted_B: np.ndarray, rate_B: np.ndarray) -> float:
    """Mean of -[r log p + (1 - r) log(1 - p)], every prompt weighing the same."""
    p = np.clip(predicted_B, *INSIDE)
    return float(-np.mean(rate_B * np.log(p) + (1 - rate_B) * np.log1p(-p)))


def calibration_slope(logit_B: np.ndarray, rate_B: np.ndarray) -> float | None:
    """Slope b of the maximum-likelihood fit rate ~ sigmoid(a + b logit), by Newton; None where there is no maximum."""
    x = logit_B - logit_B.mean()
    reach, intercept, slope = float(np.abs(x).max()), 0.0, 0.0
    for _ in range(50):
        mean = 1 / (1 + np.exp(-np.clip(intercept + slope * x, -30, 30)))
        curvature, left = mean * (1 - mean), rate_B - mean
        # Newton for two numbers, in plain floats: arrays this small cost more than the arithmetic.
        bent = curvature * x
        h00, h01, h11 = float(curvature.sum()), float(bent.sum()), float(bent @ x)
        determinant = h00 * h11 - h01 * h01
        if determinant <= 1e-12 * (h00 + h11) ** 2:  # nearly the inverse of the condition number
            return None
        g0, g1 = float(left.sum()), float(left @ x)
        up, turn = (h11 * g0 - h01 * g1) / determinant, (h00 * g1 - h01 * g0) / determinant
        # Full Newton steps can overshoot where predictions are extreme.
        part = min(1.0, 2.0 / max(abs(up) + abs(turn) * reach, 1e-12))
        intercept, slope = intercept + part * up, slope + part * turn
        if max(abs(up), abs(turn)) < 1e-8:
            return slope
    return None


class Watch:
    """Warns, once in a run, that a predictor has been no better than the pool's mean rate for PATIENCE steps in a row.

    The mean rate is that of past steps, exponentially forgotten; the two log losses are compared on their running difference,
    since a single step is noise.
    """

    PATIENCE = 20
    REMEMBERED = 0.9

    def __init__(self, predictor_name: str):
        self.predictor_name = predictor_name
        self.rate: float | None = None  # pooled, before the step
        self.excess = 0.0  # running mean of own log loss - that of the pooled rate
        self.steps = 0  # in a row without an advantage
        self.warned = False

    def see(self, predicted_B: np.ndarray, successes_B: np.ndarray, trials_B: np.ndarray) -> None:
        """Take a step's predictions and counts, as for ``diagnose``; steps with nothing scored do not count."""
        seen = trials_B > 0
        if not seen.any():
            return
        rate_B = successes_B[seen] / trials_B[seen]
        mean = float(rate_B.mean())
        if self.rate is None:
            self.rate = mean
            return
        own, pooled = log_loss(predicted_B[seen], rate_B), log_loss(np.full(len(rate_B), self.rate), rate_B)
        self.rate = self.REMEMBERED * self.rate + (1 - self.REMEMBERED) * mean
        self.excess = self.REMEMBERED * self.excess + (1 - self.REMEMBERED) * (own - pooled)
        self.steps = self.steps + 1 if self.excess >= 0 else 0
        if self.steps >= self.PATIENCE and not self.warned:
            self.warned = True
            warnings.warn(
                f"--predictor {self.predictor_name}: for {self.steps} steps in a row its predictions have been no better than "
                f"the pool's mean success rate (log loss of this step {own:.3f} against {pooled:.3f}), so its plans have "
                "nothing to go by. Where texts tell nothing this ends once prompts come again; else try another --predictor, "
                "or --allocator uniform or vigor, which need none",
                stacklevel=2,
            )

    def state_dict(self) -> dict:
        return {"rate": self.rate, "excess": self.excess, "steps": self.steps, "warned": self.warned}

    def load_state_dict(self, state: dict) -> None:
        self.rate, self.excess = state["rate"], float(state["excess"])
        self.steps, self.warned = int(state["steps"]), bool(state["warned"])
