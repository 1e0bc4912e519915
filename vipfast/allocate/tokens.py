"""A budget counted in tokens: what a rollout of each prompt should cost, and the plan that spends such a budget.

Costs are relative: 1 is a rollout of the pool's mean length. So a budget of C rollouts buys, in tokens, what C rollouts of mean
length are expected to take, and prompts with short answers can be given more than their share of rollouts.
"""

from collections.abc import Sequence

import numpy as np

from vipfast.allocate.objective import Objective, gains
from vipfast.allocate.solver import check_utilities, rounded
from vipfast.types import Tally

PRIOR_ROLLOUTS = 8.0
"""Rollouts of mean length that stand beside a prompt's own."""

KEPT = 0.9
"""Weight of the pool's mean so far against the newest step's, since a policy's lengths drift."""


class Lengths:
    """Expected completion lengths. ``mean``: the pool's, in tokens, each prompt once; 0 before anything is seen."""

    def __init__(self):
        self.mean = 0.0
        self._own: dict[str, tuple[float, int]] = {}  # of its newest step: length relative to the pool's then, rollouts

    def costs(self, uids: Sequence[str]) -> np.ndarray:
        """float64 [B] > 0, expected length of a rollout over the pool's mean: the prompt's own, shrunk towards 1."""
        own = np.array([self._own.get(uid, (1.0, 0)) for uid in uids]).reshape(-1, 2)
        return (PRIOR_ROLLOUTS + own[:, 0] * own[:, 1]) / (PRIOR_ROLLOUTS + own[:, 1])

    def update(self, tally: Tally) -> None:
        """Learn the step's lengths; prompts without rollouts say nothing."""
        drawn = np.flatnonzero(tally.asked)
        if not tally.tokens.any():
            return
        length = tally.tokens[drawn] / tally.asked[drawn]
        self.mean = KEPT * self.mean + (1 - KEPT) * float(length.mean()) if self.mean else float(length.mean())
        for q, relative in zip(drawn, length / self.mean):
            self._own[tally.uids[q]] = (float(relative), int(tally.asked[q]))

    def state_dict(self) -> dict:
        """uids list [S], relative float64 [S], rollouts int64 [S], mean float."""
        relative, rollouts = zip(*self._own.values()) if self._own else ((), ())
        return {
            "uids": list(self._own),
            "relative": np.array(relative, np.float64),
            "rollouts": np.array(rollouts, np.int64),
            "mean": self.mean,
        }

    def load_state_dict(self, state: dict) -> None:
        self.mean = float(state["mean"])
        own = zip(state["relative"], state["rollouts"])
        self._own = {uid: (float(relative), int(rollouts)) for uid, (relative, rollouts) in zip(state["uids"], own)}


def solve_tokens(
    utility_B: np.ndarray, cost_B: np.ndarray, budget: float, low: int, high: int, ties_B: np.ndarray, objective: Objective
) -> np.ndarray:
    """Counts for a budget of costs: raises in the order of gain per cost, each where it still fits, until none does.

    Up to the first raise that does not fit this is the optimum of the relaxed problem, so what is left of the objective is less
    than that one rollout's gain. Ties are broken as in ``solver.solve``; with equal costs the counts are the same.

    Args:
        utility_B: float64 [B], a_q >= 0.
        cost_B: float64 [B] > 0, cost of one rollout of each prompt.
        budget: what sum_q n_q cost_q may reach. Every prompt gets ``low`` in any case, even beyond it.
        low, high: bounds L <= U on each prompt's rollouts.
        ties_B: uint64 [B], seeded keys.
        objective: phi, discretely convex on [L, U].

    Returns:
        int64 [B].
    """
    utility_B = check_utilities(utility_B)
    B, slack = len(utility_B), 1e-9 * budget  # sums of costs round
    left = budget - low * float(cost_B.sum()) + slack
    high = min(high, low + int(max(left, 0.0) // float(cost_B.min())))  # no prompt can get more
    gain_K = gains(objective, low, high)
    gain_K = gain_K[gain_K >= 0]  # with a cap nobody need take a rollout that does harm
    high = low + len(gain_K)
    rate_BK = rounded(utility_B[:, None] * gain_K / cost_B[:, None])
    prompt_M, unit_M = np.repeat(np.arange(B), high - low), np.tile(np.arange(high - low), B)
    order_M = np.lexsort((ties_B[prompt_M], unit_M, -rate_BK.ravel()))
    prompt_M = prompt_M[order_M]
    cost_M = cost_B[prompt_M]
    spent_M = np.cumsum(cost_M)
    at = int(np.searchsorted(spent_M, left, side="right"))
    counts_B = low + np.bincount(prompt_M[:at], minlength=B)
    left -= float(spent_M[at - 1]) if at else 0.0
    # A prompt whose raise does not fit is passed over for good: its next one costs the same, and what is left only shrinks.
    while len(fitting := np.flatnonzero(cost_M[at:] <= left)):
        at += int(fitting[0]) + 1
        counts_B[prompt_M[at - 1]] += 1
        left -= float(cost_M[at - 1])
    return counts_B
