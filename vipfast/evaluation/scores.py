"""Estimates from n samples of every prompt, and their intervals over prompts.

Letters: B prompts, N samples each.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy import signal, special, stats

from vipfast.evaluate import majority_right, pass_at_k

RESAMPLES = 4000
RESAMPLED_AT_ONCE = 2**22
"""Most values that are drawn at once; bounds the bootstrap's memory."""


def pass_B(right_BN: np.ndarray, k: int) -> np.ndarray:
    """float64 [B], unbiased P(one of k samples is right) of each prompt; right_BN bool [B, N]."""
    num_samples = right_BN.shape[1]
    table = np.array([pass_at_k(num_samples, num_right, k) for num_right in range(num_samples + 1)])
    return table[right_BN.sum(1)]


def majority_B(right_BN: np.ndarray, answers: Sequence[Sequence[str | None]], k: int) -> np.ndarray:
    """float64 [B], P(the most frequent answer of k samples is right) of each prompt; answers [B][N], None has no vote.

    With k = N that is what training calls maj@k, 0 or 1, a tie going to the answer sampled first. With fewer it is exact over
    all subsets of k samples in any order, where each of t tied answers is first with probability 1/t.
    """
    one = majority_right if k == right_BN.shape[1] else (lambda found, right: expected_majority(found, right, k))
    return np.array([float(one(found, right)) for found, right in zip(answers, right_BN)])


def expected_majority(answers: Sequence[str | None], right_N: Sequence[bool], k: int) -> float:
    """P(the most frequent answer of k < N samples drawn without replacement is right)."""
    votes = Counter(answer for answer in answers if answer is not None)
    right = Counter(answer for answer, is_right in zip(answers, right_N) if answer is not None and is_right)
    counts, silent = Counter(votes.values()), len(answers) - votes.total()
    chance = 0.0
    for answer, num_right in right.items():
        others = counts - Counter([votes[answer]])
        # An answer that is right in some of its samples only counts by their share.
        chance += num_right / votes[answer] * _wins(votes[answer], tuple(sorted(others.elements())), silent, k)
    return chance


@lru_cache(maxsize=2**16)
def _wins(count: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """P(an answer wins k of the n samples), which ``count`` of them gave, ``others`` gave other answers, ``silent`` none.

    Drawing k of n without replacement is drawing each with probability k/n, given that k are drawn: a product of binomials.
    """
    num_samples = count + sum(others) + silent
    chance = 0.0
    for won in range(1, min(count, k) + 1):
        rest = k - won
        # Answers with fewer samples than it won cannot draw level.
        rivals = [other for other in others if other >= won]
        ways = _binomial(num_samples - count - sum(rivals), k, num_samples)[: rest + 1, None]  # [drawn, tied]
        for rival in rivals:
            factor = np.zeros((won + 1, 2))
            pmf = _binomial(rival, k, num_samples)
            factor[:won, 0], factor[won, 1] = pmf[:won], pmf[won]
            ways = signal.convolve2d(ways, factor)[: rest + 1, : rest // won + 1]
        if len(ways) > rest:
            chance += _binomial(count, k, num_samples)[won] * float((ways[rest] / np.arange(1, ways.shape[1] + 1)).sum())
    return chance / float(_binomial(num_samples, k, num_samples)[k])


@lru_cache(maxsize=2**12)
def _binomial(num: int, k: int, num_samples: int) -> np.ndarray:
    """float64 [num + 1], probabilities of each number of draws of ``num`` samples at k/n each; k < n."""
    drawn = np.arange(num + 1)
    ways = special.gammaln(num + 1) - special.gammaln(drawn + 1) - special.gammaln(num - drawn + 1)
    share = k / num_samples
    return np.exp(ways + drawn * np.log(share) + (num - drawn) * np.log1p(-share))


def interval(seed: int, *values_B: np.ndarray) -> tuple[float, float] | None:
    """95 % bootstrap interval (BCa) over prompts of a mean; of several tasks' values, of the mean of their means.

    Returns:
        low, high; None where resampling says nothing: fewer than two prompts, or all of them alike.
    """
    if min(map(len, values_B)) < 2 or all(np.ptp(values) == 0 for values in values_B):
        return None

    def mean(*values: np.ndarray, axis: int = -1) -> np.ndarray:
        return sum(np.mean(part, axis=axis) for part in values) / len(values)

    found = stats.bootstrap(
        values_B, mean, n_resamples=RESAMPLES, confidence_level=0.95, method="BCa", vectorized=True,
        batch=max(1, RESAMPLED_AT_ONCE // max(map(len, values_B))), random_state=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)
