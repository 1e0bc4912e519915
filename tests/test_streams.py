"""The random streams: known answers, and the properties that let rounds, order and batches be split at will."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vipfast import streams


def splitmix64(x):
    """The finaliser in plain Python integers, from the paper's listing."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


GOLDEN = 0x9E3779B97F4A7C15


def test_finaliser_gives_the_published_first_output_of_seed_0():
    assert streams._mix(np.array([GOLDEN], np.uint64)).tolist() == [0xE220A8397B1DCDAF]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**20), st.integers(0, 2**16))
def test_key_and_uniform_equal_plain_integer_arithmetic(seed, uid, step, position):
    key = streams.TRAIN
    for part in (seed, step, uid):
        key = splitmix64(((key + GOLDEN) % 2**64) ^ splitmix64((part + GOLDEN) % 2**64))
    ours = streams.keys(streams.TRAIN, seed, step, uid)
    assert int(ours) == key
    bits = splitmix64(((key + GOLDEN) % 2**64) ^ splitmix64((position + GOLDEN) % 2**64))
    assert float(streams.uniforms(ours, position)) == (bits >> 11) * 2.0**-53


@given(st.integers(0, 2**32), st.lists(st.integers(0, 40), min_size=1, max_size=20))
def test_arrays_give_what_scalars_give(seed, indices):
    together = streams.keys(streams.EVAL, seed, 3, streams.uid_hash("a"), np.array(indices))
    alone = [int(streams.keys(streams.EVAL, seed, 3, streams.uid_hash("a"), index)) for index in indices]
    assert together.tolist() == alone


@pytest.mark.parametrize("changed", ["stream", "seed", "step", "uid", "index"])
def test_every_part_names_another_stream(changed):
    parts = {"stream": streams.TRAIN, "seed": 0, "step": 5, "uid": streams.uid_hash("x"), "index": 2}
    other = parts | {changed: streams.EVAL if changed == "stream" else parts[changed] + 1}
    assert int(streams.keys(*parts.values())) != int(streams.keys(*other.values()))


def test_swapped_parts_are_another_stream():
    assert int(streams.keys(streams.TRAIN, 0, 1, 2, 3)) != int(streams.keys(streams.TRAIN, 0, 1, 3, 2))


def test_negative_seed_is_taken_modulo_two_to_the_64():
    assert int(streams.keys(streams.TRAIN, -1, 0)) == int(streams.keys(streams.TRAIN, 2**64 - 1, 0))


def test_uid_hash_is_the_same_in_every_process():
    assert streams.uid_hash("") == int.from_bytes(bytes.fromhex("e4a6a0577479b2b4"), "little")


def test_uniforms_are_in_range_level_and_unrelated_between_neighbours():
    rows = streams.keys(streams.TRAIN, 0, 0, streams.uid_hash("p"), np.arange(512))
    draws = np.stack([streams.uniforms(rows, position) for position in range(256)])
    assert draws.min() >= 0 and draws.max() < 1
    counts = np.histogram(draws, 64, (0, 1))[0]
    expected = draws.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120  # chi-square with 63 degrees of freedom: p < 2e-5 beyond
    for left, right in ((draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 5 / np.sqrt(left.size)
    assert len(np.unique(draws)) == draws.size


def test_nothing_global_is_touched():
    before = np.random.get_state()[1].copy()
    streams.uniforms(streams.keys(streams.TRAIN, 1, 2, np.arange(9)), 0)
    assert (np.random.get_state()[1] == before).all()
