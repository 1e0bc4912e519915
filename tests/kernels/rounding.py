"""How far float32 arithmetic may lie from float64, whichever processor, library, vector width or order of adding did it.

Model: each operation rounds once, fl(a op b) = (a op b)(1 + d) with |d| <= eps, the gap between 1 and the next number. A
processor rounds to the nearest and stays within eps / 2; the matrix units of a GPU may cut and stay within eps.

A sum of n products, in any order and blocks, with fused operations or without, puts at most n roundings on the way of each
product, so (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 3.1)
    |error| <= gamma_n sum |a b|,    gamma_n = n eps / (1 - n eps)
and where the roundings are independent with mean 0, but for a chance of 2 exp(-LAMBDA^2 / 2) for each product (N. J. Higham and
T. Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019, theorem 2.4)
    gamma_n = exp(LAMBDA sqrt(n) eps + n eps^2 / (1 - eps)) - 1
The bounds below follow a first-order change of every input through each formula and add what each operation rounds; what first
order leaves out is smaller than they are by as much again. A result that was rounded to bfloat16 on the way is up to 2^15 eps
off, and one that lacks a chunk or a tile is as far off as that is large.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vipfast.kernels.logit_rows import VECTOR

EPS = torch.finfo(torch.float32).eps
LAMBDA = 6

FEW = 16 * EPS
"""What a chain of up to 16 operations rounds; exp and log of any library here stay within 4."""


def gamma(num_terms: int) -> float:
    """Relative to the sum of sizes, how far a float32 sum of so many products may be from the exact one."""
    worst = num_terms * EPS / (1 - num_terms * EPS)
    return min(worst, math.expm1(LAMBDA * math.sqrt(num_terms) * EPS + num_terms * EPS**2 / (1 - EPS)))


def product_error(left: Tensor, right: Tensor, more_terms: int = 0) -> Tensor:
    """Bound for ``left @ right`` accumulated in float32; ``more_terms`` are added to each sum, such as one per chunk."""
    return gamma(left.shape[1] + more_terms) * (left.abs() @ right.abs())


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """How far a float64 number moves when it is rounded to the nearest of ``dtype``, also where that underflows."""
    info = torch.finfo(dtype)
    return info.eps / 2 * (x.abs() + info.smallest_normal)


class SoftmaxErrors(NamedTuple):
    """Bounds of what follows from a row of scores; relative_TV: of softmax(z), relative to each probability."""

    logp_T: Tensor
    entropy_T: Tensor
    relative_TV: Tensor


def softmax_errors(z_TV: Tensor, targets_T: Tensor, error_TV: Tensor | float, num_terms: int) -> SoftmaxErrors:
    """Bounds for log-prob, entropy and probabilities that float32 makes of scores.

    With a = z - max z: log total = log sum e^a, logp = a_y - log total, entropy = log total - sum e^a a / total. An error x_v
    of exponent v moves log total by p_v x_v and the entropy by p_v x_v (|log p_v| + entropy); the maximum cancels, however far
    it is off. Every term of both sums has one sign, so adding them is off by gamma of them.

    Args:
        z_TV: exact scores, float64.
        targets_T: int64.
        error_TV: how far the scores are off before they are scaled, shifted and exponentiated, which is accounted for here.
        num_terms: the most additions on the way of a term of a sum over V.
    """
    a_TV, logp_TV = z_TV - z_TV.amax(-1, keepdim=True), torch.log_softmax(z_TV, -1)
    p_TV, log_total_T1 = logp_TV.exp(), a_TV.exp().sum(-1, keepdim=True).log()
    entropy_T1 = -(p_TV * logp_TV).sum(-1, keepdim=True)
    # bias, scale, the base of the exponential and the shift round a score or an exponent a few times
    x_TV = error_TV + 4 * EPS * (z_TV.abs() + a_TV.abs())
    added = gamma(num_terms) + FEW
    total_T1 = (p_TV * x_TV).sum(-1, keepdim=True) + added + FEW * log_total_T1
    target_T1 = targets_T[:, None]
    logp_T1 = x_TV.gather(1, target_T1) + total_T1 - FEW * logp_TV.gather(1, target_T1)
    exponents_T1 = (p_TV * x_TV * (entropy_T1 - logp_TV)).sum(-1, keepdim=True)
    moment_T1 = 2 * added * (p_TV * a_TV.abs()).sum(-1, keepdim=True)
    entropy_error_T1 = exponents_T1 + moment_T1 + added + FEW * (log_total_T1 + entropy_T1)
    return SoftmaxErrors(logp_T1[:, 0], entropy_error_T1[:, 0], x_TV + total_T1)


def logits_gradient(z_TV: Tensor, targets_T: Tensor, g_T: Tensor, g_error_T: Tensor, relative_TV: Tensor):
    """g (onehot - p) in float64, and its bound where g is off by g_error and the probabilities p by ``relative_TV`` of each."""
    p_TV, g_T1 = torch.softmax(z_TV, -1), g_T[:, None]
    onehot_TV = torch.zeros_like(p_TV).scatter_(1, targets_T[:, None], 1.0)
    either_TV = onehot_TV + p_TV
    bound_TV = g_error_T[:, None] * either_TV + g_T1.abs() * (p_TV * relative_TV + FEW * either_TV)
    return g_T1 * (onehot_TV - p_TV), bound_TV


def swept_terms(num_vocab: int, BV: int) -> int:
    """Additions on the way of a term through ``row_statistics``: three a tile and those of VECTOR columns, then the groups'."""
    return -(-num_vocab // BV) * (3 + VECTOR.value) + BV // VECTOR.value


class TokenErrors(NamedTuple):
    """Bounds of a token's terms, [T] each, 0 where it is not trained; size: of the terms of the loss, not of their errors."""

    loss: Tensor
    dlogp: Tensor
    kl: Tensor
    ratio_raw: Tensor
    gap: Tensor
    size: Tensor


def token_errors(terms, logp_T, sampler_T, old_T, ref_T, *, clip_high, beta, ratio_cap=2.0, logp_error_T=0.0) -> TokenErrors:
    """Bounds for what float32 makes of log-probs by the formula of token_loss.

    exp(a - b) is off by its exponent's rounding, eps |a - b|, and by few more, relative to itself; all else multiplies.

    Args:
        terms: TokenTerms in float64.
        logp_T, sampler_T, old_T, ref_T: float64 [T] of what float32 was given; old and ref may be None.
        clip_high, beta, ratio_cap: of the rule.
        logp_error_T: how far logp was off. The surrogate's slope is proportional to e^logp, that of the KL term to e^-logp.
    """
    advantage_T, weight_T, trained_T = terms
    old_T = logp_T if old_T is None else old_T
    stale_T, moved_T = old_T - sampler_T, logp_T - old_T
    raw_T, ratio_T = stale_T.exp(), moved_T.exp()
    size_T = (weight_T * advantage_T).abs() * raw_T.clamp(max=ratio_cap)
    relative_T = FEW + 2 * EPS * (stale_T.abs() + moved_T.abs()) + logp_error_T
    kl_T = torch.zeros_like(logp_T)
    loss_size_T = size_T * ratio_T.clamp(min=1 + clip_high)
    if ref_T is not None:
        d_T = ref_T - logp_T
        kl_T = d_T.exp() * (FEW + 2 * EPS * d_T.abs() + logp_error_T) + FEW * (1 + d_T.abs()) + logp_error_T
        loss_size_T = loss_size_T + beta * weight_T * (d_T.exp() + d_T.abs() + 1)
    found = (
        relative_T * size_T * ratio_T.clamp(min=1 + clip_high) + beta * weight_T * kl_T,
        relative_T * size_T * ratio_T + beta * weight_T * kl_T,
        kl_T,
        raw_T * (FEW + 2 * EPS * stale_T.abs()),
        EPS * stale_T.abs(),
        loss_size_T,
    )
    return TokenErrors(*(torch.where(trained_T, x_T, 0.0) for x_T in found))


def assert_within(found: Tensor, exact: Tensor, bound: Tensor) -> None:
    """Every element is within its own bound; a NaN is not."""
    assert found.shape == exact.shape == bound.shape, (found.shape, exact.shape, bound.shape)
    off = (found.double() - exact).abs()
    wrong = ~(off <= bound)
    most = float((off / bound)[wrong].max()) if wrong.any() else 0.0
    assert most == 0, f"{int(wrong.sum())} of {wrong.numel()} are off by up to {most:.3g} times what rounding explains"
