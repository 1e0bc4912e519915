"""What a step's rollouts say, under the names of the README's metric table. Undefined values are None, never NaN."""

import resource
import sys

import numpy as np

from vipfast.tools.use import metrics_of
from vipfast.types import Finish, Rollouts, Tally


def rollout_metrics(rollouts: Rollouts, tally: Tally, search_k: int = 0) -> dict[str, float | int | None]:
    """Budget, counts, signal, reward, length and tool metrics of one step, from raw counts before anything is masked."""
    counts_B, lengths_R = rollouts.counts_B, rollouts.lengths_R
    seen = tally.scored > 0
    num_rollouts = max(rollouts.num_rollouts, 1)
    scored_R = ~np.isnan(rollouts.reward)
    scored, verified = rollouts.reward[scored_R], rollouts.verified[scored_R]
    ended = rollouts.finish != Finish.ERROR
    return {
        "budget/rollouts": int(counts_B.sum()),
        "budget/tokens": int(rollouts.loss_mask.sum()),
        "alloc/counts_min": int(counts_B.min()),
        "alloc/counts_mean": float(counts_B.mean()),
        "alloc/counts_max": int(counts_B.max()),
        "alloc/rounds": len(rollouts.plan.asked_KB),
        "signal/frac_all_zero": _share(tally.successes == 0, seen),
        "signal/frac_all_one": _share(tally.successes == tally.scored, seen),
        "signal/frac_wasted_rollouts": _num_wasted(rollouts, scored_R) / num_rollouts,
        "reward/mean": float(scored.mean(dtype=np.float64)) if len(scored) else None,
        "reward/verified": float(verified.mean(dtype=np.float64)) if len(verified) else None,
        "reward/std_within": float(np.sqrt(tally.variance[seen]).mean()) if seen.any() else None,
        "reward/unscored": int(rollouts.num_rollouts - len(scored)),
        "rollout/tokens_mean": float(lengths_R[ended].mean()) if ended.any() else None,
        "rollout/tokens_max": int(lengths_R[ended].max()) if ended.any() else None,
        "rollout/truncated_frac": float((rollouts.finish == Finish.LENGTH).mean()) if rollouts.num_rollouts else None,
        **metrics_of(rollouts.tool_use, search_k),
    }


def peak_bytes(device: str) -> int:
    """Peak memory so far: of this process, or of the GPU that trains."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts kilobytes


def _num_wasted(rollouts: Rollouts, scored_R: np.ndarray) -> int:
    """Rollouts without a score, or in a group whose scores are all equal: they move no weight."""
    group_r, reward_r = rollouts.group_R[scored_R], rollouts.reward[scored_R]
    low_B, high_B = np.full(rollouts.num_prompts, np.inf), np.full(rollouts.num_prompts, -np.inf)
    np.minimum.at(low_B, group_r, reward_r)
    np.maximum.at(high_B, group_r, reward_r)
    return rollouts.num_rollouts - int((low_B < high_B)[group_r].sum())


def _share(what_B: np.ndarray, among_B: np.ndarray) -> float | None:
    return float(what_B[among_B].mean()) if among_B.any() else None
