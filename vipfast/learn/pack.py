"""Which rollouts are trained, and in what shapes they pass through the model's body.

Data stays ragged everywhere else; here rollouts of like length become small right-padded rectangles, and the hidden states that
predict completion tokens are cut back to [T, D] before the head. Causal attention never looks right, so padding needs no mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vipfast import streams
from vipfast.types import Rollouts

RECTANGLE_COST = 96
"""What one more forward and backward pass costs, in padded tokens worth avoiding (measured on the starter, one thread)."""


@dataclass(frozen=True, eq=False)
class Rectangle:
    """One pass of the body. Rows are rollouts, cut to prompt + completion without the last id, which predicts nothing.

    Example: prompt [7, 8], completion [1, 2, 3] -> a row [7, 8, 1, 2, pad…]; positions 1, 2, 3 predict targets 1, 2, 3.
    """

    rows_r: np.ndarray  # int64 [r], rows of the Rollouts
    input_ids: np.ndarray  # int64 [r, L]
    positions_T: np.ndarray  # int64 [T], flat indices into [r * L]
    targets_T: np.ndarray  # int64 [T]
    tokens_T: np.ndarray  # int64 [T], where the targets lie among the Rollouts' tokens
    token_offsets: np.ndarray  # int64 [r+1], where each row's tokens lie among the T
    num_padding: int


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The integers starts[i] … starts[i] + lengths[i] - 1, one run after the other: ([5, 9], [2, 3]) -> [5, 6, 9, 10, 11]."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)


def rows_to_train(
    advantage_R: np.ndarray, reward_R: np.ndarray, use_R: np.ndarray, length_R: np.ndarray, beta: float
) -> np.ndarray:
    """Rows that can carry a gradient: in use, scored, with trained tokens, and with an advantage unless a KL term pulls at all.

    Args:
        advantage_R, reward_R: float [R]; NaN reward = unscored.
        use_R: bool [R].
        length_R: int64 [R], trained tokens.
        beta: weight of the KL term.

    Returns:
        int64 [r], ascending.
    """
    able_R = use_R & ~np.isnan(reward_R) & (length_R > 0)
    return np.flatnonzero(able_R if beta > 0 else able_R & (advantage_R != 0))


def cut_rectangles(length_r: np.ndarray, budget: int) -> list[np.ndarray]:
    """Deal rows into rectangles of at most ``budget`` padded tokens (one row at least), with little padding and few rectangles.

    Rows sorted by length are cut where padded tokens plus ``RECTANGLE_COST`` per rectangle are least (exact, by dynamic
    programming over the cuts).

    Args:
        length_r: int64 [r], input tokens of each row.
        budget: padded tokens of one rectangle.

    Returns:
        Index arrays into ``length_r``, shortest rows first.
    """
    order = np.argsort(length_r, kind="stable")
    length = length_r[order]
    least = np.zeros(len(length) + 1)
    start = np.zeros(len(length) + 1, np.int64)
    for end in range(1, len(length) + 1):
        longest = int(length[end - 1])
        first = max(end - max(budget // max(longest, 1), 1), 0)
        cost = least[first:end] + np.arange(end - first, 0, -1) * longest + RECTANGLE_COST
        best = int(cost.argmin())
        start[end], least[end] = first + best, cost[best]
    cuts, end = [], len(length)
    while end:
        cuts.append(order[start[end] : end])
        end = start[end]
    return cuts[::-1]


def pack(rollouts: Rollouts, rows_r: np.ndarray, micro_batch_tokens: int, pad_id: int) -> list[Rectangle]:
    """The rectangles that hold ``rows_r``.

    Args:
        rollouts: the whole step.
        rows_r: int64 [r], rows to pass through the model; each has at least one token and a prompt.
        micro_batch_tokens: padded tokens of one rectangle at most (a longer row stands alone).
        pad_id: fills the space after a row; any valid id, it reaches no log-prob.

    Returns:
        list of Rectangle, each row in exactly one.
    """
    prompt_R = np.diff(rollouts.prompt_offsets)[rollouts.group_R]
    length_r = (prompt_R + rollouts.lengths_R - 1)[rows_r]
    return [_rectangle(rollouts, rows_r[cut], pad_id) for cut in cut_rectangles(length_r, micro_batch_tokens)]


def _rectangle(rollouts: Rollouts, rows_r: np.ndarray, pad_id: int) -> Rectangle:
    group_r = rollouts.group_R[rows_r]
    prompt_start_r, prompt_r = rollouts.prompt_offsets[group_r], np.diff(rollouts.prompt_offsets)[group_r]
    token_start_r, length_r = rollouts.token_offsets[rows_r], rollouts.lengths_R[rows_r]
    width = int((prompt_r + length_r - 1).max())
    row_start_r = np.arange(len(rows_r)) * width

    input_ids = np.full(len(rows_r) * width, pad_id, np.int64)
    input_ids[ranges(row_start_r, prompt_r)] = rollouts.prompt_tokens[ranges(prompt_start_r, prompt_r)]
    input_ids[ranges(row_start_r + prompt_r, length_r - 1)] = rollouts.tokens[ranges(token_start_r, length_r - 1)]
    tokens_T = ranges(token_start_r, length_r)
    return Rectangle(
        rows_r=rows_r,
        input_ids=input_ids.reshape(len(rows_r), width),
        positions_T=ranges(row_start_r + prompt_r - 1, length_r),
        targets_T=rollouts.tokens[tokens_T],
        tokens_T=tokens_T,
        token_offsets=np.concatenate([[0], np.cumsum(length_r)]),
        num_padding=int(len(rows_r) * width - (prompt_r + length_r - 1).sum()),
    )


def padding_share(rectangles: Sequence[Rectangle]) -> float | None:
    """Padded tokens over all tokens of the body's passes; None without any."""
    total = sum(rectangle.input_ids.size for rectangle in rectangles)
    return sum(rectangle.num_padding for rectangle in rectangles) / total if total else None


def deal_prompts(
    tokens_B: np.ndarray, used_B: np.ndarray, uids: Sequence[str], num_batches: int, seed: int, step: int, epoch: int
) -> list[np.ndarray]:
    """Deal whole prompts into mini-batches of near-equal tokens, by a rule that only (seed, step, epoch) and the uids vary.

    Longest first, each to the lightest mini-batch; equal ones in seeded order. Prompts without any signal are dealt like the
    others, so that no mini-batch's divisor depends on the rewards.

    Args:
        tokens_B: int64 [B], tokens of each prompt's rollouts in use.
        used_B: int64 [B], rollouts in use; prompts without any are left out.
        uids: prompt uids [B].
        num_batches: mini-batches wanted (K).
        seed, step, epoch: name the order.

    Returns:
        Up to K bool masks [B], disjoint, none empty; together the prompts in use.
    """
    hashes = np.array([streams.uid_hash(uid) for uid in uids], np.uint64)
    key_B = streams.keys(streams.ORDER, seed, step, hashes, epoch)
    load = [(0, 0)] * num_batches
    batch_B = np.full(len(used_B), -1)
    for prompt in np.lexsort((key_B, -tokens_B)):
        if used_B[prompt] > 0:
            lightest = load.index(min(load))
            batch_B[prompt] = lightest
            load[lightest] = (load[lightest][0] + int(tokens_B[prompt]), load[lightest][1] + 1)
    return [batch_B == k for k in range(num_batches) if (batch_B == k).any()]
