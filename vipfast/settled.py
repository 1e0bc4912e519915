"""A run's options with nothing left open, and the checkpoint to go on from if it is one that goes on. Asked once for a run."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from vipfast import lock, run_folder
from vipfast.config import Config
from vipfast.config_file import continued, load_yaml
from vipfast.errors import UsageError
from vipfast.resolve import Resolved, resolve


@dataclass(frozen=True)
class Settled:
    """What a Trainer starts from: the resolved options, what there is to say about them, and the checkpoint to go on from."""

    run: Resolved
    notes: list[str]
    restored: Path | None


def resumed_from(config: Config) -> Path:
    """The checkpoint in --output-dir that a run goes on from.

    Raises:
        UsageError: there is none, or it lies beyond --steps.
    """
    from vipfast import checkpoint  # imports NumPy, which --help does without

    restored = checkpoint.find(config.output_dir)
    if config.steps < checkpoint.step_of(restored):
        raise UsageError(f"--steps {config.steps}: the run is already at step {checkpoint.step_of(restored)}")
    return restored


def settled(config: Config, resume: bool = False) -> Settled:
    """Settle the options of a run; one that goes on is locked for this process.

    Raises:
        UsageError: an option or a folder that cannot be used.
    """
    notes, restored = [], None
    if resume:
        config = dataclasses.replace(config, output_dir=str(run_folder.resumable(config.output_dir)))
        lock.take(config.output_dir)
        restored = resumed_from(config)
        config, notes = continued(load_yaml(Path(config.output_dir) / "config.yaml"), config)
    run = resolve(config, resumed=resume)
    if not resume:
        run_folder.check_fresh(run.config.output_dir)
    return Settled(run, notes + run.lines, restored)
