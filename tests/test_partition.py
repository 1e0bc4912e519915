"""Karmarkar and Karp's differencing against the best of all partitions."""

import itertools

import numpy as np
import pytest

from vipfast.partition import karmarkar_karp


def heaviest(weight_N, part_N, num_parts):
    return np.bincount(part_N, weight_N, minlength=num_parts).max()


def best(weight_N, num_parts):
    """The least heaviest part of all assignments."""
    every = itertools.product(range(num_parts), repeat=len(weight_N))
    return min(heaviest(weight_N, np.array(parts), num_parts) for parts in every)


def test_the_papers_example():
    # 8 7 6 5 4: differencing leaves 2 (16 and 14), while the best partition leaves 0
    assert np.bincount(karmarkar_karp(np.array([8, 7, 6, 5, 4]), 2), [8, 7, 6, 5, 4]).tolist() == [16, 14]


@pytest.mark.parametrize("num_parts", [2, 3])
def test_little_above_the_best_of_all_partitions(num_parts):
    rng = np.random.default_rng(0)
    found, least = [], []
    for _ in range(20):
        weight_N = rng.lognormal(3, 0.8, 8).round()
        found.append(heaviest(weight_N, karmarkar_karp(weight_N, num_parts), num_parts))
        least.append(best(weight_N, num_parts))
    ratio = np.array(found) / least
    assert ratio.min() >= 1 and ratio.max() < 7 / 6 and ratio.mean() < 1.03


def test_many_rows_are_level_and_parts_come_heaviest_first():
    weight_N = np.random.default_rng(1).lognormal(5, 0.8, 512).round()
    load = np.bincount(karmarkar_karp(weight_N, 8), weight_N)
    assert load.max() <= load.mean() + 1 and (np.diff(load) <= 0).all()


@pytest.mark.parametrize("weights", [[], [5], [0, 0, 0], [3, 3]])
def test_fewer_items_than_parts(weights):
    part_N = karmarkar_karp(np.array(weights), 4)
    assert len(part_N) == len(weights) and ((part_N >= 0) & (part_N < 4)).all()
    assert len(weights) != 2 or part_N[0] != part_N[1]
