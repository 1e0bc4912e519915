"""A batch of counts as predictors store it: one row per distinct prompt, in an order that does not depend on the batch's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vipfast.types import Tally


@dataclass(frozen=True, eq=False)
class Counts:
    """B distinct prompts that have trials, sorted by uid."""

    uids: list[str]
    texts: list[str]
    successes: np.ndarray  # float64 [B]
    trials: np.ndarray  # float64 [B], > 0


def distinct(uids: Sequence[str], texts: Sequence[str], successes: np.ndarray, trials: np.ndarray) -> Counts:
    """Merge rows of the same prompt, drop those without trials, and sort by uid, so that shuffling a batch changes no bit.

    Raises:
        ValueError: counts that are not 0 <= successes <= trials < infinity.
    """
    successes, trials = np.asarray(successes, np.float64), np.asarray(trials, np.float64)
    bad = ~((successes >= 0) & (successes <= trials) & np.isfinite(trials))
    if bad.any():
        i = int(np.argmax(bad))
        raise ValueError(
            f"prompt {uids[i]!r}: a predictor was given {successes[i]:g} successes of {trials[i]:g} rollouts; it needs "
            "0 <= successes <= rollouts, both finite"
        )
    order = sorted(range(len(uids)), key=lambda i: (uids[i], successes[i], trials[i]))
    uids, texts, successes, trials = [uids[i] for i in order], [texts[i] for i in order], successes[order], trials[order]
    names, first, inverse = np.unique(np.asarray(uids, dtype=object), return_index=True, return_inverse=True)
    k = np.bincount(inverse, successes, len(names))
    n = np.bincount(inverse, trials, len(names))
    keep = np.flatnonzero(n > 0)
    return Counts([names[i] for i in keep], [texts[first[i]] for i in keep], k[keep], n[keep])


def positions(rows: Mapping[str, int], uids: Sequence[str]) -> np.ndarray:
    """int64 [B], the stored row of each uid; -1 where there is none."""
    return np.array([rows.get(uid, -1) for uid in uids], np.int64)


def by_uid(uids: Sequence[str]) -> np.ndarray:
    """int64 [B], the order in which predictors take a batch, so that shuffling it changes no bit."""
    return np.array(sorted(range(len(uids)), key=uids.__getitem__), np.int64)


def check_points(X_BD: np.ndarray, uids: Sequence[str]) -> None:
    """Raise ValueError, naming the prompt, where an embedding is not finite."""
    bad = ~np.isfinite(X_BD).all(1)
    if bad.any():
        i = int(np.argmax(bad))
        raise ValueError(
            f"prompt {uids[i]!r}: its embedding has entries that are NaN or infinite ({int(bad.sum())} of {len(bad)} prompts)"
        )


def reward_counts(tally: Tally) -> tuple[np.ndarray, np.ndarray]:
    """Counts a predictor can learn from: float64 [B] successes, float64 [B] trials (the scored rollouts).

    Rewards of 0 and 1 are their own successes, whatever the success threshold. For others the variance of the reward takes the
    place of p (1-p): a prompt is given the rate p of the 0/1 reward that has the same variance, on its mean's side of one half.
    So a prompt that always earns 0.5 counts as certain, and a plan spends where rewards vary. Where many prompts earn rewards
    outside [0, 1], all are first mapped there (``_scale``); what then still lies outside is cut to 0 or 1.
    """
    n, seen = tally.scored.astype(np.float64), tally.scored > 0
    low, width = _scale(tally.min[seen], tally.max[seen])
    mean = np.clip((tally.mean - low) / width, 0.0, 1.0)
    variance = np.minimum(tally.variance / width**2, mean * (1 - mean))
    # Of rewards within [0, 1], only zeros and ones are spread as far as their mean allows.
    plain = np.abs(variance - mean * (1 - mean)) < 1e-9
    rate = 0.5 - np.sqrt(np.maximum(0.25 - variance, 0.0))
    rate = np.where(plain, mean, np.where(mean > 0.5, 1 - rate, rate))
    return np.where(seen, _whole(n * rate), 0.0), n


ODD = 0.05
"""Share of the prompts whose rewards may lie outside without moving the others' scale."""


def _scale(min_B: np.ndarray, max_B: np.ndarray) -> tuple[float, float]:
    """What reward is to be 0, and how much more is to be 1, from the least and greatest reward of each prompt.

    [0, 1] unless more than ODD of the prompts reach beyond an end, which is then moved to where at most that many do. The very
    extremes would let a single odd reward change what every other prompt's rewards mean.
    """
    if not len(min_B):
        return 0.0, 1.0
    low = min(0.0, float(np.quantile(min_B, ODD, method="lower")))
    return low, max(1.0, float(np.quantile(max_B, 1 - ODD, method="higher"))) - low


def mean_counts(tally: Tally) -> tuple[np.ndarray, np.ndarray]:
    """As ``reward_counts``, but with the mean reward, cut to [0, 1], as the rate: for baselines."""
    n = tally.scored.astype(np.float64)
    return _whole(n * np.clip(tally.mean, 0.0, 1.0)), n


def _whole(counts: np.ndarray) -> np.ndarray:
    """Counts that only rounding keeps from being whole numbers, made whole."""
    return np.where(np.abs(counts - np.rint(counts)) < 1e-9, np.rint(counts), counts)
