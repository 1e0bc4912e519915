"""How long a run goes on, what it measures and what it leaves behind."""

from dataclasses import dataclass
from typing import Literal

from vipfast.options import idle
from vipfast.options.facts import option


@dataclass(frozen=True)
class RunOptions:
    """How long a run goes on, what it measures and what it leaves behind."""

    seed: int = option(0, low=0, high=2**63 - 1)
    """Names every random stream of the run."""
    steps: int = option(60, low=0, high=10**9, resumable=True, evaluated=False)
    """Training steps."""
    eval_every: int = option(20, low=0, high=10**9, resumable=True, evaluated=False, idle=idle.without_heldout)
    """Evaluate every so many steps, besides start and end; 0 only at start and end."""
    eval_samples: int = option(8, low=1, high=4096, evaluated=False, idle=idle.without_heldout)
    """Samples per held-out prompt at an evaluation (k of mean@k, pass@k, maj@k)."""
    checkpoint_every: int = option(20, low=0, high=10**9, resumable=True, evaluated=False)
    """Save every so many steps, besides the end; 0 only at the end."""
    keep: int = option(2, low=1, high=10**6, resumable=True, evaluated=False)
    """Newest complete checkpoints to keep."""
    output_dir: str | None = option(None, resumable=True, travels="never", moves_samples=False)
    """The run's folder; runs/<task>-<allocator>-s<seed>-<time> unless given."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = option((), resumable=True, evaluated=False)
    """Boards to log to besides metrics.jsonl."""
    stop_when_dead: bool = option(False, resumable=True, evaluated=False)
    """End the run, saved and with exit code 1, where it would otherwise only say that it learns nothing (rewards missing or all
    alike for many steps)."""
    sample_rollouts: int | Literal["all"] = option(16, low=0, high=10**6, resumable=True, evaluated=False)
    """Rollouts whose texts, rewards and advantages are kept per step in rollouts/STEP.parquet: so many, all of them, or none
    (0)."""
