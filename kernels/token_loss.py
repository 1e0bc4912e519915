"""Log-probs, advantage and weight of a token to its loss and derivative: the part that no statistic of a batch enters.

Letters: T tokens.

Formula, token t of rollout i (advantage A, weight w, clip bounds lo and hi, old = log-prob before the step's first update):
    rho  = exp(logp - old)                     v = min(exp(old - sampler), ratio_cap), no gradient
    l    = -v min(rho A, clip(rho, 1 - lo, 1 + hi) A) + beta (e^d - d - 1),   d = ref - logp
    loss = sum w l

Gradient:
    dl/dlogp = -v rho A [not (A > 0 and rho > 1 + hi)] [not (A < 0 and rho < 1 - lo)] + beta (1 - e^d)

Every exponent is clamped before exp, so neither value nor derivative overflows.

Bytes moved: none of its own; ``token_loss`` works on registers of ``policy_loss`` and ``policy_head``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vipfast.kernels.launch import tl, triton

EXPONENT_MAX = 20.0
"""Largest argument of any exp here: e^20 is 4.9e8, far beyond every clip bound and far below overflow."""

_EXPONENT_MAX = tl.constexpr(EXPONENT_MAX)  # a kernel reads no other kind of global

SUMS = ("tokens", "clip_low", "clip_high", "kl", "ratio_raw", "ratio_raw_max", "gap")
"""What is summed over trained tokens beside the loss: counts, exp(old - sampler) before the cap, its maximum, and
abs(old - sampler)."""


class TokenTerms(NamedTuple):
    """What the loss needs of each token besides log-probs."""

    advantage_T: Tensor
    weight_T: Tensor
    trained_T: Tensor  # bool: sampled by the policy, in a row that is scored and in use


class TokenLoss(NamedTuple):
    """loss: scalar. dlogp_T: d loss / d logp. ratio_T: exp(logp - old), 1 where untrained.
    sums: 0-d float64 tensors that ``add_sums`` merges over micro-batches.
    """

    loss: Tensor
    dlogp_T: Tensor
    ratio_T: Tensor
    sums: dict[str, Tensor]


def clipped_surrogate_ref(advantage_T: Tensor, ratio_T: Tensor, low_T: Tensor, high_T: Tensor, bounds: tuple[float, float]):
    """-min(rho A, clip(rho) A) and its derivative by logp; low_T and high_T mark the clipped tokens."""
    value_T = -torch.minimum(ratio_T * advantage_T, ratio_T.clamp(*bounds) * advantage_T)
    return value_T, torch.where(low_T | high_T, 0.0, -ratio_T * advantage_T)


def k3_ref(logp_T: Tensor, ref_T: Tensor):
    """e^d - d - 1 with d = ref - logp, and its derivative by logp (Schulman's low-variance KL estimate)."""
    d_T = ref_T - logp_T
    exp_T = bounded_exp_ref(d_T)
    return exp_T - d_T - 1, 1 - exp_T


def bounded_exp_ref(x: Tensor) -> Tensor:
    return x.clamp(max=EXPONENT_MAX).exp()


def token_loss_ref(
    terms: TokenTerms, logp_T: Tensor, sampler_logp_T: Tensor, old_logp_T: Tensor | None, ref_logp_T: Tensor | None,
    clip_low: float, clip_high: float, beta: float, ratio_cap: float,
) -> TokenLoss:  # fmt: skip
    """The token-wise part: no statistic of the batch enters, so any slice of the tokens may be passed."""
    advantage_T, weight_T, trained_T = terms
    # Slots that are not trained may hold anything, NaN included: they are overwritten before arithmetic and zeroed after.
    sampler_T = torch.where(trained_T, sampler_logp_T.to(logp_T), logp_T)
    old_T = logp_T if old_logp_T is None else torch.where(trained_T, old_logp_T.to(logp_T), logp_T)
    ratio_T = bounded_exp_ref(logp_T - old_T)
    raw_T = bounded_exp_ref(old_T - sampler_T)
    low_T = trained_T & (advantage_T < 0) & (ratio_T < 1 - clip_low)
    high_T = trained_T & (advantage_T > 0) & (ratio_T > 1 + clip_high)

    value_T, slope_T = clipped_surrogate_ref(advantage_T, ratio_T, low_T, high_T, (1 - clip_low, 1 + clip_high))
    weighted_T = weight_T * raw_T.clamp(max=ratio_cap)
    loss_T, dlogp_T = weighted_T * value_T, weighted_T * slope_T
    kl_T = torch.zeros_like(logp_T)
    if ref_logp_T is not None:
        kl_T, kl_slope_T = k3_ref(logp_T, torch.where(trained_T, ref_logp_T.to(logp_T), logp_T))
        loss_T, dlogp_T = loss_T + beta * weight_T * kl_T, dlogp_T + beta * weight_T * kl_slope_T

    def total(x_T: Tensor) -> Tensor:
        return torch.where(trained_T, x_T, 0.0).sum(dtype=torch.float64)

    largest = torch.where(trained_T, raw_T, 0.0).amax().double() if len(raw_T) else total(raw_T)
    gap_T = (old_T - sampler_T).abs()
    found = (total(trained_T), total(low_T), total(high_T), total(kl_T), total(raw_T), largest, total(gap_T))
    return TokenLoss(total(loss_T), torch.where(trained_T, dlogp_T, 0.0), ratio_T, dict(zip(SUMS, found)))


@triton.jit
def bounded_exp(x):
    # A missing log-prob of a trained token must stay NaN; the default minimum would return the bound.
    return tl.exp(tl.minimum(x, _EXPONENT_MAX, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def clipped_surrogate(advantage, ratio, weight, low, high, bound_low, bound_high):
    value = -weight * (tl.where(high, bound_high, tl.where(low, bound_low, ratio)) * advantage)
    return value, tl.where(low | high, 0.0, value)


@triton.jit
def k3(logp, ref):
    d = ref - logp
    exp = bounded_exp(d)
    return exp - d - 1.0, 1.0 - exp


@triton.jit
def token_loss(
    logp, old, sampler, ref, advantage, weight, clip_low, clip_high, beta, ratio_cap,
    HAS_REF: tl.constexpr, HAS_OLD: tl.constexpr = True,
):  # fmt: skip
    """(loss, d loss / d logp, ratio, raw, kl, low, high) of clean values in registers, all fp32 or all fp64.

    Without HAS_OLD old is logp and the ratio is 1; without HAS_REF ref is not read and kl is 0. The rule's numbers may be fp64
    whatever the values are.
    """
    dtype: tl.constexpr = logp.dtype
    raw = bounded_exp(old - sampler)
    weighted = weight * tl.minimum(raw, tl.full((), ratio_cap, dtype), propagate_nan=tl.PropagateNan.ALL)
    if HAS_OLD:
        ratio = bounded_exp(logp - old)
        bound_low, bound_high = tl.full((), 1.0 - clip_low, dtype), tl.full((), 1.0 + clip_high, dtype)
        low, high = (advantage < 0.0) & (ratio < bound_low), (advantage > 0.0) & (ratio > bound_high)
        loss, dlogp = clipped_surrogate(advantage, ratio, weighted, low, high, bound_low, bound_high)
    else:  # a ratio of 1 is never clipped
        ratio = tl.full(logp.shape, 1.0, dtype)
        low, high = tl.full(logp.shape, False, tl.int1), tl.full(logp.shape, False, tl.int1)
        loss = -weighted * advantage
        dlogp = loss
    kl = tl.zeros_like(logp)
    if HAS_REF:
        kl, kl_slope = k3(logp, ref)
        kl_weight = tl.full((), beta, dtype) * weight
        loss, dlogp = loss + kl_weight * kl, dlogp + kl_weight * kl_slope
    return loss, dlogp, ratio, raw, kl, low, high
