"""One Gaussian times one binomial: what k of n successes say of a logit that was N(mean, variance) before.

The density is proportional to N(g; m, v) s(g - o)^k s(o - g)^(n - k), s the sigmoid, o a known shift between the logit now and
when it was observed. It is log-concave, so Newton finds its mode, and on either side the point where it has fallen by e^-12; 32
evenly spaced nodes between the two integrate it to four digits, certain rates (k = 0, k = n), fractional counts and priors
much wider than the sigmoid included. (Gauss-Hermite nodes around the mode miss the last by a tenth.)
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from vipfast.xp import namespace_of

NUM_NODES = 32
FALL = 12.0
"""Logarithm of the density at the mode over that at the outermost nodes."""
MODE_STEPS, EDGE_STEPS = 10, 4
LEAST_PRECISION = 1e-8
"""Keeps a site that says nothing, where algebra divides by its precision."""


@dataclass(frozen=True, eq=False)
class Posterior:
    """The logit of B prompts after their counts.

    Its Gaussian of equal mean and variance is N(mean, variance) times a *site* exp(natural g - precision g^2 / 2), the
    evidence of the counts as expectation propagation uses it; 0 <= precision <= n / 4, since the binomial is log-concave with
    curvature of at most n / 4.
    """

    logit_BQ: Any  # float64 [B, Q], possible values
    weight_BQ: Any  # float64 [B, Q], their probabilities
    natural_B: Any
    precision_B: Any


def condition(mean_B: Any, variance_B: Any, k_B: Any, n_B: Any, shift_B: Any) -> Posterior:
    """The posterior of logits N(mean, variance), variance > 0, that were ``shift`` lower when k of n came out; all [B].

    NumPy or CuPy, and nothing waits for a GPU.
    """
    xp, inverse_B = namespace_of(mean_B), 1 / variance_B
    mean_B = mean_B - shift_B  # as seen from then; shifted back at the end

    def density(g):
        """Logarithm and slope of the density at g [..., B]; both need e^-|g|, which costs most."""
        tail, away = xp.exp(-xp.abs(g)), g - mean_B
        softplus, p = xp.maximum(g, 0.0) + xp.log1p(tail), xp.where(g >= 0, 1.0, tail) / (1 + tail)
        pull = inverse_B * away
        return k_B * g - n_B * softplus - 0.5 * pull * away, k_B - n_B * p - pull

    # Start where a Gaussian around the empirical logit would end.
    noise_B = 1 / (k_B + 0.5) + 1 / (n_B - k_B + 0.5)
    mode_B = (mean_B * noise_B + xp.log((k_B + 0.5) / (n_B - k_B + 0.5)) * variance_B) / (variance_B + noise_B)
    for _ in range(MODE_STEPS):
        p_B = sigmoid(mode_B)
        curvature_B = inverse_B + n_B * p_B * (1 - p_B)
        change_B = (k_B - n_B * p_B - inverse_B * (mode_B - mean_B)) / curvature_B
        mode_B = mode_B + xp.clip(change_B, -1.5, 1.5)
        # Near enough, in units of the density's own width? Asking a GPU would make it wait.
        if xp is np and (change_B**2 * curvature_B).max() < 0.01:
            break
    # How far to the left and right, [2, B]. Beyond the nearest and farthest that curvatures from n/4 to 0 allow is no root.
    side = xp.array([[-1.0], [1.0]])
    nearest_B, farthest_B = xp.sqrt(2 * FALL / (inverse_B + n_B / 4)), xp.sqrt(2 * FALL * variance_B)
    top_B, _ = density(mode_B)
    away_2B = xp.clip(xp.sqrt(2 * FALL / curvature_B), nearest_B, farthest_B) * xp.ones((2, 1))
    for _ in range(EDGE_STEPS):
        edge_2B = mode_B + side * away_2B
        height_2B, slope_2B = density(edge_2B)
        fall_2B = xp.maximum(top_B - height_2B, 1e-12)
        steep_2B = xp.maximum(-side * slope_2B, 1e-12)
        # The fall is convex, so Newton from beyond stays beyond; from within, its square root is straighter.
        beyond, within = fall_2B - FALL, 2 * (fall_2B - xp.sqrt(FALL * fall_2B))
        away_2B = xp.clip(away_2B - xp.where(beyond > 0, beyond, within) / steep_2B, nearest_B, farthest_B)
    gap_B = away_2B.sum(0) / (NUM_NODES - 1)
    then_BQ = (mode_B - away_2B[0])[:, None] + gap_B[:, None] * xp.arange(NUM_NODES)
    tail_BQ = xp.exp(-xp.abs(then_BQ))
    p_BQ = xp.where(then_BQ >= 0, 1.0, tail_BQ) / (1 + tail_BQ)
    log_BQ = k_B[:, None] * then_BQ - n_B[:, None] * (xp.maximum(then_BQ, 0.0) + xp.log1p(tail_BQ))
    log_BQ -= 0.5 * inverse_B[:, None] * (then_BQ - mean_B[:, None]) ** 2
    weight_BQ = xp.exp(log_BQ - log_BQ.max(1, keepdims=True))
    weight_BQ /= weight_BQ.sum(1, keepdims=True)
    logit_BQ = then_BQ + shift_B[:, None]
    moment_B = (weight_BQ * logit_BQ).sum(1)
    spread_B = (weight_BQ * (logit_BQ - moment_B[:, None]) ** 2).sum(1)
    precision_B = xp.clip(1 / xp.maximum(spread_B, 1e-300) - inverse_B, 0.0, n_B / 4) + LEAST_PRECISION
    # moment / spread - mean / variance, which would cancel, is precision moment + E[k - n p].
    natural_B = precision_B * moment_B + k_B - n_B * (weight_BQ * p_BQ).sum(1)
    return Posterior(logit_BQ, weight_BQ, natural_B, precision_B)


def common_shift(logit_BQ: np.ndarray, weight_BQ: np.ndarray, k_B: np.ndarray, n_B: np.ndarray, variance: float) -> float:
    """The likeliest shift d, N(0, variance) before, if every logit was d higher than expected when k of n came out; within 1.5.

    Newton on sum_B log sum_Q w s(g + d)^k s(-g - d)^(n-k) - d^2 / (2 variance).
    """
    shift = 0.0
    for _ in range(5):
        moved_BQ = logit_BQ + shift
        p_BQ = sigmoid(moved_BQ)
        log_BQ = k_B[:, None] * moved_BQ - n_B[:, None] * softplus(moved_BQ)
        given_BQ = weight_BQ * np.exp(log_BQ - log_BQ.max(1, keepdims=True))
        given_BQ /= given_BQ.sum(1, keepdims=True)
        slope_BQ = k_B[:, None] - n_B[:, None] * p_BQ
        slope_B = (given_BQ * slope_BQ).sum(1)
        bend_B = (given_BQ * (slope_BQ**2 - n_B[:, None] * p_BQ * (1 - p_BQ))).sum(1) - slope_B**2
        # Where the mixture over nodes is not concave, only the prior's curvature holds the step.
        change = (slope_B.sum() - shift / variance) / (1 / variance - np.minimum(bend_B, 0.0).sum())
        shift += float(np.clip(change, -0.3, 0.3))
        if abs(change) < 1e-4:
            break
    return shift


def sigmoid(logit: Any) -> Any:
    """1 / (1 + e^-g), without overflow up to |g| = 700."""
    xp = namespace_of(logit)
    return 1 / (1 + xp.exp(-xp.clip(logit, -700.0, 700.0)))


def softplus(logit: Any) -> Any:
    """log(1 + e^g), without overflow."""
    xp = namespace_of(logit)
    return xp.maximum(logit, 0.0) + xp.log1p(xp.exp(-xp.abs(logit)))
