"""What a terminal view needs to remember of a run: trends, totals, and how long a step takes."""

import time
from collections import deque
from typing import Any

Metrics = dict[str, Any]

_CELLS = "▁▂▃▄▅▆▇█"


class History:
    """Fed with every line of metrics.jsonl, earlier processes' lines first, so that a resumed run shows its whole course.

    Attributes: ``rewards`` list of float, one per training step; ``evals`` list of (step, {name without "eval/": value});
    ``rollouts`` int; ``seconds`` float, of all processes of the run; ``step`` int, the last one seen.

    Args:
        total_steps: the step at which the run ends, with an evaluation.
        eval_every: steps from one evaluation to the next (--eval-every); 0: none before the last.
    """

    def __init__(self, total_steps: int, eval_every: int = 0):
        self.total_steps, self._eval_every = total_steps, eval_every
        self.step = -1
        self.rewards: list[float] = []
        self.evals: list[tuple[int, Metrics]] = []
        self.rollouts = 0
        self.seconds = 0.0
        self._wasted = 0.0
        self._eval_s = self._newest_eval_s = 0.0
        self._intervals: deque[float] = deque(maxlen=20)
        self._last_time = self._start_time = time.monotonic()

    def add(self, metrics: Metrics) -> None:
        """Take in one step's line (plain values, ``step`` among them)."""
        self.step = metrics["step"]
        rollouts = metrics.get("budget/rollouts") or 0
        self.rollouts += rollouts
        self._wasted += rollouts * (metrics.get("signal/frac_wasted_rollouts") or 0.0)
        self.seconds += sum(metrics.get(f"time/{phase}_s") or 0.0 for phase in ("step", "eval", "checkpoint"))
        if metrics.get("reward/mean") is not None:
            self.rewards.append(metrics["reward/mean"])
        scores = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
        if scores:
            self.evals.append((self.step, scores))
        self._eval_s = metrics.get("time/eval_s") or 0.0
        self._newest_eval_s = self._eval_s or self._newest_eval_s

    def restart_clock(self) -> None:
        """Time left is told from this process's steps alone, and from the newest evaluation of any process."""
        self._last_time = self._start_time = time.monotonic()
        self._intervals.clear()

    def tick(self, trained: bool = True) -> None:
        """The line that was added last was logged just now; the time since the one before is a step's and its evaluation's
        unless nothing was ``trained``."""
        now = time.monotonic()
        if trained:
            self._intervals.append(max(now - self._last_time - self._eval_s, 0.0))
        self._last_time = now

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_time

    @property
    def left_s(self) -> float | None:
        """Seconds to the end of the last evaluation, at the pace of the last 20 steps and of the newest evaluation; what is
        under way counts. None before the first step."""
        if not self._intervals:
            return None
        pace = sum(self._intervals) / len(self._intervals)
        gone = min(time.monotonic() - self._last_time, pace + self._newest_eval_s * self._num_evals(self.step + 1))
        steps = (self.total_steps - self.step) * pace
        return max(steps + self._num_evals(self.total_steps) * self._newest_eval_s - gone, 0.0)

    def _num_evals(self, last: int) -> int:
        """Evaluations after steps that are still to come, up to step ``last``."""
        every = self._eval_every or self.total_steps + 1
        at_end = self.step < self.total_steps == last and last % every > 0
        return max(last // every - max(self.step, 0) // every, 0) + at_end

    @property
    def wasted(self) -> float | None:
        """Share of all rollouts so far that were in groups without signal."""
        return self._wasted / self.rollouts if self.rollouts else None

    def score_names(self) -> list[str]:
        """mean@k, pass@k, maj@k as far as the newest evaluation has numbers for them."""
        newest = self.evals[-1][1] if self.evals else {}
        return [name for name in sorted(newest, key=_score_order) if "@" in name and newest[name] is not None]

    def course(self, name: str) -> list[float]:
        """A score's values over the evaluations so far."""
        return [scores[name] for _, scores in self.evals if scores.get(name) is not None]


def trend(values: list[float], width: int, least_span: float = 0.05) -> str:
    """A sparkline of at most ``width`` characters over all values (bucket means); a span under ``least_span`` looks flat.

    Example: trend([0, .5, 1], 3) == "▁▅█".
    """
    if not values:
        return ""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, span = min(means), max(max(means) - min(means), least_span)
    return "".join(_CELLS[min(int((mean - low) / span * len(_CELLS)), len(_CELLS) - 1)] for mean in means)


def clock(seconds: float | None) -> str:
    """75 -> "1:15", 3700 -> "1:01:40"."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def change(values: list[float]) -> str:
    """First and last of a course with the difference: "0.270 → 0.412 (+0.142)"."""
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else "–"
    return f"{values[0]:.3f} → {values[-1]:.3f} ({values[-1] - values[0]:+.3f})"


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def printable(text: str, limit: int) -> str:
    """A sampled text on one line, cut to ``limit`` characters; control bytes, which could steer a terminal, become "·"."""
    shown = "".join(letter if letter.isprintable() else "⏎" if letter == "\n" else "·" for letter in text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _score_order(name: str) -> tuple[int, str]:
    kinds = ("mean", "pass", "maj")
    kind = name.split("@")[0]
    return (kinds.index(kind) if kind in kinds else len(kinds), name)
