"""The line that moves before a run has its view: what is being imported or loaded, and for how long."""

import shutil
import sys
from collections.abc import Callable
from typing import Any, TextIO

from vipfast.telemetry.activity import NOW
from vipfast.telemetry.plain import Reminder
from vipfast.telemetry.ticker import LOCK, Ticker

CLEAR = "\r\x1b[K"
"""To the start of the line, and erase it."""


class _Over:
    """A stream whose output goes over the status line, not behind it."""

    def __init__(self, file: TextIO, clear: Callable[[], None]):
        self._file, self._clear = file, clear

    def write(self, text: str) -> int:
        with LOCK:
            self._clear()
            return self._file.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class StatusLine:
    """Context manager: one line that is rewritten in a terminal and gone at the end, a line now and then elsewhere.

    Args:
        shown: False on ranks that show nothing.
    """

    def __init__(self, shown: bool = True):
        self._shown, self._reminder, self._ticker = shown, Reminder(), Ticker(self.tick)
        self._there = False

    def __enter__(self) -> "StatusLine":
        self._out, self._err = sys.stdout, sys.stderr
        self._live = self._out.isatty()
        if self._shown:
            if self._live:
                sys.stdout, sys.stderr = _Over(self._out, self._clear), _Over(self._err, self._clear)
            self._ticker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ticker.stop()
        self._clear()
        sys.stdout, sys.stderr = self._out, self._err

    def tick(self) -> None:
        """Rewrite the line; where there is no terminal, print one if nothing has been said for long."""
        if self._live:
            self._clear()
            # Too narrow to wrap: what has wrapped is not erased.
            self._write(NOW.text()[: max(shutil.get_terminal_size().columns - 1, 0)])
            self._there = True
        elif self._reminder.due():
            self._write(f"{NOW.text()}\n")

    def _clear(self) -> None:
        if self._there:
            self._there = False
            self._write(CLEAR)

    def _write(self, text: str) -> None:
        encoding = getattr(self._out, "encoding", None) or "utf-8"
        self._out.write(text.encode(encoding, "replace").decode(encoding))
        self._out.flush()
