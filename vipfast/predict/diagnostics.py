"""How good a step's predictions were, on the prompts planned, before the predictor learned from them."""

import numpy as np


def diagnose(predicted_B: np.ndarray, successes_B: np.ndarray, trials_B: np.ndarray) -> dict[str, float | None]:
    """Scores of predicted success probabilities against counts; every prompt with trials weighs the same.

    Args:
        predicted_B: float64 [B] in [0, 1].
        successes_B, trials_B: int64 [B].

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
    # A float64 probability this close to 0 or 1 still has a finite logarithm.
    inside = np.clip(p, 1e-9, 1 - 1e-9)
    spread = p.std() > 1e-12 and rate.std() > 0
    return {
        "predict/brier": float(np.mean(rate * (1 - p) ** 2 + (1 - rate) * p**2)),
        "predict/log_loss": float(-np.mean(rate * np.log(inside) + (1 - rate) * np.log1p(-inside))),
        "predict/corr": float(np.corrcoef(p, rate)[0, 1]) if spread else None,
        "predict/slope": calibration_slope(np.log(inside) - np.log1p(-inside), rate) if spread else None,
    }


def calibration_slope(logit_B: np.ndarray, rate_B: np.ndarray) -> float | None:
    """Slope b of the maximum-likelihood fit rate ~ sigmoid(a + b logit), by Newton; None where there is no maximum."""
    X = np.stack([np.ones_like(logit_B), logit_B - logit_B.mean()], 1)
    beta = np.zeros(2)
    for _ in range(50):
        mean = 1 / (1 + np.exp(-np.clip(X @ beta, -30, 30)))
        hessian = (X * (mean * (1 - mean))[:, None]).T @ X
        trace, determinant = np.trace(hessian), np.linalg.det(hessian)
        if determinant <= 1e-12 * trace**2:  # for 2 x 2, nearly the inverse of the condition number
            return None
        change = np.linalg.solve(hessian, X.T @ (rate_B - mean))
        # Full Newton steps can overshoot where predictions are extreme.
        beta += change * min(1.0, 2.0 / max(np.abs(X @ change).max(), 1e-12))
        if np.abs(change).max() < 1e-8:
            return float(beta[1])
    return None
