"""Rewards of ragged groups to the centre and scale that make an advantage of every reward.

Letters: B prompts of the whole step, R its rollouts, r the rollouts in hand.

Formula, over the n counted rollouts of group q (scored and in use):
    center = b_q if the plan gives it, else mean r        rms = sqrt(mean (r - center)^2)
    scale  = rloo n / (n - 1), or 1 around a given center;  dr_grpo 1;  grpo 1 / (rms + 1e-4)
    A_i    = (r_i - center) scale
A group without a given center has no signal, scale 0, unless max r > min r: so 0 or 1 counted rollouts, and equal rewards, give
exactly 0. Rows that are not counted have A = 0. Statistics are taken in float64 and in two passes, never E[r^2] - E[r]^2.

Gradient: none, rewards are data.

Bytes moved: reads (4 + 1) R twice and 16 B; writes 16 B.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vipfast.kernels.launch import launch, tl, triton

STD_FLOOR = 1e-4
"""Added to a group's root mean square by the grpo estimator."""

_STD_FLOOR = tl.constexpr(STD_FLOOR)  # a kernel reads no other kind of global

BLOCK_ROWS = 128


def rloo_ref(count_B: Tensor, rms_B: Tensor, given_B: Tensor) -> Tensor:
    """r - mean of the others = n / (n - 1) (r - mean of all); a given center is already apart from the rollout."""
    return torch.where(given_B, 1.0, count_B / (count_B - 1).clamp(min=1))


def dr_grpo_ref(count_B: Tensor, rms_B: Tensor, given_B: Tensor) -> Tensor:
    """r - center, undivided."""
    return torch.ones_like(count_B)


def grpo_ref(count_B: Tensor, rms_B: Tensor, given_B: Tensor) -> Tensor:
    """Over the population std, plus a floor, where the center is the group's mean."""
    return 1 / (rms_B + STD_FLOOR)


def group_statistics_ref(reward_R: Tensor, use_R: Tensor, group_offsets: Tensor, baseline_B: Tensor, estimator: str) -> Tensor:
    """Plain torch twin of ``group_statistics``."""
    device, B = reward_R.device, len(group_offsets) - 1
    group_R = torch.repeat_interleave(torch.arange(B, device=device), group_offsets.diff(), output_size=len(reward_R))
    reward_R, baseline_B = reward_R.double(), baseline_B.double()
    counted_R = use_R & ~reward_R.isnan()

    def over_groups(start: float, reduce: str, value_R: Tensor) -> Tensor:
        return reward_R.new_full((B,), start).scatter_reduce_(0, group_R, torch.where(counted_R, value_R, start), reduce)

    count_B = over_groups(0.0, "sum", torch.ones_like(reward_R))
    mean_B = over_groups(0.0, "sum", reward_R) / count_B.clamp(min=1)
    given_B = ~baseline_B.isnan()
    center_B = torch.where(given_B, baseline_B, mean_B)
    rms_B = (over_groups(0.0, "sum", (reward_R - center_B[group_R]).square()) / count_B.clamp(min=1)).sqrt()
    # Rounding leaves a group of equal non-dyadic rewards a tiny variance, so whether it is constant is asked of the rewards.
    inf = float("inf")
    signal_B = given_B | (over_groups(-inf, "amax", reward_R) > over_groups(inf, "amin", reward_R))
    scale_B = torch.where(signal_B, ESTIMATORS[estimator].ref(count_B, rms_B, given_B), 0.0)
    return torch.stack([center_B, scale_B], 1)


def group_advantages_ref(reward_R, group_offsets, use_R, baseline_B, estimator: str, device=None) -> Tensor:
    """Advantage of every rollout of a step within its own group.

    Args:
        reward_R: float [R], NaN = unscored: out of the baseline, advantage 0.
        group_offsets: int [B+1], rollouts of prompt q are rows ``group_offsets[q]:group_offsets[q+1]``; groups may be empty.
        use_R: bool [R], rows that enter the update; the others are out of the baseline too, advantage 0.
        baseline_B: float [B], NaN = from the group; a number replaces the group's baseline (so a constant group has signal).
        estimator: "rloo", "dr_grpo" or "grpo".
        device: where to compute; None: where the rewards are.

    Returns:
        float64 [R]. Exactly 0 for groups of 0 or 1 counted rollouts and for constant ones (max == min), given baselines apart.
    """
    reward_R = torch.as_tensor(reward_R, device=device).double()
    use_R, offsets, baseline_B = (torch.as_tensor(x, device=reward_R.device) for x in (use_R, group_offsets, baseline_B))
    statistics_B2 = group_statistics_ref(reward_R, use_R, offsets, baseline_B, estimator)
    center_R, scale_R = statistics_B2.repeat_interleave(offsets.diff(), dim=0, output_size=len(reward_R)).unbind(1)
    live_R = use_R & ~reward_R.isnan() & (scale_R != 0)
    return torch.where(live_R, (reward_R - center_R) * scale_R, 0.0)


@triton.jit
def rloo(count, rms, given):
    return tl.where(given, 1.0, count / tl.maximum(count - 1.0, 1.0))


@triton.jit
def dr_grpo(count, rms, given):
    return tl.full((), 1.0, tl.float64)


@triton.jit
def grpo(count, rms, given):
    return 1.0 / (rms + _STD_FLOOR)


class Estimator(NamedTuple):
    """Scale of a group from (counted rollouts, root mean square deviation, whether its center was given)."""

    ref: Callable[[Tensor, Tensor, Tensor], Tensor]
    kernel: Any


ESTIMATORS = {"rloo": Estimator(rloo_ref, rloo), "dr_grpo": Estimator(dr_grpo_ref, dr_grpo), "grpo": Estimator(grpo_ref, grpo)}


@triton.jit
def counted_rewards(p_reward, p_use, o_begin, o_end, BR: tl.constexpr):
    """Rewards of up to BR rows in fp64, and which of them count."""
    o_R = o_begin + tl.arange(0, BR)
    m_R = o_R < o_end
    b_reward = tl.load(p_reward + o_R, mask=m_R, other=0.0).to(tl.float64)
    return b_reward, m_R & (tl.load(p_use + o_R, mask=m_R, other=0) != 0) & (b_reward == b_reward)


@triton.jit
def group_statistics_kernel(
    p_reward, p_use, p_offsets, p_baseline, p_statistics, ESTIMATOR: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """One program per group."""
    i_group = tl.program_id(0).to(tl.int64)
    o_begin, o_end = tl.load(p_offsets + i_group), tl.load(p_offsets + i_group + 1)
    b_count = tl.zeros([BR], tl.float64)
    b_total = tl.zeros([BR], tl.float64)
    b_high = tl.full([BR], -float("inf"), tl.float64)
    b_low = tl.full([BR], float("inf"), tl.float64)
    for o in range(o_begin, o_end, BR):
        b_reward, m_counted = counted_rewards(p_reward, p_use, o, o_end, BR)
        b_count += tl.where(m_counted, 1.0, 0.0)
        b_total += tl.where(m_counted, b_reward, 0.0)
        b_high = tl.where(m_counted, tl.maximum(b_high, b_reward), b_high)
        b_low = tl.where(m_counted, tl.minimum(b_low, b_reward), b_low)
    count = tl.sum(b_count)
    baseline = tl.load(p_baseline + i_group).to(tl.float64)
    given = baseline == baseline
    center = tl.where(given, baseline, tl.sum(b_total) / tl.maximum(count, 1.0))
    b_square = tl.zeros([BR], tl.float64)
    for o in range(o_begin, o_end, BR):
        b_reward, m_counted = counted_rewards(p_reward, p_use, o, o_end, BR)
        b_square += tl.where(m_counted, (b_reward - center) * (b_reward - center), 0.0)
    rms = tl.sqrt(tl.sum(b_square) / tl.maximum(count, 1.0))
    signal = given | (tl.max(b_high) > tl.min(b_low))
    tl.store(p_statistics + 2 * i_group, center)
    tl.store(p_statistics + 2 * i_group + 1, tl.where(signal, ESTIMATOR(count, rms, given), 0.0))


@triton.jit
def row_advantage(p_reward, p_use, p_statistics, i_row, i_group):
    """Advantage in fp64 and whether the row counts; i_row and i_group are int64, scalars or blocks."""
    reward = tl.load(p_reward + i_row).to(tl.float64)
    counted = (tl.load(p_use + i_row) != 0) & (reward == reward)
    center, scale = tl.load(p_statistics + 2 * i_group), tl.load(p_statistics + 2 * i_group + 1)
    return tl.where(counted & (scale != 0.0), (reward - center) * scale, 0.0), counted


def check_step(reward_R, group_offsets, plan: Any, rows_r, token_offsets, weight_R) -> None:
    """Refuse parts of a step that do not fit each other: a kernel would read beyond their ends. Nothing waits for a device.

    Raises:
        ValueError: naming what does not fit.
    """
    R, B = len(reward_R), len(group_offsets) - 1
    for name, found in {"plan.use_R": len(plan.use_R), "weight_R": len(weight_R)}.items():
        if found != R:
            raise ValueError(f"{name} has {found} entries for {R} rewards: pass one per rollout of the whole step")
    if len(plan.baseline_B) != B:
        raise ValueError(f"plan.baseline_B has {len(plan.baseline_B)} entries for {B} groups: pass one per group, NaN for none")
    if len(token_offsets) != len(rows_r) + 1:
        raise ValueError(f"{len(token_offsets)} token_offsets for {len(rows_r)} rows: pass one more than rows_r")

    def on_host(x) -> Tensor | None:
        x = torch.as_tensor(x)
        return x if x.device.type == "cpu" and len(x) else None

    rows, offsets = on_host(rows_r), on_host(group_offsets)
    if rows is not None and not 0 <= int(rows.min()) <= int(rows.max()) < R:
        raise ValueError(f"rows_r names rows {int(rows.min())} to {int(rows.max())} of {R} rollouts: number them from 0")
    if offsets is not None and int(offsets[-1]) != R:
        raise ValueError(f"group_offsets end at {int(offsets[-1])} for {R} rewards: rewards are those of the whole step")


def group_statistics(reward_R: Tensor, use_R: Tensor, group_offsets: Tensor, baseline_B: Tensor, estimator: str) -> Tensor:
    """Centre and scale of every group of a step: A_i = (r_i - center) scale, which ``row_advantage`` reads in other kernels.

    Args:
        reward_R: float [R], NaN = unscored. All arguments are contiguous and on one device.
        use_R: bool [R].
        group_offsets: int64 [B+1].
        baseline_B: float [B], NaN = from the group.
        estimator: "rloo", "dr_grpo" or "grpo".

    Returns:
        float64 [B, 2]; scale 0 marks a group without signal.
    """
    assert all(x.is_contiguous() and x.device == reward_R.device for x in (reward_R, use_R, group_offsets, baseline_B))
    statistics_B2 = torch.empty(len(group_offsets) - 1, 2, dtype=torch.float64, device=reward_R.device)
    launch(
        group_statistics_kernel, len(statistics_B2), reward_R, use_R, group_offsets, baseline_B, statistics_B2,
        ESTIMATOR=ESTIMATORS[estimator].kernel, BR=BLOCK_ROWS, num_warps=1,
    )  # fmt: skip
    return statistics_B2
