"""A sample of a step's texts with their rewards, as rows and as ``RUN/rollouts/STEP.parquet``."""

import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vipfast import atomic, streams
from vipfast.distributed import Ranks
from vipfast.types import Finish, Rollouts

COLUMNS = ("uid", "prompt", "completion", "answer", "reward", "index", "round", "finish")


def sample_rows(rollouts: Rollouts, decode: Callable[[list[int]], str], count: int, seed: int, step: int) -> list[dict]:
    """Pick ``count`` rollouts of a step by a seeded hash (nothing is drawn, so nothing of the run changes), in row order.

    Args:
        rollouts: the whole step.
        decode: token ids -> text.

    Returns:
        one dict per rollout with the keys of COLUMNS; ``reward`` is None where unscored. Rows that other ranks hold are left
        out; ``gathered_rows`` has them all.
    """
    slots, picked = rollouts.group_R, _picked(rollouts, count, seed, step)
    rows = []
    for row in picked[rollouts.held_R[picked]]:
        prompt = rollouts.prompts[slots[row]]
        tokens = rollouts.tokens[rollouts.token_offsets[row] : rollouts.token_offsets[row + 1]]
        reward, answer = float(rollouts.reward[row]), prompt.answer
        values = (
            prompt.uid,
            prompt.text,
            decode(tokens.tolist()),
            answer if isinstance(answer, str | None) else json.dumps(answer, default=str, ensure_ascii=False),
            None if math.isnan(reward) else reward,
            int(rollouts.index[row]),
            int(rollouts.round[row]),
            Finish(int(rollouts.finish[row])).name.lower(),
        )
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def gathered_rows(
    rollouts: Rollouts, decode: Callable[[list[int]], str], count: int, seed: int, step: int, ranks: Ranks
) -> list[dict]:
    """``sample_rows`` over all ranks: those of a process that holds every row."""
    own = sample_rows(rollouts, decode, count, seed, step)
    if rollouts.holder_R is None:
        return own
    parts = [iter(part) for part in ranks.gather(own)]
    return [next(parts[rank]) for rank in rollouts.holder_R[_picked(rollouts, count, seed, step)]]


def _picked(rollouts: Rollouts, count: int, seed: int, step: int) -> np.ndarray:
    """The rows of the sample, ascending."""
    uids = np.array([streams.uid_hash(prompt.uid) for prompt in rollouts.prompts], np.uint64)[rollouts.group_R]
    order = np.argsort(streams.keys(streams.ORDER, seed, step, uids, rollouts.index), kind="stable")
    return np.sort(order[:count])


def write_samples(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows (keys of COLUMNS) as one parquet file, complete or absent (a power cut apart: it is not fsynced)."""
    import pyarrow
    from pyarrow import parquet

    text, number = pyarrow.string(), pyarrow.int64()
    kinds = (text, text, text, text, pyarrow.float32(), number, number, text)
    schema = pyarrow.schema(list(zip(COLUMNS, kinds, strict=True)))
    table = pyarrow.Table.from_pylist([{name: _utf8(row[name]) for name in COLUMNS} for row in rows], schema=schema)
    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_file(path, buffer.getvalue(), durable=False)


def _utf8(value: Any) -> Any:
    """Half a surrogate pair, which a sampled text may hold, cannot be stored: it becomes "?"."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
