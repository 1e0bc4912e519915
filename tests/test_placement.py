"""Homes of prompts: level by expected tokens, kept over a step's rounds."""

import numpy as np

from vipfast.distributed import ALONE, Ranks
from vipfast.placement import HERE, Placement
from vipfast.types import Tally

NOWHERE = np.full(6, -1)
UIDS = list("abcdef")


def two():
    return Placement(Ranks({"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}))


def learned(lengths):
    tally = Tally.empty(UIDS)
    tally.asked[:], tally.tokens[:] = 100, 100 * np.array(lengths)
    return tally


def test_a_process_alone_keeps_everything_and_remembers_nothing():
    assert HERE.homes(UIDS, np.array([1, 0, 2, 1, 1, 1]), NOWHERE).tolist() == [0, -1, 0, 0, 0, 0]
    HERE.learn(learned([1] * 6))
    assert HERE.state_dict() == {} and ALONE.size == 1


def test_counts_are_levelled_before_anything_is_known():
    home_B = two().homes(UIDS, np.array([6, 1, 1, 1, 2, 1]), NOWHERE)
    assert np.bincount(home_B, [6, 1, 1, 1, 2, 1]).tolist() == [6, 6]


def test_long_answers_are_kept_apart_once_they_are_known():
    placement = two()
    placement.learn(learned([90, 90, 10, 10, 10, 10]))
    home_B = placement.homes(UIDS, np.full(6, 4), NOWHERE)
    assert home_B[0] != home_B[1] and np.bincount(home_B).tolist() == [3, 3]
    again = two()
    again.load_state_dict(placement.state_dict())
    assert again.homes(UIDS, np.full(6, 4), NOWHERE).tolist() == home_B.tolist()


def test_a_home_is_for_all_rounds_and_new_prompts_go_where_least_is_to_do():
    placement = two()
    first = placement.homes(UIDS, np.array([4, 4, 2, 2, 0, 0]), NOWHERE)
    busy = int(first[0])
    counts_B = np.array([8, 0, 0, 0, 3, 1])
    then = placement.homes(UIDS, counts_B, first)
    assert then[:4].tolist() == first[:4].tolist() and first[4:].tolist() == [-1, -1]
    assert then[4] == 1 - busy
