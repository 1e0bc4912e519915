"""Rewards and token log-probs to the policy-gradient loss and its derivative, in one pass.

Letters: B prompts of the whole step, R its rollouts, r the rollouts in hand, T their tokens (those of rows_r alone), P tiles of
tokens, K sums.

Formula: loss = sum of w_i l(A_i, log-probs of the token), the token loss of token_loss with the advantages of group_advantage.

Gradient, formed in the forward pass: d loss / d logp_T = w_i dl/dlogp. backward only multiplies by the upstream scalar.

Bytes moved per token in fp32: reads logp, sampler, (old), (ref), mask = 9 to 17; writes dlogp = 4. The rest is [R] or [P].
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vipfast.kernels.group_advantage import ESTIMATORS, check_step, group_advantages_ref, group_statistics, row_advantage
from vipfast.kernels.launch import backend_of, launch, tl, triton
from vipfast.kernels.token_loss import SUMS, TokenTerms, token_loss, token_loss_ref

TILE_BYTES, BLOCK_PARTIALS = 2048, 8192

VECTOR = tl.constexpr(4)
"""Neighbouring tokens of one thread: 16 bytes of fp32, and one layout for columns of every width."""


class PolicyLoss(NamedTuple):
    """loss: float64 scalar, differentiable in logp_T. dlogp_T: d loss / d logp, not differentiable. sums: as of TokenLoss."""

    loss: Tensor
    dlogp_T: Tensor
    sums: dict[str, Tensor]


def token_terms_ref(
    reward_R, group_offsets, plan: Any, rows_r, token_offsets, loss_mask_T, weight_R, estimator: str, like_T: Tensor
) -> TokenTerms:
    """Spread the step's advantages and weights over the tokens of rows_r, in the dtype and on the device of ``like_T``."""
    device = like_T.device
    advantage_R = group_advantages_ref(reward_R, group_offsets, plan.use_R, plan.baseline_B, estimator, device)
    counted_R = torch.as_tensor(plan.use_R, device=device) & ~torch.as_tensor(reward_R, device=device).isnan()
    rows_r = torch.as_tensor(rows_r, device=device)
    lengths_r = torch.as_tensor(token_offsets, device=device).diff()
    row_T = torch.repeat_interleave(rows_r, lengths_r, output_size=like_T.shape[0])
    trained_T = counted_R[row_T]
    if loss_mask_T is not None:
        trained_T = trained_T & torch.as_tensor(loss_mask_T, device=device).bool()
    weight_R = torch.as_tensor(weight_R, device=device)
    return TokenTerms(advantage_R[row_T].to(like_T.dtype), weight_R[row_T].to(like_T.dtype), trained_T)


def add_sums(total: dict[str, Tensor], part: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge the sums of two disjoint sets of tokens."""
    if not total:
        return part
    return {name: torch.maximum(total[name], x) if name.endswith("_max") else total[name] + x for name, x in part.items()}


def policy_loss_ref(
    reward_R, group_offsets, plan: Any, rows_r, token_offsets, sampler_logp_T, old_logp_T, ref_logp_T, loss_mask_T,
    weight_R, estimator: str, rule: tuple[float, float, float, float], logp_T: Tensor,
) -> PolicyLoss:  # fmt: skip
    """Plain torch twin of ``policy_loss``, any dtype; ``rule`` is clip_low, clip_high, beta, ratio_cap."""
    terms = token_terms_ref(reward_R, group_offsets, plan, rows_r, token_offsets, loss_mask_T, weight_R, estimator, logp_T)
    found = token_loss_ref(terms, logp_T, sampler_logp_T, old_logp_T, ref_logp_T, *rule)
    return PolicyLoss(found.loss, found.dlogp_T, found.sums)


@triton.jit
def load_tokens(p, o_T, num_left, FULL: tl.constexpr, dtype: tl.constexpr):
    # A mask of unknown alignment would narrow every load to one token, so full tiles go without.
    return (tl.load(p + o_T) if FULL else tl.load(p + o_T, mask=o_T < num_left, other=0)).to(dtype)


@triton.jit
def row_terms(p_reward, p_use, p_weight, p_statistics, p_rows, p_group, i, dtype: tl.constexpr):
    """Advantage, weight and whether it counts of the i-th row in hand; p_group holds 1 + its group."""
    i_row = tl.load(p_rows + i)
    advantage, counted = row_advantage(p_reward, p_use, p_statistics, i_row, tl.load(p_group + i) - 1)
    return advantage.to(dtype), tl.load(p_weight + i_row).to(dtype), counted


@triton.jit
def policy_loss_tile(
    p_logp, p_sampler, p_old, p_ref, p_mask, p_reward, p_use, p_weight, p_statistics, p_rows, p_group, p_offsets, p_first,
    p_dlogp, p_partial, num_tokens, num_rows, clip_low, clip_high, beta, ratio_cap, i_tile, FULL: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = p_partial.dtype.element_ty
    o_tile = i_tile * BT
    num_left = num_tokens - o_tile
    o_T = tl.max_contiguous(tl.arange(0, BT), VECTOR)
    b_logp = load_tokens(p_logp + o_tile, o_T, num_left, FULL, dtype)
    b_sampler = load_tokens(p_sampler + o_tile, o_T, num_left, FULL, dtype)
    b_old = b_logp if p_old is None else load_tokens(p_old + o_tile, o_T, num_left, FULL, dtype)
    b_ref = b_logp if p_ref is None else load_tokens(p_ref + o_tile, o_T, num_left, FULL, dtype)

    # Rows follow each other, so each one overwrites its predecessor from its first token on. The first is made to depend on all
    # that was loaded: the loop's values then keep the layout of the loads, and no load is put off until after the loop. A NaN
    # changes nothing by it: a trained one makes the loss NaN whatever its advantage and weight are.
    i_first, i_last = tl.load(p_first + i_tile) - 1, tl.minimum(tl.load(p_first + i_tile + 1), num_rows) - 1
    advantage, weight, counted = row_terms(p_reward, p_use, p_weight, p_statistics, p_rows, p_group, i_first, dtype)
    b_known = b_logp + b_sampler
    if p_old is not None:
        b_known += b_old
    if p_ref is not None:
        b_known += b_ref
    m_known = b_known == b_known
    b_advantage, b_weight = tl.where(m_known, advantage, 0.0), tl.where(m_known, weight, 0.0)
    b_counted = tl.where(m_known, counted.to(dtype), -counted.to(dtype))
    for i in range(i_first + 1, i_last + 1):
        advantage, weight, counted = row_terms(p_reward, p_use, p_weight, p_statistics, p_rows, p_group, i, dtype)
        m_row = o_T >= tl.minimum(tl.load(p_offsets + i) - o_tile, BT).to(tl.int32)
        b_advantage, b_weight = tl.where(m_row, advantage, b_advantage), tl.where(m_row, weight, b_weight)
        b_counted = tl.where(m_row, counted.to(dtype), b_counted)

    m_trained = b_counted != 0.0
    if not FULL:
        m_trained = m_trained & (o_T < num_left)
    if p_mask is not None:
        m_trained = m_trained & (load_tokens(p_mask + o_tile, o_T, num_left, FULL, tl.int8) != 0)
    # Slots that are not trained may hold anything, NaN included: overwritten, they add 0 to everything but raw.
    b_trained = tl.where(m_trained, 1.0, 0.0).to(dtype)
    b_logp, b_sampler = tl.where(m_trained, b_logp, 0.0), tl.where(m_trained, b_sampler, 0.0)
    b_old, b_ref = tl.where(m_trained, b_old, 0.0), tl.where(m_trained, b_ref, 0.0)
    b_advantage = tl.where(m_trained, b_advantage, 0.0)
    b_loss, b_dlogp, _, b_raw, b_kl, m_low, m_high = token_loss(
        b_logp, b_old, b_sampler, b_ref, b_advantage, b_weight, clip_low, clip_high, beta, ratio_cap,
        HAS_REF=p_ref is not None, HAS_OLD=p_old is not None,
    )  # fmt: skip
    b_dlogp = b_dlogp.to(p_dlogp.dtype.element_ty)
    if FULL:
        tl.store(p_dlogp + o_tile + o_T, b_dlogp)
    else:
        tl.store(p_dlogp + o_tile + o_T, b_dlogp, mask=o_T < num_left)

    b_raw *= b_trained
    raw = tl.sum(b_raw)
    tokens = tl.sum(b_trained)
    low = tl.sum(m_low.to(tl.int32)) if p_old is not None else 0
    high = tl.sum(m_high.to(tl.int32)) if p_old is not None else 0
    kl = tl.sum(b_kl) if p_ref is not None else 0.0
    p_partial += i_tile
    num_tiles = tl.num_programs(0).to(tl.int64)
    tl.store(p_partial, tl.sum(b_loss))
    tl.store(p_partial + num_tiles, tokens)
    tl.store(p_partial + 2 * num_tiles, low)
    tl.store(p_partial + 3 * num_tiles, high)
    tl.store(p_partial + 4 * num_tiles, kl)
    tl.store(p_partial + 5 * num_tiles, raw)
    # A maximum may pass over a NaN, which the sum keeps.
    tl.store(p_partial + 6 * num_tiles, tl.where(raw == raw, tl.max(b_raw), raw))
    tl.store(p_partial + 7 * num_tiles, tl.sum(tl.abs(b_old - b_sampler)))


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def policy_loss_kernel(
    p_logp, p_sampler, p_old, p_ref, p_mask, p_reward, p_use, p_weight, p_statistics, p_rows, p_group, p_offsets, p_first,
    p_dlogp, p_partial, num_tokens: tl.int64, num_rows: tl.int64,
    clip_low: tl.float64, clip_high: tl.float64, beta: tl.float64, ratio_cap: tl.float64, BT: tl.constexpr,
):  # fmt: skip
    """One program per tile of BT tokens; partial sums go to p_partial [K, P], K = loss and SUMS."""
    i_tile = tl.program_id(0).to(tl.int64)
    if (i_tile + 1) * BT <= num_tokens:
        policy_loss_tile(
            p_logp, p_sampler, p_old, p_ref, p_mask, p_reward, p_use, p_weight, p_statistics, p_rows, p_group, p_offsets,
            p_first, p_dlogp, p_partial, num_tokens, num_rows, clip_low, clip_high, beta, ratio_cap, i_tile, True, BT,
        )  # fmt: skip
    else:
        policy_loss_tile(
            p_logp, p_sampler, p_old, p_ref, p_mask, p_reward, p_use, p_weight, p_statistics, p_rows, p_group, p_offsets,
            p_first, p_dlogp, p_partial, num_tokens, num_rows, clip_low, clip_high, beta, ratio_cap, i_tile, False, BT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_partials", "max_bits"])
def reduce_partials(p_partial, p_total, num_partials: tl.int64, max_bits: tl.int64, BP: tl.constexpr):
    """One program per sum, in a fixed order; bit k of max_bits makes the k-th a maximum of numbers >= 0."""
    i_sum = tl.program_id(0).to(tl.int64)
    b_total = tl.zeros([BP], tl.float64)
    b_largest = tl.zeros([BP], tl.float64)
    for o in range(0, num_partials, BP):
        o_P = o + tl.arange(0, BP)
        b_part = tl.load(p_partial + i_sum * num_partials + o_P, mask=o_P < num_partials, other=0.0).to(tl.float64)
        b_total += b_part
        b_largest = tl.maximum(b_largest, b_part)
    total = tl.sum(b_total)
    is_max = ((max_bits >> i_sum) & 1) != 0
    # The sum tells whether a NaN was among them; a maximum may pass over it.
    tl.store(p_total + i_sum, tl.where(is_max & (total == total), tl.max(b_largest), total))


def reduced(partial_KP: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Sums over the partials of each name in float64, in a fixed order; maxima for names that end in _max."""
    total_K = torch.empty(len(names), dtype=torch.float64, device=partial_KP.device)
    max_bits = sum(1 << k for k, name in enumerate(names) if name.endswith("_max"))
    launch(reduce_partials, len(names), partial_KP, total_K, partial_KP.shape[1], max_bits, BP=BLOCK_PARTIALS, num_warps=16)
    return dict(zip(names, total_K.unbind()))


class Rows(NamedTuple):
    """A step's statistics and the rows in hand, on the device of their tokens."""

    reward_R: Tensor
    use_R: Tensor
    weight_R: Tensor  # float64
    statistics_B2: Tensor
    rows_r: Tensor  # int64
    group_r: Tensor  # int64, 1 + the group of each row
    token_offsets: Tensor  # int64 [r+1]


def moved(x, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """On the device, without waiting for it."""
    return torch.as_tensor(x).to(device, dtype, non_blocking=True).contiguous()


def rows_on(device: torch.device, reward_R, group_offsets, plan: Any, rows_r, token_offsets, weight_R, estimator: str) -> Rows:
    """Move what describes the step and the rows to a device and launch the group statistics."""
    reward_R, use_R = moved(reward_R, device), moved(plan.use_R, device, torch.bool)
    weight_R, baseline_B = moved(weight_R, device, torch.float64), moved(plan.baseline_B, device, torch.float64)
    group_offsets, rows_r, token_offsets = (moved(x, device, torch.int64) for x in (group_offsets, rows_r, token_offsets))
    statistics_B2 = group_statistics(reward_R, use_R, group_offsets, baseline_B, estimator)
    group_r = torch.searchsorted(group_offsets, rows_r, right=True)
    return Rows(reward_R, use_R, weight_R, statistics_B2, rows_r, group_r, token_offsets)


def policy_loss_triton(
    reward_R, group_offsets, plan: Any, rows_r, token_offsets, sampler_logp_T, old_logp_T, ref_logp_T, loss_mask_T,
    weight_R, estimator: str, rule: tuple[float, float, float, float], logp_T: Tensor,
) -> PolicyLoss:  # fmt: skip
    """Launcher: group statistics, one pass over the tokens, the sums of its partials."""
    T, device = len(logp_T), logp_T.device
    rows = rows_on(device, reward_R, group_offsets, plan, rows_r, token_offsets, weight_R, estimator)
    mask_T = None if loss_mask_T is None else moved(loss_mask_T, device, torch.bool)
    dtype = torch.float64 if logp_T.dtype == torch.float64 else torch.float32
    BT = TILE_BYTES // dtype.itemsize
    num_tiles = triton.cdiv(T, BT)
    starts_P = torch.arange(0, (num_tiles + 1) * BT, BT, device=device)
    first_P = torch.searchsorted(rows.token_offsets, starts_P, right=True)
    dlogp_T = torch.empty_like(logp_T)
    partial_KP = torch.empty(1 + len(SUMS), num_tiles, dtype=dtype, device=device)
    launch(
        policy_loss_kernel, num_tiles, logp_T, sampler_logp_T, old_logp_T, ref_logp_T, mask_T,
        rows.reward_R, rows.use_R, rows.weight_R, rows.statistics_B2, rows.rows_r, rows.group_r, rows.token_offsets, first_P,
        dlogp_T, partial_KP, T, len(rows.rows_r), *rule, BT=BT, num_warps=1,
    )  # fmt: skip
    sums = reduced(partial_KP, ("loss", *SUMS))
    return PolicyLoss(sums.pop("loss").clone(), dlogp_T, sums)


def check_inputs(logp_T: Tensor, sampler_T: Tensor, old_T, ref_T, mask_T, token_offsets, estimator: str) -> None:
    """Refuse what would be read wrongly.

    Raises:
        ValueError: naming argument, value and remedy.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator {estimator!r}: must be one of {', '.join(ESTIMATORS)}")
    columns = dict(logp_T=logp_T, sampler_logp_T=sampler_T, old_logp_T=old_T, ref_logp_T=ref_T)
    for name, column in ((name, column) for name, column in columns.items() if column is not None):
        if column.shape != logp_T.shape or column.ndim != 1 or column.device != logp_T.device:
            raise ValueError(
                f"{name} of shape {tuple(column.shape)} on {column.device}, logp_T of shape {tuple(logp_T.shape)} on "
                f"{logp_T.device}: pass one value per token, all on one device"
            )
        if not column.is_contiguous():
            raise ValueError(f"{name} has stride {column.stride()[0]}: pass {name}.contiguous()")
    if mask_T is not None and len(mask_T) != len(logp_T):
        raise ValueError(f"loss_mask_T has {len(mask_T)} entries for {len(logp_T)} tokens: pass one per token")
    # Asking a device for a number would wait for it.
    on_host = not isinstance(token_offsets, Tensor) or token_offsets.device.type == "cpu"
    if on_host and int(token_offsets[-1]) != len(logp_T):
        raise ValueError(f"token_offsets end at {int(token_offsets[-1])} for {len(logp_T)} tokens: pass those of rows_r alone")


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logp_T, compute):
        result = compute(logp_T=logp_T)
        ctx.save_for_backward(result.dlogp_T)
        ctx.mark_non_differentiable(result.dlogp_T)
        return tuple(result)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss, *_):
        # Out of place: a second backward over a kept graph must find the same gradient.
        return ctx.saved_tensors[0] * dloss, None


def policy_loss(
    reward_R,
    group_offsets,
    plan: Any,
    rows_r,
    token_offsets,
    logp_T: Tensor,
    sampler_logp_T: Tensor,
    old_logp_T: Tensor | None = None,
    ref_logp_T: Tensor | None = None,
    loss_mask_T=None,
    *,
    weight_R,
    estimator: str,
    clip_low: float,
    clip_high: float,
    beta: float,
    ratio_cap: float = 2.0,
    backend: str | None = None,
) -> PolicyLoss:
    """Loss, d loss / d logp and the sums worth logging, for the tokens of some rows of a step.

    ``reward_R``, ``group_offsets``, ``plan`` and ``weight_R`` always describe the whole step, so any split of its rows adds up
    to the same loss and gradient.

    Args:
        reward_R: float [R], NaN = unscored (out of baseline and loss). A row without a trainable token should be passed as NaN.
        group_offsets: int [B+1].
        plan: has ``use_R`` bool [R] and ``baseline_B`` float [B], NaN = from the group.
        rows_r: int [r], the rows whose tokens follow.
        token_offsets: int [r+1], where each row's tokens lie in the T tokens.
        logp_T: [T], under the policy being trained, at the sampling temperature; gradients reach it.
        sampler_logp_T, old_logp_T, ref_logp_T: [T]; old None means logp itself (one optimizer step), ref None means no KL term.
        loss_mask_T: bool [T], False for ids the policy did not sample; None trains all.
        weight_R: float [R], weight of each token of a row.
        estimator: "rloo", "dr_grpo" or "grpo".
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        beta: weight of the KL term.
        ratio_cap: cap of the trainer-to-sampler importance weight.
        backend: "triton", "torch", or None for the device's own.

    Returns:
        PolicyLoss; ``sums``: tokens, clip_low, clip_high, kl, ratio_raw, ratio_raw_max, gap (sum of abs(old - sampler)).

    Raises:
        ValueError: columns of tokens that differ in length or device or have gaps in memory, token_offsets that do not end at
            T, parts of a step that do not fit, an unknown estimator, or a backend that cannot run here.
    """
    check_inputs(logp_T, sampler_logp_T, old_logp_T, ref_logp_T, loss_mask_T, token_offsets, estimator)
    check_step(reward_R, group_offsets, plan, rows_r, token_offsets, weight_R)
    run = policy_loss_triton if backend_of(backend, logp_T.device) == "triton" else policy_loss_ref
    compute = partial(
        run, reward_R, group_offsets, plan, rows_r, token_offsets, sampler_logp_T, old_logp_T, ref_logp_T, loss_mask_T,
        weight_R, estimator, (clip_low, clip_high, beta, ratio_cap),
    )  # fmt: skip
    return PolicyLoss(*_PolicyLoss.apply(logp_T, compute))
