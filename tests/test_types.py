"""Tally merges like one pass over everything; StepPlan spreads rounds to rows; the docstrings' worked examples hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vipfast.types import StepPlan, Tally

rewards = st.lists(st.one_of(st.just(float("nan")), st.sampled_from([0.0, 1.0, 0.1, 0.3, -2.5])), max_size=12)


@given(parts=st.lists(rewards, min_size=1, max_size=5))
def test_tally_of_parts_equals_tally_of_the_whole(parts):
    tally = Tally.empty(["u"])
    for part in parts:
        tally.add(0, np.array(part), 1.0, 0, 0)
    seen = np.array([r for part in parts for r in part if not np.isnan(r)])
    assert tally.scored[0] == len(seen) and tally.successes[0] == (seen >= 1).sum()
    if len(seen):
        assert tally.mean[0] == pytest.approx(seen.mean(), abs=1e-12)
        assert tally.variance[0] == pytest.approx(seen.var(), abs=1e-12)
        assert (tally.min[0], tally.max[0]) == (seen.min(), seen.max())
        assert tally.variance[0] == 0 or len(set(seen)) > 1


@pytest.mark.parametrize("value", [0.1, 0.3, 0.35, 1 / 3])
def test_constant_rewards_have_exactly_no_variance(value):
    tally = Tally.empty(["u"])
    for size in (3, 7, 1):
        tally.add(0, np.full(size, value, np.float32), 1.0, 0, 0)
    assert tally.m2[0] == 0.0 and tally.min[0] == tally.max[0] == tally.mean[0]


def test_tally_docstring_example():
    tally = Tally.empty(["u"])
    tally.asked += 4
    tally.pending += 4
    tally.add(0, np.array([1, 0, np.nan, 1]), 1.0, 9, 1)
    assert (tally.asked[0], tally.scored[0], tally.successes[0], tally.pending[0]) == (4, 3, 2, 0)
    assert tally.mean[0] == pytest.approx(2 / 3) and tally.m2[0] == pytest.approx(2 / 3)
    assert (tally.tokens[0], tally.truncated[0]) == (9, 1)


def test_step_plan_spreads_rounds_to_rows():
    plan = StepPlan.plain([np.array([2, 1]), np.array([0, 3])], use_KB=np.array([[True, False], [True, True]]))
    assert plan.counts_B.tolist() == [2, 4] and plan.used_B.tolist() == [2, 3]
    assert plan.use_R.tolist() == [True, True, False, True, True, True]


def test_step_plan_pads_rounds_of_a_growing_batch():
    assert StepPlan.plain([np.array([2, 1]), np.array([0, 0, 3])]).counts_B.tolist() == [2, 1, 3]
