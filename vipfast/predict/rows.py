"""A batch of counts as predictors store it: one row per distinct prompt, in an order that does not depend on the batch's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Counts:
    """B distinct prompts that have trials, sorted by uid."""

    uids: list[str]
    texts: list[str]
    successes: np.ndarray  # float64 [B]
    trials: np.ndarray  # float64 [B], > 0


def distinct(uids: Sequence[str], texts: Sequence[str], successes: np.ndarray, trials: np.ndarray) -> Counts:
    """Merge rows of the same prompt, drop those without trials, and sort by uid, so that shuffling a batch changes no bit."""
    names, first, inverse = np.unique(np.asarray(uids, dtype=object), return_index=True, return_inverse=True)
    k = np.bincount(inverse, np.asarray(successes, np.float64), len(names))
    n = np.bincount(inverse, np.asarray(trials, np.float64), len(names))
    keep = np.flatnonzero(n > 0)
    return Counts([names[i] for i in keep], [texts[first[i]] for i in keep], k[keep], n[keep])


def positions(rows: Mapping[str, int], uids: Sequence[str]) -> np.ndarray:
    """int64 [B], the stored row of each uid; -1 where there is none."""
    return np.array([rows.get(uid, -1) for uid in uids], np.int64)
