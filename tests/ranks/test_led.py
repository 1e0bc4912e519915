"""Rounds that one rank decides are the allocator's own, and a batch grows with them."""

import numpy as np
import pytest

from vipfast.distributed import ALONE
from vipfast.errors import BudgetError
from vipfast.ranks.led import Led
from vipfast.types import Prompt, PromptBatch, StepPlan, Tally


class Drawing:
    """Two rollouts each, then one of a new prompt; learns how many it has seen."""

    name, barrier, budget_kind = "drawing", True, "cap"

    def __init__(self):
        self.seen = 0

    def rounds(self, prompts, budget):
        asked = [np.full(len(prompts), 2)]
        tally = yield asked[0]
        prompts.more(1)
        asked.append(np.array([*np.zeros(len(prompts) - 1, int), tally.scored.sum()]))
        yield asked[1]
        return StepPlan.plain(asked)

    def learn(self, tally):
        self.seen += 1
        return {"predict/brier": 0.5}

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Follower:
    """What rank 1 is told, as rank 0 has said it."""

    rank, size = 1, 2

    def __init__(self, said):
        self.said = iter(said)

    def decided(self, work):
        return next(self.said)


class Recorder:
    rank, size = 0, 1

    def __init__(self):
        self.said = []

    def decided(self, work):
        self.said.append(work())
        return self.said[-1]


def batch():
    draw = lambda num: [Prompt("new", "", np.array([1]))] * num  # noqa: E731 - the selector's side
    return PromptBatch([Prompt(uid, "", np.array([1])) for uid in "ab"], 1, 0, draw)


def stepped(led):
    """Counts of each round, sizes of the batch, and the plan."""
    prompts, counts, sizes = batch(), [], []
    rounds = led.rounds(prompts, 5)
    try:
        counts.append(next(rounds))
        while True:
            tally = Tally.empty(prompts.uids)
            tally.scored[:] = 1
            counts.append(rounds.send(tally))
            sizes.append(len(prompts))
    except StopIteration as stop:
        return [part.tolist() for part in counts], sizes, stop.value.asked_KB.tolist()


def test_all_ranks_step_through_the_rounds_of_rank_0():
    recorder = Recorder()
    leader = Led(Drawing, recorder)
    expected = ([[2, 2], [0, 0, 2]], [3], [[2, 2, 0], [0, 0, 2]])
    assert stepped(leader) == expected
    follower = Led(lambda: pytest.fail("only rank 0 makes an allocator"), Follower(recorder.said))
    assert stepped(follower) == expected
    assert (follower.name, follower.barrier, follower.budget_kind) == ("drawing", True, "cap") and follower.state_dict() == {}


def test_learning_and_state_are_rank_0s():
    led = Led(Drawing, ALONE)
    assert led.learn(None) == {"predict/brier": 0.5} and led.state_dict() == {"seen": 1}
    led.load_state_dict({"seen": 7})
    assert led.allocator.seen == 7


def test_what_cannot_be_made_is_refused():
    def infeasible():
        raise BudgetError("--rollouts-per-prompt 1")

    with pytest.raises(BudgetError, match="--rollouts-per-prompt 1"):
        Led(infeasible, ALONE)
