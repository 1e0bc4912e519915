"""Rounds that do not wait, decided by several ranks, each a thread here with an engine of its own."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from vipfast.allocate.vigor import Schedule, Vigor
from vipfast.distributed import ALONE
from vipfast.engine.base import Finished
from vipfast.placement import Placement
from vipfast.ranks.apart import Apart, joined, shares
from vipfast.rewards.base import Grades
from vipfast.rollout import collect
from vipfast.types import ZERO_ONE, Finish, Prompt, PromptBatch, StepPlan

NONE = np.zeros(0, np.int64), np.zeros(0, np.float32)


class Threads:
    """Ranks that live in one process; ``vipfast.distributed.Ranks`` as far as a step needs it."""

    def __init__(self, rank, size, board):
        self.rank, self.size, self.board = rank, size, board

    def gather(self, value):
        self.board.values[self.rank] = value
        self.board.barrier.wait()
        values = list(self.board.values)
        self.board.barrier.wait()
        self.board.meetings[self.rank] += 1
        return values

    def together(self, work):
        return self.gather(work())

    def decided(self, work):
        return self.gather(work() if self.rank == 0 else None)[0]

    def split(self, num):
        return Threads(self.rank % num, num, self.board.peers[self.rank // num]) if num > 1 else ALONE


class OneByOne:
    """Engine and grader: one rollout is back at a time, in an order and with a reward of its own seed."""

    reward_range = ZERO_ONE

    def __init__(self, seed, right=True):
        self.rng, self.rows, self.seen, self.right = np.random.default_rng(seed), [], [], right

    @property
    def pending(self):
        return len(self.rows)

    def submit(self, requests):
        assert all(request.one_by_one for request in requests)
        self.rows += [(request.slot, request.first_index + i) for request in requests for i in range(request.count)]

    def step(self):
        row = self.rows.pop(self.rng.integers(len(self.rows)))
        self.seen.append(row)
        return [Finished(*row, *NONE, Finish.STOP)]

    def grade(self, prompts, finished):
        return Grades.plain([float(self.right and (7 * row.slot + 3 * row.index) % 5 < 2) for row in finished])


def board_of(size):
    return SimpleNamespace(values=[None] * size, barrier=threading.Barrier(size, timeout=20), meetings=[0] * size)


def run(size, num_prompts, budget, mode, tensor_parallel=1):
    """(rollouts, tally, engine) of every rank, and how often ranks met. The first of a home grades right."""
    board, results = board_of(size), [None] * size
    board.peers = [board_of(tensor_parallel) for _ in range(size // tensor_parallel)]

    def rank(r):
        placement = Placement(Threads(r, size, board), tensor_parallel)
        engine = OneByOne(r // tensor_parallel, right=r % tensor_parallel == 0)
        make = lambda: Vigor(Schedule(2, 4), round_mode=mode)  # noqa: E731
        batch = PromptBatch([Prompt(f"u{i}", "", np.zeros(1, np.int64)) for i in range(num_prompts)], step=1, seed=0)
        results[r] = *collect(Apart(make, placement), batch, budget, engine, engine, placement=placement)[:2], engine

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(size)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert None not in results
    return results, board.meetings


@pytest.mark.parametrize("mode", ["early", "streaming"])
@pytest.mark.parametrize(("size", "num_prompts"), [(2, 16), (3, 16), (2, 7), (3, 2)])
def test_ranks_decide_apart_and_tell_the_same_step(mode, size, num_prompts):
    results, meetings = run(size, num_prompts, 8 * num_prompts, mode)
    (first, tally, _), *others = results
    assert first.counts_B.sum() == 8 * num_prompts and not tally.pending.any()
    for rollouts, other, _ in others:
        for name in ("asked", "scored", "successes", "mean", "m2", "min", "max"):
            assert np.array_equal(getattr(other, name), getattr(tally, name), equal_nan=True), name
        for name in ("reward", "index", "round", "group_offsets", "holder_R"):
            assert np.array_equal(getattr(rollouts, name), getattr(first, name)), name
        assert np.array_equal(rollouts.plan.use_R, first.plan.use_R)
    # A prompt's rollouts all come from one rank, and each from where it was generated.
    for r, (_, _, engine) in enumerate(results):
        group_R = first.group_R
        assert sorted(engine.seen) == [(q, k) for q, k, at in zip(group_R, first.index, first.holder_R) if at == r]
    # Within the step nobody waits for anybody: once for all plans, once for the tallies, once for the rows.
    assert meetings == [3] * size


@pytest.mark.parametrize("mode", ["early", "streaming"])
def test_ranks_that_share_a_model_do_what_one_would(mode):
    (whole, tally, _), *_ = run(2, 16, 128, mode)[0]
    for rollouts, other, _ in run(4, 16, 128, mode, tensor_parallel=2)[0]:
        assert np.array_equal(other.m2, tally.m2) and np.array_equal(rollouts.reward, whole.reward)
        assert np.array_equal(rollouts.plan.asked_KB, whole.plan.asked_KB)
        assert np.array_equal(rollouts.holder_R, 2 * whole.holder_R)  # rows are counted once, at the first rank of a home


def test_each_rank_decides_as_a_process_alone_with_its_prompts_and_share_would():
    results, _ = run(2, 16, 128, "early")
    counts_B, holder_R, group_R = results[0][0].counts_B, results[0][0].holder_R, results[0][0].group_R
    for r in range(2):
        own = np.unique(group_R[holder_R == r])
        engine = OneByOne(r)
        engine.grade = lambda prompts, finished, own=own, grade=engine.grade: grade(
            prompts, [SimpleNamespace(slot=own[row.slot], index=row.index) for row in finished]
        )
        batch = PromptBatch([Prompt(f"u{q}", "", np.zeros(1, np.int64)) for q in own], step=1, seed=0)
        alone = collect(Vigor(Schedule(2, 4), round_mode="early"), batch, 8 * len(own), engine, engine)[0]
        assert alone.counts_B.tolist() == counts_B[own].tolist()


def test_shares_add_up_and_follow_the_prompts():
    assert shares(512, np.array([32, 32])).tolist() == [256, 256]
    assert shares(100, np.array([3, 0, 4])).tolist() == [42, 0, 58]
    rng = np.random.default_rng(0)
    for _ in range(200):
        num_G, budget = rng.integers(0, 9, rng.integers(1, 9)), int(rng.integers(0, 500))
        num_G[0] += 1
        share_G = shares(budget, num_G)
        assert share_G.sum() == budget and (np.abs(share_G - budget * num_G / num_G.sum()) < 1).all()


def test_plans_of_different_lengths_join():
    one = StepPlan.plain([[2, 0, 0], [4, 0, 0]], use_KB=np.array([[0, 1, 1], [1, 1, 1]], bool), note={"alloc/survivors": 1})
    other = StepPlan.plain([[0, 3, 5]], note={"alloc/survivors": 2})
    plan = joined([one, other])
    assert plan.asked_KB.tolist() == [[2, 3, 5], [4, 0, 0]] and plan.note["alloc/survivors"] == 3
    assert plan.use_R.tolist() == [False] * 2 + [True] * 4 + [True] * 8
