"""What a step's rollouts say, under the names of the README's metric table. Undefined values are None, never NaN."""

import resource
import sys

import numpy as np

from vipfast.types import Finish, Rollouts, Tally


def rollout_metrics(rollouts: Rollouts, tally: Tally) -> dict[str, float | int | None]:
    """Budget, counts, signal, reward and length metrics of one step, from raw counts before anything is masked."""
    counts_B, lengths_R = rollouts.counts_B, rollouts.lengths_R
    seen = tally.scored > 0
    flat = seen & (tally.min == tally.max)
    num_rollouts = max(rollouts.num_rollouts, 1)
    # A rollout without a score, or in a group whose scores are all equal, moves no weight.
    wasted = int(np.where(flat, counts_B, counts_B - tally.scored).sum())
    scored = rollouts.reward[~np.isnan(rollouts.reward)]
    ended = rollouts.finish != Finish.ERROR
    return {
        "budget/rollouts": int(counts_B.sum()),
        "budget/tokens": int(lengths_R.sum()),
        "alloc/counts_min": int(counts_B.min()),
        "alloc/counts_mean": float(counts_B.mean()),
        "alloc/counts_max": int(counts_B.max()),
        "alloc/rounds": len(rollouts.plan.asked_KB),
        "signal/frac_all_zero": _share(tally.successes == 0, seen),
        "signal/frac_all_one": _share(tally.successes == tally.scored, seen),
        "signal/frac_wasted_rollouts": wasted / num_rollouts,
        "reward/mean": float(scored.mean(dtype=np.float64)) if len(scored) else None,
        "reward/std_within": float(np.sqrt(tally.variance[seen]).mean()) if seen.any() else None,
        "reward/unscored": int(rollouts.num_rollouts - len(scored)),
        "rollout/tokens_mean": float(lengths_R[ended].mean()) if ended.any() else None,
        "rollout/tokens_max": int(lengths_R[ended].max()) if ended.any() else None,
        "rollout/truncated_frac": float((rollouts.finish == Finish.LENGTH).mean()) if rollouts.num_rollouts else None,
    }


def peak_bytes(device: str) -> int:
    """Peak memory so far: of this process, or of the GPU that trains."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts kilobytes


def _share(what_B: np.ndarray, among_B: np.ndarray) -> float | None:
    return float(what_B[among_B].mean()) if among_B.any() else None
