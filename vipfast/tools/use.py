"""What rollouts did with tools, as numbers a row, and what a step's rows say together."""

from collections.abc import Sequence

import numpy as np

from vipfast.engine.base import Finished

COLUMNS = np.dtype([("turns", "i8"), ("calls", "i8"), ("errors", "i8"), ("seconds", "f8"), ("precision", "f8")])
"""A row: ``turns`` is 0 for a rollout without tools (an engine error); ``precision`` is NaN where it means nothing."""

GOLD_FIELDS = ("gold_ids", "supporting")
"""Metadata that names the passages that hold the answer."""


def columns_of(rows: Sequence[Finished], metadata: Sequence[dict]) -> np.ndarray:
    """COLUMNS [n] of n rollouts and their problems' metadata."""
    columns = np.zeros(len(rows), COLUMNS)
    columns["precision"] = np.nan
    for i, (row, about) in enumerate(zip(rows, metadata)):
        if row.use is not None:
            use = row.use
            columns[i] = use.turns, use.calls, use.errors, use.seconds, precision(use.found, about)
    return columns


def precision(found: Sequence[str], metadata: dict) -> float:
    """Share of the passages found, over all searches of a rollout, that are the problem's own; NaN if none was found or the
    metadata names none."""
    gold = next((about for name in GOLD_FIELDS if isinstance(about := metadata.get(name), list | tuple) and about), ())
    if not found or not gold:
        return np.nan
    own = set(map(str, gold))
    return sum(id in own for id in found) / len(found)


def metrics_of(columns: np.ndarray | None, search_k: int) -> dict[str, float | None]:
    """The step's tools/* and time/tools_s, where a search returns ``search_k`` passages; nothing without tools."""
    if columns is None:
        return {}
    with_tools = columns[columns["turns"] > 0]
    num_calls, precision = int(with_tools["calls"].sum()), with_tools["precision"][~np.isnan(with_tools["precision"])]
    return {
        "tools/turns_mean": float(with_tools["turns"].mean()),
        "tools/calls_mean": float(with_tools["calls"].mean()),
        "tools/errors_frac": int(with_tools["errors"].sum()) / num_calls if num_calls else None,
        f"tools/precision@{search_k}": float(precision.mean()) if len(precision) else None,
        "time/tools_s": float(with_tools["seconds"].sum()),
    }
