"""Rewards and token log-probs to the policy-gradient loss and its derivative, in one pass.

Letters: B prompts of the whole step, R its rollouts, r the rollouts in hand, T their tokens (those of rows_r alone).

Formula, token t of rollout i (advantage A, weight w, clip bounds lo and hi, old = log-prob before the step's first update):
    rho  = exp(logp - old)                     v = min(exp(old - sampler), ratio_cap), no gradient
    l    = -v min(rho A, clip(rho, 1 - lo, 1 + hi) A) + beta (e^d - d - 1),   d = ref - logp
    loss = sum w l

Gradient:
    dl/dlogp = -v rho A [not (A > 0 and rho > 1 + hi)] [not (A < 0 and rho < 1 - lo)] + beta (1 - e^d)

Every exponent is clamped before exp, so neither value nor derivative overflows.

Bytes moved per token in fp32: reads logp, sampler, (old), (ref), mask = 9 to 17; writes dlogp = 4. Group statistics are [R].
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

STD_FLOOR = 1e-4
"""Added to a group's standard deviation by the grpo estimator."""

EXPONENT_MAX = 20.0
"""Largest argument of any exp here: e^20 is 4.9e8, far beyond every clip bound and far below overflow."""


class Groups(NamedTuple):
    """What an estimator may look at besides a rollout's deviation from its baseline."""

    group_R: Tensor  # int64, prompt slot of each row
    count_B: Tensor  # float64, rows that carry a reward and are in use
    counted_R: Tensor  # bool, those rows
    fixed_B: Tensor  # bool, the baseline was given and not taken from the group


def rloo(deviation_R: Tensor, groups: Groups) -> Tensor:
    """r - mean of the others = n / (n - 1) (r - mean of all); a given baseline is already apart from the rollout."""
    factor_B = groups.count_B / (groups.count_B - 1).clamp(min=1)
    return deviation_R * torch.where(groups.fixed_B, 1.0, factor_B)[groups.group_R]


def dr_grpo(deviation_R: Tensor, groups: Groups) -> Tensor:
    """r - mean of all, undivided."""
    return deviation_R


def grpo(deviation_R: Tensor, groups: Groups) -> Tensor:
    """Deviation over (its root mean square in the group + 1e-4): the population std when the baseline is the group's mean."""
    squares_B = segment_sum(torch.where(groups.counted_R, deviation_R, 0.0).square(), groups.group_R, groups.count_B)
    std_B = (squares_B / groups.count_B.clamp(min=1)).sqrt()
    return deviation_R / (std_B + STD_FLOOR)[groups.group_R]


ESTIMATORS: dict[str, Callable[[Tensor, Groups], Tensor]] = {"rloo": rloo, "dr_grpo": dr_grpo, "grpo": grpo}


def segment_sum(value_R: Tensor, group_R: Tensor, like_B: Tensor) -> Tensor:
    return torch.zeros_like(like_B).index_add_(0, group_R, value_R)


def group_advantages_ref(reward_R, group_offsets, use_R, baseline_B, estimator: str, device=None) -> Tensor:
    """Advantage of every rollout of a step within its own group, statistics in float64 and two passes.

    Args:
        reward_R: float [R], NaN = unscored: out of the baseline, advantage 0.
        group_offsets: int [B+1], rollouts of prompt q are rows ``group_offsets[q]:group_offsets[q+1]``; groups may be empty.
        use_R: bool [R], rows that enter the update; the others are out of the baseline too, advantage 0.
        baseline_B: float [B], NaN = from the group; a number replaces the group's baseline (so a constant group has signal).
        estimator: "rloo", "dr_grpo" or "grpo".

    Returns:
        float64 [R]. Exactly 0 for groups of 0 or 1 counted rollouts and for constant ones (max == min), given baselines apart.
    """
    reward_R = torch.as_tensor(reward_R, device=device).double()
    device = reward_R.device
    offsets = torch.as_tensor(group_offsets, device=device)
    baseline_B = torch.as_tensor(baseline_B, device=device).double()
    B = len(offsets) - 1
    group_R = torch.repeat_interleave(torch.arange(B, device=device), offsets.diff(), output_size=len(reward_R))

    counted_R = torch.as_tensor(use_R, device=device) & ~reward_R.isnan()
    zeros_B = reward_R.new_zeros(B)
    count_B = segment_sum(counted_R.double(), group_R, zeros_B)
    mean_B = segment_sum(torch.where(counted_R, reward_R, 0.0), group_R, zeros_B) / count_B.clamp(min=1)
    # Rounding leaves a group of equal non-dyadic rewards a tiny variance, so whether it is constant is asked of the rewards.
    inf = float("inf")
    max_B = torch.full_like(zeros_B, -inf).scatter_reduce_(0, group_R, torch.where(counted_R, reward_R, -inf), "amax")
    min_B = torch.full_like(zeros_B, inf).scatter_reduce_(0, group_R, torch.where(counted_R, reward_R, inf), "amin")

    fixed_B = ~baseline_B.isnan()
    live_R = counted_R & (fixed_B | (max_B > min_B))[group_R]
    deviation_R = torch.where(live_R, reward_R - torch.where(fixed_B, baseline_B, mean_B)[group_R], 0.0)
    advantage_R = ESTIMATORS[estimator](deviation_R, Groups(group_R, count_B, counted_R, fixed_B))
    return torch.where(live_R, advantage_R, 0.0)


class TokenTerms(NamedTuple):
    """What the loss needs of each token besides log-probs."""

    advantage_T: Tensor
    weight_T: Tensor
    trained_T: Tensor  # bool: sampled by the policy, in a row that is scored and in use


class PolicyLoss(NamedTuple):
    """loss: scalar. dlogp_T: d loss / d logp. ratio_T: exp(logp - old), 1 where untrained.
    sums: 0-d float64 tensors that ``add_sums`` merges over micro-batches.
    """

    loss: Tensor
    dlogp_T: Tensor
    ratio_T: Tensor
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
        trained_T = trained_T & torch.as_tensor(loss_mask_T, device=device)
    weight_R = torch.as_tensor(weight_R, device=device)
    return TokenTerms(advantage_R[row_T].to(like_T.dtype), weight_R[row_T].to(like_T.dtype), trained_T)


def clipped_surrogate(advantage_T: Tensor, ratio_T: Tensor, low_T: Tensor, high_T: Tensor, bounds: tuple[float, float]):
    """-min(rho A, clip(rho) A) and its derivative by logp; low_T and high_T mark the clipped tokens."""
    value_T = -torch.minimum(ratio_T * advantage_T, ratio_T.clamp(*bounds) * advantage_T)
    return value_T, torch.where(low_T | high_T, 0.0, -ratio_T * advantage_T)


def k3(logp_T: Tensor, ref_T: Tensor):
    """e^d - d - 1 with d = ref - logp, and its derivative by logp (Schulman's low-variance KL estimate)."""
    d_T = ref_T - logp_T
    exp_T = bounded_exp(d_T)
    return exp_T - d_T - 1, 1 - exp_T


def bounded_exp(x: Tensor) -> Tensor:
    return x.clamp(max=EXPONENT_MAX).exp()


def token_loss_ref(
    terms: TokenTerms, logp_T: Tensor, sampler_logp_T: Tensor, old_logp_T: Tensor | None, ref_logp_T: Tensor | None,
    clip_low: float, clip_high: float, beta: float, ratio_cap: float,
) -> PolicyLoss:  # fmt: skip
    """The token-wise part: no statistic of the batch enters, so any slice of the tokens may be passed."""
    advantage_T, weight_T, trained_T = terms
    # Slots that are not trained may hold anything, NaN included: they are overwritten before arithmetic and zeroed after.
    sampler_T = torch.where(trained_T, sampler_logp_T.to(logp_T), logp_T)
    old_T = logp_T if old_logp_T is None else torch.where(trained_T, old_logp_T.to(logp_T), logp_T)
    ratio_T = bounded_exp(logp_T - old_T)
    raw_T = bounded_exp(old_T - sampler_T)
    low_T = trained_T & (advantage_T < 0) & (ratio_T < 1 - clip_low)
    high_T = trained_T & (advantage_T > 0) & (ratio_T > 1 + clip_high)

    value_T, slope_T = clipped_surrogate(advantage_T, ratio_T, low_T, high_T, (1 - clip_low, 1 + clip_high))
    weighted_T = weight_T * raw_T.clamp(max=ratio_cap)
    loss_T, dlogp_T = weighted_T * value_T, weighted_T * slope_T
    kl_T = torch.zeros_like(logp_T)
    if ref_logp_T is not None:
        kl_T, kl_slope_T = k3(logp_T, torch.where(trained_T, ref_logp_T.to(logp_T), logp_T))
        loss_T, dlogp_T = loss_T + beta * weight_T * kl_T, dlogp_T + beta * weight_T * kl_slope_T

    def total(x_T: Tensor) -> Tensor:
        return torch.where(trained_T, x_T, 0.0).sum(dtype=torch.float64)

    sums = {
        "tokens": trained_T.sum(dtype=torch.float64),
        "clip_low": low_T.sum(dtype=torch.float64),
        "clip_high": high_T.sum(dtype=torch.float64),
        "kl": total(kl_T),
        "ratio_raw": total(raw_T),
        "ratio_raw_max": torch.where(trained_T, raw_T, 0.0).amax().double() if len(raw_T) else total(raw_T),
        "gap": total((old_T - sampler_T).abs()),
    }
    return PolicyLoss(total(loss_T), torch.where(trained_T, dlogp_T, 0.0), ratio_T, sums)


def add_sums(total: dict[str, Tensor], part: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge the sums of two disjoint sets of tokens."""
    if not total:
        return part
    return {name: torch.maximum(total[name], x) if name.endswith("_max") else total[name] + x for name, x in part.items()}


def policy_loss_ref(
    reward_R, group_offsets, plan: Any, rows_r, token_offsets, logp_T, sampler_logp_T, old_logp_T, ref_logp_T, loss_mask_T,
    weight_R, estimator: str, *rule: float,
) -> PolicyLoss:  # fmt: skip
    """Plain torch twin of ``policy_loss``, any dtype; ``rule`` is clip_low, clip_high, beta, ratio_cap."""
    logp_T = logp_T.detach()
    terms = token_terms_ref(reward_R, group_offsets, plan, rows_r, token_offsets, loss_mask_T, weight_R, estimator, logp_T)
    return token_loss_ref(terms, logp_T, sampler_logp_T, old_logp_T, ref_logp_T, *rule)


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
        logp_T: [T], under the policy being trained, at the sampling temperature.
        sampler_logp_T, old_logp_T, ref_logp_T: [T]; old None means logp itself (one optimizer step), ref None means no KL term.
        loss_mask_T: bool [T], False for ids the policy did not sample; None trains all.
        weight_R: float [R], weight of each token of a row.
        estimator: "rloo", "dr_grpo" or "grpo".
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        beta: weight of the KL term.
        ratio_cap: cap of the trainer-to-sampler importance weight.

    Returns:
        PolicyLoss; ``sums``: tokens, clip_low, clip_high, kl, ratio_raw, ratio_raw_max, gap (sum of abs(old - sampler)).
    """
    return policy_loss_ref(
        reward_R, group_offsets, plan, rows_r, token_offsets, logp_T, sampler_logp_T, old_logp_T, ref_logp_T, loss_mask_T,
        weight_R, estimator, clip_low, clip_high, beta, ratio_cap,
    )  # fmt: skip
