"""What rollouts did with tools, as numbers a row, and what a step's rows say together."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from vipfast.engine.base import ToolUse

RETRIEVAL = ("precision", "recall", "f1")

COLUMNS = np.dtype(
    [("turns", "i8"), ("calls", "i8"), ("errors", "i8"), ("seconds", "f8"), *((name, "f8") for name in RETRIEVAL)]
)
"""A row: ``turns`` is 0 for a rollout without tools (an engine error); those of RETRIEVAL are NaN where they mean nothing."""

GOLD_FIELDS = ("gold_ids", "supporting")
"""Metadata that names the passages that hold the answer."""


class Used(Protocol):
    """A rollout, as far as its tools go; ``use`` None: it had none, or was lost."""

    use: ToolUse | None


def columns_of(rows: Sequence[Used], metadata: Sequence[dict]) -> np.ndarray:
    """COLUMNS [n] of n rollouts and their problems' metadata."""
    columns = np.zeros(len(rows), COLUMNS)
    for name in RETRIEVAL:
        columns[name] = np.nan
    for i, (row, about) in enumerate(zip(rows, metadata)):
        if row.use is not None:
            use = row.use
            columns[i] = use.turns, use.calls, use.errors, use.seconds, *retrieved(use.found, about)
    return columns


def retrieved(found: Sequence[str], metadata: dict) -> tuple[float, float, float]:
    """Of the passages found, over all searches of a rollout: the share that is the problem's own, the share of the problem's
    own that is among them, and the harmonic mean of both; NaN if none was found or the metadata names none."""
    gold = next((about for name in GOLD_FIELDS if isinstance(about := metadata.get(name), list | tuple) and about), ())
    if not found or not gold:
        return np.nan, np.nan, np.nan
    own = set(map(str, gold))
    precision, recall = sum(id in own for id in found) / len(found), len(own & set(found)) / len(own)
    return precision, recall, 2 * precision * recall / (precision + recall) if recall else 0.0


def metrics_of(columns: np.ndarray | None, search_k: int) -> dict[str, float | None]:
    """The step's tools/* and time/tools_s, where a search returns ``search_k`` passages; nothing without tools."""
    if columns is None:
        return {}
    with_tools = columns[columns["turns"] > 0]
    num_calls, searched = int(with_tools["calls"].sum()), with_tools[~np.isnan(with_tools["precision"])]
    return {
        "tools/turns_mean": float(with_tools["turns"].mean()),
        "tools/calls_mean": float(with_tools["calls"].mean()),
        "tools/errors_frac": int(with_tools["errors"].sum()) / num_calls if num_calls else None,
        **{f"tools/{name}@{search_k}": float(searched[name].mean()) if len(searched) else None for name in RETRIEVAL},
        "time/tools_s": float(with_tools["seconds"].sum()),
    }
