"""The solver against known allocations, brute force, the closed forms of the paper, and its own invariants."""

import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vipfast.allocate import solver
from vipfast.allocate.objective import OBJECTIVES, rloo
from vipfast.errors import BudgetError

P = np.array([0.01, 0.1, 0.2, 0.4, 0.5, 0.8, 0.95, 0.99])
TIES = np.arange(8, dtype=np.uint64)


def solve(p, budget, low, high, objective="rloo", ties=None):
    p = np.asarray(p, float)
    ties = np.arange(len(p), dtype=np.uint64) if ties is None else ties
    return solver.solve(p * (1 - p), budget, low, high, ties, OBJECTIVES[objective])


@pytest.mark.parametrize(
    "objective, low, high, expected",
    [
        ("rloo", 2, 32, [3, 8, 10, 12, 12, 10, 6, 3]),
        ("dr_grpo", 3, 32, [3, 7, 10, 13, 13, 10, 5, 3]),
        ("rloo", 4, 12, [4, 7, 10, 11, 12, 10, 6, 4]),
        ("dr_grpo", 4, 12, [4, 7, 10, 12, 12, 10, 5, 4]),
    ],
)
def test_known_allocations(objective, low, high, expected):
    assert solve(P, 64, low, high, objective).tolist() == expected


def brute_force(a, budget, low, high, phi):
    plans = [n for n in itertools.product(range(low, high + 1), repeat=len(a)) if sum(n) == budget]
    return min(sum(a_q * phi(float(n_q)) for a_q, n_q in zip(a, n)) for n in plans)


@pytest.mark.parametrize("objective, low", [("rloo", 2), ("dr_grpo", 3)])
def test_no_integer_plan_is_better(objective, low):
    rng, phi = np.random.default_rng(0), OBJECTIVES[objective]
    for _ in range(60):
        B, high = rng.integers(1, 5), low + rng.integers(0, 6)
        budget = int(rng.integers(B * low, B * high + 1))
        a = rng.choice([0.0, 0.01, 0.09, 0.16, 0.25], B)
        counts = solver.solve(a, budget, low, high, TIES[:B], phi)
        assert counts.sum() == budget and counts.min() >= low and counts.max() <= high
        assert np.sum(a * phi(counts.astype(float))) == pytest.approx(brute_force(a, budget, low, high, phi), abs=1e-12)


def continuous(a, budget, low, high, objective):
    """Theorems 5.1 and 5.2: n_q(lambda), with lambda by bisection on sum n = C."""

    def counts(lam):
        if objective == "rloo":
            return np.clip(1 + np.sqrt(a / lam), low, high)
        inside = np.minimum(3 * np.sqrt(3 * lam / a), 1.0)
        root = 2 * np.sqrt(a / (3 * lam)) * np.cos(np.arccos(-inside) / 3)
        marginal = lambda n: a * (n - 2) / n**3  # noqa: E731
        return np.where(lam <= marginal(high), high, np.where(lam >= marginal(low), low, root))

    below, above = 1e-14, 1.0
    for _ in range(200):
        middle = np.sqrt(below * above)
        below, above = (middle, above) if counts(middle).sum() > budget else (below, middle)
    return counts(above)


@pytest.mark.parametrize("objective, low", [("rloo", 2), ("dr_grpo", 3)])
def test_integers_lie_within_rounding_of_the_closed_form(objective, low):
    rng = np.random.default_rng(1)
    for B in (8, 64):
        a = rng.uniform(0.01, 0.25, B)
        real = continuous(a, 8 * B, low, 32, objective)
        assert real.sum() == pytest.approx(8 * B, abs=1e-6)
        counts = solver.solve(a, 8 * B, low, 32, np.arange(B, dtype=np.uint64), OBJECTIVES[objective])
        assert np.abs(counts - real).max() < 1.5
        phi = OBJECTIVES[objective]
        assert np.sum(a * phi(counts.astype(float))) == pytest.approx(np.sum(a * phi(real)), rel=0.01)


@pytest.mark.parametrize("objective, low", [("rloo", 2), ("dr_grpo", 3)])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_closed_form_bounds_every_integer_plan_from_below(objective, low, data):
    p = np.array(data.draw(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=40)))
    a, high, phi = p * (1 - p), data.draw(st.integers(low + 1, 40)), OBJECTIVES[objective]
    budget = data.draw(st.integers(len(a) * low, len(a) * high))
    real = continuous(a, budget, low, high, objective)
    counts = solver.solve(a, budget, low, high, np.arange(len(a), dtype=np.uint64), phi)
    least, ours = np.sum(a * phi(real)), np.sum(a * phi(counts.astype(float)))
    assert real.sum() == pytest.approx(budget, rel=1e-6)
    # No whole plan beats the continuous optimum, and ours is no worse than rounding every prompt of it down, L apart.
    assert least - 1e-6 * least <= ours <= np.sum(a * phi(np.maximum(np.floor(real + 1e-6), low))) + 1e-12
    # Between the bounds the marginal gain is lambda, so where a is equal the counts are too, within one.
    assert np.abs(counts - real).max() < 2


def test_closed_form_root_of_dr_grpo_by_hand():
    # psi(n) = a (n - 2) / n^3 at n = 6 is a / 54; the cosine form must find 6 again: 2 sqrt(18) cos(arccos(-3 sqrt(1/18)) / 3).
    a = 0.25
    root = 2 * np.sqrt(a / (3 * a / 54)) * np.cos(np.arccos(-3 * np.sqrt(3 / 54)) / 3)
    assert root == pytest.approx(6)
    assert continuous(np.full(3, a), 18, 3, 32, "dr_grpo") == pytest.approx([6, 6, 6])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_spends_the_budget_within_bounds_and_moves_with_its_prompts(data):
    B = data.draw(st.integers(1, 12))
    low = data.draw(st.integers(3, 6))
    high = data.draw(st.integers(low, 14))
    budget = data.draw(st.integers(B * low, B * high))
    p = np.array(data.draw(st.lists(st.sampled_from([0.0, 1e-9, 0.1, 0.2, 0.5, 0.8, 1.0]), min_size=B, max_size=B)))
    objective = data.draw(st.sampled_from(["rloo", "dr_grpo"]))
    ties = np.random.default_rng(B).permutation(B).astype(np.uint64)
    counts = solve(p, budget, low, high, objective, ties)
    assert counts.sum() == budget and counts.min() >= low and counts.max() <= high and counts.dtype == np.int64
    order = np.array(data.draw(st.permutations(range(B))))
    assert (solve(p[order], budget, low, high, objective, ties[order]) == counts[order]).all()


@pytest.mark.parametrize("a", [0.0, 0.25, 1e-300], ids=["nothing to learn", "equal", "tiny"])
def test_equal_utilities_give_uniform_within_one_by_the_seeded_key(a):
    ties = np.array([5, 1, 4, 2, 3], np.uint64)
    counts = solver.solve(np.full(5, a), 38, 2, 32, ties, rloo)
    assert counts.tolist() == [7, 8, 7, 8, 8]


def test_p_and_one_minus_p_are_equal_although_float64_tells_them_apart():
    assert 0.2 * (1 - 0.2) != 0.8 * (1 - 0.8)
    for ties in ([0, 1], [1, 0]):
        counts = solve([0.2, 0.8], 9, 2, 32, ties=np.array(ties, np.uint64))
        assert counts[np.argmin(ties)] == 5


def test_what_full_prompts_cannot_take_goes_to_prompts_without_signal():
    assert solve([0.5, 0.0, 0.0], 20, 2, 10).tolist() == [10, 5, 5]


def test_capped_small_budgets_add_up():
    # 10 over 4 with floor 1 and cap 3, and 11 over 3: rounding 4 x 2.5 would give 8.
    convex = lambda n: 1 / n  # noqa: E731
    assert sorted(solver.solve(np.ones(4), 10, 1, 3, TIES[:4], convex)) == [2, 2, 3, 3]
    assert sorted(solver.solve(np.ones(3), 11, 1, 9, TIES[:3], convex)) == [3, 4, 4]


@pytest.mark.parametrize("objective, low", [("rloo", 2), ("dr_grpo", 3)])
def test_bounds_of_each_prompt_own(objective, low):
    rng, phi = np.random.default_rng(5), OBJECTIVES[objective]
    for _ in range(60):
        B = int(rng.integers(1, 5))
        low_B = low + rng.integers(0, 3, B)
        high_B = low_B + rng.integers(0, 5, B)
        budget = int(rng.integers(low_B.sum(), high_B.sum() + 1))
        a = rng.choice([0.0, 0.01, 0.09, 0.25], B)
        counts = solver.solve(a, budget, low_B, high_B, TIES[:B], phi)
        assert counts.sum() == budget and (counts >= low_B).all() and (counts <= high_B).all()
        plans = itertools.product(*(range(one, other + 1) for one, other in zip(low_B, high_B)))
        least = min(sum(a * phi(np.array(n, float))) for n in plans if sum(n) == budget)
        assert np.sum(a * phi(counts.astype(float))) == pytest.approx(least, abs=1e-12)


def test_utilities_that_share_no_shape_as_a_table_of_gains():
    # The chance of at least one success, 1 - (1 - p)^n, gains p (1 - p)^n with the next rollout.
    rng = np.random.default_rng(6)
    for _ in range(60):
        B, budget = 4, int(rng.integers(4, 21))
        p = rng.uniform(0, 1, B)
        table = p[:, None] * (1 - p[:, None]) ** np.arange(1, 6)
        counts = solver.solve_gains(table, budget, 1, 5, TIES[:B])
        plans = np.array([n for n in itertools.product(range(1, 6), repeat=B) if sum(n) == budget])
        most = (1 - (1 - p) ** plans).sum(1).max()
        assert counts.sum() == budget and (1 - (1 - p) ** counts).sum() == pytest.approx(most, abs=1e-12)
    # Gains may be losses: whoever loses least takes what must be spent.
    assert solver.solve_gains(np.array([[-1.0, -3.0], [-2.0, -2.0]]), 3, 0, 2, TIES[:2]).tolist() == [1, 2]


def test_tables_that_cannot_be_are_named():
    with pytest.raises(ValueError, match="unit 2 of prompt 1 gains 3 after 1"):
        solver.solve_gains(np.array([[3.0, 2, 1], [2, 1, 3]]), 4, 0, 3, TIES[:2])
    with pytest.raises(ValueError, match="unit 1 of prompt 0 is nan"):
        solver.solve_gains(np.array([[3.0, np.nan]]), 1, 0, 2, TIES[:1])
    with pytest.raises(ValueError, match="gains of 2 units .* 3 apart"):
        solver.solve_gains(np.ones((2, 2)), 4, 0, 3, TIES[:2])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -0.01])
def test_utilities_that_are_none_are_named(bad):
    with pytest.raises(ValueError, match=rf"finite and at least 0: prompt 1 of 3 has {bad} \(1 such in all\)"):
        solver.solve(np.array([0.1, bad, 0.2]), 24, 2, 32, TIES[:3], rloo)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_every_p_at_an_end_is_uniform_within_one(p):
    counts = solve(np.full(7, p), 59, 2, 32)
    assert counts.sum() == 59 and counts.max() - counts.min() == 1


def test_bounds_that_pin_everything_one_prompt_and_none():
    assert solve([0.5, 0.1], 12, 6, 6).tolist() == [6, 6]
    assert solver.solve(np.array([0.2, 0.1]), 9, np.array([4, 5]), np.array([4, 5]), TIES[:2], rloo).tolist() == [4, 5]
    assert solve([0.3], 17, 2, 32).tolist() == [17] and solve([0.0], 17, 2, 32).tolist() == [17]
    assert solve([], 0, 2, 32).tolist() == []
    with pytest.raises(BudgetError, match="C = 5 .* B = 0"):
        solve([], 5, 2, 32)


def test_bounds_of_prompts_that_cannot_hold_the_budget():
    with pytest.raises(BudgetError, match=r"C = 30 .* add up to \[6, 20\]"):
        solver.solve(np.full(2, 0.2), 30, np.array([2, 4]), np.array([10, 10]), TIES[:2], rloo)
    with pytest.raises(BudgetError, match="bounds of prompt 1 cross: at least 4 and at most 3"):
        solver.solve(np.full(2, 0.2), 8, np.array([2, 4]), np.array([10, 3]), TIES[:2], rloo)


@pytest.mark.parametrize("budget, remedy", [(12, "--min-rollouts 1"), (300, "--max-rollouts 38")])
def test_infeasible_budget_names_everything(budget, remedy):
    with pytest.raises(BudgetError) as error:
        solve(P, budget, 2, 32)
    for word in (f"C = {budget}", "B = 8", "L = 2", "U = 32", "[16, 256]", "--rollouts-per-prompt between 2 and 32", remedy):
        assert word in str(error.value)


def test_a_bound_below_what_the_objective_needs_is_no_remedy():
    with pytest.raises(BudgetError) as error:
        solver.check_budget(8, 8, 2, 32, least_low=2)
    assert "--min-rollouts 1" not in str(error.value) and "--prompts-per-step 4" in str(error.value)


def test_bounds_the_wrong_way_round():
    with pytest.raises(BudgetError, match="--min-rollouts 9 .* --max-rollouts 4"):
        solver.check_budget(8, 64, 9, 4)


def test_ceiling_by_hand():
    # a = [.25, 0, 0, 0]: (.5/4)^2 / (.25/4) = 1/4; equal a: 1; nothing to gain: 1.
    assert solver.ceiling(np.array([0.25, 0, 0, 0])) == pytest.approx(0.25)
    assert solver.ceiling(np.full(4, 0.16)) == pytest.approx(1.0)
    assert solver.ceiling(np.zeros(4)) == 1.0


def test_variance_ratio_by_hand():
    # [4, 2] against uniform [3, 3]: (.25/3) / (.25/2).
    assert solver.variance_ratio(np.array([0.25, 0.0]), np.array([4, 2]), rloo) == pytest.approx(2 / 3)
    # Uniform at 2.5 rollouts is half 2 and half 3: phi = (1 + 1/2) / 2 = .75; this plan: .25 (1/2 + 1) / 2 per prompt.
    assert solver.variance_ratio(np.array([0.25, 0.25]), np.array([3, 2]), rloo) == pytest.approx(1.0)
    assert solver.variance_ratio(np.zeros(2), np.array([4, 2]), rloo) == 1.0
    # Costs 1 and 3 make [6, 2] cost what uniform 3 does: .25 / 5 + .25 / 1 against 2 x .25 / 2.
    ratio = solver.variance_ratio(np.array([0.25, 0.25]), np.array([6, 2]), rloo, np.array([1.0, 3.0]))
    assert ratio == pytest.approx((0.2 + 1) / 1)


def test_the_share_of_a_budget_in_tokens_is_not_rounded_below_itself():
    """cost . counts / cost can come to 1.9999999999999998 where everyone has two, and phi(1) is no number."""
    rng = np.random.default_rng(0)
    for _ in range(500):
        cost_B = rng.random(13) * 3 + 0.1
        with warnings.catch_warnings(action="error"):
            assert solver.variance_ratio(rng.random(13), np.full(13, 2), rloo, cost_B) == pytest.approx(1)
