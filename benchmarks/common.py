"""What every benchmark shares: a table for people, and a row in results.csv with device, versions and commit."""

import csv
import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).with_name("results.csv")
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
    versions = " ".join(f"{name}={metadata.version(name)}" for name in ("torch", "transformers", "numpy"))
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=RESULTS.parent, capture_output=True, text=True, check=False
    )
    row = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "benchmark": benchmark,
        "device": _device(),
        "versions": versions,
        "commit": git.stdout.strip() or "unknown",
        "result": json.dumps(result),
    }
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(row)


def _device() -> str:
    import os

    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"
