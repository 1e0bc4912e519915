"""A run's options with nothing left open, and its folder if it is one that goes on."""

import dataclasses
from pathlib import Path

from vipfast import checkpoint, lock, run_folder
from vipfast.config import Config
from vipfast.config_file import continued, load_yaml
from vipfast.errors import UsageError
from vipfast.resolve import backend_notes, resolve


def settled(config: Config, resume: bool) -> tuple[Config, list[str], Path | None]:
    """Settle the options of a run; one that goes on is locked for this process.

    Returns:
        the options, what there is to say about them, and the checkpoint to go on from.

    Raises:
        UsageError: an option or a folder that cannot be used.
    """
    notes, restored = [], None
    if resume:
        config = dataclasses.replace(config, output_dir=str(run_folder.resumable(config.output_dir)))
        lock.take(config.output_dir)
        restored = checkpoint.find(config.output_dir)
        config, notes = continued(load_yaml(Path(config.output_dir) / "config.yaml"), config)
        if config.steps < checkpoint.step_of(restored):
            raise UsageError(f"--steps {config.steps}: the run is already at step {checkpoint.step_of(restored)}")
    config, chosen = resolve(config, resumed=resume)
    if not resume:
        run_folder.check_fresh(config.output_dir)
    # A resumed run's options have been told; the machine it goes on with may be another.
    return config, notes + (chosen or (backend_notes(config) if resume else [])), restored
