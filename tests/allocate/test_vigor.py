"""VIGOR against its table of group sizes, for every batch size, and with rewards that are missing, constant or shuffled."""

import warnings
from collections import Counter

import numpy as np
import pytest

from vipfast.allocate.score import posterior
from vipfast.allocate.vigor import Schedule, Vigor
from vipfast.allocation import make_allocator
from vipfast.config import Config
from vipfast.errors import BudgetError
from vipfast.types import Prompt, PromptBatch, Tally


def play(vigor, B, budget, p, unscored=0.0, uids=None):
    """Run the rounds on rewards that are a fixed function of uid and rollout index. Returns the plan and the tally."""
    uids = uids or [f"u{i}" for i in range(B)]
    draws = {uid: np.random.default_rng([int(uid[1:]), 7]) for uid in uids}
    tally = Tally.empty(uids)
    rounds = vigor.rounds(PromptBatch([Prompt(uid, uid, np.zeros(0, np.int64)) for uid in uids], step=3, seed=0), budget)
    counts = next(rounds)
    while True:
        for q, n in enumerate(counts):
            u = draws[uids[q]].random((n, 2))
            tally.asked[q] += n
            tally.pending[q] += n
            tally.add(q, np.where(u[:, 1] < unscored, np.nan, u[:, 0] < p), 1.0, tokens=n, truncated=0)
        try:
            counts = rounds.send(tally)
        except StopIteration as end:
            return end.value, tally


def sizes(plan):
    return dict(Counter(plan.counts_B.tolist()))


def test_default_table_at_160_prompts():
    plan, _ = play(Vigor(Schedule(2)), 160, 1280, p=0.3)
    assert plan.asked_KB.sum(1).tolist() == [320] * 4
    assert sizes(plan) == {2: 80, 6: 40, 14: 20, 30: 20}


def test_two_round_table():
    schedule = Schedule.fit(160, 1280, None, num_rounds=2, alpha=0.25, gamma=4)
    assert schedule.m0 == 4
    assert sizes(play(Vigor(schedule), 160, 1280, p=0.3)[0]) == {4: 120, 20: 40}


def test_every_batch_size_spends_the_budget_exactly():
    rng, vigor = np.random.default_rng(0), Vigor(Schedule(2))
    prompts = [Prompt(f"u{i}", "", np.zeros(0, np.int64)) for i in range(300)]
    for B in range(1, 301):
        rounds, drawn = vigor.rounds(PromptBatch(prompts[:B], step=1, seed=0), 8 * B), []
        tally = Tally.empty([str(i) for i in range(B)])
        tally.scored[:], tally.m2[:] = 2, rng.integers(0, 3, B) / 4
        drawn.append(next(rounds))
        try:
            while True:
                drawn.append(rounds.send(tally))
        except StopIteration:
            total_B = sum(drawn)
        assert total_B.sum() == 8 * B
        assert B < 2 or (total_B.min() >= 2 and total_B.max() <= 30)


@pytest.mark.parametrize("score", ["variance", "posterior"])
def test_survivors_have_the_highest_scores(score):
    plan, _ = play(Vigor(Schedule.fit(64, 512, 4, 2, 0.25, 4), score), 64, 512, p=0.5)
    varied = np.array([(np.random.default_rng([q, 7]).random((4, 2))[:, 0] < 0.5).var() for q in range(64)])
    kept = plan.asked_KB[1] > 0
    assert kept.sum() == 16 and varied[kept].min() >= varied[~kept].max()


def test_equal_variances_are_ties_whatever_order_the_rewards_came_in():
    # One success or one failure of 6 has the same variance, though floats summed in another order may differ in the last bit.
    uids = [f"u{i}" for i in range(40)]
    tally = Tally.empty(uids)
    for q in range(40):
        rewards = np.roll([1.0, 0, 0, 0, 0, 0], q) if q % 2 else 1 - np.roll([1.0, 0, 0, 0, 0, 0], q)
        for half in np.split(rewards, [1 + q % 5]):
            tally.add(q, half, 1.0, 0, 0)
    assert len(set(tally.variance)) > 1, "the case must contain variances that differ by rounding"
    prompts = PromptBatch([Prompt(uid, uid, np.zeros(0, np.int64)) for uid in uids], step=1, seed=0)
    rounds = Vigor(Schedule(2)).rounds(prompts, 320)
    next(rounds)
    kept = np.flatnonzero(rounds.send(tally))
    assert sorted(kept) == sorted(np.argsort(prompts.ties_B)[:20])


def test_note_tells_survivors_and_how_many_were_kept_by_lot():
    # All zeros: every score ties, so all that are kept are kept by lot. With two scores, lots decide only the lower one kept.
    assert play(Vigor(Schedule(2)), 160, 1280, p=0.0)[0].note["alloc/tied_share"] == 1.0
    plan, _ = play(Vigor(Schedule(2)), 160, 1280, p=0.5)
    varied = sum((np.random.default_rng([q, 7]).random((2, 2))[:, 0] < 0.5).var() > 0 for q in range(160))
    assert plan.note["alloc/survivors"] == 20
    assert plan.note["alloc/tied_share"] == pytest.approx(1.0 if varied > 80 else (80 - varied) / 80)


def test_shuffling_prompts_shuffles_counts():
    uids = [f"u{i}" for i in range(37)]
    plan, _ = play(Vigor(Schedule(2)), 37, 296, p=0.3, uids=uids)
    order = np.random.default_rng(0).permutation(37)
    shuffled, _ = play(Vigor(Schedule(2)), 37, 296, p=0.3, uids=[uids[i] for i in order])
    assert (shuffled.asked_KB == plan.asked_KB[:, order]).all()


@pytest.mark.parametrize(
    "p, unscored", [(0.0, 0.0), (1.0, 0.0), (0.5, 1.0), (0.5, 0.5)], ids=["zeros", "ones", "unscored", "half unscored"]
)
@pytest.mark.parametrize("score", ["variance", "posterior"])
def test_constant_and_missing_rewards_end_at_the_cap(p, unscored, score):
    for _ in range(5):
        plan, _ = play(Vigor(Schedule(2), score), 64, 512, p, unscored)
        assert plan.counts_B.sum() == 512 and len(plan.asked_KB) == 4


@pytest.mark.parametrize("score", ["variance", "posterior"])
def test_a_prompt_whose_grader_always_fails_ranks_last(score):
    uids = [f"u{i}" for i in range(8)]
    tally = Tally.empty(uids)
    for q in range(4):
        tally.add(q, np.array([0.0, 1.0]), 1.0, 0, 0)
    for q in range(4, 8):
        tally.add(q, np.array([np.nan, np.nan]), 1.0, 0, 0)
    rounds = Vigor(Schedule(2), score).rounds(PromptBatch([Prompt(uid, uid, np.zeros(0)) for uid in uids], 1, 0), 64)
    next(rounds)
    assert (rounds.send(tally) > 0).tolist() == [True] * 4 + [False] * 4


def test_posterior_by_hand():
    # Jeffreys: 1 of 2 -> Beta(1.5, 1.5), 2.25 / (3 * 4); 0 of 2 -> Beta(.5, 2.5), 1.25 / 12; more zeros -> less; unscored -> 0.
    tally = Tally.empty(["a", "b", "c", "d"])
    for q, rewards in enumerate(([1, 0], [0, 0], [0] * 6)):
        tally.add(q, np.array(rewards, float), 1.0, 0, 0)
    assert posterior(tally) == pytest.approx([0.1875, 1.25 / 12, 3.25 / 56, 0.0])


def test_update_on_final_uses_survivors_only():
    plan, _ = play(Vigor(Schedule(2), update_on="final"), 160, 1280, p=0.3)
    assert (plan.used_B > 0).sum() == 20 and set(plan.used_B) == {0, 30}
    plan, _ = play(Vigor(Schedule(2), update_on="all"), 160, 1280, p=0.3)
    assert plan.use_KB.all()


@pytest.mark.parametrize("mean, m0", [(8, 2), (12, 3), (4, 1), (40, 10)])
def test_m0_follows_from_the_mean(mean, m0):
    assert Schedule.fit(64, 64 * mean, None, 4, 0.5, 2.0).m0 == m0


def test_schedule_that_is_not_flat():
    # alpha gamma = .75: 2 (1 + .75 + .5625) = 4.625 rollouts per prompt, 296 for 64.
    assert Schedule.fit(64, 296, None, 3, 0.25, 3).m0 == 2


def test_a_schedule_that_cannot_meet_the_mean_names_what_fits():
    with pytest.raises(BudgetError, match=r"--vigor-m0 3 .* spends 12 .* use --vigor-m0 2, or --rollouts-per-prompt 12"):
        Schedule.fit(64, 512, 3, 4, 0.5, 2.0)
    with pytest.raises(BudgetError, match=r"-prompt 7.5: .* use --rollouts-per-prompt 4 or --rollouts-per-prompt 8"):
        Schedule.fit(64, 480, None, 4, 0.5, 2.0)
    with pytest.raises(BudgetError, match=r"use --rollouts-per-prompt 4 or --rollouts-per-prompt 8"):
        make_allocator(Config(allocator="vigor", rollouts_per_prompt=2.0))


def test_few_survivors_and_halved_groups_warn_once_each():
    with pytest.warns(UserWarning, match="only 2 of --prompts-per-step 16 prompts survive the last cut"):
        make_allocator(Config(allocator="vigor", prompts_per_step=16))
    with pytest.warns(UserWarning, match="groups of 2, .* count half"):
        make_allocator(Config(allocator="vigor", estimator="dr_grpo"))
    with pytest.warns(UserWarning, match="a first round of 1 rollout"):
        make_allocator(Config(allocator="vigor", rollouts_per_prompt=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_allocator(Config(allocator="vigor"))


def test_nothing_to_learn_or_keep():
    allocator = make_allocator(Config(allocator="vigor"))
    assert allocator.learn(Tally.empty(["a"])) == {} and allocator.state_dict() == {}
