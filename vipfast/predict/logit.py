"""One Gaussian times one binomial: what k of n successes say of a logit that was N(mean, variance) before.

The density is proportional to N(g; m, v) s(g - o)^k s(o - g)^(n - k), s the sigmoid, o a known shift between the logit now and
when it was observed. It is log-concave, so Newton finds its mode, and on either side the point where it has fallen by e^-12; 32
evenly spaced nodes between the two integrate it to four digits, certain rates (k = 0, k = n), fractional counts and priors
much wider than the sigmoid included. (Gauss-Hermite nodes around the mode miss the last by a tenth.)
"""

from dataclasses import dataclass

import numpy as np

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

    logit_BQ: np.ndarray  # float64 [B, Q], possible values
    weight_BQ: np.ndarray  # float64 [B, Q], their probabilities
    natural_B: np.ndarray
    precision_B: np.ndarray


def condition(mean_B: np.ndarray, variance_B: np.ndarray, k_B: np.ndarray, n_B: np.ndarray, shift_B: np.ndarray) -> Posterior:
    """The posterior of logits N(mean, variance), variance > 0, that were ``shift`` lower when k of n came out; all [B]."""
    inverse_B = 1 / variance_B
    mean_B = mean_B - shift_B  # as seen from then; shifted back at the end

    def density(g, log: bool):
        """Logarithm, or its slope, of the density at g [..., B]."""
        if log:
            return k_B * g - n_B * softplus(g) - 0.5 * inverse_B * (g - mean_B) ** 2
        return k_B - n_B * sigmoid(g) - inverse_B * (g - mean_B)

    # Start where a Gaussian around the empirical logit would end.
    noise_B = 1 / (k_B + 0.5) + 1 / (n_B - k_B + 0.5)
    mode_B = (mean_B * noise_B + np.log((k_B + 0.5) / (n_B - k_B + 0.5)) * variance_B) / (variance_B + noise_B)
    for _ in range(MODE_STEPS):
        p_B = sigmoid(mode_B)
        curvature_B = inverse_B + n_B * p_B * (1 - p_B)
        change_B = density(mode_B, log=False) / curvature_B
        mode_B = mode_B + np.clip(change_B, -1.5, 1.5)
        if (change_B**2 * curvature_B).max() < 0.01:  # near enough, in units of the density's own width
            break
    # How far to the left and right, [2, B]. Beyond the nearest and farthest that curvatures from n/4 to 0 allow is no root.
    side = np.array([[-1.0], [1.0]])
    nearest_B, farthest_B = np.sqrt(2 * FALL / (inverse_B + n_B / 4)), np.sqrt(2 * FALL * variance_B)
    top_B = density(mode_B, log=True)
    away_2B = np.clip(np.sqrt(2 * FALL / curvature_B), nearest_B, farthest_B) * np.ones((2, 1))
    for _ in range(EDGE_STEPS):
        edge_2B = mode_B + side * away_2B
        fall_2B = np.maximum(top_B - density(edge_2B, log=True), 1e-12)
        steep_2B = np.maximum(-side * density(edge_2B, log=False), 1e-12)
        # The fall is convex, so Newton from beyond stays beyond; from within, its square root is straighter.
        beyond, within = fall_2B - FALL, 2 * (fall_2B - np.sqrt(FALL * fall_2B))
        away_2B = np.clip(away_2B - np.where(beyond > 0, beyond, within) / steep_2B, nearest_B, farthest_B)
    gap_B = away_2B.sum(0) / (NUM_NODES - 1)
    then_BQ = (mode_B - away_2B[0])[:, None] + gap_B[:, None] * np.arange(NUM_NODES)
    tail_BQ = np.exp(-np.abs(then_BQ))
    p_BQ = np.where(then_BQ >= 0, 1.0, tail_BQ) / (1 + tail_BQ)
    log_BQ = k_B[:, None] * then_BQ - n_B[:, None] * (np.maximum(then_BQ, 0.0) + np.log1p(tail_BQ))
    log_BQ -= 0.5 * inverse_B[:, None] * (then_BQ - mean_B[:, None]) ** 2
    weight_BQ = np.exp(log_BQ - log_BQ.max(1, keepdims=True))
    weight_BQ /= weight_BQ.sum(1, keepdims=True)
    logit_BQ = then_BQ + shift_B[:, None]
    moment_B = (weight_BQ * logit_BQ).sum(1)
    spread_B = (weight_BQ * (logit_BQ - moment_B[:, None]) ** 2).sum(1)
    precision_B = np.clip(1 / np.maximum(spread_B, 1e-300) - inverse_B, 0.0, n_B / 4) + LEAST_PRECISION
    # moment / spread - mean / variance, which would cancel, is precision moment + E[k - n p].
    natural_B = precision_B * moment_B + k_B - n_B * (weight_BQ * p_BQ).sum(1)
    return Posterior(logit_BQ, weight_BQ, natural_B, precision_B)


def common_shift(logit_BQ: np.ndarray, weight_BQ: np.ndarray, k_B: np.ndarray, n_B: np.ndarray, variance: float) -> float:
    """The likeliest shift d, N(0, variance) before, if every logit was d higher than expected when k of n came out.

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


def sigmoid(logit: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-g), without overflow up to |g| = 700."""
    return 1 / (1 + np.exp(-np.clip(logit, -700.0, 700.0)))


def softplus(logit: np.ndarray) -> np.ndarray:
    """log(1 + e^g), without overflow."""
    return np.maximum(logit, 0.0) + np.log1p(np.exp(-np.abs(logit)))
