"""collect(): the ledger is exact, whatever order the engine returns rows in, and whatever it loses."""

import time

import numpy as np
import pytest

from vipfast import streams
from vipfast.engine.base import Finished
from vipfast.errors import BudgetError, RewardError
from vipfast.rewards.base import Grades
from vipfast.rewards.grader import Grader
from vipfast.rollout import collect
from vipfast.telemetry.step import rollout_metrics
from vipfast.types import Finish, Prompt, PromptBatch, StepPlan


class ScriptedEngine:
    """Ends each rollout after as many steps as its hash says; ids tell slot and index. ``lose`` names rows never returned."""

    name = "scripted"

    def __init__(self, lose=(), order=1):
        self.rows, self.lose, self.order, self.clock = [], set(lose), order, 0

    @property
    def pending(self):
        return len(self.rows)

    def submit(self, requests):
        self.requests = list(requests)
        for request in requests:
            for index in range(request.first_index, request.first_index + request.count):
                length = int(streams.keys(9, 0, 0, request.slot, index) % np.uint64(5)) + 1
                self.rows.append((self.clock + length, request.slot, index, length))

    def step(self):
        self.clock += 1
        done = [row for row in self.rows if row[0] <= self.clock]
        self.rows = [row for row in self.rows if row[0] > self.clock]
        return [
            Finished(slot, index, np.full(length, 10 * slot + index), np.full(length, -0.5, np.float32), Finish.STOP)
            for _, slot, index, length in done[:: self.order]
            if (slot, index) not in self.lose
        ]


class Decoder:
    def batch_decode(self, tokens, skip_special_tokens):
        return [str(row[0]) if len(row) else "" for row in tokens]


class InRounds:
    """Asks for the rounds it is given."""

    name, barrier, budget_kind = "scripted", True, "exact"

    def __init__(self, *rounds):
        self.asked, self.seen = [np.array(counts) for counts in rounds], []

    def rounds(self, prompts, budget):
        for counts in self.asked:
            tally = yield counts
            self.seen.append((tally.scored.copy(), tally.mean.copy(), tally.pending.copy()))
        return StepPlan.plain(self.asked)


def grader(reward=lambda texts, answers, metadata: [float(int(text) % 2) for text in texts]):
    return Grader(reward, Decoder())


def batch(num=3):
    return PromptBatch([Prompt(f"u{i}", f"p{i}", np.array([i] * (i + 1))) for i in range(num)], 1, 0)


def test_ragged_batch_is_ordered_by_prompt_round_and_index():
    allocator = InRounds([2, 0, 1], [0, 0, 3])
    rollouts, tally, seconds = collect(allocator, batch(), 6, ScriptedEngine(), grader())
    assert rollouts.group_offsets.tolist() == [0, 2, 2, 6]
    assert rollouts.index.tolist() == [0, 1, 0, 1, 2, 3]
    assert rollouts.round.tolist() == [0, 0, 0, 1, 1, 1]
    assert [int(rollouts.tokens[o]) for o in rollouts.token_offsets[:-1]] == [0, 1, 20, 21, 22, 23]
    assert rollouts.reward.tolist() == [0, 1, 0, 1, 0, 1]
    assert rollouts.prompt_offsets.tolist() == [0, 1, 3, 6]
    assert allocator.seen[0][0].tolist() == [2, 0, 1] and allocator.seen[1][0].tolist() == [2, 0, 4]
    assert tally.mean.tolist() == [0.5, 0, 0.5] and tally.pending.tolist() == [0, 0, 0]
    assert set(seconds) == {"time/allocate_s", "time/generate_s", "time/reward_s"}


def test_arrival_order_moves_no_bit():
    reward = lambda texts, answers, metadata: [0.1 * int(text) for text in texts]  # noqa: E731 - a one-line reward
    tallies = [collect(InRounds([7, 5, 9]), batch(), 21, ScriptedEngine(order=o), grader(reward))[1] for o in (1, -1)]
    for name in ("mean", "m2", "min", "max", "scored", "tokens"):
        assert getattr(tallies[0], name).tobytes() == getattr(tallies[1], name).tobytes()


def test_lost_rollouts_are_error_rows_unscored_and_counted():
    rollouts, tally, _ = collect(InRounds([3, 2, 1]), batch(), 6, ScriptedEngine(lose=[(0, 1), (2, 0)]), grader())
    assert rollouts.finish.tolist() == [0, Finish.ERROR, 0, 0, 0, Finish.ERROR]
    assert np.isnan(rollouts.reward[[1, 5]]).all() and rollouts.lengths_R[[1, 5]].tolist() == [0, 0]
    assert tally.scored.tolist() == [2, 2, 0]
    metrics = rollout_metrics(rollouts, tally)
    assert metrics["reward/unscored"] == 2 and metrics["budget/rollouts"] == 6
    # group 0: rewards [0, lost, 0] is flat, all 3 wasted; group 1: [0, 1] has signal; group 2: the lost one is wasted
    assert metrics["signal/frac_wasted_rollouts"] == 4 / 6


@pytest.mark.parametrize("asked", [[2, 2, 1], [2, 2, 3]])
def test_an_exact_allocator_that_misses_the_budget_is_stopped(asked):
    with pytest.raises(BudgetError, match="budget of 6"):
        collect(InRounds(asked), batch(), 6, ScriptedEngine(), grader())


def test_an_allocator_without_barrier_is_resumed_while_rollouts_are_pending():
    class Eager(InRounds):
        barrier = False

        def rounds(self, prompts, budget):
            asked, tally = [np.array([2, 2, 2])], None
            tally = yield asked[0]
            while tally.pending.any():
                self.seen.append(int(tally.pending.sum()))
                asked.append(np.array([0, 0, int(tally.asked.sum() < budget)]))
                tally = yield asked[-1]
            return StepPlan.plain(asked)

    allocator, engine = Eager(), ScriptedEngine()
    rollouts, _, _ = collect(allocator, batch(), 7, engine, grader())
    assert allocator.seen[0] > 0 and rollouts.num_rollouts == 7
    assert all(request.one_by_one for request in engine.requests)
    collect(InRounds([2, 2, 2]), batch(), 6, engine, grader())
    assert not any(request.one_by_one for request in engine.requests)


def test_a_batch_that_grows_keeps_its_ledger():
    extra = [Prompt("u9", "p9", np.array([9]))]

    class Drawing(InRounds):
        def rounds(self, prompts, budget):
            asked = [np.array([2, 1, 1])]
            yield asked[0]
            prompts.more(1)
            asked.append(np.array([0, 0, 0, 2]))
            yield asked[1]
            return StepPlan.plain(asked)

    grown = PromptBatch(batch().prompts, 1, 0, lambda k: extra[:k])
    rollouts, tally, _ = collect(Drawing(), grown, 6, ScriptedEngine(), grader())
    assert tally.asked.tolist() == [2, 1, 1, 2] == rollouts.counts_B.tolist()
    with pytest.raises(ValueError, match="no selector"):
        batch().more(1)


def test_metrics_are_defined_when_nothing_is_scored():
    nothing = grader(lambda texts, answers, metadata: [None] * len(texts))
    rollouts, tally, _ = collect(InRounds([2, 2, 2]), batch(), 6, ScriptedEngine(), nothing)
    metrics = rollout_metrics(rollouts, tally)
    assert metrics["reward/mean"] is None and metrics["signal/frac_all_zero"] is None
    assert metrics["signal/frac_wasted_rollouts"] == 1.0 and metrics["reward/unscored"] == 6
    assert not any(isinstance(value, float) and np.isnan(value) for value in metrics.values())


def test_without_barrier_the_tally_holds_whole_groups_in_the_order_they_were_asked_for():
    # Prompt 0 is asked for 2 rollouts, then for 2 more while those are out; what comes back first must not be merged first.
    class Impatient(InRounds):
        barrier = False

        def rounds(self, prompts, budget):
            asked, tally = [np.array([2, 0, 1])], None
            tally = yield asked[0]
            asked.append(np.array([2, 0, 0]))
            while tally.pending.any() or len(asked) == 2:
                tally = yield asked[1] if len(asked) == 2 else np.zeros(3, np.int64)
                asked += [np.zeros(3, np.int64)] * (len(asked) == 2)
                self.seen.append((int(tally.scored[0]), int(tally.so_far.scored[0]), float(tally.mean[0])))
            return StepPlan.plain(asked[:2])

    class Backwards(ScriptedEngine):
        """The last rollout asked for is the first to come back, one per step."""

        def submit(self, requests):
            self.rows = [(0, r.slot, r.first_index + i, 1) for r in requests for i in range(r.count)][::-1] + self.rows

        def step(self):
            _, slot, index, length = self.rows.pop(0)
            return [Finished(slot, index, np.array([10 * slot + index]), np.zeros(1, np.float32), Finish.STOP)]

    allocator = Impatient()
    reward = lambda texts, answers, metadata: [0.1 * int(text) for text in texts]  # noqa: E731 - a one-line reward
    rollouts, tally, _ = collect(allocator, batch(), 5, Backwards(), grader(reward))
    expected = collect(InRounds([2, 0, 1], [2, 0, 0]), batch(), 5, ScriptedEngine(), grader(reward))[1]
    # 3 and 2 are back, then 1; with 0 the first group is whole, and the second a resumption later.
    assert [seen[:2] for seen in allocator.seen] == [(0, 1), (0, 2), (0, 3), (2, 4), (4, 4)]
    assert tally.mean.tobytes() == expected.mean.tobytes() and tally.m2.tobytes() == expected.m2.tobytes()
    assert rollouts.round.tolist() == [0, 0, 1, 1, 0]


class Slow:
    """A reward that takes its time in another thread, each completion another one."""

    beside = True

    def __call__(self, texts, answers, metadata):
        time.sleep(max(0.002 * (int(text) % 7) for text in texts))
        return [float(int(text) % 2) for text in texts]


class WithoutWaiting(InRounds):
    """Asks for its next round as soon as anything is back."""

    barrier = False

    def rounds(self, prompts, budget):
        for counts in self.asked:
            tally = yield counts
        while tally.pending.any():
            tally = yield np.zeros(len(prompts), np.int64)
        return StepPlan.plain(self.asked)


@pytest.mark.parametrize("rule", [InRounds, WithoutWaiting])
def test_a_reward_beside_generation_gives_what_one_in_between_gives(rule):
    asked = [[2, 0, 1], [1, 3, 2], [0, 1, 1]]
    allocators = [rule(*asked), rule(*asked)]
    expected, there, _ = collect(allocators[0], batch(), 11, ScriptedEngine(), grader())
    rollouts, tally, _ = collect(allocators[1], batch(), 11, ScriptedEngine(), grader(Slow()))
    for name in ("reward", "verified", "tokens", "index", "round", "finish"):
        assert getattr(rollouts, name).tolist() == getattr(expected, name).tolist()
    assert tally.mean.tolist() == there.mean.tolist() and tally.m2.tolist() == there.m2.tolist()
    assert not tally.pending.any()


def test_the_engine_goes_on_while_rewards_are_waited_for():
    engine, steps = ScriptedEngine(), []
    decode = engine.step

    def step():
        steps.append(None)
        return decode()

    engine.step = step

    def reward(texts, answers, metadata):
        limit = time.monotonic() + 10
        while engine.pending and time.monotonic() < limit:
            time.sleep(0.001)
        return [float(engine.pending == 0)] * len(texts)

    reward.beside = True
    rollouts, _, seconds = collect(InRounds([9, 9, 9]), batch(), 27, engine, grader(reward))
    assert rollouts.reward.tolist() == [1.0] * 27 and len(steps) > 1


def test_an_error_beside_generation_ends_the_step():
    def reward(texts, answers, metadata):
        return [1.0] * (len(texts) + 1)

    reward.beside = True
    with pytest.raises(RewardError, match="values for"):
        collect(InRounds([2, 2, 2]), batch(), 6, ScriptedEngine(), grader(reward))


@pytest.mark.parametrize("shape, expected", [(None, [0.25, 1.0, 0.7]), (0.7, [0.0, 1.0, 1.0])])
def test_the_shape_of_the_reward_is_what_loss_and_allocator_see(shape, expected):
    values = {"0": 0.25, "10": 1.0, "20": 0.7}
    shaped = Grader(lambda texts, answers, metadata: [values[text] for text in texts], Decoder(), binary_at=shape)
    rollouts, tally, _ = collect(
        InRounds([1, 1, 1]), batch(), 3, ScriptedEngine(), shaped, threshold=0.7 if shape is None else 1
    )
    assert rollouts.reward.tolist() == rollouts.verified.tolist() == np.float32(expected).tolist()
    assert tally.mean.tolist() == expected and tally.successes.tolist() == [0, 1, 1]


def test_allocation_goes_by_the_verifiers_part_alone():
    class Parts(Grader):
        """A length bonus beside the verifier's part."""

        def grade(self, prompts, finished):
            grades = super().grade(prompts, finished)
            return Grades(grades.reward + [len(row.tokens) / 8 for row in finished], grades.verified, grades.answer)

    mixed = Parts(lambda texts, answers, metadata: [0.0] * len(texts), Decoder())
    rollouts, tally, _ = collect(InRounds([4, 4, 4]), batch(), 12, ScriptedEngine(), mixed)
    assert not rollouts.verified.any() and (rollouts.reward > 0).all() and not tally.m2.any() and not tally.successes.any()
    metrics = rollout_metrics(rollouts, tally)
    assert metrics["reward/verified"] == 0 < metrics["reward/mean"] and metrics["signal/frac_all_zero"] == 1
    # all failed alike, and yet most of them teach: by length
    assert metrics["signal/frac_wasted_rollouts"] < 1
