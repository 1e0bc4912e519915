"""VIGOR's rounds that do not wait: ``early`` allocates as rounds that wait do, whatever is back first."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vipfast import streams
from vipfast.allocate.open_rounds import Early, Round, Streaming
from vipfast.allocate.score import BOUNDS, SCORES
from vipfast.allocate.solver import rounded
from vipfast.allocate.vigor import Schedule, Vigor
from vipfast.allocation import make_allocator
from vipfast.config import Config
from vipfast.engine.base import Finished
from vipfast.errors import UsageError
from vipfast.rewards.base import Grades
from vipfast.rollout import collect
from vipfast.types import ZERO_ONE, Finish, Prompt, PromptBatch, RewardRange, Tally

NONE = np.zeros(0, np.int64), np.zeros(0, np.float32)


class AnyOrder:
    """Engine and grader whose rollouts come back in any order, up to ``most`` at a time; a reward depends on slot and index."""

    name = "any order"

    def __init__(self, seed, reward=lambda u: float(u < 0.5), reward_range=ZERO_ONE, unscored=0.0, most=3, longest=None):
        self.rng, self.seed, self.most, self.longest = np.random.default_rng((seed, 1)), seed % 7, most, longest
        self.reward, self.reward_range, self.unscored = reward, reward_range, unscored
        self.rows, self.events = [], []

    @property
    def pending(self):
        return len(self.rows)

    def submit(self, requests):
        new = [(request.slot, request.first_index + i) for request in requests for i in range(request.count)]
        self.rows += new
        self.events += [("asked", *row) for row in new]

    def step(self):
        done = []
        for _ in range(min(self.rng.integers(0, self.most + 1), len(self.rows))):
            others = [i for i, row in enumerate(self.rows) if row != self.longest] or [0]
            done.append(self.rows.pop(others[self.rng.integers(len(others))]))
        self.events += [("back", *row) for row in done]
        return [Finished(*row, *NONE, Finish.STOP) for row in done]

    def grade(self, prompts, finished):
        return Grades.plain([self.reward_of(row.slot, row.index) for row in finished])

    def reward_of(self, slot, index):
        u, v = streams.uniforms(streams.keys(9, self.seed, 0, slot, index), np.arange(2))
        return np.nan if v < self.unscored else self.reward(u)


def play(vigor, B, budget, seed, **engine):
    engine = AnyOrder(seed, **engine)
    batch = PromptBatch([Prompt(f"u{i}", "", np.zeros(1, np.int64)) for i in range(B)], step=1, seed=0)
    rollouts, tally, _ = collect(vigor, batch, budget, engine, engine)
    return rollouts, tally, engine


REWARDS = {
    "0 or 1": dict(),
    "mostly 0": dict(reward=lambda u: float(u < 0.1)),
    "-1 or 2": dict(reward=lambda u: 2.0 if u < 0.5 else -1.0, reward_range=RewardRange(-1, 2, binary=True)),
    "0 or 1, range unknown": dict(reward_range=None),
    # .1 and .2 make sums whose last bits depend on the order.
    "of a few": dict(reward=lambda u: (-0.3, 0.1, 0.2, 1.7)[int(4 * u)], reward_range=RewardRange(-0.3, 1.7)),
    "real": dict(reward=lambda u: 3 + u, reward_range=RewardRange(0, 5)),
    "real, range unknown": dict(reward=lambda u: 1e3 * (u - 0.5) ** 3, reward_range=None),
}
STEPS = dict(
    B=st.integers(1, 20),
    spare=st.integers(0, 25),
    schedule=st.builds(
        Schedule,
        m0=st.integers(1, 3),
        num_rounds=st.integers(1, 5),
        alpha=st.sampled_from([0.1, 0.34, 0.5, 0.8, 1.0]),
        gamma=st.sampled_from([1.0, 1.5, 2.0, 4.0]),
    ),
    score=st.sampled_from(sorted(SCORES)),
    kind=st.sampled_from(sorted(REWARDS)),
    unscored=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 10**6),
    most=st.sampled_from([1, 3, 50]),
)


# Small steps in which a prompt that is still to come from the round before takes a place.
@example(3, 2, Schedule(1, 3, 0.5, 1.0), "variance", "0 or 1", 0.0, 145, 1)
@example(3, 0, Schedule(2, 3, 0.5, 1.0), "variance", "of a few", 0.0, 46, 1)
@example(3, 1, Schedule(2, 3, 0.5, 2.0), "variance", "real, range unknown", 0.0, 479, 1)
@example(3, 3, Schedule(2, 3, 0.34, 2.0), "variance", "of a few", 0.0, 308, 3)
@settings(max_examples=60, deadline=None)
@given(**STEPS)
def test_early_allocates_as_rounds_that_wait(B, spare, schedule, score, kind, unscored, seed, most):
    budget = B * schedule.m0 * schedule.num_rounds + spare
    engine = REWARDS[kind] | {"unscored": unscored, "most": most}
    waiting, tally, _ = play(Vigor(schedule, score), B, budget, seed, **engine)
    rollouts, early_tally, _ = play(Vigor(schedule, score, round_mode="early"), B, budget, seed + 7, **engine)
    assert rollouts.plan.asked_KB.tolist() == waiting.plan.asked_KB.tolist() and rollouts.num_rollouts == budget
    assert rollouts.plan.note == waiting.plan.note and rollouts.round.tolist() == waiting.round.tolist()
    assert rollouts.reward.tobytes() == waiting.reward.tobytes()
    for name, column in vars(tally).items():
        if isinstance(column, np.ndarray):
            assert getattr(early_tally, name).tobytes() == column.tobytes(), name


@settings(max_examples=30, deadline=None)
@given(**STEPS)
def test_streaming_spends_each_rounds_counts_and_repeats_itself(B, spare, schedule, score, kind, unscored, seed, most):
    budget = B * schedule.m0 * schedule.num_rounds + spare
    engine = REWARDS[kind] | {"unscored": unscored, "most": most}
    waiting, *_ = play(Vigor(schedule, score), B, budget, seed, **engine)
    rollouts, tally, _ = play(Vigor(schedule, score, round_mode="streaming"), B, budget, seed, **engine)
    again, *_ = play(Vigor(schedule, score, round_mode="streaming"), B, budget, seed, **engine)
    asked_KB = rollouts.plan.asked_KB
    assert np.sort(asked_KB).tolist() == np.sort(waiting.plan.asked_KB).tolist() and asked_KB.sum() == budget
    assert ((asked_KB[1:] > 0) <= (asked_KB[:-1] > 0))[: (asked_KB.min(1) > 0).sum()].all()
    assert again.plan.asked_KB.tolist() == asked_KB.tolist() and not tally.pending.any()
    assert rollouts.round.tolist() == np.concatenate([np.repeat(range(len(n)), n) for n in asked_KB.T]).tolist()


def test_early_goes_on_around_a_rollout_that_never_ends():
    # Prompt 0 has a rollout that comes last of all; rounds that wait cannot begin the second round before it.
    longest = (0, 1)
    for mode, before in (("barrier", 0), ("early", 30), ("streaming", 30)):
        _, _, engine = play(Vigor(Schedule(2), round_mode=mode), 16, 128, seed=3, longest=longest)
        last = engine.events.index(("back", *longest))
        started = sum(event[0] == "asked" for event in engine.events[:last]) - 32
        assert (started == before) if mode == "barrier" else started >= before


def test_without_a_range_a_pending_prompt_may_come_to_anything():
    # Of 4 prompts 2 stay. 0 has the most variance that is back, and may still be overtaken by all three that are not.
    rewards = {0: [0.0, 9.0], 1: [0.0], 2: [0.0], 3: [0.0]}
    for reward_range, stays in ((None, []), (RewardRange(0, 9), [0]), (RewardRange(0, 90), [])):
        tally = tally_of(rewards, 2, reward_range)
        keys = np.arange(4).astype(np.uint64)
        rounds = Early(Schedule(2, 2, 0.5, 2).rounds(4, 16), Schedule(2, 2).cut, keys, "variance")
        rounds.start()
        assert np.flatnonzero(rounds.resume(tally)).tolist() == stays


def tally_of(rewards, asked, reward_range, threshold=1.0):
    """The tally of prompts that were asked for ``asked`` rollouts each, of which ``rewards`` {slot: [...]} are back."""
    tally = Tally.empty([str(slot) for slot in rewards])
    tally.so_far, tally.reward_range = Tally.empty(tally.uids), reward_range
    tally.so_far.reward_range = reward_range
    for part in (tally, tally.so_far):
        part.asked[:] = part.pending[:] = asked
    for slot, back in rewards.items():
        tally.so_far.add(slot, np.array(back), threshold, 0, 0)
        if len(back) == asked:
            tally.add(slot, np.array(back), threshold, 0, 0)
    return tally


@pytest.mark.parametrize("score", sorted(SCORES))
@pytest.mark.parametrize("back", [[], [0], [1], [0, 1], [0, 0, 0], [1, 1, np.nan], [0, 1, 1, 1], [0, 0, 1, 0, 1, 1]], ids=str)
def test_bounds_of_zero_one_rewards_are_reached_and_never_passed(score, back):
    back = np.array(back, float)
    for pending in range(5):
        tally = tally_of({0: back}, len(back) + pending, ZERO_ONE)
        low, high = BOUNDS[score](tally.so_far, np.array([0]), np.array([pending]), 2)
        reached = []
        for rest in itertools.product([0.0, 1.0, np.nan], repeat=pending):
            tally = Tally.empty(["0"])
            tally.add(0, back, 1.0, 0, 0)
            tally.add(0, np.array(rest), 1.0, 0, 0)
            reached.append(float(rounded(SCORES[score](tally))[0]))
        assert low[0] <= min(reached) and low[0] == pytest.approx(min(reached), rel=1e-11)
        assert high[0] >= max(reached) and high[0] == pytest.approx(max(reached), rel=1e-11)


def test_bounds_of_real_rewards_are_never_passed_and_the_upper_is_reached():
    rng = np.random.default_rng(0)
    for low, high in ((0.0, 1.0), (-3.0, 0.5), (1e6, 1e6 + 1)):
        for _ in range(40):
            back, pending = rng.uniform(low, high, rng.integers(0, 6)), int(rng.integers(1, 5))
            so_far = tally_of({0: back}, len(back) + pending, RewardRange(low, high)).so_far
            least, most = BOUNDS["variance"](so_far, np.array([0]), np.array([pending]), 2)
            ends = [list(rest) for s in range(pending + 1) for rest in itertools.product([low, high], repeat=s)]
            inside = [rng.uniform(low, high, pending) for _ in range(20)] + [
                np.full(pending, back.mean() if len(back) else low)
            ]
            variances = []
            for rest in ends + inside:
                tally = Tally.empty(["0"])
                tally.add(0, back, 1.0, 0, 0)
                tally.add(0, np.array(rest), 1.0, 0, 0)
                variances.append(rounded(tally.variance)[0])
            assert least[0] <= min(variances) and max(variances) <= most[0]
            assert most[0] == pytest.approx(max(variances), rel=1e-6)


@pytest.mark.parametrize("score", sorted(SCORES))
def test_a_prompt_goes_on_as_soon_as_no_outcome_can_stop_it(score):
    # Every outcome of what is pending is tried: those who stay in all of them go on, and nobody else.
    rng, schedule = np.random.default_rng(0), Schedule(3, 2, 0.5, 2)
    found = set()
    for _ in range(60):
        B = int(rng.integers(2, 5))
        keys = rng.permutation(B).astype(np.uint64)
        back = {slot: rng.choice([0.0, 1.0, np.nan], rng.integers(0, 4), p=[0.5, 0.4, 0.1]) for slot in range(B)}
        missing = [slot for slot in range(B) for _ in range(3 - len(back[slot]))]
        if len(missing) > 4:
            continue
        always = set(range(B))
        for rest in itertools.product([0.0, 1.0, np.nan], repeat=len(missing)):
            came = {slot: [*back[slot], *(r for r, at in zip(rest, missing) if at == slot)] for slot in range(B)}
            values = rounded(SCORES[score](tally_of(came, 3, ZERO_ONE)))
            always &= set(np.lexsort((keys, -values))[: schedule.cut(B)].tolist())
        rounds = Early([Round(B, 3, 0), Round(schedule.cut(B), 6, 0)], schedule.cut, keys, score)
        rounds.start()
        went = set(np.flatnonzero(rounds.resume(tally_of(back, 3, ZERO_ONE))).tolist())
        assert went == always
        found.add((len(went), bool(missing)))
    assert {(0, True), (1, True), (2, True), (2, False)} <= found


def test_streaming_cut_by_hand():
    # 6 prompts of 2, half of which stay; 4 rollouts back are 2 groups' worth, so 1 goes on: prompt 4, whose rewards vary.
    schedule = Schedule(2, 2, 0.5, 2)
    rounds = Streaming(schedule.rounds(6, 24), schedule.cut, np.array([3, 1, 2, 0, 5, 4], np.uint64), "variance")
    assert rounds.start().tolist() == [2] * 6
    rewards = {0: [0.0], 1: [], 2: [1.0], 3: [], 4: [0.0, 1.0], 5: []}
    assert rounds.resume(tally_of(rewards, 2, None)).tolist() == [0, 0, 0, 0, 4, 0]
    # 8 back are 4 groups' worth: a second one goes on, prompt 2, which alone varies. At 12 the third: all tie, and prompt 3
    # has the lowest key.
    rewards |= {0: [0.0, 0.0], 2: [1.0, 0.0], 1: [0.0], 5: [0.0]}
    assert rounds.resume(tally_of(rewards, 2, None)).tolist() == [0, 0, 4, 0, 0, 0]
    rewards |= {1: [0.0, 0.0], 3: [0.0, 0.0], 5: [0.0, 0.0]}
    assert rounds.resume(tally_of(rewards, 2, None)).tolist() == [0, 0, 0, 4, 0, 0]
    assert rounds.survivors().tolist() == [2, 3, 4]


@pytest.mark.parametrize("allocator", ["uniform", "vip"])
def test_a_rule_of_one_round_refuses_a_round_mode(allocator):
    with pytest.raises(UsageError, match=f"--round-mode early: --allocator {allocator} has .*; use --allocator vigor"):
        Config(allocator=allocator, round_mode="early")
    assert make_allocator(Config(round_mode="early")).barrier is False and make_allocator(Config()).barrier is True
