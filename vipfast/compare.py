"""Allocators against each other on the same configuration and seeds: score, cost and waste of each run, ratios to uniform.

``vipfast compare --seeds 0 1 2 -- --steps 60``
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from vipfast.errors import UsageError

ALLOCATORS = ("uniform", "vip", "vigor")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, or 2 where a run could not be made."""
    parser = argparse.ArgumentParser(prog="vipfast compare", description="Train every allocator on the same seeds and compare.")
    parser.add_argument("--allocators", nargs="+", default=ALLOCATORS, choices=ALLOCATORS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output-dir", default=None, help="keep the runs in this folder")
    parser.add_argument("flags", nargs="*", help="after --, options of vipfast train for every run")
    args = parser.parse_args(argv)
    folder = Path(args.output_dir or tempfile.mkdtemp(prefix="vipfast-compare-"))
    try:
        outcomes = [run(allocator, seed, folder, args.flags) for seed in args.seeds for allocator in args.allocators]
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(show(outcomes)))
    return 0


@dataclass(frozen=True)
class Outcome:
    """One finished run. ``curve``: (rollouts so far, seconds of steps so far, held-out mean@k) at every evaluation."""

    allocator: str
    seed: int
    rollouts: int
    seconds: float  # of the whole process
    wasted: float  # mean signal/frac_wasted_rollouts
    curve: list[tuple[int, float, float]]

    @property
    def start(self) -> float:
        return self.curve[0][2]

    @property
    def end(self) -> float:
        return self.curve[-1][2]

    def cost_at(self, score: float, column: int) -> float:
        """Rollouts (column 0) or seconds (1) at which the curve first reaches ``score``, between evaluations by a line."""
        for before, after in zip(self.curve, self.curve[1:]):
            if after[2] >= score:
                share = 0.0 if after[2] == before[2] else max(0.0, (score - before[2]) / (after[2] - before[2]))
                return before[column] + share * (after[column] - before[column])
        return float("nan")


def run(allocator: str, seed: int, folder: Path, flags: Sequence[str]) -> Outcome:
    """Train once in a process of its own, with ``flags`` passed on to ``vipfast train``.

    Raises:
        UsageError: the run ended with an exit code other than 0.
    """
    run_dir = folder / f"{allocator}-s{seed}"
    train = [sys.executable, "-m", "vipfast", "train"]
    command = [*train, "--allocator", allocator, "--seed", str(seed), "--output-dir", str(run_dir), *flags]
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise UsageError(f"{' '.join(command)}\nexited with {done.returncode}: {done.stderr.strip()}")
    return read(run_dir, allocator, seed, time.perf_counter() - start)


def read(run_dir: Path, allocator: str, seed: int, seconds: float) -> Outcome:
    """An Outcome from a run's metrics.jsonl."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    score = next(name for name in lines[0] if name.startswith("eval/mean@"))
    clock = np.cumsum([line.get("time/step_s", 0.0) for line in lines])
    curve = [
        (line["budget/rollouts_cum"], float(t), line[score]) for line, t in zip(lines, clock) if line.get(score) is not None
    ]
    wasted = [line["signal/frac_wasted_rollouts"] for line in lines if line["step"] > 0]
    return Outcome(allocator, seed, lines[-1]["budget/rollouts_cum"], seconds, float(np.mean(wasted)), curve)


def ratios(outcomes: Sequence[Outcome], column: int) -> dict[str, list[float]]:
    """Per allocator [mean, lowest, highest over seeds] of its cost over uniform's, to the lower of the two final scores.

    ``column`` 0 counts rollouts, 1 seconds of training steps; below 1 is cheaper than uniform.
    """
    uniform = {outcome.seed: outcome for outcome in outcomes if outcome.allocator == "uniform"}
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        if outcome.allocator != "uniform" and outcome.seed in uniform:
            other = uniform[outcome.seed]
            score = min(outcome.end, other.end)
            found.setdefault(outcome.allocator, []).append(outcome.cost_at(score, column) / other.cost_at(score, column))
    return {name: [round(float(f(values)), 3) for f in (np.mean, np.min, np.max)] for name, values in found.items()}


def show(outcomes: Sequence[Outcome]) -> dict:
    """Print the table for people; returns the object for tools (the last line of stdout)."""
    table = Table(box=box.MARKDOWN)
    for name in ("allocator", "seed", "rollouts", "seconds", "held-out start", "end", "gain", "wasted share"):
        table.add_column(name, justify="left" if name == "allocator" else "right")
    for o in outcomes:
        gain = f"{100 * (o.end - o.start):+.1f}"
        row = (o.allocator, o.seed, o.rollouts, f"{o.seconds:.0f}", f"{o.start:.3f}", f"{o.end:.3f}", gain, f"{o.wasted:.3f}")
        table.add_row(*map(str, row))
    Console(width=120).print(table)
    rollouts, seconds = ratios(outcomes, 0), ratios(outcomes, 1)
    return {
        "ends": {o.allocator: [round(p.end, 4) for p in outcomes if p.allocator == o.allocator] for o in outcomes},
        "rollouts_ratio": rollouts,
        "seconds_ratio": seconds,
    }
