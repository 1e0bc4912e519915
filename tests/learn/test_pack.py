import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vipfast.learn.pack import (
    blank,
    cut_packed,
    cut_rectangles,
    deal_prompts,
    pack,
    padding_share,
    ranges,
    rows_to_train,
)
from vipfast.types import Prompt, Rollouts, StepPlan


def ragged(counts, prompt_lengths, lengths, vocab=37, seed=0):
    rng = np.random.default_rng(seed)
    offsets = lambda x: np.concatenate([[0], np.cumsum(x)]).astype(np.int64)  # noqa: E731 - three uses in one expression
    P, R, T = offsets(prompt_lengths), sum(counts), int(sum(lengths))
    ids = rng.integers(0, vocab, P[-1])
    prompts = [Prompt(f"uid{q}", "", ids[P[q] : P[q + 1]]) for q in range(len(counts))]
    return Rollouts(
        prompts, ids, P, offsets(counts), offsets(lengths), rng.integers(0, vocab, T), np.ones(T, bool),
        np.zeros(T, np.float32), np.zeros(R, np.float32), np.zeros(R, np.int64), np.zeros(R, np.int64), np.zeros(R, np.uint8),
        StepPlan.plain([np.array(counts)]),
    )  # fmt: skip


def test_ranges():
    assert ranges(np.array([5, 9, 0]), np.array([2, 3, 0])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.zeros(0, int), np.zeros(0, int)).tolist() == []


def test_rectangle_by_hand():
    step = ragged([1, 2], [2, 1], [3, 1, 2])
    (only,) = pack(step, np.array([0, 1, 2]), 100, pad_id=36)
    rows = {row: ids for row, ids in zip(only.rows_r, only.input_ids.tolist(), strict=True)}
    t, p = step.tokens.tolist(), step.prompt_tokens.tolist()
    assert rows == {0: p[:2] + t[:2], 1: p[2:] + [36] * 3, 2: p[2:] + [t[4], 36, 36]}
    assert only.num_padding == 5 and padding_share([only]) == 5 / 12
    for row, a, b in zip(only.rows_r, only.token_offsets[:-1], only.token_offsets[1:], strict=True):
        assert only.targets_T[a:b].tolist() == t[step.token_offsets[row] : step.token_offsets[row + 1]]
    flat = only.input_ids.ravel()
    for position, token in zip(only.positions_T, only.tokens_T, strict=True):
        row = int(np.searchsorted(step.token_offsets, token, "right") - 1)
        k = token - step.token_offsets[row]
        assert flat[position] == (step.tokens[token - 1] if k else step.prompts[step.group_R[row]].tokens[-1])


def test_packed_row_by_hand():
    step = ragged([1, 2], [2, 1], [3, 1, 2])
    only, _ = pack(step, np.array([0, 1, 2]), 5, pad_id=36, packing="varlen")
    t, p = step.tokens.tolist(), step.prompt_tokens.tolist()
    # prompt of 2 and completion of 3: 4 inputs; prompt of 1 and completion of 1: 1 input; the third row's 2 would make 7
    assert only.input_ids.tolist() == [p[:2] + t[:2] + p[2:]] and only.row_offsets.tolist() == [0, 4, 5]
    assert only.rows_r.tolist() == [0, 1] and only.positions_T.tolist() == [1, 2, 3, 4] and only.targets_T.tolist() == t[:4]
    assert only.token_offsets.tolist() == [0, 3, 4] and only.num_padding == 0 and padding_share([only]) == 0


def test_a_blank_pass_holds_no_row():
    empty = blank(36)
    assert empty.input_ids.tolist() == [[36]] and not len(empty.rows_r) and not len(empty.positions_T)
    assert empty.token_offsets.tolist() == [0]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 300))
def test_every_row_once_within_the_budget(lengths, budget):
    lengths = np.array(lengths, int)
    cuts = cut_rectangles(lengths, budget)
    assert sorted(np.concatenate([[], *cuts]).tolist()) == list(range(len(lengths)))
    for cut in cuts:
        assert len(cut) == 1 or len(cut) * lengths[cut].max() <= budget


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 300))
def test_packed_rows_hold_every_row_once_within_the_budget(lengths, budget):
    lengths = np.array(lengths, int)
    cuts = cut_packed(lengths, budget)
    assert np.concatenate([[], *cuts]).tolist() == list(range(len(lengths)))
    assert all(len(cut) == 1 or lengths[cut].sum() <= budget for cut in cuts)
    # two neighbours always hold more than one budget, so there are at most twice as many as needed
    assert all(lengths[a].sum() + lengths[b].sum() > budget for a, b in zip(cuts, cuts[1:]))


def test_padding_share_on_short_arithmetic():
    rng = np.random.default_rng(0)
    counts = np.full(64, 8)
    step = ragged(counts, rng.integers(8, 31, 64), rng.integers(2, 13, 512))
    rectangles = pack(step, np.sort(rng.choice(512, 256, replace=False)), 8192, 0)
    assert padding_share(rectangles) <= 0.15 and len(rectangles) <= 8


def test_rows_to_train():
    advantage = np.array([1.0, 0, -1, 1, 1, 0])
    reward = np.array([1, 1, 0, np.nan, 1, 1])
    use = np.array([True, True, True, True, False, True])
    length = np.array([3, 2, 0, 1, 4, 5])
    assert rows_to_train(advantage, reward, use, length, beta=0.0).tolist() == [0]
    assert rows_to_train(advantage, reward, use, length, beta=0.1).tolist() == [0, 1, 5]


def deal(tokens, k, seed=0, step=0, epoch=0, order=None):
    order = np.arange(len(tokens)) if order is None else order
    used = (tokens > 0).astype(int)
    return deal_prompts(tokens[order], used[order], [f"uid{q}" for q in order], k, seed, step, epoch)


def test_prompts_are_dealt_whole_into_near_equal_mini_batches():
    tokens = np.random.default_rng(0).integers(10, 100, 64)
    masks = deal(tokens, 4)
    assert len(masks) == 4 and np.sum(masks, 0).tolist() == [1] * 64
    loads = [tokens[mask].sum() for mask in masks]
    assert max(loads) - min(loads) <= 0.05 * np.mean(loads)


def test_dealing_is_seeded_and_blind_to_order():
    tokens = np.full(12, 5)
    first = deal(tokens, 3)
    assert all((a == b).all() for a, b in zip(first, deal(tokens, 3), strict=True))
    others = [deal(tokens, 3, seed=1), deal(tokens, 3, step=1), deal(tokens, 3, epoch=1)]
    assert all(any((a != b).any() for a, b in zip(first, other, strict=True)) for other in others)
    order = np.random.default_rng(0).permutation(12)
    assert all((a[order] == b).all() for a, b in zip(first, deal(tokens, 3, order=order), strict=True))


def test_fewer_prompts_than_mini_batches():
    assert [mask.tolist() for mask in deal(np.array([5, 0, 9]), 4)] == [[False, False, True], [True, False, False]]
