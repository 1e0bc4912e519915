"""A budget in tokens: the plan against the bound of its linear relaxation, and what prompts are expected to cost."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.optimize

from vipfast import rollout
from vipfast.allocate import solver
from vipfast.allocate.objective import OBJECTIVES, rloo
from vipfast.allocate.tokens import Lengths, solve_tokens
from vipfast.allocate.vip import Vip
from vipfast.allocation import make_allocator
from vipfast.config import Config
from vipfast.engine.base import Finished
from vipfast.errors import UsageError
from vipfast.predict.base import Prediction
from vipfast.rewards.base import Grades
from vipfast.types import Finish, Prompt, PromptBatch, Tally

TIES = np.arange(64, dtype=np.uint64)


def tally_of(lengths, counts):
    tally = Tally.empty([f"u{i}" for i in range(len(counts))])
    tally.asked += counts
    tally.tokens += np.array(lengths) * counts
    return tally


@pytest.mark.parametrize("objective, low", [("rloo", 2), ("dr_grpo", 3)])
def test_equal_costs_give_the_counts_of_a_budget_in_rollouts(objective, low):
    rng, phi = np.random.default_rng(0), OBJECTIVES[objective]
    for _ in range(200):
        B = int(rng.integers(1, 20))
        utility_B, ties_B = rng.choice([0.0, 0.09, 0.16, 0.25], B), rng.permutation(B).astype(np.uint64)
        budget = int(rng.integers(low * B, 12 * B + 1))
        ours = solve_tokens(utility_B, np.ones(B), budget, low, 12, ties_B, phi)
        assert ours.tolist() == solver.solve(utility_B, budget, low, 12, ties_B, phi).tolist()


def test_by_hand():
    # Gains of the third rollout: .25 / 2 each. Short (cost 1/2) gains .25 a token, long (cost 2) .0625; the short one's fourth
    # gains .25 / 6 / .5 = .083, its fifth .042. Budget 8.5 less 2 (.5 + 2) = 3.5: two raises of the short one, then the long
    # one's third (2) leaves .5, which buys the short one's fifth.
    counts = solve_tokens(np.array([0.25, 0.25]), np.array([0.5, 2.0]), 8.5, 2, 32, TIES[:2], rloo)
    assert counts.tolist() == [5, 3]
    # With .4 less nothing fits at the end; the raise that does not fit is passed over, not the end of it all.
    assert solve_tokens(np.array([0.25, 0.25]), np.array([0.5, 2.0]), 8.1, 2, 32, TIES[:2], rloo).tolist() == [4, 3]
    assert solve_tokens(np.array([0.25, 0.25]), np.array([0.5, 2.0]), 7.0, 2, 32, TIES[:2], rloo).tolist() == [6, 2]


def test_a_budget_that_is_met_exactly_is_met_though_sums_round():
    # Three rollouts of .1 cost .3, but .3 - .2 is less than .1 in float64.
    assert solve_tokens(np.array([0.25]), np.array([0.1]), 0.3, 2, 32, TIES[:1], rloo).tolist() == [3]
    assert solve_tokens(np.array([0.25]), np.array([0.1]), 0.2999, 2, 32, TIES[:1], rloo).tolist() == [2], "but not beyond it"


def relaxed(utility_B, cost_B, budget, low, high, phi):
    """The least of sum a phi(n) over fractions of rollouts, by a linear program over the gains of single rollouts."""
    n = np.arange(low, high + 1.0)
    gain_BK = utility_B[:, None] * (phi(n)[:-1] - phi(n)[1:])
    cost = np.repeat(cost_B, high - low)
    found = scipy.optimize.linprog(-gain_BK.ravel(), A_ub=cost[None], b_ub=[budget - low * cost_B.sum()], bounds=(0, 1))
    assert found.status == 0
    return float(utility_B.sum() * phi(np.float64(low)) + found.fun)


@pytest.mark.parametrize("objective, low", [("rloo", 2), ("dr_grpo", 3)])
def test_within_one_rollouts_gain_of_the_relaxed_bound_and_of_the_budget(objective, low):
    rng, phi, gaps = np.random.default_rng(1), OBJECTIVES[objective], []
    for _ in range(60):
        B, high = int(rng.integers(2, 12)), int(rng.integers(low + 1, 14))
        utility_B, cost_B = rng.uniform(0, 0.25, B), rng.lognormal(0, 0.7, B)
        budget = float(rng.uniform(low, high)) * cost_B.sum()
        counts = solve_tokens(utility_B, cost_B, budget, low, high, TIES[:B], phi)
        assert counts.min() >= low and counts.max() <= high and counts @ cost_B <= budget * (1 + 1e-8)
        raisable = counts < high
        assert not (cost_B[raisable] <= budget - counts @ cost_B - 1e-6).any(), "a raise that fits was left out"
        value = np.sum(utility_B * phi(counts.astype(float)))
        bound = relaxed(utility_B, cost_B, budget, low, high, phi)
        first = float((utility_B * (phi(np.float64(low)) - phi(low + 1.0))).max())
        assert -1e-9 < value - bound < first
        gaps.append((value - bound) / bound)
    assert np.median(gaps) < 0.02


def test_one_rollouts_gain_is_that_of_the_first_raise_that_does_not_fit():
    # The bound takes the fraction 1/2 of a raise that gains .125 at cost 1; whole rollouts take nothing of it.
    bound = relaxed(np.array([0.25]), np.ones(1), 2.5, 2, 32, rloo)
    counts = solve_tokens(np.array([0.25]), np.ones(1), 2.5, 2, 32, TIES[:1], rloo)
    assert counts.tolist() == [2] and 0.25 - bound == pytest.approx(0.125 / 2)


def test_lower_bounds_come_first_even_beyond_the_budget():
    assert solve_tokens(np.full(3, 0.2), np.full(3, 5.0), 12, 2, 32, TIES[:3], rloo).tolist() == [2, 2, 2]
    assert solve_tokens(np.full(3, 0.2), np.full(3, 0.1), 99, 2, 4, TIES[:3], rloo).tolist() == [4, 4, 4]
    assert solve_tokens(np.full(3, 0.2), np.ones(3), 6, 2, 2, TIES[:3], rloo).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="prompt 1 of 2 has nan"):
        solve_tokens(np.array([0.1, np.nan]), np.ones(2), 16, 2, 32, TIES[:2], rloo)


def test_lengths_are_shrunk_towards_the_pools_mean():
    lengths = Lengths()
    assert lengths.costs(["u0", "u1"]).tolist() == [1, 1], "nothing known: every rollout costs the same"
    # Means of 20 and 60 tokens: the pool's is 40, prompts once each, although u1 had six of the eight rollouts.
    lengths.update(tally_of([20, 60], np.array([2, 6])))
    assert lengths.mean == 40
    assert lengths.costs(["u0", "u1", "new"]) == pytest.approx([(8 + 2 * 0.5) / 10, (8 + 6 * 1.5) / 14, 1])
    # The policy doubles its lengths: the mean follows slowly, own lengths are relative to it and the newest counts.
    lengths.update(tally_of([80, 80], np.array([8, 0])))
    assert lengths.mean == pytest.approx(0.9 * 40 + 0.1 * 80)
    assert lengths.costs(["u0", "u1"]) == pytest.approx([(8 + 8 * 80 / 44) / 16, (8 + 6 * 1.5) / 14])


def test_lengths_restore_and_a_step_without_tokens_teaches_none():
    lengths, other = Lengths(), Lengths()
    other.load_state_dict(lengths.state_dict())
    lengths.update(tally_of([20, 60], np.array([2, 6])))
    other.load_state_dict(lengths.state_dict())
    lengths.update(tally_of([0, 0], np.array([4, 4])))
    assert other.costs(["u1", "u0", "x"]).tolist() == lengths.costs(["u1", "u0", "x"]).tolist() and other.mean == 40


class Known:
    name = "known"

    def predict(self, uids, texts):
        return Prediction(np.full(len(uids), 0.5), np.zeros(len(uids)), np.full(len(uids), 0.25))

    def update(self, *counts):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


class Echo:
    """An engine whose completions are as long as the prompt says."""

    name, pending = "echo", 0

    def submit(self, requests):
        self.requests, self.pending = requests, sum(request.count for request in requests)

    def step(self):
        self.pending = 0
        return [
            Finished(r.slot, r.first_index + i, np.zeros(r.tokens[0], np.int64), np.zeros(r.tokens[0], np.float32), Finish.STOP)
            for r in self.requests
            for i in range(r.count)
        ]


def test_short_answers_get_more_rollouts_for_the_same_tokens():
    allocator = Vip(Known(), "rloo", 2, 32, Lengths())
    prompts = [Prompt(f"u{i}", "", np.array([length])) for i, length in enumerate([10, 10, 10, 90])]
    grader = SimpleNamespace(grade=lambda prompts, finished: Grades.plain(np.zeros(len(finished))))
    spent, expected = [], []
    for step in range(8):
        rollouts, tally, _ = rollout.collect(allocator, PromptBatch(prompts, step, 0), 32, Echo(), grader)
        allocator.learn(tally)
        spent.append((rollouts.counts_B.tolist(), int(tally.tokens.sum())))
        expected.append(rollouts.plan.note["budget/tokens_expected"])
    assert spent[0] == ([8, 8, 8, 8], 960)
    # Then the mean of 30 tokens is known, and 8 rollouts of a third or of three times that beside the prior's 8.
    assert expected[0] is None and expected[1] == pytest.approx(30 * np.dot([2 / 3, 2 / 3, 2 / 3, 2], spent[1][0]))
    counts, tokens = spent[-1]
    assert sum(counts) > 32 and min(counts[:3]) > 8 > counts[3] and tokens < 960, spent


def test_the_expected_variance_is_compared_at_equal_tokens():
    # Means of 20 and 60 tokens, 8 rollouts each: costs 3/4 and 5/4. Gain per cost is .25 / ((n - 1) n cost), so of 16 the short
    # one gets 9 (6.75) and the long one 7 (8.75). That costs 15.5, for which uniform gives 7.75 each: 7, and 8 to 3 of 4.
    allocator = Vip(Known(), "rloo", 2, 32, Lengths())
    allocator.lengths.update(tally_of([20, 60], np.array([8, 8])))
    rounds = allocator.rounds(PromptBatch([Prompt(f"u{i}", "", np.zeros(1, np.int64)) for i in range(2)], 1, 0), 16)
    assert next(rounds).tolist() == [9, 7]
    with pytest.raises(StopIteration) as end:
        rounds.send(tally_of([20, 60], np.array([9, 7])))
    ratio = (1 / 8 + 1 / 6) / (2 * (0.25 / 6 + 0.75 / 7))
    assert end.value.value.note["alloc/var_ratio_expected"] == pytest.approx(ratio)


def test_state_holds_lengths_beside_the_predictors():
    one, other = (Vip(Known(), "rloo", 2, 32, Lengths()) for _ in range(2))
    one.lengths.update(tally_of([20, 60], np.array([2, 6])))
    lengths = {"length_uids", "length_relative", "length_rollouts", "length_mean"}
    assert {name for name in one.state_dict() if not name.startswith("watch_")} == {"predictor", *lengths}
    other.load_state_dict(one.state_dict())
    assert other.lengths.costs(["u0"]) == one.lengths.costs(["u0"])
    assert not any(name.startswith("length_") for name in Vip(Known(), "rloo", 2, 32).state_dict())


def test_only_vip_takes_a_budget_in_tokens():
    vip = make_allocator(Config(allocator="vip", budget_unit="tokens"))
    assert vip.budget_kind == "cap" and vip.lengths is not None
    assert make_allocator(Config(allocator="vip")).budget_kind == "exact"
    for allocator in ("uniform", "vigor"):
        with pytest.raises(UsageError, match=f"--budget-unit tokens: --allocator {allocator} plans in rollouts"):
            Config(allocator=allocator, budget_unit="tokens")


def test_nobody_takes_a_rollout_that_does_harm_and_a_high_bound_costs_nothing():
    counts = solve_tokens(np.array([1.0, 1.0]), np.ones(2), 40, 2, 20, TIES[:2], lambda n: (n - 6.0) ** 2)
    assert counts.tolist() == [6, 6]
    utility_B = np.linspace(0.01, 0.25, 8)
    few, many = (solve_tokens(utility_B, np.ones(8), 64, 2, high, TIES[:8], rloo) for high in (50, 4096))
    assert few.tolist() == many.tolist() and few.sum() == 64
