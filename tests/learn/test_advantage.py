import numpy as np
import pytest

from vipfast.learn.advantage import rollout_weights
from vipfast.types import StepPlan

# Two prompts with 1 and 3 rollouts, lengths 2 | 4 1 3; M = 10, B = 2, C = 4, sum of lengths 10.
GROUPS, LENGTHS, PLAN = np.array([0, 1, 4]), np.array([2, 4, 1, 3]), StepPlan.plain([np.array([1, 3])])

TABLE = {
    ("prompt", "constant"): [1 / 20, 1 / 60, 1 / 60, 1 / 60],
    ("prompt", "sequence"): [1 / 4, 1 / 24, 1 / 6, 1 / 18],
    ("prompt", "token"): [1 / 4, 1 / 16, 1 / 16, 1 / 16],
    ("rollout", "constant"): [1 / 40] * 4,
    ("rollout", "sequence"): [1 / 8, 1 / 16, 1 / 4, 1 / 12],
    ("token", "constant"): [1 / 10] * 4,
}


@pytest.mark.parametrize("cell", TABLE, ids="-".join)
def test_every_cell_by_hand(cell):
    assert rollout_weights(GROUPS, LENGTHS, PLAN, *cell, 10).tolist() == pytest.approx(TABLE[cell])


@pytest.mark.parametrize(
    "cell", [c for c in TABLE if c != ("prompt", "constant") and c != ("rollout", "constant")], ids="-".join
)
def test_token_weights_sum_to_one(cell):
    assert (rollout_weights(GROUPS, LENGTHS, PLAN, *cell, 10) * LENGTHS).sum() == pytest.approx(1)


def test_rows_not_in_use_leave_divisors_and_get_nothing():
    # Round 0 draws 1 and 1, round 1 draws 0 and 2; only prompt 1 survives: B = 1, n = 3.
    plan = StepPlan(np.array([[1, 1], [0, 2]]), np.array([[False, True], [True, True]]), np.ones(2), np.full(2, np.nan))
    assert rollout_weights(GROUPS, LENGTHS, plan, "prompt", "constant", 10).tolist() == pytest.approx([0] + [1 / 30] * 3)
    assert rollout_weights(GROUPS, LENGTHS, plan, "token", "constant", 10).tolist() == pytest.approx([0] + [1 / 8] * 3)
    # Only the last round of prompt 1: n = 2, C = 2.
    plan = StepPlan(plan.asked_KB, np.array([[False, False], [True, True]]), np.ones(2), np.full(2, np.nan))
    assert rollout_weights(GROUPS, LENGTHS, plan, "prompt", "constant", 10).tolist() == pytest.approx([0, 0, 1 / 20, 1 / 20])
    assert rollout_weights(GROUPS, LENGTHS, plan, "rollout", "sequence", 10).tolist() == pytest.approx([0, 0, 1 / 2, 1 / 6])


def test_prompts_without_rollouts_do_not_count():
    plan = StepPlan.plain([np.array([1, 0, 3])])
    found = rollout_weights(np.array([0, 1, 1, 4]), LENGTHS, plan, "prompt", "constant", 10)
    assert found.tolist() == pytest.approx(TABLE["prompt", "constant"])


def test_mini_batch_counts_its_own_prompts():
    found = rollout_weights(GROUPS, LENGTHS, PLAN, "rollout", "constant", 10, np.array([False, True]))
    assert found.tolist() == pytest.approx([0] + [1 / 30] * 3)
    found = rollout_weights(GROUPS, LENGTHS, PLAN, "prompt", "constant", 10, np.array([True, False]))
    assert found.tolist() == pytest.approx([1 / 10, 0, 0, 0])


def test_plan_weight_multiplies():
    plan = StepPlan.plain([np.array([1, 3])], weight_B=np.array([2.0, 0.5]))
    assert rollout_weights(GROUPS, LENGTHS, plan, "token", "constant", 10).tolist() == pytest.approx([0.2] + [0.05] * 3)


@pytest.mark.parametrize("cell", TABLE, ids="-".join)
def test_no_tokens_and_no_rollouts_are_finite(cell):
    assert np.isfinite(rollout_weights(GROUPS, np.zeros(4, int), PLAN, *cell, 10)).all()
    assert rollout_weights(np.array([0, 0]), np.zeros(0, int), StepPlan.plain([np.array([0])]), *cell, 10).shape == (0,)


def test_a_masked_rollout_dilutes_no_token_mean():
    alone = rollout_weights(np.array([0, 1]), np.array([4]), StepPlan.plain([np.array([1])]), "token", "constant", 10)
    beside = rollout_weights(np.array([0, 2]), np.array([4, 0]), StepPlan.plain([np.array([2])]), "token", "constant", 10)
    assert beside[0] == alone[0]
