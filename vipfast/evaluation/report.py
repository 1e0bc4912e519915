"""Shows an evaluation's results as tables."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vipfast.evaluation.results import score_names
from vipfast.telemetry.history import clock, number

WIDTH, WIDE = 112, 100
"""Of what is no terminal; from which on every score of a table shows its interval."""


def show(results: dict[str, Any], took: str, folder: str, console: Console | None = None) -> None:
    """Print the scores of each task, what they are by level, and of several tasks a summary.

    Args:
        results: as ``results.results`` makes them.
        took: how the sampling went, in words.
        folder: where everything lies.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = WIDTH
    samples = results["config"]["samples"]
    for name, task in results["tasks"].items():
        _show_task(console, name, task, results["config"]["k"], samples)
    if len(results["tasks"]) > 1:
        _show_summary(console, results, samples)
    console.print(f"{took}; all of it in {folder}/", markup=False, highlight=False)


def _show_task(console: Console, name: str, task: dict, ks: list[int], samples: int) -> None:
    mean, counts = task["scores"][f"mean@{samples}"], f"{task['num_prompts']} prompts × {samples} samples"
    reward = f", reward {_cell(task['scores']['reward'])}" if "reward" in _names(task["scores"], samples) else ""
    _line(console, f"\n{name}: mean@{samples} {_cell(mean)}{reward} over {counts}")
    table = _table("k", "pass@k", "95 %", "maj@k", "95 %")
    for k in ks:
        table.add_row(str(k), *_pair(task["scores"][f"pass@{k}"]), *_pair(task["scores"][f"maj@{k}"]))
    console.print(table)
    tokens, total = task["tokens"], task["samples"]
    wrong = {"unscored": ", counted as wrong"}
    told = [
        f"{task[kind]} {kind} ({100 * task[kind] / total:.1f} %){wrong.get(kind, '')}"
        for kind in ("unscored", "truncated", "lost")
        if task[kind]
    ]
    lengths = (
        f"tokens {tokens['mean']:.1f} mean, {tokens['median']:.0f} median, {tokens['p95']:.0f} at 95 %, {tokens['max']} at most"
    )
    _line(console, "; ".join([*(told or ["none unscored, truncated or lost"]), lengths]))
    if tools := task.get("tools"):
        means = (f"{name.replace('_', ' ')} {number(value)}" for name, value in tools.items() if value is not None)
        _line(console, f"tools: {', '.join(means)}")
    for key, levels in task["by"].items():
        names = _names(task["scores"], samples)
        _show_rows(console, key, names, [(level, found["num_prompts"], found) for level, found in levels.items()])


def _show_summary(console: Console, results: dict, samples: int) -> None:
    names = _names(results["average"], samples)
    rows = [(task, found["num_prompts"], found["scores"]) for task, found in results["tasks"].items()]
    _line(console, "")
    _show_rows(console, "task", names, [*rows, ("average", "", results["average"])])


def _names(scores: dict, samples: int) -> list[str]:
    """The scores to tell; the mean reward where it is not the share of right samples."""
    names = [name for name in score_names(samples) if name in scores]
    reward, right = scores["reward"], scores[f"mean@{samples}"]
    return names if reward is None or reward["value"] != right["value"] else [name for name in names if name != "reward"]


def _show_rows(console: Console, head: str, names: list[str], rows: list[tuple[str, Any, dict]]) -> None:
    """A table of some scores; a narrow terminal has room for the first one's interval alone."""
    bounds = {name: i == 0 or console.width >= WIDE for i, name in enumerate(names)}
    table = _table(head, "prompts", *[column for name in names for column in (name, "95 %")[: 1 + bounds[name]]])
    for level, num, scores in rows:
        table.add_row(level, str(num), *[cell for name in names for cell in _pair(scores[name])[: 1 + bounds[name]]])
    console.print(table)


def took(num_new: int, num_all: int, seconds: float) -> str:
    """How the sampling went: "4096 samples in 0:04 (1,020/s)"."""
    if not num_new:
        return f"all {num_all} samples were there already"
    rest = f", {num_all - num_new} were there already" if num_new < num_all else ""
    return f"{num_new} samples in {clock(seconds)} ({number(num_new / max(seconds, 1e-9), 0)}/s){rest}"


def _table(*heads: str) -> Table:
    table = Table(box=box.MARKDOWN)
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right")
    return table


def _pair(score: dict | None) -> tuple[str, str]:
    """Value and interval of a score; dashes where it means nothing."""
    if score is None:
        return "–", "–"
    return number(score["value"]), "–" if score["low"] is None else f"{score['low']:.3f} – {score['high']:.3f}"


def _cell(score: dict | None) -> str:
    value, bounds = _pair(score)
    return value if bounds == "–" else f"{value} ({bounds})"


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
