"""Exact integer allocation: minimise sum_q a_q phi(n_q) subject to sum_q n_q = C and L <= n_q <= U.

For discretely convex phi, giving units one by one to the largest gain a_q [phi(n) - phi(n + 1)] is the integer optimum, so the
whole answer is "the C - B L largest of B (U - L) gains". One partition finds the smallest gain that is still served; only gains
equal to it need an order. Order: gain rounded to 40 mantissa bits (0.2 * 0.8 and 0.8 * 0.2 differ in float64), then smaller n,
then a seeded key per prompt, which gives the same integers on every backend. A new objective is a new small function phi(n).

Shape letters: B prompts, K = U - L units that a prompt can gain.
"""

from collections.abc import Callable

import numpy as np

from vipfast.errors import BudgetError, UsageError

Objective = Callable[[np.ndarray], np.ndarray]


def rloo(n: np.ndarray) -> np.ndarray:
    """phi of the leave-one-out estimator: a prompt's gradient variance is 4 sigma^2 p (1-p) phi(n) (VIP, Theorem 5.2)."""
    return 1.0 / (n - 1.0)


def dr_grpo(n: np.ndarray) -> np.ndarray:
    """phi of the centred estimator (VIP, Theorem 5.1). It rises from n = 1 to 2, so it is discretely convex from n = 3 on."""
    return (n - 1.0) / n**2


OBJECTIVES: dict[str, Objective] = {"rloo": rloo, "dr_grpo": dr_grpo}
LEAST_ROLLOUTS = {"rloo": 2, "dr_grpo": 3}
"""Smallest L from which each objective is finite and discretely convex."""


def solve(utility_B: np.ndarray, budget: int, low: int, high: int, ties_B: np.ndarray, objective: Objective) -> np.ndarray:
    """The optimal counts (VIP, problem 5; integer form).

    Args:
        utility_B: float64 [B], a_q >= 0, the signal p (1-p) expected of each prompt.
        budget: C, rollouts to spend in all.
        low, high: L and U, bounds on each prompt's rollouts.
        ties_B: uint64 [B], seeded keys; between equal gains at equal n the smaller key goes first.
        objective: phi, discretely convex on [L, U].

    Returns:
        int64 [B] with sum exactly C. Equal utilities (all zero included) give counts that differ by at most one.

    Raises:
        BudgetError: B L <= C <= B U does not hold.
    """
    num_prompts = len(utility_B)
    check_budget(num_prompts, budget, low, high)
    utility_B = np.asarray(utility_B, np.float64)
    assert np.isfinite(utility_B).all() and (utility_B >= 0).all(), "utilities must be finite and >= 0"
    units = budget - num_prompts * low
    if units == 0:
        return np.full(num_prompts, low, np.int64)
    values = objective(np.arange(low, min(high, low + units) + 1, dtype=np.float64))
    gain_BK = rounded(utility_B[:, None] * (values[:-1] - values[1:]))
    last = np.partition(gain_BK.ravel(), gain_BK.size - units)[gain_BK.size - units]
    counts_B = low + (gain_BK > last).sum(1)
    prompt, unit = np.nonzero(gain_BK == last)
    served = np.lexsort((ties_B[prompt], unit))[: budget - int(counts_B.sum())]
    return counts_B + np.bincount(prompt[served], minlength=num_prompts)


def rounded(values: np.ndarray) -> np.ndarray:
    """Round non-negative float64 to 40 mantissa bits, so that values equal in exact arithmetic compare equal."""
    drop = np.uint64(12)
    # Adding +0.0 turns -0.0, whose bits would read as a huge integer, into 0.0.
    bits = (np.ascontiguousarray(values, np.float64) + 0.0).view(np.uint64)
    return (((bits + np.uint64(1 << 11)) >> drop) << drop).view(np.float64)


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


def least_rollouts(objective: str, given: int | None) -> int:
    """L: the option's value, or the objective's own least when it is None.

    Raises:
        UsageError: ``given`` is below the least for which the objective means anything.
    """
    least = LEAST_ROLLOUTS[objective]
    if given is not None and given < least:
        raise UsageError(
            f"--min-rollouts {given}: --objective {objective} needs at least {least} rollouts per prompt (below that its "
            f"variance is undefined, or is least without any signal); use {least} or leave it out"
        )
    return least if given is None else given


def ceiling(utility_B: np.ndarray) -> float:
    """(E sqrt a)^2 / E a: variance of the best allocation relative to uniform, bounds and rounding aside; at 1 no rule wins."""
    mean = float(np.mean(utility_B)) if len(utility_B) else 0.0
    return float(np.mean(np.sqrt(utility_B)) ** 2 / mean) if mean > 0 else 1.0


def variance_ratio(utility_B: np.ndarray, counts_B: np.ndarray, objective: Objective) -> float:
    """sum a phi(n) of these counts over that of uniform at the same budget (its odd rollouts on prompts chosen at random).

    1 where every utility is 0. Both plans must keep phi finite.
    """
    share, extra = divmod(int(counts_B.sum()), len(counts_B))
    part = extra / len(counts_B)
    uniform = (1 - part) * objective(np.float64(share)) + (part * objective(np.float64(share + 1)) if extra else 0.0)
    total = float(np.sum(utility_B) * uniform)
    return float(np.sum(utility_B * objective(counts_B.astype(np.float64)))) / total if total > 0 else 1.0
