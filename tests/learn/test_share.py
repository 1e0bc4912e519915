"""Which rank trains a row: level by tokens in every mini-batch, a prompt's rows wherever they fit."""

import dataclasses

import numpy as np
from ragged_steps import configured, sampled, tiny

from vipfast.learn.share import owners
from vipfast.learn.trainable import Trainable


def shared(updates=1):
    config = configured(updates_per_step=updates)
    step = sampled(tiny(), counts=[8, 8, 8, 8], reward=np.arange(32, dtype=np.float32) % 2)
    step = dataclasses.replace(step, holder_R=np.repeat([0, 1], 16))
    data = Trainable.of(step, config)
    return data, owners(data, 0, 2)


def tokens(step):
    return np.diff(step.prompt_offsets)[step.group_R] + step.lengths_R


def test_tokens_are_level_in_every_mini_batch():
    for updates in (1, 3):
        data, owner_R = shared(updates)
        for _, rows_r, _ in data.minibatches(0):
            load = np.bincount(owner_R[rows_r], tokens(data.rollouts)[rows_r])
            assert load.max() <= 1.05 * load.mean()


def test_a_prompts_rows_may_be_trained_apart():
    data, owner_R = shared()
    assert any(len(set(owner_R[data.rollouts.group_R == q])) == 2 for q in range(4))


def test_untrained_rows_stay_where_they_were_sampled():
    data, _ = shared()
    data.rollouts.reward[:8] = 1
    data = Trainable.of(data.rollouts, data.config)
    assert (owners(data, 0, 2)[:8] == 0).all() and len(data.rows_r) == 24
