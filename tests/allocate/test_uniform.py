"""Uniform spends any budget exactly, and who gets the odd rollout depends on uid, seed and step alone."""

import numpy as np
import pytest

from vipfast.allocation import make_allocator
from vipfast.config import Config
from vipfast.types import Prompt, PromptBatch, Tally


def batch(uids, step=1, seed=0):
    return PromptBatch([Prompt(uid, uid, np.zeros(0, np.int64)) for uid in uids], step, seed)


def counts(uids, budget, **kwargs):
    return next(make_allocator(Config(allocator="uniform")).rounds(batch(uids, **kwargs), budget))


@pytest.mark.parametrize("B, budget", [(1, 8), (3, 11), (64, 480), (7, 3), (4, 10)])
def test_any_budget_is_spent_within_one(B, budget):
    n = counts([f"u{i}" for i in range(B)], budget)
    assert n.sum() == budget and n.max() - n.min() <= 1 and n.dtype == np.int64


def test_odd_rollouts_follow_the_prompt_not_its_place():
    uids = [f"u{i}" for i in range(10)]
    n = dict(zip(uids, counts(uids, 75)))
    assert dict(zip(uids[::-1], counts(uids[::-1], 75))) == n
    assert any(dict(zip(uids, counts(uids, 75, step=step))) != n for step in (2, 3, 4))


def test_one_round_and_an_empty_note():
    rounds = make_allocator(Config(allocator="uniform")).rounds(batch(["a", "b"]), 5)
    asked = next(rounds)
    with pytest.raises(StopIteration) as end:
        rounds.send(Tally.empty(["a", "b"]))
    plan = end.value.value
    assert plan.asked_KB.tolist() == [asked.tolist()] and plan.use_R.all() and plan.predicted_B is None
    assert plan.note == {"alloc/ceiling": None, "alloc/var_ratio_expected": None}


def test_nothing_to_learn_or_keep():
    allocator = make_allocator(Config(allocator="uniform"))
    assert allocator.learn(Tally.empty(["a"])) == {} and allocator.state_dict() == {}
    allocator.load_state_dict({})


def test_groups_of_one_warn():
    with pytest.warns(UserWarning, match="--rollouts-per-prompt 1.5"):
        make_allocator(Config(allocator="uniform", rollouts_per_prompt=1.5))
