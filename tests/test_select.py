"""Seeded epochs: every prompt once per epoch, none twice in a step, independent of the dataset's order, resumable."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vipfast.errors import DataError
from vipfast.select import EpochSelector
from vipfast.types import Prompt


def pool(num: int) -> list[Prompt]:
    return [Prompt(f"uid-{i}", f"text {i}", np.array([i])) for i in range(num)]


def uids(prompts):
    return [prompt.uid for prompt in prompts]


@given(num=st.integers(1, 40), k=st.integers(1, 40), seed=st.integers(0, 5))
def test_each_prompt_once_per_epoch_and_none_twice_in_a_step(num, k, seed):
    k = min(k, num)
    selector = EpochSelector(pool(num), seed)
    drawn = [uids(selector.next(k)) for _ in range(2 * num + 1)]
    assert all(len(set(step)) == k for step in drawn)
    flat = [uid for step in drawn for uid in step]
    for epoch in range(len(flat) // num):
        assert sorted(flat[epoch * num : (epoch + 1) * num]) == sorted(uids(pool(num)))


def test_seven_prompts_by_three_use_each_once():
    selector = EpochSelector(pool(7), 0)
    first = uids(selector.next(3)) + uids(selector.next(3)) + uids(selector.next(3))[:1]
    assert sorted(first) == sorted(uids(pool(7)))


def test_order_depends_on_seed_and_epoch_and_not_on_the_datasets_order():
    a, b, c = EpochSelector(pool(50), 1), EpochSelector(pool(50)[::-1], 1), EpochSelector(pool(50), 2)
    first = uids(a.next(50))
    assert first == uids(b.next(50)) != uids(c.next(50))
    assert first != uids(a.next(50))


@pytest.mark.parametrize("steps_before", [1, 2, 3, 5, 8])  # within an epoch, at its end and across it
def test_resume_goes_on_where_it_stopped(steps_before):
    straight = EpochSelector(pool(10), 3)
    for _ in range(steps_before):
        straight.next(4)
    resumed = EpochSelector(pool(10)[::-1], 3)
    resumed.load_state_dict(straight.state_dict())
    for _ in range(8):
        assert uids(straight.next(4)) == uids(resumed.next(4))


@given(
    before=st.integers(4, 30), gone=st.integers(0, 20), new=st.integers(0, 20), steps=st.integers(0, 9), seed=st.integers(0, 5)
)
def test_a_changed_pool_goes_on_in_its_epoch(before, gone, new, steps, seed):
    """Nothing drawn comes again before the epoch ends, and all that was still to come does, as do new prompts once at most."""
    old = EpochSelector(pool(before), seed)
    drawn = [uid for _ in range(steps) for uid in uids(old.next(4))][steps * 4 - old.position :]
    now = pool(before + new)[min(gone, before - 1) :]
    changed = EpochSelector(now, seed)
    state = old.state_dict()
    if len(now) == before and not new:
        changed.load_state_dict(state)
        assert changed.position == old.position
        return
    with pytest.warns(
        UserWarning, match=f"not those of the checkpoint: {len(now)} now, {before} then; .* in epoch {old.epoch}"
    ):
        changed.load_state_dict(state)
    rest = uids(changed._take(len(now)))
    assert len(set(rest)) == len(rest) and not set(rest) & set(drawn)
    assert set(uids(now)) & (set(uids(pool(before))) - set(drawn)) <= set(rest)


def test_a_step_larger_than_the_pool_names_the_option_and_what_fits():
    with pytest.raises(DataError, match=r"--prompts-per-step 8.*holds 7"):
        EpochSelector(pool(7), 0).next(8)
