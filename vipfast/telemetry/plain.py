"""One aligned line per step, for logs and pipes; where a step or an evaluation takes long, a line now and then in between."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vipfast.telemetry.activity import NOW
from vipfast.telemetry.history import History, Metrics, change, clock, number, share
from vipfast.telemetry.ticker import LOCK, Ticker

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

_HEADER_EVERY = 20
_COLUMNS = (("step", 6), ("reward", 7), ("spread", 7), ("wasted", 7), ("rollouts", 12), ("tokens/s", 9), ("generate", 9))
_COLUMNS += (("update", 8), ("step s", 8), ("left", 8))

REMIND_S, LONGEST_GAP_S = 20.0, 320.0
"""Silence after which a line is due, and to what it grows as it doubles each time."""


class Reminder:
    """Whether a log has been silent for so long that it needs a line."""

    def __init__(self):
        self.said()

    def said(self) -> None:
        """Something has just been printed."""
        self._told, self._gap = time.monotonic(), REMIND_S

    def due(self) -> bool:
        """Whether to print a line now; true once per silence, and after twice as long again."""
        now = time.monotonic()
        if now - self._told < self._gap:
            return False
        self._told, self._gap = now, min(2 * self._gap, LONGEST_GAP_S)
        return True


class PlainView:
    """Prints to the file of ``console``; every line is flushed, and what its encoding lacks becomes "?"."""

    def __init__(self, console: "Console", history: History, title: str):
        self._console, self._history, self._title = console, history, title
        self._num_lines = 0
        self._reminder, self._ticker = Reminder(), Ticker(self.tick)

    def start(self) -> None:
        self.say(self._title)
        self._ticker.start()

    def update(self, metrics: Metrics, counts_B: "np.ndarray | None", sample: Sequence[dict[str, Any]]) -> None:
        if metrics.get("reward/mean") is not None:
            if self._num_lines % _HEADER_EVERY == 0:
                self.say("".join(f"{name:>{width}}" for name, width in _COLUMNS))
            self._num_lines += 1
            counts = [metrics.get(f"alloc/counts_{end}") for end in ("min", "mean", "max")]
            cells = (
                str(metrics["step"]),
                number(metrics["reward/mean"]),
                number(metrics.get("reward/std_within")),
                share(metrics.get("signal/frac_wasted_rollouts")),
                "/".join(number(count, digits) for count, digits in zip(counts, (0, 1, 0), strict=True)),
                number(metrics.get("speed/tokens_per_s"), 0),
                number(metrics.get("time/generate_s"), 2),
                number(metrics.get("time/update_s"), 2),
                number(metrics.get("time/step_s"), 2),
                clock(self._history.left_s),
            )
            self.say("".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True)))
        if any(name.startswith("eval/") and value is not None for name, value in metrics.items()):
            scores = "   ".join(f"{name} {change(self._history.course(name))}" for name in self._history.score_names())
            self.say(f"  eval after step {metrics['step']}:   {scores}   since start")

    def tick(self) -> None:
        """A line if nothing has been said for long."""
        if self._reminder.due():
            self._print(f"  {NOW.text()}")

    def say(self, message: str) -> None:
        self._print(message)
        self._reminder.said()

    def close(self) -> None:
        self._ticker.stop()

    def _print(self, message: str) -> None:
        file = self._console.file
        encoding = getattr(file, "encoding", None) or "utf-8"
        with LOCK:
            print(message.encode(encoding, "replace").decode(encoding), file=file, flush=True)
