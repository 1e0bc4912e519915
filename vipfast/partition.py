"""Work dealt to ranks so that the busiest has little more than its share."""

import heapq
from operator import itemgetter

import numpy as np


def karmarkar_karp(weight_N: np.ndarray, num_parts: int) -> np.ndarray:
    """Deal items to parts of nearly equal weight by the largest differencing method (Karmarkar and Karp, 1982).

    Every item starts as a partition of its own with one part filled. The two partitions whose heaviest and lightest parts lie
    farthest apart are merged, heaviest on lightest, until one is left. Whole, deterministic, O(N log N) merges of the parts.

    Args:
        weight_N: [N] >= 0.
        num_parts: parts (K), some of which may stay empty.

    Returns:
        int64 [N], each item's part; part 0 is the heaviest, part K - 1 the lightest.
    """
    part_N = np.zeros(len(weight_N), np.int64)
    if num_parts == 1 or not len(weight_N):
        return part_N
    empty = [(0.0, ())] * (num_parts - 1)
    # (-difference, tie-break, parts from heavy to light); a part is its weight and a nested pair of what was merged into it.
    heap = [(-float(weight), i, [(float(weight), (i,)), *empty]) for i, weight in enumerate(weight_N)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, heavy = heapq.heappop(heap)
        _, _, light = heapq.heappop(heap)
        merged = [(a + b, (x, y)) for (a, x), (b, y) in zip(heavy, reversed(light))]
        merged.sort(key=itemgetter(0), reverse=True)
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], first, merged))
    for part, (_, items) in enumerate(heap[0][2]):
        part_N[_flat(items)] = part
    return part_N


def _flat(nested: tuple) -> list[int]:
    """The integers in nested tuples, however deep."""
    found, stack = [], [nested]
    while stack:
        for item in stack.pop():
            found.append(item) if isinstance(item, int) else stack.append(item)
    return found
