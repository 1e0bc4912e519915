"""The live terminal view: how the policy learns, where the budget went, what it writes, where the time goes."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from vipfast.telemetry.history import History, Metrics, change, clock, number, printable, share, trend

_REFRESH_S = 0.2
_NARROW = 100
_LEFT = 62
_PHASES = (("generate", "cyan"), ("update", "green"), ("logprob", "blue"))
_PHASES += (("reward", "yellow"), ("allocate", "magenta"), ("sync", "red"))


class LiveView:
    """Redraws in place at most every 0.2 s, in the caller's thread (forking reward workers beside a thread is unsafe).

    Lines are laid out here, not by rich's tables: those take ten times as long to draw.
    """

    def __init__(self, console: Console, history: History, title: str):
        self._console, self._history, self._title = console, history, title
        self._live = Live(Text(title), console=console, auto_refresh=False)
        self._metrics: Metrics = {}
        self._counts: np.ndarray | None = None
        self._sample: Sequence[dict[str, Any]] = ()
        self._drawn = 0.0

    def start(self) -> None:
        self._live.start()
        self._draw()

    def update(self, metrics: Metrics, counts_B: np.ndarray | None, sample: Sequence[dict[str, Any]]) -> None:
        self._metrics = {**self._metrics, **metrics}
        self._counts = self._counts if counts_B is None else counts_B
        self._sample = sample or self._sample
        if time.monotonic() - self._drawn >= _REFRESH_S:
            self._draw()

    def say(self, message: str) -> None:
        self._console.print(Text(message))

    def close(self) -> None:
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._live.update(Group(*self.frame(self._console.width)), refresh=self._live.is_started)

    def frame(self, width: int) -> list[Text]:
        """The view as lines for a terminal of ``width`` columns."""
        wide = width >= _NARROW
        left = self._learning(_LEFT if wide else width)
        right = self._budget(width - _LEFT - 2 if wide else width)
        if wide:
            rows = max(len(left), len(right))
            left += [Text()] * (rows - len(left))
            right += [Text()] * (rows - len(right))
            middle = [_side_by_side(a, b) for a, b in zip(left, right)]
        else:
            middle = left + right
        lines = [Text(self._title, "bold"), self._progress(width), *middle, *self._bottom(width)]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
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
        lines = [_heading("budget: rollouts × prompts", width)]
        bins = histogram(self._counts) if self._counts is not None else []
        total = max(sum(rollouts for *_, rollouts in bins), 1)
        for label, prompts, rollouts in bins:
            line = Text(f"{label:>7} ").append(f"× {prompts:<5}", "dim")
            _bar(line, rollouts / total, max(width - len(line) - 6, 4), "magenta")
            lines.append(line.append(f"{share(rollouts / total):>6}"))
        return lines

    def _bottom(self, width: int) -> list[Text]:
        metrics = self._metrics
        phases = [(name, metrics.get(f"time/{name}_s") or 0.0, style) for name, style in _PHASES]
        total = sum(seconds for _, seconds, _ in phases)
        if not total:
            return []
        strip, legend = Text(), Text()
        for name, seconds, style in phases:
            strip.append("━" * round(seconds / total * (width - len(_PHASES))), style)
            legend.append(f"{name} {seconds:.2f}  ", style)
        legend.append(f"of {number(metrics.get('time/step_s'), 2)} s")
        speed = f"{number(metrics.get('speed/tokens_per_s'), 0)} tokens/s"
        lines = [_heading(f"seconds a step, {speed}", width), strip, legend]
        if self._sample:
            row = self._sample[0]
            line = Text(f"reward {number(row['reward'], 2)}  ", "bold")
            line.append(printable(row["prompt"], max(width // 2, 20)), "dim").append(" ▸ ", "cyan")
            lines += [_heading("a rollout", width), line.append(printable(row["completion"], width))]
        return lines


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
    halves = min(max(round(part * 2 * width), 0), 2 * width)
    line.append("━" * (halves // 2) + "╸" * (halves % 2), style)
    line.append("─" * (width - (halves + 1) // 2), "bright_black")


def _side_by_side(left: Text, right: Text) -> Text:
    line = left.copy()
    return line.append(" " * (_LEFT + 2 - cell_len(left.plain))).append_text(right)
