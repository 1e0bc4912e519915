"""How far an evaluation is, and how fast: a live line in a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Sequence

from vipfast.engine.base import Engine, Finished, Request
from vipfast.telemetry.flow import Flow
from vipfast.telemetry.history import clock

EVERY_S, REFRESH_S = 10.0, 0.2


class Progress:
    """Used as a context manager around the sampling of everything; tells time by tokens, as the ``Flow`` that it takes the
    place of.

    Args:
        total: samples of the whole evaluation.
        done: those that were there already.
        shown: False on ranks that show nothing.
        share: samples that one told here stands for, where other ranks sample as well.
        longest: most tokens of a sample, None if unknown.
    """

    def __init__(self, total: int, done: int, shown: bool = True, share: int = 1, longest: int | None = None):
        self.total, self.done, self._before, self._share, self._shown = total, done, done, share, shown
        self.flow = Flow(-(-(total - done) // share), longest)
        self.task, self._bar = "", None
        self._start = self._told = time.monotonic()

    def __enter__(self) -> "Progress":
        self._start = self._told = time.monotonic()
        if self._shown and sys.stdout.isatty():
            from rich import progress

            # Not as wide as the terminal: the ^C that it echoes would wrap, and the bar be left there.
            columns = (progress.TextColumn("{task.description}"), progress.BarColumn(20), progress.MofNCompleteColumn())
            columns += (progress.TextColumn("{task.fields[rate]}"), progress.TextColumn("{task.fields[left]} left"))
            self._bar = progress.Progress(*columns, transient=True)
            self._row = self._bar.add_task("", total=self.total, completed=self.done, rate="", left="–")
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def more(self, num: int) -> None:
        """So many further samples have been graded here."""
        self.at(min(self.done + num * self._share, self.total))

    def at(self, done: int) -> None:
        """So many samples are there."""
        self.done = done
        self._show()

    def say(self, message: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
        elif self._shown:
            print(message, flush=True)

    def ask(self, requests: Sequence[Request]) -> None:
        self.flow.ask(requests)

    def advance(self, engine: Engine) -> list[Finished]:
        """What the next step of ``engine`` finishes."""
        finished = self.flow.advance(engine)
        self._show()
        return finished

    def _show(self) -> None:
        now = time.monotonic()
        if not self._shown or now - self._told < (EVERY_S if self._bar is None else REFRESH_S):
            return
        self._told = now
        rate, left = f"{self.rate:,.0f}/s", clock(self.left_s)
        if self._bar is not None:
            self._bar.update(self._row, completed=self.done, description=self.task, rate=rate, left=left)
        else:
            print(f"{self.task}: {self.done} of {self.total} samples, {rate}, {left} left", flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def new(self) -> int:
        """Samples since the start of this process."""
        return self.done - self._before

    @property
    def rate(self) -> float:
        """New samples a second."""
        return self.new / max(self.seconds, 1e-9)

    @property
    def left_s(self) -> float | None:
        return self.flow.left_s


class Watched:
    """A grader that tells ``progress`` of every rollout it has graded; otherwise as the grader it is put around."""

    def __init__(self, grader, progress: Progress):
        self.grader, self.progress = grader, progress

    def __getattr__(self, name: str):
        return getattr(self.grader, name)

    def grade(self, prompts, finished):
        grades = self.grader.grade(prompts, finished)
        self.progress.more(len(finished))
        return grades
