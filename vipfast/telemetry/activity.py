"""What this process is doing right now: told by those who do it in plain assignments, read by whoever shows it.

Nothing is shown, counted or waited for here, so telling costs next to nothing and may happen anywhere, at every decoded token.
"""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vipfast.telemetry.history import clock

if TYPE_CHECKING:
    from vipfast.telemetry.flow import Flow


class Activity:
    """A task ("step 13", "the evaluation") goes through phases ("generate", "update"); ``done`` of ``total`` things of a phase
    are there. ``round`` counts the allocator's rounds, 0 where there are none; ``flow`` knows the tokens of a generating phase.
    """

    def __init__(self):
        self.task, self.since = "", time.monotonic()
        self.enter("")

    def begin(self, task: str, phase: str = "") -> None:
        """Start a task, whose clock then starts at 0, or go on with the one that is under way."""
        if task != self.task:
            self.task, self.since = task, time.monotonic()
        self.enter(phase)

    def enter(self, phase: str, total: int = 0, unit: str = "", flow: "Flow | None" = None) -> None:
        """Start a phase of the task. ``total`` 0: nothing is counted."""
        self.phase, self.total, self.unit, self.flow = phase, total, unit, flow
        self.done = self.round = 0

    def each(self, phase: str, items: Sequence[Any], unit: str = "micro-batches") -> Iterator[Any]:
        """The items one by one, as a phase in which each that is done counts."""
        self.enter(phase, len(items), unit)
        for item in items:
            yield item
            self.done += 1

    def text(self, width: int | None = None) -> str:
        """One line: "step 13 · generate, round 2 · 311/512 rollouts, 0:03 left · 0:07"; what is left is the phase's. It goes
        first where a line of ``width`` columns has no room. "" between tasks."""
        if not self.task:
            return ""
        phase = self.phase + (f", round {self.round}" if self.round else "")
        count = f"{min(self.done, self.total)}/{self.total} {self.unit}" if self.total else ""
        left = None if self.flow is None else self.flow.left_s
        counts = [count] if left is None else [f"{count}, {clock(left)} left", count]
        gone = clock(time.monotonic() - self.since)
        lines = [" · ".join(part for part in (self.task, phase, count, gone) if part) for count in counts]
        return next((line for line in lines if width is None or len(line) <= width), lines[-1])


NOW = Activity()
"""Of this process; a rank that shows nothing tells it all the same."""
