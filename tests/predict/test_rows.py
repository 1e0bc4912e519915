"""What a step's tally becomes for a predictor, and how counts age."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vipfast.predict.history import History
from vipfast.predict.rows import distinct, mean_counts, reward_counts
from vipfast.types import Tally


def tally_of(*groups):
    tally = Tally.empty([f"u{i}" for i in range(len(groups))])
    for slot, rewards in enumerate(groups):
        tally.add(slot, np.array(rewards, float), 1.0, tokens=0, truncated=0)
    return tally


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, np.nan]), max_size=12), min_size=1, max_size=8))
def test_rewards_of_0_and_1_are_their_own_counts(groups):
    tally = tally_of(*groups)
    for counts in (reward_counts, mean_counts):
        k, n = counts(tally)
        assert k.tolist() == tally.successes.tolist() and n.tolist() == tally.scored.tolist()


def test_partial_credit_counts_by_its_variance():
    # Always .5: no variance, so as certain as a prompt can be. 0, .5, .5, 1: variance 1/8, that of p(1-p) with p = .1464.
    # .9, 1: variance .0025, p = .9975. Nothing scored: no trials.
    k, n = reward_counts(tally_of([0.5, 0.5], [0.0, 0.5, 0.5, 1.0], [0.9, 1.0], [np.nan]))
    assert n.tolist() == [2, 4, 2, 0] and k[0] == 0 and k[3] == 0
    assert k[1] / 4 == pytest.approx(0.1464, abs=1e-4) and k[2] / 2 == pytest.approx(0.9975, abs=1e-4)
    assert mean_counts(tally_of([0.5, 0.5], [0.9, 1.0]))[0] == pytest.approx([1.0, 1.9])


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=10), min_size=1, max_size=6))
def test_any_rewards_keep_their_variance_in_units_of_the_range(groups):
    tally = tally_of(*groups)
    k, n = reward_counts(tally)
    width = max(1.0, *tally.max, 1.0) - min(0.0, *tally.min, 0.0)
    assert (0 <= k).all() and (k <= n).all()
    assert (k / n * (1 - k / n)) * width**2 == pytest.approx(tally.variance, abs=1e-6)


def test_rewards_of_minus_1_and_1_are_mapped():
    k, n = reward_counts(tally_of([-1.0, 1.0, 1.0, 1.0], [-1.0, -1.0], [1.0]))
    assert k.tolist() == [3, 0, 1] and n.tolist() == [4, 2, 1]


def test_distinct_merges_sorts_and_refuses():
    counts = distinct(["b", "a", "b", "c"], ["tb", "ta", "tb", "tc"], np.array([1, 0, 2, 0]), np.array([4, 3, 4, 0]))
    assert counts.uids == ["a", "b"] and counts.texts == ["ta", "tb"]
    assert counts.successes.tolist() == [0, 3] and counts.trials.tolist() == [3, 8]
    with pytest.raises(ValueError, match="prompt 'b': a predictor was given -1 successes of 4 rollouts"):
        distinct(["a", "b"], ["", ""], np.array([0, -1]), np.array([1, 4]))


def test_repeated_small_counts_add_up_as_counts():
    # 0 of 2 for ten steps is 0 of 20, far surer than a single 0 of 2.
    history = History(drift=0.0)
    for step in range(10):
        history.add(["a"], np.array([0.0]), np.array([2.0]), 0.0, step)
    k, n, _ = history.aged(["a", "b"], 10)
    assert k.tolist() == [0, 0] and n.tolist() == [20, 0]


def test_old_counts_shrink_by_what_drift_has_made_of_them():
    # Noise of 4 of 8 is 2/4.5; after 2 steps of drift .1 they are worth 2/4.5 / (2/4.5 + .2) of their number.
    history = History(drift=0.1)
    history.add(["a"], np.array([4.0]), np.array([8.0]), 0.5, 0)
    kept = (2 / 4.5) / (2 / 4.5 + 0.2)
    assert [x[0] for x in history.aged(["a"], 2)] == pytest.approx([4 * kept, 8 * kept, 0.5])
    history.add(["a"], np.array([1.0]), np.array([2.0]), 1.0, 2)
    mixed = (0.5 * 8 * kept + 1.0 * 2) / (8 * kept + 2)
    assert [x[0] for x in history.aged(["a"], 2)] == pytest.approx([1 + 4 * kept, 2 + 8 * kept, mixed])


def test_history_grows_and_comes_back():
    history, other = History(0.01), History(0.01)
    uids = [f"u{i}" for i in range(1000)]
    for start in range(0, 1000, 37):
        part = uids[start : start + 37]
        history.add(part, np.arange(len(part)) % 3.0, np.full(len(part), 4.0), 0.1, start)
    other.load_state_dict(history.state_dict())
    assert len(other) == 1000 and other.uids == uids
    for a, b in zip(history.aged(uids[::-1], 2000), other.aged(uids[::-1], 2000), strict=True):
        assert (a == b).all()
    other.load_state_dict(History(0.01).state_dict())
    other.add(["x"], np.array([1.0]), np.array([1.0]), 0.0, 0)
    assert len(other) == 1


def test_one_odd_reward_leaves_the_others_counts_alone():
    """Where one prompt of twenty or fewer earns beyond [0, 1], it is cut; where many do, all are scaled."""
    rng = np.random.default_rng(0)
    plain = [list(rng.integers(0, 2, 8).astype(float)) for _ in range(40)]
    alone = reward_counts(tally_of(*plain))
    for odd in (-1000.0, 5.0):
        k, n = reward_counts(tally_of(*plain[:-1], [*plain[-1], odd]))
        assert np.array_equal(k[:-1], alone[0][:-1]) and 0 <= k[-1] <= n[-1] == 9
    scaled = reward_counts(tally_of(*([4 * reward - 1 for reward in rewards] for rewards in plain)))
    assert np.array_equal(scaled[0], alone[0])


def test_shuffling_rows_of_one_prompt_changes_no_bit():
    rng = np.random.default_rng(0)
    k, n = rng.random(7) * 3, np.full(7, 3.0)
    first = distinct(["a", "b"] + ["a"] * 5, ["t"] * 7, k, n)
    for _ in range(50):
        order = np.concatenate([[0, 1], 2 + rng.permutation(5)])
        order = order[rng.permutation(7)]
        uids = np.array(["a", "b"] + ["a"] * 5)[order].tolist()
        again = distinct(uids, ["t"] * 7, k[order], n[order])
        assert again.uids == first.uids and np.array_equal(again.successes, first.successes)
