"""Rewards, hidden states and output embedding to policy loss and gradients; no [tokens, vocabulary] tensor exists whole.

Letters: T tokens of the rows in hand, V vocabulary, D hidden, c tokens of a chunk; R, B, r as in policy_loss.

Formula: logp and entropy of token_logprob on h W^T + b, then the loss of policy_loss on logp.

Gradient, formed in the forward pass, chunk by chunk, while the logits are at hand (g = d loss / d logp of policy_loss):
    d raw = g (onehot(y) - softmax(z)) slope scale / temperature     slope = 1 - tanh^2 with a soft-cap, else 1
    d h   = d raw W        d W = sum d raw^T h        d b = sum d raw
backward only multiplies by the upstream scalar.

Bytes moved in bf16: the logits' matmul writes 2 c V, the pass reads them twice and rewrites them in place, two more matmuls
read them; 4 V D for W and 8 V D for d W per chunk; 4 T D for h and d h. d W is accumulated in fp32 (fp64 for fp64 states).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vipfast.kernels.group_advantage import check_step
from vipfast.kernels.launch import backend_of, launch, tl, triton
from vipfast.kernels.logit_rows import (
    Head,
    check_inputs,
    chunk_budget,
    chunks,
    clear_row,
    compute_dtype,
    distribution_ref,
    operands,
    row_arguments,
    row_entropy,
    row_statistics,
    target_logp,
    write_gradient,
)
from vipfast.kernels.policy_loss import add_sums, reduced, row_terms, rows_on, token_terms_ref
from vipfast.kernels.policy_loss import check_inputs as check_columns
from vipfast.kernels.token_loss import SUMS, token_loss, token_loss_ref


class LossRule(NamedTuple):
    """The numbers of the loss."""

    clip_low: float
    clip_high: float
    beta: float
    ratio_cap: float


class Given(NamedTuple):
    """The step and its tokens, as the public function takes them."""

    targets_T: Tensor
    reward_R: Any
    group_offsets: Any
    plan: Any
    rows_r: Any
    token_offsets: Any
    sampler_logp_T: Tensor
    old_logp_T: Tensor | None
    ref_logp_T: Tensor | None
    loss_mask_T: Any
    weight_R: Any
    estimator: str


class Needs(NamedTuple):
    """Which inputs want a gradient."""

    hidden: bool
    weight: bool
    bias: bool


class HeadGradients(NamedTuple):
    """Gradients times ``gain``, in the dtype computed in (hidden in its own); None where not asked for."""

    hidden_TD: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None
    gain: Tensor | None = None  # None is 1


class PolicyHead(NamedTuple):
    """loss: differentiable scalar. logp_T, entropy_T, ratio_T: [T], not differentiable. sums: as policy_loss, and entropy."""

    loss: Tensor
    logp_T: Tensor
    entropy_T: Tensor
    ratio_T: Tensor
    sums: dict[str, Tensor]


@torch.no_grad()
def policy_head_ref(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, given: Given, head: Head, rule: LossRule,
    chunk_bytes: int | None, needs: Needs,
) -> tuple[PolicyHead, HeadGradients]:  # fmt: skip
    """Plain torch twin: loss and the gradients asked for, any dtype."""
    T, dtype, device = len(hidden_TD), compute_dtype(hidden_TD), hidden_TD.device
    weight = weight_VD[: head.vocab_size].to(dtype)
    bias = None if bias_V is None else bias_V[: head.vocab_size].to(dtype)
    dhidden_TD = torch.empty_like(hidden_TD) if needs.hidden else None
    dweight_VD = torch.zeros_like(weight_VD, dtype=dtype) if needs.weight else None
    dbias_V = torch.zeros_like(bias_V, dtype=dtype) if needs.bias else None
    found_3T = torch.empty(3, T, dtype=dtype, device=device)
    loss, sums = torch.zeros((), dtype=torch.float64, device=device), {}
    factor = head.logit_scale / head.temperature
    terms = token_terms_ref(*given[1:6], given.loss_mask_T, given.weight_R, given.estimator, found_3T[0])
    cuts = list(chunks(T, len(weight), dtype.itemsize, chunk_budget(chunk_bytes, device)))
    logits_cV = torch.empty(cuts[0].stop, len(weight), dtype=dtype, device=device)
    for cut in cuts:
        hidden_cD, targets_c = hidden_TD[cut].to(dtype), given.targets_T[cut]
        known = (None if column_T is None else column_T[cut] for column_T in given[6:9])
        terms_c = type(terms)(*(column_T[cut] for column_T in terms))
        found = distribution_ref(hidden_cD, weight, bias, targets_c, head, logits_cV[: len(targets_c)])
        result = token_loss_ref(terms_c, found.logp_c, *known, *rule)
        entropy_sum = torch.where(terms_c.trained_T, found.entropy_c, 0.0).sum(dtype=torch.float64)
        loss, sums = loss + result.loss, add_sums(sums, result.sums | {"entropy": entropy_sum})
        found_3T[:, cut] = torch.stack([found.logp_c, found.entropy_c, result.ratio_T])
        if any(needs):
            g_c1 = (result.dlogp_T * factor)[:, None]
            draw_cV = found.mass_cV.mul_(-g_c1 / found.total_c[:, None]).scatter_add_(1, found.target_c1, g_c1)
            if found.slope_cV is not None:
                draw_cV *= found.slope_cV
            if dhidden_TD is not None:
                dhidden_TD[cut] = draw_cV @ weight
            if dweight_VD is not None:
                dweight_VD[: head.vocab_size].addmm_(draw_cV.T, hidden_cD)
            if dbias_V is not None:
                dbias_V[: head.vocab_size] += draw_cV.sum(0)
    return PolicyHead(loss.to(dtype), *found_3T, sums), HeadGradients(dhidden_TD, dweight_VD, dbias_V)


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=[
        "p_target", "p_sampler", "p_old", "p_ref", "p_mask", "p_rank", "p_logp", "p_entropy", "p_ratio", "p_partial"
    ],
)  # fmt: skip
def policy_head_kernel(
    p_logits, p_bias, p_target, p_sampler, p_old, p_ref, p_mask, p_rank, p_logp, p_entropy, p_ratio, p_partial,
    p_reward, p_use, p_weight, p_statistics, p_rows, p_group, num_tokens: tl.int64,
    clip_low: tl.float64, clip_high: tl.float64, beta: tl.float64, ratio_cap: tl.float64,
    stride, num_vocab, inner: tl.float64, outer: tl.float64,
    WRITES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program per token: its loss from its row of logits, which it turns into their gradient.

    The token is of the p_rank-th row in hand. Its parts of the sums go to p_partial [K, num_tokens]: loss, SUMS, entropy.
    """
    DTYPE: tl.constexpr = p_logp.dtype.element_ty
    inner, outer = tl.full((), inner, DTYPE), tl.full((), outer, DTYPE)
    i_T = tl.program_id(0).to(tl.int64)
    i_y, i_rank = tl.load(p_target + i_T), tl.load(p_rank + i_T)
    advantage, weight, trained = row_terms(p_reward, p_use, p_weight, p_statistics, p_rows, p_group, i_rank, DTYPE)
    if p_mask is not None:
        trained = trained & (tl.load(p_mask + i_T) != 0)

    p_row = p_logits + i_T * stride
    top, total, moment = row_statistics(p_row, p_bias, stride, num_vocab, inner, outer, HAS_BIAS, HAS_SOFTCAP, BV)
    logp = target_logp(p_row, p_bias, i_y, num_vocab, top, total, inner, outer, HAS_BIAS, HAS_SOFTCAP)
    entropy = row_entropy(num_vocab, total, moment)
    sampler = tl.load(p_sampler + i_T).to(DTYPE)
    old = logp if p_old is None else tl.load(p_old + i_T).to(DTYPE)
    ref = logp if p_ref is None else tl.load(p_ref + i_T).to(DTYPE)

    # Slots that are not trained may hold anything, NaN included: they are overwritten before arithmetic and zeroed after.
    c_old, c_sampler = tl.where(trained, old, 0.0), tl.where(trained, sampler, 0.0)
    loss, dlogp, ratio, raw, kl, low, high = token_loss(
        tl.where(trained, logp, 0.0), c_old, c_sampler, tl.where(trained, ref, 0.0), advantage, weight,
        clip_low, clip_high, beta, ratio_cap, HAS_REF=p_ref is not None, HAS_OLD=p_old is not None,
    )  # fmt: skip
    tl.store(p_logp + i_T, logp)
    tl.store(p_entropy + i_T, entropy)
    tl.store(p_ratio + i_T, ratio)
    p_partial += i_T
    tl.store(p_partial, tl.where(trained, loss, 0.0))
    tl.store(p_partial + num_tokens, tl.where(trained, 1.0, 0.0))
    tl.store(p_partial + 2 * num_tokens, tl.where(trained & low, 1.0, 0.0))
    tl.store(p_partial + 3 * num_tokens, tl.where(trained & high, 1.0, 0.0))
    tl.store(p_partial + 4 * num_tokens, tl.where(trained, kl, 0.0))
    tl.store(p_partial + 5 * num_tokens, tl.where(trained, raw, 0.0))
    tl.store(p_partial + 6 * num_tokens, tl.where(trained, raw, 0.0))
    tl.store(p_partial + 7 * num_tokens, tl.abs(c_old - c_sampler))
    tl.store(p_partial + 8 * num_tokens, tl.where(trained, entropy, 0.0))

    if WRITES:
        tl.debug_barrier()  # every thread has its target's logit before the first one overwrites it
        g = tl.where(trained, dlogp, 0.0)
        if g == 0:
            clear_row(p_row, stride, num_vocab, BV)
        else:
            write_gradient(
                p_row, p_bias, i_y.to(tl.int32), g, top, total, stride, num_vocab, inner, outer,
                HAS_BIAS, HAS_SOFTCAP, BV,
            )  # fmt: skip


MIXED_ADDMM = torch.__version__ >= (2, 11)
"""Whether torch.addmm adds a product of bf16 matrices to an fp32 one in place. It does on CUDA alone; before, nowhere."""


def add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total += left @ right without rounding the product to the factors' dtype; the first product overwrites."""
    beta = 0 if first else 1
    if total.dtype == left.dtype or not total.is_cuda:
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), beta=beta, out=total)
    elif MIXED_ADDMM:
        torch.addmm(total, left, right, beta=beta, out_dtype=total.dtype, out=total)
    else:
        product = torch.mm(left, right, out_dtype=total.dtype)
        total.copy_(product) if first else total.add_(product)


def fp16_gain(weight_R: Tensor) -> Tensor:
    """Power of two that brings the largest token weight near 1: 1 / (B n M) times a probability is zero in fp16."""
    return torch.exp2(-weight_R.abs().amax().clamp(min=2.0**-100).log2().floor())


@torch.no_grad()
def policy_head_triton(
    hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, given: Given, head: Head, rule: LossRule,
    chunk_bytes: int | None, needs: Needs,
) -> tuple[PolicyHead, HeadGradients]:  # fmt: skip
    """Launcher: chunk by chunk, the library's matmul, one pass over the logits, two more matmuls with what it leaves."""
    T, dtype, device = len(hidden_TD), compute_dtype(hidden_TD), hidden_TD.device
    rows = rows_on(device, *given[1:6], given.weight_R, given.estimator)
    gain = fp16_gain(rows.weight_R) if hidden_TD.dtype == torch.float16 and len(rows.weight_R) else None
    weight_R = rows.weight_R if gain is None else rows.weight_R * gain
    lengths_r = rows.token_offsets.diff()
    rank_T = torch.repeat_interleave(torch.arange(len(lengths_r), device=device), lengths_r, output_size=T)
    mask_T = (
        None if given.loss_mask_T is None else torch.as_tensor(given.loss_mask_T).to(device, non_blocking=True).contiguous()
    )
    columns_T = (given.targets_T, given.sampler_logp_T, given.old_logp_T, given.ref_logp_T, mask_T, rank_T)
    found_3T = torch.empty(3, T, dtype=dtype, device=device)
    partial_KT = torch.empty(len(SUMS) + 2, T, dtype=dtype, device=device)

    ready = operands(hidden_TD, weight_VD, bias_V, head, chunk_bytes)
    numbers, switches = row_arguments(ready, head)
    V = len(ready.weight_VD)
    dhidden_TD = torch.empty_like(hidden_TD) if needs.hidden else None
    dweight_VD = torch.empty(weight_VD.shape, dtype=dtype, device=device) if needs.weight else None
    dbias_V = torch.zeros(len(weight_VD), dtype=dtype, device=device) if needs.bias else None
    if needs.weight:
        dweight_VD[V:] = 0
    for cut in ready.cuts:
        size, hidden_cD = cut.stop - cut.start, ready.hidden_TD[cut]
        logits_cV = torch.mm(hidden_cD, ready.weight_VD.T, out=ready.logits_cV[:size])
        launch(
            policy_head_kernel, size, logits_cV, ready.bias_V, *(None if x is None else x[cut] for x in columns_T),
            *found_3T[:, cut], partial_KT[:, cut], rows.reward_R, rows.use_R, weight_R, rows.statistics_B2, rows.rows_r,
            rows.group_r, T, *rule, *numbers, WRITES=any(needs), **switches,
        )  # fmt: skip
        draw_cV = logits_cV
        if needs.hidden:
            torch.mm(draw_cV, ready.weight_VD, out=dhidden_TD[cut])
        if needs.weight:
            add_product(dweight_VD[:V], draw_cV.T, hidden_cD, first=cut.start == 0)
        if needs.bias:
            dbias_V[:V] += draw_cV.sum(0, dtype=dtype)
    sums = reduced(partial_KT, ("loss", *SUMS, "entropy"))
    loss = sums.pop("loss") if gain is None else sums.pop("loss") / gain
    return PolicyHead(loss.to(dtype), *found_3T, sums), HeadGradients(dhidden_TD, dweight_VD, dbias_V, gain)


class _PolicyHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, bias_V, compute: Callable):
        result, grads = compute(hidden_TD, weight_VD, bias_V, needs=Needs(*ctx.needs_input_grad[:3]))
        ctx.save_for_backward(*grads)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden_TD, weight_VD, bias_V)]
        ctx.mark_non_differentiable(result.logp_T, result.entropy_T, result.ratio_T)
        return tuple(result)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss, *_):
        *grads, gain = ctx.saved_tensors
        dloss = dloss if gain is None else dloss / gain
        # Out of place: a second backward over a kept graph must find the same gradients.
        return *(None if g is None else (g.to(compute_dtype(g)) * dloss).to(dtype) for g, dtype in zip(grads, ctx.dtypes)), None


def policy_head(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    reward_R,
    group_offsets,
    plan: Any,
    rows_r,
    token_offsets,
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
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    chunk_bytes: int | None = None,
    backend: str | None = None,
) -> PolicyHead:
    """Policy loss of some rows of a step from their hidden states; gradients reach hidden states, weight and bias.

    Args:
        hidden_TD: [T, D], states that predict the tokens of rows_r.
        weight_VD: [V, D], the output embedding; without requires_grad no gradient of it is formed.
        targets_T: int64 [T], the tokens.
        bias_V, temperature, logit_scale, softcap, vocab_size, chunk_bytes, backend: as token_logprob.
        The rest as policy_loss.

    Returns:
        PolicyHead. No tokens, or none that are trained: the loss is 0, still differentiable, and its gradients are 0.

    Raises:
        ValueError: as token_logprob and policy_loss.
    """
    check_inputs(hidden_TD, weight_VD, bias_V, targets_T)
    targets_T = targets_T.contiguous()
    check_columns(targets_T, sampler_logp_T, old_logp_T, ref_logp_T, loss_mask_T, token_offsets, estimator)
    check_step(reward_R, group_offsets, plan, rows_r, token_offsets, weight_R)
    given = Given(
        targets_T, reward_R, group_offsets, plan, rows_r, token_offsets, sampler_logp_T, old_logp_T, ref_logp_T, loss_mask_T,
        weight_R, estimator,
    )  # fmt: skip
    run = policy_head_triton if backend_of(backend, hidden_TD.device) == "triton" else policy_head_ref
    compute = partial(
        run, given=given, head=Head(temperature, logit_scale, softcap, vocab_size),
        rule=LossRule(clip_low, clip_high, beta, ratio_cap), chunk_bytes=chunk_bytes,
    )  # fmt: skip
    return PolicyHead(*_PolicyHead.apply(hidden_TD, weight_VD, bias_V, compute))
