"""The default run as a user starts it: seconds to the first step, per phase, rollouts/s and peak memory.

    python benchmarks/step.py [--allocator vigor] [--smoke]

Every figure is read from the run's own metrics.jsonl, except the wall times, which are taken from outside the process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import append_results, print_table

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("allocate", "generate", "reward", "logprob", "update", "sync", "eval", "checkpoint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--allocator", default="vigor", choices=("uniform", "vip", "vigor"))
    parser.add_argument("--smoke", action="store_true", help="three steps of eight prompts")
    args = parser.parse_args()
    small = "--steps 3 --prompts-per-step 8 --heldout-prompts 16".split() if args.smoke else []
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        first_step_s, run_s = timed_run(["--allocator", args.allocator, "--output-dir", str(run_dir), *small], run_dir)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    seconds = {phase: sum(line.get(f"time/{phase}_s") or 0.0 for line in lines) for phase in PHASES}
    step_s = sum(line["time/step_s"] for line in steps)
    result = {
        "first_step_s": round(first_step_s, 2),
        "run_s": round(run_s, 2),
        "alloc_share": round(seconds["allocate"] / step_s, 4),
        "peak_mb": round(max(line["memory/peak_bytes"] for line in lines) / 1e6, 1),
        "rollouts_per_s": round(sum(line["budget/rollouts"] for line in steps) / step_s, 1),
        "padding_share": round(sum(line["train/padding_share"] or 0.0 for line in steps) / len(steps), 3),
        "allocator": args.allocator,
    }
    print_table("seconds per phase", [(phase, f"{s:.2f}", f"{s / run_s:.1%}") for phase, s in seconds.items()])
    append_results("step.py", result, smoke=args.smoke)
    print(json.dumps(result))


def timed_run(flags: list[str], run_dir: Path) -> tuple[float, float]:
    """Start scripts/train.py; returns seconds from the command to the first training step's line, and to its end."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, str(ROOT / "scripts" / "train.py"), *flags], stdout=subprocess.DEVNULL)
    first_step_s = None
    while process.poll() is None:
        time.sleep(0.05)
        if first_step_s is None and '"step": 1,' in _text(run_dir / "metrics.jsonl"):
            first_step_s = time.perf_counter() - start
    if process.returncode != 0:
        raise SystemExit(f"scripts/train.py exited with {process.returncode}")
    return first_step_s if first_step_s is not None else time.perf_counter() - start, time.perf_counter() - start


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    main()
