"""The exact allocation on a GPU: one launch of one block, which counts and bisects instead of sorting.

Unit j of prompt q gains g = weight[q] table[first[q] + j], j < room[q], never increasing in j; the C - sum L best units are
handed out. Every g is mapped to a 64-bit key that orders like g rounded to 40 mantissa bits. Then, each time by asking "how
many?" of all prompts for one more bit of the answer:

1. the smallest key still served: the largest lambda with at least C - sum L units at or above it (64 questions, each prompt
   answering by binary search). Units above lambda are placed; those equal to it are ties, a run of n per prompt;
2. ties with the smaller n go first: the largest level m below which all ties can be placed (32 questions);
3. at n = m the smaller tie key goes first (64 questions), and among equal keys the smaller index (32).

Counting is integer arithmetic, so thread order moves nothing. The NumPy twin (solver.py) gives the same integers.
Bytes moved: 48 B in, 16 B scratch and result, per prompt; the questions are answered from the caches.
"""

from functools import cache
from typing import Any

import numpy as np

from vipfast import xp

NAME = "place_units"
THREADS = 1024
SOURCE = r"""
typedef long long i64;
typedef unsigned long long u64;

// Sum over the block; every thread gets it. blockDim.x is a power of two.
__device__ i64 total(i64 mine) {
    __shared__ i64 sums[1024];
    sums[threadIdx.x] = mine;
    __syncthreads();
    for (unsigned int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    i64 all = sums[0];
    __syncthreads();  // before the next question overwrites the sums
    return all;
}

// Orders like the gain rounded to 40 mantissa bits.
__device__ u64 key_of(double gain) {
    u64 bits = (u64)__double_as_longlong(gain);
    bits = (bits + (1ULL << 11)) >> 12 << 12;
    if (!(bits << 1)) bits = 0;  // -0
    return bits >> 63 ? ~bits : bits | 1ULL << 63;
}

// How many of a prompt's units have a key of at least this.
__device__ i64 at_least(u64 key, double weight, const double* gains, i64 room) {
    i64 served = 0, refused = room;
    while (served < refused) {
        i64 middle = served + (refused - served) / 2;
        if (key_of(weight * gains[middle]) >= key) served = middle + 1;
        else refused = middle;
    }
    return served;
}

__device__ i64 between(i64 value, i64 least, i64 most) { return value < least ? least : value > most ? most : value; }

extern "C" __global__ void __launch_bounds__(1024)
place_units(const double* weight, const double* table, const i64* first, const i64* low, const i64* room, const u64* tie,
            i64* until, i64* counts, i64 num_prompts, i64 units) {
    const i64 lane = threadIdx.x, lanes = blockDim.x;

    i64 bad = 0;
    for (i64 q = lane; q < num_prompts; q += lanes) bad += !(weight[q] >= 0 && weight[q] <= 1.7976931348623157e308);
    if (total(bad)) {
        for (i64 q = lane; q < num_prompts; q += lanes) counts[q] = -1;
        return;
    }

    u64 lambda = 0;
    for (int bit = 63; bit >= 0; --bit) {
        u64 guess = lambda | 1ULL << bit;
        i64 mine = 0;
        for (i64 q = lane; q < num_prompts; q += lanes) mine += at_least(guess, weight[q], table + first[q], room[q]);
        if (total(mine) >= units) lambda = guess;
    }
    // Prompt q holds counts[q] units' worth of rollouts for sure; its ties reach from there up to until[q].
    i64 placed = 0;
    for (i64 q = lane; q < num_prompts; q += lanes) {
        i64 sure = at_least(lambda + 1, weight[q], table + first[q], room[q]);
        counts[q] = low[q] + sure;
        until[q] = low[q] + at_least(lambda, weight[q], table + first[q], room[q]);
        placed += sure;
    }
    i64 left = units - total(placed);

    i64 level = 0;
    for (int bit = 31; bit >= 0; --bit) {
        i64 guess = level | 1LL << bit;
        i64 mine = 0;
        for (i64 q = lane; q < num_prompts; q += lanes) mine += between(guess, counts[q], until[q]) - counts[q];
        if (total(mine) <= left) level = guess;
    }
    i64 below = 0;
    for (i64 q = lane; q < num_prompts; q += lanes) {
        i64 reached = between(level, counts[q], until[q]);
        below += reached - counts[q];
        counts[q] = reached;
    }
    left -= total(below);

    // What is left goes to prompts whose next tie is the unit from n = level on: by tie key, then by index.
    u64 last = 0;
    for (int bit = 63; bit >= 0; --bit) {
        u64 guess = last | 1ULL << bit;
        i64 mine = 0;
        for (i64 q = lane; q < num_prompts; q += lanes) mine += counts[q] == level && level < until[q] && tie[q] < guess;
        if (total(mine) <= left) last = guess;
    }
    i64 earlier = 0;
    for (i64 q = lane; q < num_prompts; q += lanes) earlier += counts[q] == level && level < until[q] && tie[q] < last;
    left -= total(earlier);
    i64 end = 0;
    for (int bit = 31; bit >= 0; --bit) {
        i64 guess = end | 1LL << bit;
        i64 mine = 0;
        for (i64 q = lane; q < num_prompts; q += lanes)
            mine += counts[q] == level && level < until[q] && tie[q] == last && q < guess;
        if (total(mine) <= left) end = guess;
    }
    for (i64 q = lane; q < num_prompts; q += lanes)
        if (counts[q] == level && level < until[q] && (tie[q] < last || (tie[q] == last && q < end))) counts[q] += 1;
}
"""


def place(
    weight_B: Any, table: np.ndarray, first_B: np.ndarray, low_B: np.ndarray, room_B: np.ndarray, units: int, ties_B: np.ndarray
) -> Any:
    """Hand out ``units`` on the GPU of ``weight_B``; nothing comes back to the host.

    Args:
        weight_B: CuPy float64 [B].
        table: float64 [...], gains; first_B: int64 [B], where a prompt's begin in it.
        low_B, room_B: int64 [B], rollouts each prompt has anyway, and units it can take.
        units: 1 <= units <= sum of room_B.
        ties_B: uint64 [B].

    Returns:
        CuPy int64 [B]; all -1 where a weight is negative or not finite.
    """
    B = len(low_B)
    assert 0 < units <= room_B.sum() and max(B, int((low_B + room_B).max())) < 2**31, "out of the kernel's range"
    cupy = xp.namespace_of(weight_B)
    with xp.scope(cupy):
        weight_B = cupy.ascontiguousarray(weight_B, dtype=cupy.float64)
        facts = np.stack([first_B, low_B, room_B, np.asarray(ties_B, np.uint64).view(np.int64)]).astype(np.int64)
        first, low, room, tie = cupy.asarray(facts)
        gains = cupy.asarray(np.ascontiguousarray(table, np.float64))
        until, counts = cupy.empty(B, cupy.int64), cupy.empty(B, cupy.int64)
        threads = min(THREADS, max(32, 1 << (B - 1).bit_length()))
        arguments = (weight_B, gains, first, low, room, tie, until, counts, np.int64(B), np.int64(units))
        _kernel(cupy)((1,), (threads,), arguments)
    return counts


@cache
def _kernel(cupy: Any) -> Any:
    return cupy.RawKernel(SOURCE, NAME)
