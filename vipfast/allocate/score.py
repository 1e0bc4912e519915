"""What VIGOR ranks prompts by, and the bounds of what a prompt may still come to while rollouts of it are pending.

A pending rollout may come back with any reward of the declared range, or unscored, so bounds are taken over every number of
scored ones among them. For 0/1 rewards both are attained.
"""

import numpy as np

from vipfast.allocate.solver import rounded
from vipfast.types import Tally

EPS = np.finfo(np.float64).eps


def variance(tally: Tally) -> np.ndarray:
    """float64 [B], the rewards' population variance so far; 0 where fewer than two are scored."""
    return tally.variance


def posterior(tally: Tally) -> np.ndarray:
    """float64 [B], E[p (1-p)] under the Jeffreys posterior; 0 where nothing is scored, since nothing is learned there."""
    return _jeffreys(tally.successes, tally.scored)


def variance_bounds(tally: Tally, slots: np.ndarray, pending: np.ndarray, merges: int) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest variance, rounded as ranks are, that prompts may have once all they wait for is back.

    Args:
        tally: of every rollout that is back (``Tally.so_far``). Without a ``reward_range`` nothing is known of those to come,
            so the bounds are 0 and infinity.
        slots: int64 [n], the prompts asked about.
        pending: int64 [n], rollouts of each that are still out.
        merges: in how many groups a prompt's rewards are merged, at most; each adds a rounding error to its variance.

    Returns:
        float64 [n] each.
    """
    if tally.reward_range is None:
        return np.zeros(len(slots)), np.full(len(slots), np.inf)
    n, low, high = tally.scored[slots], tally.reward_range.low, tally.reward_range.high
    mean, m2 = np.clip((tally.mean[slots] - low) / (high - low), 0, 1), tally.m2[slots] / (high - low) ** 2
    if tally.reward_range.binary:
        least, most = _binary_bounds(np.rint(n * mean), n, pending)
    else:
        least, most = m2 / np.maximum(n + pending, 1), _most_variance(n, mean, m2, pending)  # squared deviations only add up
    # The final variance comes from merging groups of rewards of this size, what is back so far from merging it one by one.
    merged = merges + 1 + (0 if tally.reward_range.binary else n)
    error = 8 * EPS * merged * max(abs(low), abs(high)) / (high - low)
    least, most = np.maximum(np.sqrt(least) - error, 0), np.sqrt(most) + error
    return rounded((least * (high - low)) ** 2), rounded((most * (high - low)) ** 2)


def posterior_bounds(tally: Tally, slots: np.ndarray, pending: np.ndarray, merges: int) -> tuple[np.ndarray, np.ndarray]:
    """The same of the posterior score. It counts successes, so it is bounded and exact whatever the range of rewards."""
    k, n = tally.successes[slots], tally.scored[slots]
    least = np.minimum.reduce([_jeffreys(k, n), _jeffreys(k, n + pending), _jeffreys(k + pending, n + pending)])
    # It grows with every reward that brings successes and failures nearer to each other, and with pairs of them.
    most = _jeffreys(np.clip((n + pending) // 2, k, k + pending), n + pending)
    return rounded(least), rounded(most)


def _binary_bounds(k: np.ndarray, n: np.ndarray, pending: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of k ones among n: least with all that comes alike or unscored, most where ones and zeros can be made equally many."""
    least = np.minimum.reduce([_bernoulli(k, n), _bernoulli(k, n + pending), _bernoulli(k + pending, n + pending)])
    level = (np.abs(n - 2 * k) <= pending) & (n + pending > 1)
    return least, np.where(level, 0.25, _bernoulli(np.minimum(k, n - k) + pending, n + pending))


def _most_variance(n: np.ndarray, mean: np.ndarray, m2: np.ndarray, pending: np.ndarray) -> np.ndarray:
    """The most of rewards in [0, 1]. Of s more, j at 1 and the others at 0 spread most, with j what levels the ends best."""
    s = np.minimum(np.arange(pending.max(initial=0) + 1), pending[:, None])[..., None]
    n, mean, m2 = n[:, None, None], mean[:, None, None], m2[:, None, None]
    j = np.clip(np.floor((n + s) / 2 - n * mean) + [0, 1], 0, s)
    share, total = j / np.maximum(s, 1), np.maximum(n + s, 1)
    return ((m2 + s * share * (1 - share) + (share - mean) ** 2 * n * s / total) / total).max((1, 2))


def _jeffreys(k: np.ndarray, n: np.ndarray) -> np.ndarray:
    alpha, beta = k + 0.5, n - k + 0.5
    total = alpha + beta
    return np.where(n > 0, alpha * beta / (total * (total + 1)), 0.0)


def _bernoulli(k: np.ndarray, n: np.ndarray) -> np.ndarray:
    return k * (n - k) / np.maximum(n, 1) ** 2


SCORES = {"variance": variance, "posterior": posterior}
BOUNDS = {"variance": variance_bounds, "posterior": posterior_bounds}
