"""TensorBoard, W&B and trackio behind one call: ``log(step, metrics)``. Each is imported only when ``--trackers`` names it."""

import dataclasses
import importlib
import json
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from vipfast import atomic
from vipfast.config import Config
from vipfast.errors import UsageError


class Tracker(Protocol):
    """A board that takes the numbers of a step."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files under RUN/tensorboard. On resume, points from ``first_step`` on that an earlier process wrote are purged."""

    def __init__(self, run_dir: Path, config: Config, first_step: int):
        _module("tensorboard", "tensorboard")
        board = _module("torch.utils.tensorboard", "tensorboard")
        self._writer = board.SummaryWriter(log_dir=str(run_dir / "tensorboard"), purge_step=first_step or None)
        if not first_step:
            options = dataclasses.asdict(config).items()
            self._writer.add_text("config", "\n\n".join(f"`{name}`: {value}" for name, value in options))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A W&B run, continued on resume by the id kept in RUN/trackers.json."""

    def __init__(self, run_dir: Path, config: Config, first_step: int):
        run_id = _run_id(run_dir, "wandb")
        settings = dict(project="vipfast", name=run_dir.name, id=run_id, resume="allow", dir=str(run_dir))
        self._run = _module("wandb", "wandb").init(config=dataclasses.asdict(config), **settings)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A trackio run (a local board), continued on resume under the name kept in RUN/trackers.json."""

    def __init__(self, run_dir: Path, config: Config, first_step: int):
        name = f"{run_dir.name}-{_run_id(run_dir, 'trackio')}"
        self._run = _module("trackio", "trackio").init(
            project="vipfast", name=name, resume="allow", config=dataclasses.asdict(config)
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


def open_trackers(run_dir: Path, config: Config, first_step: int) -> list[Tracker]:
    """Open every board of ``config.trackers``; ``first_step`` is the next step to be logged, 0 for a new run.

    Raises:
        UsageError: a board's package is not installed.
    """
    return [_TRACKERS[name](run_dir, config, first_step) for name in config.trackers]


def _module(name: str, tracker: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f'--trackers {tracker}: its package is missing ({error}); install it with: pip install "vipfast[trackers]"'
        ) from error


def _run_id(run_dir: Path, tracker: str) -> str:
    """The id a board knows this run by: drawn once, then read back from RUN/trackers.json."""
    path = run_dir / "trackers.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if tracker not in known:
        known[tracker] = uuid.uuid4().hex[:12]
        atomic.write_file(path, json.dumps(known).encode())
    return known[tracker]
