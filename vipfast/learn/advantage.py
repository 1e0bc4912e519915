"""What each rollout counts in the loss: the weight table of ragged groups, fixed for the whole step before any split."""

from collections.abc import Callable

import numpy as np

from vipfast.types import StepPlan


def rollout_weights(
    group_offsets: np.ndarray,
    length_R: np.ndarray,
    plan: StepPlan,
    weighting: str,
    length_term: str,
    max_new_tokens: int,
    prompts_B: np.ndarray | None = None,
) -> np.ndarray:
    """Weight of every trained token of each rollout; a loss is the sum of weight times token loss, normalised nowhere else.

    B, n_q and C count what the plan uses, zero-advantage and unscored rollouts included, so neither skipping rows nor splitting
    them moves a weight. With o the trained tokens of a rollout and M = max_new_tokens:

    ==================  =======================
    prompt, constant    1 / (B n_q M)
    prompt, sequence    1 / (B n_q o_i)
    prompt, token       1 / (B sum_{j in q} o_j)
    rollout, constant   1 / (C M)
    rollout, sequence   1 / (C o_i)
    token               1 / sum o
    ==================  =======================

    Args:
        group_offsets: int64 [B+1].
        length_R: int64 [R], tokens of each rollout that count (loss_mask true).
        plan: whose ``use_R``, ``used_B`` and ``weight_B`` (a factor on each prompt) apply.
        weighting: "prompt", "rollout" or "token".
        length_term: "constant", "sequence" or "token"; ignored by weighting "token".
        max_new_tokens: length limit of a completion over all turns.
        prompts_B: bool [B], the prompts of one mini-batch; only they are counted and weighted. None: all.

    Returns:
        float64 [R]; 0 for rows not in use, rows of other mini-batches, and rows without tokens where their length divides.
    """
    counts_B = np.diff(group_offsets)
    group_R = np.repeat(np.arange(len(counts_B)), counts_B)
    kept_B = plan.used_B > 0 if prompts_B is None else (plan.used_B > 0) & prompts_B
    kept_R = plan.use_R & kept_B[group_R]
    length_R = np.where(kept_R, length_R, 0).astype(np.float64)

    divisor_R = _DIVISORS[weighting, "constant" if weighting == "token" else length_term](
        length_R, group_R, np.where(kept_B, plan.used_B, 0).astype(np.float64), float(max_new_tokens)
    )
    weight_R = np.divide(plan.weight_B[group_R], divisor_R, out=np.zeros(len(group_R)), where=kept_R & (divisor_R > 0))
    return weight_R


def _prompts(used_B: np.ndarray) -> int:
    return np.count_nonzero(used_B)


def _group_tokens(length_R: np.ndarray, group_R: np.ndarray, used_B: np.ndarray) -> np.ndarray:
    return np.bincount(group_R, length_R, minlength=len(used_B))[group_R]


_DIVISORS: dict[tuple[str, str], Callable[[np.ndarray, np.ndarray, np.ndarray, float], np.ndarray]] = {
    ("prompt", "constant"): lambda o, q, n, M: _prompts(n) * n[q] * M,
    ("prompt", "sequence"): lambda o, q, n, M: _prompts(n) * n[q] * o,
    ("prompt", "token"): lambda o, q, n, M: _prompts(n) * _group_tokens(o, q, n),
    ("rollout", "constant"): lambda o, q, n, M: np.full(len(o), n.sum() * M),
    ("rollout", "sequence"): lambda o, q, n, M: n.sum() * o,
    ("token", "constant"): lambda o, q, n, M: np.full(len(o), o.sum()),
}
