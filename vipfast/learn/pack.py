"""Which rollouts are trained, and in what shapes they pass through the model's body.

Data stays ragged everywhere else. Here rollouts become either small right-padded rectangles of like length (causal attention
never looks right, so padding needs no mask) or one packed row without padding, whose positions start anew with each rollout.
Either way the hidden states that predict completion tokens are cut back to [T, D] before the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vipfast import streams
from vipfast.distributed import ALONE, Ranks
from vipfast.types import Rollouts

PACKED = ("varlen", "masked")
"""The values of ``--packing`` that make one row of many rollouts."""

RECTANGLE_COST = 96
"""What one more forward and backward pass costs, in padded tokens worth avoiding (measured on the starter, one thread)."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One pass of the body. Rows are rollouts, cut to prompt + completion without the last id, which predicts nothing.

    Example: prompt [7, 8], completion [1, 2, 3] -> a row [7, 8, 1, 2, pad…]; positions 1, 2, 3 predict targets 1, 2, 3.
    Packed with prompt [9], completion [4, 5] behind it: [7, 8, 1, 2, 9, 4], row_offsets [0, 4, 6].
    """

    rows_r: np.ndarray  # int64 [r], rows of the Rollouts
    input_ids: np.ndarray  # int64 [r, L]; packed [1, L]
    positions_T: np.ndarray  # int64 [T], flat indices into [r * L]
    targets_T: np.ndarray  # int64 [T]
    tokens_T: np.ndarray  # int64 [T], where the targets lie among the Rollouts' tokens
    token_offsets: np.ndarray  # int64 [r+1], where each row's tokens lie among the T
    num_padding: int
    row_offsets: np.ndarray | None = None  # int64 [r+1], where the rows of a packed row lie; None for a rectangle


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


def cut_packed(length_r: np.ndarray, budget: int) -> list[np.ndarray]:
    """Deal rows into packed rows of at most ``budget`` tokens (one rollout at least), in order.

    Args and returns as ``cut_rectangles``.
    """
    cuts, start, total = [], 0, 0
    for end, length in enumerate(length_r.tolist()):
        if end > start and total + length > budget:
            cuts.append(np.arange(start, end))
            start, total = end, 0
        total += length
    return [*cuts, np.arange(start, len(length_r))] if len(length_r) else []


def pack(
    rollouts: Rollouts, rows_r: np.ndarray, micro_batch_tokens: int, pad_id: int, packing: str = "rectangles"
) -> list[MicroBatch]:
    """The passes that hold ``rows_r``.

    Args:
        rollouts: the whole step.
        rows_r: int64 [r], rows to pass through the model; each has at least one token and a prompt.
        micro_batch_tokens: tokens of one pass at most, padding included (a longer row stands alone).
        pad_id: fills the space after a row; any valid id, it reaches no log-prob.
        packing: "rectangles"; or "varlen" or "masked", for packed rows.

    Returns:
        list of MicroBatch, each row in exactly one.
    """
    prompt_R = np.diff(rollouts.prompt_offsets)[rollouts.group_R]
    length_r = (prompt_R + rollouts.lengths_R - 1)[rows_r]
    packed = packing in PACKED
    cut = cut_packed if packed else cut_rectangles
    return [_micro_batch(rollouts, rows_r[part], pad_id, packed) for part in cut(length_r, micro_batch_tokens)]


def blank(pad_id: int) -> MicroBatch:
    """A pass without rollouts, for a rank that has none left while others still gather weights and reduce gradients."""
    none = np.zeros(0, np.int64)
    return MicroBatch(none, np.full((1, 1), pad_id, np.int64), none, none, none, np.zeros(1, np.int64), num_padding=1)


def _micro_batch(rollouts: Rollouts, rows_r: np.ndarray, pad_id: int, packed: bool) -> MicroBatch:
    group_r = rollouts.group_R[rows_r]
    prompt_start_r, prompt_r = rollouts.prompt_offsets[group_r], np.diff(rollouts.prompt_offsets)[group_r]
    token_start_r, length_r = rollouts.token_offsets[rows_r], rollouts.lengths_R[rows_r]
    input_r = prompt_r + length_r - 1
    row_offsets = np.concatenate([[0], np.cumsum(input_r)])
    width = int(row_offsets[-1] if packed else input_r.max())
    row_start_r = row_offsets[:-1] if packed else np.arange(len(rows_r)) * width

    input_ids = np.full(width if packed else len(rows_r) * width, pad_id, np.int64)
    input_ids[ranges(row_start_r, prompt_r)] = rollouts.prompt_tokens[ranges(prompt_start_r, prompt_r)]
    input_ids[ranges(row_start_r + prompt_r, length_r - 1)] = rollouts.tokens[ranges(token_start_r, length_r - 1)]
    tokens_T = ranges(token_start_r, length_r)
    return MicroBatch(
        rows_r=rows_r,
        input_ids=input_ids.reshape(-1, width),
        positions_T=ranges(row_start_r + prompt_r - 1, length_r),
        targets_T=rollouts.tokens[tokens_T],
        tokens_T=tokens_T,
        token_offsets=np.concatenate([[0], np.cumsum(length_r)]),
        num_padding=len(input_ids) - int(input_r.sum()),
        row_offsets=row_offsets if packed else None,
    )


def padding_share(micro_batches: Sequence[MicroBatch], ranks: Ranks = ALONE) -> float | None:
    """Padded tokens over all tokens of the body's passes on all ranks; None without any."""
    own = sum(part.num_padding for part in micro_batches), sum(part.input_ids.size for part in micro_batches)
    padding, total = np.sum(ranks.gather(own), axis=0).tolist()
    return padding / total if total else None


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
