"""A step's trained rows dealt to ranks by their tokens, whichever rank has sampled them."""

import dataclasses

import numpy as np

from vipfast.distributed import Ranks
from vipfast.learn.pack import ranges
from vipfast.learn.trainable import Trainable
from vipfast.partition import karmarkar_karp
from vipfast.types import Rollouts


def shared_out(data: Trainable, step: int, ranks: Ranks) -> Trainable:
    """The same step with each trained row's tokens on the rank that trains it.

    Args:
        data: the step as it was collected, alike on every rank but for the tokens.
        step: names the order of mini-batches, as in ``Trainable.minibatches``.
        ranks: every one calls this.
    """
    if ranks.size == 1:
        return data
    return dataclasses.replace(data, rollouts=moved(data.rollouts, owners(data, step, ranks.size), ranks))


def owners(data: Trainable, step: int, num_ranks: int) -> np.ndarray:
    """int64 [R], the rank to train each row. Rows that are not trained stay where they are.

    Each mini-batch of the first epoch is dealt by itself, since ranks wait for one another at every optimizer step; later
    epochs find the rows where the first has put them.
    """
    rollouts = data.rollouts
    owner_R = rollouts.holder_R.copy()
    tokens_R = np.diff(rollouts.prompt_offsets)[rollouts.group_R] + rollouts.lengths_R
    for epoch, rows_r, _ in data.minibatches(step):
        if epoch == 0:
            owner_R[rows_r] = karmarkar_karp(tokens_R[rows_r], num_ranks)
    return owner_R


def moved(rollouts: Rollouts, owner_R: np.ndarray, ranks: Ranks) -> Rollouts:
    """Send the tokens of rows that are here to their owners, and take in those that are owned here."""

    def tokens_of(rows_r: np.ndarray) -> np.ndarray:
        return ranges(rollouts.token_offsets[rows_r], rollouts.lengths_R[rows_r])

    held_R, owned_R = rollouts.held_R, owner_R == ranks.rank
    out = [tokens_of(np.flatnonzero(held_R & (owner_R == rank))) for rank in range(ranks.size)]
    into = np.concatenate([tokens_of(np.flatnonzero(owned_R & (rollouts.holder_R == rank))) for rank in range(ranks.size)])
    columns = {}
    for name, nothing in (("tokens", -1), ("sampler_logp", np.nan)):
        column = getattr(rollouts, name)
        columns[name] = np.full_like(column, nothing)
        columns[name][into] = np.concatenate(ranks.exchange([column[at] for at in out]))
    return dataclasses.replace(rollouts, holder_R=owner_R, **columns)
