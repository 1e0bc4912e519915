"""Rewards, hidden states and output embedding to policy loss and gradients; no [tokens, vocabulary] tensor exists whole.

Letters: T tokens of the rows in hand, V vocabulary, D hidden, c tokens of a chunk; R, B, r as in policy_loss.

Formula: logp and entropy of token_logprob on h W^T + b, then the loss of policy_loss on logp.

Gradient, formed in the forward pass, chunk by chunk, while the logits are at hand (g = d loss / d logp of policy_loss):
    d raw = g (onehot(y) - softmax(z)) slope scale / temperature     slope = 1 - tanh^2 with a soft-cap, else 1
    d h   = d raw W        d W = sum d raw^T h        d b = sum d raw
backward only multiplies by the upstream scalar.

Bytes moved in fp32: the logits 4 c V are written once and rewritten in place; 4 V D per chunk for each of W and d W; 8 T D for
h and d h. d W is accumulated in fp32 (fp64 for fp64 states) over all chunks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vipfast.kernels.policy_loss import TokenTerms, add_sums, token_loss_ref, token_terms_ref
from vipfast.kernels.token_logprob import CHUNK_BYTES, Head, check_shapes, chunks, compute_dtype, distribution_ref


class LossRule(NamedTuple):
    """The numbers of the loss."""

    clip_low: float
    clip_high: float
    beta: float
    ratio_cap: float


class Given(NamedTuple):
    """What is known of each token before the forward pass; None as in policy_loss."""

    targets_T: Tensor
    sampler_logp_T: Tensor
    old_logp_T: Tensor | None
    ref_logp_T: Tensor | None
    terms: TokenTerms

    def part(self, cut: slice) -> "Given":
        columns = (None if column is None else column[cut] for column in self[:4])
        return Given(*columns, TokenTerms(*(column[cut] for column in self.terms)))


class HeadGradients(NamedTuple):
    """d loss / d input in the dtype computed in (hidden in its own); None where not asked for."""

    hidden_TD: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None


class PolicyHead(NamedTuple):
    """loss: differentiable scalar. logp_T, entropy_T, ratio_T: [T], not differentiable. sums: as policy_loss, and entropy."""

    loss: Tensor
    logp_T: Tensor
    entropy_T: Tensor
    ratio_T: Tensor
    sums: dict[str, Tensor]


@torch.no_grad()
def policy_head_ref(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    given: Given,
    head: Head,
    rule: LossRule,
    chunk_bytes: int,
    needs: tuple[bool, bool, bool],
) -> tuple[PolicyHead, HeadGradients]:
    """Plain torch twin: loss and the gradients asked for (of hidden, weight, bias), any dtype."""
    T, dtype = len(hidden_TD), compute_dtype(hidden_TD)
    weight = weight_VD[: head.vocab_size].to(dtype)
    bias = None if bias_V is None else bias_V[: head.vocab_size].to(dtype)
    dhidden_TD = torch.empty_like(hidden_TD) if needs[0] else None
    dweight_VD = torch.zeros_like(weight_VD, dtype=dtype) if needs[1] else None
    dbias_V = torch.zeros_like(bias_V, dtype=dtype) if needs[2] else None
    columns = torch.empty(3, T, dtype=dtype, device=hidden_TD.device)
    loss, sums = torch.zeros((), dtype=torch.float64, device=hidden_TD.device), {}
    factor = head.logit_scale / head.temperature
    for cut in chunks(T, len(weight), dtype.itemsize, chunk_bytes):
        known, hidden_cD = given.part(cut), hidden_TD[cut].to(dtype)
        found = distribution_ref(hidden_cD, weight, bias, known.targets_T, head)
        result = token_loss_ref(known.terms, found.logp_c, known.sampler_logp_T, known.old_logp_T, known.ref_logp_T, *rule)
        entropy_sum = torch.where(known.terms.trained_T, found.entropy_c, 0.0).sum(dtype=torch.float64)
        loss, sums = loss + result.loss, add_sums(sums, result.sums | {"entropy": entropy_sum})
        columns[:, cut] = torch.stack([found.logp_c, found.entropy_c, result.ratio_T])
        if any(needs):
            g_c1 = (result.dlogp_T * factor)[:, None]
            draw_cV = found.probs_cV.mul_(-g_c1).scatter_add_(1, known.targets_T[:, None], g_c1)
            if found.slope_cV is not None:
                draw_cV *= found.slope_cV
            if dhidden_TD is not None:
                dhidden_TD[cut] = draw_cV @ weight
            if dweight_VD is not None:
                dweight_VD[: head.vocab_size].addmm_(draw_cV.T, hidden_cD)
            if dbias_V is not None:
                dbias_V[: head.vocab_size] += draw_cV.sum(0)
    return PolicyHead(loss.to(dtype), *columns, sums), HeadGradients(dhidden_TD, dweight_VD, dbias_V)


class _PolicyHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, bias_V, given, head, rule, chunk_bytes):
        result, grads = policy_head_ref(hidden_TD, weight_VD, bias_V, given, head, rule, chunk_bytes, ctx.needs_input_grad[:3])
        ctx.save_for_backward(*grads)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden_TD, weight_VD, bias_V)]
        ctx.mark_non_differentiable(result.logp_T, result.entropy_T, result.ratio_T)
        return tuple(result)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss, *_):
        # Out of place: a second backward over a kept graph must find the same gradients.
        grads = (None if g is None else (g * dloss).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return (*grads, None, None, None, None)


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
    chunk_bytes: int = CHUNK_BYTES,
) -> PolicyHead:
    """Policy loss of some rows of a step from their hidden states; gradients reach hidden states, weight and bias.

    Args:
        hidden_TD: [T, D], states that predict the tokens of rows_r.
        weight_VD: [V, D], the output embedding; without requires_grad no gradient of it is formed.
        targets_T: int64 [T], the tokens.
        bias_V, temperature, logit_scale, softcap, vocab_size, chunk_bytes: as token_logprob.
        The rest as policy_loss.

    Returns:
        PolicyHead. No tokens, or none that are trained: the loss is 0, still differentiable, and its gradients are 0.

    Raises:
        ValueError: states and weight do not fit.
    """
    check_shapes(hidden_TD, weight_VD, targets_T)
    like_T = torch.empty(len(targets_T), dtype=compute_dtype(hidden_TD), device=hidden_TD.device)
    terms = token_terms_ref(reward_R, group_offsets, plan, rows_r, token_offsets, loss_mask_T, weight_R, estimator, like_T)
    given = Given(targets_T, sampler_logp_T, old_logp_T, ref_logp_T, terms)
    head, rule = Head(temperature, logit_scale, softcap, vocab_size), LossRule(clip_low, clip_high, beta, ratio_cap)
    return PolicyHead(*_PolicyHead.apply(hidden_TD, weight_VD, bias_V, given, head, rule, chunk_bytes))
