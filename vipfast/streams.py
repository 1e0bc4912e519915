"""Counter-based random numbers: the k-th rollout of a prompt draws the same numbers under any allocator, order or batch.

A uniform is a hash of (stream, seed, step, prompt_uid, rollout index, position), so no generator object is kept per row and
nothing about the batch can change what a rollout draws (invariant 12). The mixer is SplitMix64's finaliser (Steele, Lea and
Flood, OOPSLA 2014), applied once per key part.
"""

import hashlib

import numpy as np

TRAIN, EVAL, TIES, ORDER = 1, 2, 3, 4
"""Stream ids: rollouts of training, rollouts of evaluation, an allocator's tie-breaks, the selector's epochs."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uid_hash(uid: str) -> int:
    """64-bit integer of a prompt_uid (any string), the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=8).digest(), "little")


def keys(stream: int, seed: int, step: int, *parts) -> np.ndarray:
    """Hash key parts into uint64 keys.

    Args:
        stream: one of TRAIN, EVAL, TIES, ORDER.
        seed, step: any Python integers (taken modulo 2^64).
        parts: integers or integer arrays that broadcast together, e.g. uid hashes [R] and rollout indices [R].

    Returns:
        uint64 array of the broadcast shape (0-d if every part is a scalar).
    """
    with np.errstate(over="ignore"):
        key = np.asarray(np.uint64(stream))
        for part in (seed, step, *parts):
            if isinstance(part, int):
                part = part % 2**64
            key = _mix((key + _GOLDEN) ^ _mix(np.asarray(part).astype(np.uint64) + _GOLDEN))
        return key


def uniforms(key_R: np.ndarray, position: int | np.ndarray) -> np.ndarray:
    """float64 in [0, 1) for each key at a position (token index); 53 random bits each."""
    with np.errstate(over="ignore"):
        bits = _mix((key_R + _GOLDEN) ^ _mix(np.asarray(position).astype(np.uint64) + _GOLDEN))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
