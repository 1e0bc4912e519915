"""What every benchmark shares: a table for people, and a row in results.csv with device, versions and commit."""

import csv
import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = Path(os.environ.get("VIPFAST_RESULTS", HERE / "results.csv"))
"""VIPFAST_RESULTS names another file, where the checkout has to stay as it is."""
# A script's folder leads sys.path, where kernels.py would be taken for the PyPI package that transformers loads by that name.
sys.path.sort(key=lambda path: Path(path or ".").resolve() == HERE)
COLUMNS = ("date", "benchmark", "device", "versions", "commit", "result")


def print_table(title: str, rows: list[tuple]) -> None:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    print(title)
    for row in rows:
        cells = [str(row[0]).ljust(widths[0]), *(str(cell).rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        print("  " + "  ".join(cells))


def append_results(benchmark: str, result: dict, *, smoke: bool) -> None:
    """Append one row to results.csv; a --smoke run measures nothing and is not kept."""
    if smoke:
        return
    versions = " ".join(f"{name}={_version(name)}" for name in ("torch", "transformers", "numpy", "triton"))
    row = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "benchmark": benchmark,
        "device": _device(),
        "versions": versions,
        "commit": _commit(),
        "result": json.dumps(result),
    }
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(row)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    git = lambda *args: subprocess.run(("git", *args), cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()  # noqa: E731
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "..", f":!{RESULTS.name}")
    return (git("describe", "--always") or "unknown") + ("-dirty" if changed else "")


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"
