"""Exact integer allocation: minimise sum_q a_q phi(n_q) subject to sum_q n_q = C and L_q <= n_q <= U_q.

For discretely convex phi, giving units one by one to the largest gain a_q [phi(n) - phi(n + 1)] is the integer optimum, so the
whole answer is "the C - sum L largest of the gains between the bounds". On the CPU one partition finds the smallest gain that
is still served; only gains equal to it need an order. On a GPU one kernel bisects that gain's bit pattern (bisection.py).
Order: gain rounded to 40 mantissa bits (0.2 * 0.8 and 0.8 * 0.2 differ in float64), then smaller n, then a seeded key per
prompt, then its place in the batch: the same integers on every backend. A new objective is a new small function (objective.py).

Shape letters: B prompts, K units that a prompt can gain.
"""

from typing import Any

import numpy as np

from vipfast.allocate import bisection
from vipfast.allocate.objective import OBJECTIVES as OBJECTIVES
from vipfast.allocate.objective import Objective, checked_gains, gains
from vipfast.allocate.objective import rloo as rloo
from vipfast.errors import BudgetError
from vipfast.xp import namespace_of

Bound = int | np.ndarray
"""One bound for every prompt, or int64 [B]."""


def solve(utility_B: Any, budget: int, low: Bound, high: Bound, ties_B: np.ndarray, objective: Objective) -> Any:
    """The optimal counts (VIP, problem 5; integer form).

    Args:
        utility_B: float64 [B], a_q >= 0, the signal p (1-p) expected of each prompt; NumPy, or CuPy on its device.
        budget: C, rollouts to spend in all.
        low, high: L and U, bounds on each prompt's rollouts.
        ties_B: uint64 [B] (NumPy), seeded keys; between equal gains at equal n the smaller key goes first.
        objective: phi, discretely convex on [L, U].

    Returns:
        int64 [B] with sum exactly C, where ``utility_B`` lives. Equal utilities (all zero included) give counts that differ
        by at most one. On a GPU, where raising would need a transfer, utilities that are refused give counts of -1 instead.

    Raises:
        BudgetError: sum L <= C <= sum U does not hold.
        UsageError: phi is not finite or not discretely convex between the bounds.
        ValueError: a utility is negative or not finite (``check_utilities``).
    """
    low_B, units = _open_units(len(utility_B), budget, low, high)
    room_B = np.minimum(np.broadcast_to(high, low_B.shape) - low_B, units)
    xp = namespace_of(utility_B)
    if xp is np:
        utility_B = check_utilities(utility_B)
    if units == 0:
        return xp.asarray(low_B)
    base = int(low_B.min())
    gain_K = gains(objective, base, int((low_B + room_B).max()))
    return _place(utility_B, gain_K, low_B - base, low_B, room_B, units, ties_B)


def solve_gains(gain_BK: np.ndarray, budget: int, low: Bound, high: Bound, ties_B: np.ndarray) -> np.ndarray:
    """The same for utilities that share no phi: row q of ``gain_BK`` holds what n = L_q + 1, L_q + 2, ... add to q's utility.

    Args:
        gain_BK: float64 [B, K], K >= U_q - L_q, rows never increasing (discrete concavity), negative entries allowed.

    Raises:
        ValueError: a row rises or is not finite; BudgetError as in ``solve``.
    """
    low_B, units = _open_units(len(gain_BK), budget, low, high)
    room_B = np.minimum(np.broadcast_to(high, low_B.shape) - low_B, units)
    table = checked_gains(gain_BK)
    if room_B.max(initial=0) > table.shape[1]:
        raise ValueError(f"gains of {table.shape[1]} units per prompt cannot fill bounds that are {room_B.max()} apart")
    if units == 0:
        return low_B
    first_B = np.arange(len(low_B)) * table.shape[1]
    return _place(np.ones(len(low_B)), table.ravel(), first_B, low_B, room_B, units, ties_B)


def _place(weight_B, table, first_B, low_B, room_B, units, ties_B):
    """Hand out ``units`` > 0: unit j of prompt q gains weight_B[q] * table[first_B[q] + j], for j < room_B[q]."""
    if namespace_of(weight_B) is not np:
        return bisection.place(weight_B, table, first_B, low_B, room_B, units, ties_B)
    unit_K = np.arange(int(room_B.max()))
    open_BK = unit_K < room_B[:, None]
    at_BK = np.minimum(first_B[:, None] + unit_K, len(table) - 1)  # clipped entries lie beyond the room
    gain_BK = np.where(open_BK, rounded(weight_B[:, None] * table[at_BK]), -np.inf)
    last = np.partition(gain_BK.ravel(), gain_BK.size - units)[gain_BK.size - units]
    counts_B = low_B + (gain_BK > last).sum(1)
    prompt, unit = np.nonzero(gain_BK == last)
    served = np.lexsort((ties_B[prompt], low_B[prompt] + unit))[: units - int((counts_B - low_B).sum())]
    return counts_B + np.bincount(prompt[served], minlength=len(low_B))


def rounded(values: np.ndarray) -> np.ndarray:
    """Round float64 to 40 mantissa bits, so that values equal in exact arithmetic compare equal."""
    drop = np.uint64(12)
    bits = np.ascontiguousarray(values, np.float64).view(np.uint64)
    return (((bits + np.uint64(1 << 11)) >> drop) << drop).view(np.float64)


def check_utilities(utility_B: np.ndarray) -> np.ndarray:
    """The utilities as float64 [B]; ValueError names the first that is negative or not finite."""
    utility_B = np.asarray(utility_B, np.float64)
    good_B = np.isfinite(utility_B) & (utility_B >= 0)
    if not good_B.all():
        q = int(np.argmin(good_B))
        raise ValueError(
            f"utilities must be finite and at least 0: prompt {q} of {len(utility_B)} has {utility_B[q]} "
            f"({int((~good_B).sum())} such in all)"
        )
    return utility_B


def check_budget(num_prompts: int, budget: int, low: int, high: int, least_low: int = 1) -> None:
    """Raise BudgetError unless B L <= C <= B U, naming all four and what would work; L below ``least_low`` would not."""
    if low > high:
        raise BudgetError(
            f"--min-rollouts {low} (L) is above --max-rollouts {high} (U), so no budget C fits B = {num_prompts} prompts; "
            f"use --min-rollouts {high} or less, or --max-rollouts {low} or more"
        )
    least, most = num_prompts * low, num_prompts * high
    if not least <= budget <= most:
        mean = budget / max(num_prompts, 1)
        remedy = f", or --max-rollouts {-int(-mean // 1)}"
        if budget < least:
            remedy = f", or --min-rollouts {int(mean)}" if mean >= least_low else ""
        raise BudgetError(
            f"a budget of C = {budget} rollouts for B = {num_prompts} prompts cannot be met with --min-rollouts L = {low} and "
            f"--max-rollouts U = {high}: C must lie in [B L, B U] = [{least}, {most}]. Use --rollouts-per-prompt between "
            f"{low} and {high} (now {mean:g}){remedy}"
            + (f", or --prompts-per-step {budget // low} or fewer at the same budget" if budget < least else "")
        )


def _open_units(num_prompts: int, budget: int, low: Bound, high: Bound) -> tuple[np.ndarray, int]:
    """(L as int64 [B], units left to hand out), once the budget is known to fit the bounds."""
    if np.ndim(low) == 0 and np.ndim(high) == 0:
        check_budget(num_prompts, budget, int(low), int(high))
    low_B = np.array(np.broadcast_to(low, num_prompts), np.int64)
    high_B = np.broadcast_to(high, num_prompts)
    if (low_B > high_B).any():
        q = int(np.argmax(low_B > high_B))
        raise BudgetError(f"the bounds of prompt {q} cross: at least {low_B[q]} and at most {high_B[q]} rollouts")
    least, most = int(low_B.sum()), int(high_B.sum())
    if not least <= budget <= most:
        raise BudgetError(
            f"a budget of C = {budget} rollouts for B = {num_prompts} prompts cannot be met: their bounds L and U add up to "
            f"[{least}, {most}]; use a budget in that range or other bounds"
        )
    return low_B, budget - least


def ceiling(utility_B: np.ndarray) -> float:
    """(E sqrt a)^2 / E a: variance of the best allocation relative to uniform, bounds and rounding aside; at 1 no rule wins."""
    mean = float(np.mean(utility_B)) if len(utility_B) else 0.0
    return float(np.mean(np.sqrt(utility_B)) ** 2 / mean) if mean > 0 else 1.0


def variance_ratio(
    utility_B: np.ndarray, counts_B: np.ndarray, objective: Objective, cost_B: np.ndarray | None = None
) -> float:
    """sum a phi(n) of these counts over that of uniform at the same cost (its odd rollouts on prompts chosen at random).

    ``cost_B``: float64 [B], expected cost of a rollout of each prompt; equal unless given. 1 where every utility is 0. Both
    plans must keep phi finite.
    """
    cost_B = np.ones(len(counts_B)) if cost_B is None else cost_B
    mean = float(cost_B @ counts_B) / float(cost_B.sum())
    if abs(mean - round(mean)) < 1e-9:  # 1.9999999999999998 is two rollouts each, never one
        mean = float(round(mean))
    share, part = divmod(mean, 1.0)
    below, *above = objective(np.array([share, share + 1] if part else [share]))
    uniform = (1 - part) * below + (part * above[0] if part else 0.0)
    total = float(np.sum(utility_B) * uniform)
    return float(np.sum(utility_B * objective(counts_B.astype(np.float64)))) / total if total > 0 else 1.0
