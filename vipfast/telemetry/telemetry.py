"""Everything a run reports: RUN/metrics.jsonl, RUN/rollouts/, boards, and a view (live on a terminal, lines elsewhere)."""

import contextlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vipfast.config import Config
from vipfast.cores import counted
from vipfast.telemetry.health import Health, example
from vipfast.telemetry.history import History, change, clock, share
from vipfast.telemetry.plain import PlainView
from vipfast.telemetry.samples import write_samples
from vipfast.telemetry.trackers import open_trackers
from vipfast.unread import pipes_may_close

if TYPE_CHECKING:
    from rich.console import Console


class Telemetry:
    """The run's reporter, used as a context manager. One object per run and process (rank 0 only).

    A resumed run first cuts its records back (``checkpoint.trim_run``); then the lines that are left are read here, so that
    trends, totals and "since start" span the whole run.

    Args:
        run_dir: the run's folder; made if absent.
        config: the resolved options.
        total_steps: the step at which the run ends.
        console: where to show things; stdout unless given.

    Raises:
        UsageError: ``--trackers`` names a board whose package is missing.
    """

    def __init__(self, run_dir: str | Path, config: Config, total_steps: int, console: "Console | None" = None):
        # Here and not above: Trainer also steps where rich is not installed, as long as nothing is shown.
        from rich.console import Console

        from vipfast.telemetry.live import LiveView

        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._path = self.run_dir / "metrics.jsonl"
        self._history, self._health = History(total_steps, config.eval_every), Health()
        for line in read_metrics(self._path):
            self._history.add(line)
            self._health.add(line)
        self._trackers = open_trackers(self.run_dir, config, self.last_step + 1)
        live = sys.stdout.isatty() if console is None else console.is_terminal
        console = console or Console()
        budget = f"{config.prompts_per_step} × {config.rollouts_per_prompt:g} = {counted(config.budget, 'rollout')} a step"
        title = ["vipfast", config.allocator, config.estimator, config.task, config.model, budget, str(self.run_dir)]
        if live and not console.is_dumb_terminal and console.encoding.startswith("utf"):
            self._view: LiveView | PlainView = LiveView(console, self._history, title)
        else:
            self._view = PlainView(console, self._history, "  ".join(title))
        self._file: int | None = None
        self._output = contextlib.ExitStack()

    @property
    def last_step(self) -> int:
        """The step of the last line in metrics.jsonl, -1 if there is none."""
        return self._history.step

    @property
    def dead(self) -> str | None:
        """Why the run learns nothing any more (``Health``), None as long as it may."""
        return self._health.dead

    def start(self) -> None:
        """Open metrics.jsonl and the view; the clock of "time left" starts. From here to ``close`` whoever reads what is
        printed may go."""
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._history.restart_clock()
        self._output.enter_context(pipes_may_close())
        self._view.start()

    def log(
        self,
        step: int,
        metrics: Mapping[str, Any],
        counts_B: np.ndarray | None = None,
        sample: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Report a step: one line of metrics.jsonl, the boards, the view.

        Args:
            step: larger than the last one logged.
            metrics: names as in ``metrics.py``; numbers (Python, NumPy, 0-d torch), strings or None. NaN, inf become null.
            counts_B: int [B], rollouts each prompt got.
            sample: rows of ``samples.sample_rows``, kept as RUN/rollouts/STEP.parquet; the view shows the first.

        Raises:
            ValueError: ``step`` is not larger than the last one.
        """
        assert self._file is not None, "start() first"
        if step <= self.last_step:
            raise ValueError(f"step {step}: {self._path} already ends with step {self.last_step}")
        line = {"step": int(step), **{name: _plain(name, value) for name, value in metrics.items() if name != "step"}}
        data = (json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        written = os.write(self._file, data)
        if written != len(data):
            os.write(self._file, data[written:])  # a full disk cuts a write short, and says so on the next
        if sample:
            write_samples(self.run_dir / "rollouts" / f"{step}.parquet", sample)
        self._history.add(line)
        self._history.tick(trained="reward/mean" in line)
        numbers = {name: value for name, value in line.items() if type(value) in (int, float) and name != "step"}
        for tracker in self._trackers:
            tracker.log(int(step), numbers)
        self._view.update(line, counts_B, sample or ())
        if wrong := self._health.add(line):
            self.say(f"warning: {wrong}{example(sample or ())}")

    def say(self, message: str) -> None:
        """Print a line above the live view."""
        self._view.say(message)

    def close(self, summary: Mapping[str, str] | None = None) -> None:
        """End the view, then print how the run went.

        Args:
            summary: further lines, label -> text, e.g. {"continue": "python scripts/train.py …"}; None prints no summary.
        """
        if self._file is None:
            return
        self._view.close()
        os.close(self._file)
        self._file = None
        for tracker in self._trackers:
            tracker.close()
        if summary is not None:
            lines = {**self._totals(), **summary}
            width = max(map(len, lines)) + 2
            self._view.say("\n" + "\n".join(f"{label:<{width}}{text}" for label, text in lines.items()))
        self._output.close()

    def __enter__(self) -> "Telemetry":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _totals(self) -> dict[str, str]:
        history = self._history
        lines = {f"held-out {name}": change(history.course(name)) for name in history.score_names()}
        wasted = f"{share(history.wasted)} in groups without signal"
        lines["rollouts"] = f"{history.rollouts} in {counted(max(history.step, 0), 'step')}, {wasted}"
        lines["time"] = f"{history.seconds:.1f} s" + (f" ({clock(history.seconds)})" if history.seconds >= 60 else "")
        return {**lines, "folder": str(self.run_dir)}


class NoTelemetry:
    """Takes a ``Telemetry``'s place on ranks other than 0, which write and show nothing."""

    dead = None

    def log(self, *line: Any) -> None: ...

    def say(self, message: str) -> None: ...

    def close(self, summary: Mapping[str, str] | None = None) -> None: ...

    def __enter__(self) -> "NoTelemetry":
        return self

    def __exit__(self, *error: object) -> None: ...


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, [] if there is none. A torn last line, left by a killed process, is cut off the file."""
    path = Path(path)
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    return [json.loads(line) for line in data[:whole].splitlines()]


def _plain(name: str, value: Any) -> bool | int | float | str | None:
    """A strict-JSON scalar: NumPy and torch scalars unwrapped, non-finite numbers as null."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"metric {name} is a {type(value).__qualname__}; log numbers, strings or None")
