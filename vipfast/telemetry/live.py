"""The live terminal view: how the policy learns, where the budget went, what it writes, where the time goes."""

import time
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from vipfast.telemetry.activity import NOW
from vipfast.telemetry.history import History, Metrics, change, clock, number, printable, share, trend
from vipfast.telemetry.ticker import LOCK, Ticker

_REFRESH_S = 0.2
_NARROW = 100
_LEFT = 62
_PHASES = (("generate", "cyan"), ("update", "green"), ("logprob", "blue"))
_PHASES += (("reward", "yellow"), ("allocate", "magenta"), ("sync", "red"))


class LiveView:
    """Redraws in place when there is news, at most every 0.2 s, and twice a second for the clock's sake (``ticker``).

    Lines are laid out here, not by rich's tables: those take ten times as long to draw. A frame is as high as the terminal at
    most: bars go first, then headings and what is learned; progress, timings and the sample stay.
    """

    def __init__(self, console: Console, history: History, title: Sequence[str]):
        self._console, self._history, self._title = console, history, title
        self._live = self._new_live()
        self._metrics: Metrics = {}
        self._counts: np.ndarray | None = None
        self._sample: Sequence[dict[str, Any]] = ()
        self._drawn = 0.0
        self._size = console.size
        self._ticker = Ticker(self.tick)

    def start(self) -> None:
        self._live.start()
        self._draw()
        self._ticker.start()

    def update(self, metrics: Metrics, counts_B: np.ndarray | None, sample: Sequence[dict[str, Any]]) -> None:
        with LOCK:
            self._metrics = {**self._metrics, **metrics}
            self._counts = self._counts if counts_B is None else counts_B
            self._sample = sample or self._sample
            if time.monotonic() - self._drawn >= _REFRESH_S:
                self._draw()

    def tick(self) -> None:
        """Draw anew what time changes; after a resize on a cleared screen, since terminals differ in where old lines go."""
        if self._console.size != self._size:
            self._size = self._console.size
            self._live.transient = True
            self._live.stop()
            self._console.clear()
            self._live = self._new_live()
            self._live.start()
        self._draw()

    def say(self, message: str) -> None:
        with LOCK:
            for line in message.split("\n"):  # a command that is pasted must stay one line, words may go on the next
                self._console.print(Text(line), soft_wrap="--resume" in line or "resume=True" in line)

    def close(self) -> None:
        self._ticker.stop()
        NOW.begin("")
        self._draw()
        self._live.stop()

    def _new_live(self) -> Live:
        return Live(Text(), console=self._console, auto_refresh=False)

    def _draw(self) -> None:
        with LOCK:
            self._drawn = time.monotonic()
            width, height = self._console.size
            self._live.update(Group(*self.frame(width, height - 1)), refresh=self._live.is_started)

    def frame(self, width: int, height: int) -> list[Text]:
        """The view as lines for a terminal of ``width`` columns, ``height`` of them at most."""
        wide = width >= _NARROW
        learning = self._learning(_LEFT if wide else width)
        budget = self._budget(width - _LEFT - 2 if wide else width)
        if wide:
            rows = max(len(learning), len(budget))
            learning += [Text()] * (rows - len(learning))
            budget += [Text()] * (rows - len(budget))
            learning, budget = [_side_by_side(left, right) for left, right in zip(learning, budget)], []
        timings, sample = self._timings(width), self._rollout(width)
        # Blocks with their ranks; the highest rank goes first where there is no room.
        blocks = [
            (4, [Text(shortened(self._title, width), "bold")]),
            (0, [self._progress(width)]),
            (1, [Text(now, "cyan")] if (now := NOW.text(width)) else []),
        ]
        blocks += [(6, learning[:1]), *((5, [line]) for line in learning[1:]), (9, budget)]
        blocks += [(7, timings[:1]), (8, timings[1:2]), (2, timings[2:]), (7, sample[:1]), (3, sample[1:])]
        while sum(len(lines) for _, lines in blocks) > max(height, 1):
            # Of one rank the last goes.
            blocks.pop(max(range(len(blocks)), key=lambda i: (blocks[i][0], i)))
        lines = [line for _, lines in blocks for line in lines]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        # The cursor rests behind the last one, where the terminal echoes ^C; wrapped, that would leave a line behind.
        lines[-1].truncate(max(width - 2, 1), overflow="ellipsis")
        return lines

    def _progress(self, width: int) -> Text:
        history = self._history
        done, total = max(history.step, 0), max(history.total_steps, 1)
        times = f" {clock(history.elapsed_s)} gone, {clock(history.left_s)} left"
        line = Text(f"step {done}/{history.total_steps} ")
        _bar(line, done / total, width - len(line) - len(times), "cyan" if done < total else "green")
        return line.append(times)

    def _learning(self, width: int) -> list[Text]:
        metrics, history = self._metrics, self._history
        counts = [number(metrics.get(f"alloc/counts_{end}"), digits) for end, digits in (("min", 0), ("mean", 1), ("max", 0))]
        wasted = share(metrics.get("signal/frac_wasted_rollouts"))
        rows = [
            ("reward", number(metrics.get("reward/mean")), "", trend(history.rewards, 16)),
            ("spread in a group", number(metrics.get("reward/std_within")), "", ""),
            ("wasted rollouts", f"{wasted} ({share(history.wasted)} of the run)", "", ""),
            ("rollouts a prompt", f"{counts[0]} min  {counts[1]} mean  {counts[2]} max", "", ""),
        ]
        for name in history.score_names():
            course = history.course(name)
            style = "bold green" if course[-1] > course[0] else "bold red" if course[-1] < course[0] else "bold"
            rows.append((f"held-out {name}", change(course), style, trend(course, 16)))
        lines = [_heading("learning", width)]
        for label, value, style, curve in rows:
            line = Text().append(f"{label:<19}", "dim").append(f"{value:<25}" if curve else value, style)
            lines.append(line.append(curve, "cyan"))
        return lines

    def _budget(self, width: int) -> list[Text]:
        """How many prompts got how many rollouts; a bar is that row's share of the step's rollouts."""
        if self._counts is None:
            return []
        lines, bins = [_heading("budget: rollouts × prompts", width)], histogram(self._counts)
        total = max(sum(rollouts for *_, rollouts in bins), 1)
        for label, prompts, rollouts in bins:
            line = Text(f"{label:>7} ").append(f"× {prompts:<5}", "dim")
            _bar(line, rollouts / total, max(width - len(line) - 6, 4), "magenta")
            lines.append(line.append(f"{share(rollouts / total):>6}"))
        return lines

    def _timings(self, width: int) -> list[Text]:
        """Heading, bar and numbers of the last step's phases, the longest ones where there is no room for all; [] before it."""
        metrics = self._metrics
        phases = [(name, metrics.get(f"time/{name}_s") or 0.0, style) for name, style in _PHASES]
        total = sum(seconds for _, seconds, _ in phases)
        if not total:
            return []
        strip, whole = Text(), f"of {number(metrics.get('time/step_s'), 2)} s"
        for _, seconds, style in phases:
            strip.append("━" * round(seconds / total * (width - len(_PHASES))), style)
        shown = [(f"{name} {seconds:.2f}  ", seconds, style) for name, seconds, style in phases]
        while shown and sum(len(text) for text, *_ in shown) + len(whole) > width:
            shown.remove(min(shown, key=itemgetter(1)))
        legend = Text.assemble(*((text, style) for text, _, style in shown), whole)
        speed = f"{number(metrics.get('speed/tokens_per_s'), 0)} tokens/s"
        return [_heading(f"seconds a step, {speed}", width), strip, legend]

    def _rollout(self, width: int) -> list[Text]:
        if not self._sample:
            return []
        row = self._sample[0]
        line = Text(f"reward {number(row['reward'], 2)}  ", "bold")
        line.append(printable(row["prompt"], max(width // 2, 20)), "dim").append(" ▸ ", "cyan")
        return [_heading("a rollout", width), line.append(printable(row["completion"], max(width, 1)))]


def shortened(title: Sequence[str], width: int) -> str:
    """The parts of a title side by side: whole if they fit, else paths by their last names, then every long part cut."""
    whole = "  ".join(title)
    if cell_len(whole) <= width:
        return whole
    names = [part.rstrip("/").rpartition("/")[2] for part in title]
    for limit in (40, 24, 16, 10):
        line = "  ".join(name if len(name) <= limit else f"{name[: limit - 1]}…" for name in names)
        if cell_len(line) <= width:
            break
    return line


def histogram(counts_B: np.ndarray, most_bins: int = 6) -> list[tuple[str, int, int]]:
    """(label, prompts, rollouts) per distinct count, neighbours joined evenly by number of counts beyond ``most_bins``.

    Example: counts [2, 2, 6, 14] -> [("2", 2, 4), ("6", 1, 6), ("14", 1, 14)].
    """
    values, prompts = np.unique(np.asarray(counts_B), return_counts=True)
    rows = []
    for group in np.array_split(np.arange(len(values)), min(most_bins, max(len(values), 1))):
        if len(group):
            low, high = values[group[0]], values[group[-1]]
            label = f"{low}" if low == high else f"{low}–{high}"
            rows.append((label, int(prompts[group].sum()), int((values * prompts)[group].sum())))
    return rows


def _heading(title: str, width: int) -> Text:
    return Text(f"── {title} " + "─" * (width - len(title) - 4), "dim")


def _bar(line: Text, part: float, width: int, style: str) -> None:
    """Append a bar of ``width`` cells, ``part`` of it filled, to half a cell."""
    width = max(width, 0)
    halves = min(max(round(part * 2 * width), 0), 2 * width)
    line.append("━" * (halves // 2) + "╸" * (halves % 2), style)
    line.append("─" * (width - (halves + 1) // 2), "bright_black")


def _side_by_side(left: Text, right: Text) -> Text:
    line = left.copy()
    return line.append(" " * (_LEFT + 2 - cell_len(left.plain))).append_text(right)
