"""A sample of a step's texts with their rewards, as rows and as ``RUN/rollouts/STEP.parquet``."""

import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vipfast import atomic, streams
from vipfast.config import Config
from vipfast.distributed import Ranks
from vipfast.types import Finish, Rollouts

COLUMNS = (
    "uid", "prompt", "completion", "answer", "reward", "index", "round", "finish",
    "step", "advantage", "tokens", "n", "metadata",
)  # fmt: skip
"""Columns of the file; those after ``finish`` are absent from files of earlier versions.

``advantage`` is what the update used, 0 for rollouts that were out of it; ``tokens`` counts the completion's, ``n`` the
rollouts of its prompt in the step; ``metadata`` is JSON.
"""


def sample_rows(rollouts: Rollouts, decode: Callable[[list[int]], str], config: Config, step: int) -> list[dict]:
    """Pick ``config.sample_rollouts`` rollouts of a step by a seeded hash (nothing is drawn, so nothing of the run changes), in
    row order.

    Args:
        rollouts: the whole step.
        decode: token ids -> text.
        config: also names the seed, and the estimator of the advantages.
        step: its number from 1.

    Returns:
        one dict per rollout with the keys of COLUMNS; ``reward`` is None where unscored. Rows that other ranks hold are left
        out; ``gathered_rows`` has them all.
    """
    # torch comes with it, and readers of files need none
    from vipfast.learn.trainable import Trainable

    slots, picked = rollouts.group_R, _picked(rollouts, config, step)
    advantage_R, counts_B, lengths_R = Trainable.of(rollouts, config).advantage_R, rollouts.counts_B, rollouts.lengths_R
    rows = []
    for row in picked[rollouts.held_R[picked]]:
        prompt = rollouts.prompts[slots[row]]
        tokens = rollouts.tokens[rollouts.token_offsets[row] : rollouts.token_offsets[row + 1]]
        reward, answer = float(rollouts.reward[row]), prompt.answer
        values = (
            prompt.uid,
            prompt.text,
            decode(tokens.tolist()),
            answer if isinstance(answer, str | None) else _json(answer),
            None if math.isnan(reward) else reward,
            int(rollouts.index[row]),
            int(rollouts.round[row]),
            Finish(int(rollouts.finish[row])).name.lower(),
            step,
            float(advantage_R[row]),
            int(lengths_R[row]),
            int(counts_B[slots[row]]),
            _json(prompt.metadata),
        )
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def gathered_rows(
    rollouts: Rollouts, decode: Callable[[list[int]], str], config: Config, step: int, ranks: Ranks
) -> list[dict]:
    """``sample_rows`` over all ranks: those of a process that holds every row."""
    own = sample_rows(rollouts, decode, config, step)
    if rollouts.holder_R is None:
        return own
    parts = [iter(part) for part in ranks.gather(own)]
    return [next(parts[rank]) for rank in rollouts.holder_R[_picked(rollouts, config, step)]]


def _picked(rollouts: Rollouts, config: Config, step: int) -> np.ndarray:
    """The rows of the sample, ascending."""
    if config.sample_rollouts == "all":
        return np.arange(rollouts.num_rollouts)
    uids = np.array([streams.uid_hash(prompt.uid) for prompt in rollouts.prompts], np.uint64)[rollouts.group_R]
    order = np.argsort(streams.keys(streams.ORDER, config.seed, step, uids, rollouts.index), kind="stable")
    return np.sort(order[: config.sample_rollouts])


def write_samples(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows (keys of COLUMNS) as one parquet file, complete or absent (a power cut apart: it is not fsynced)."""
    import pyarrow
    from pyarrow import parquet

    text, number = pyarrow.string(), pyarrow.int64()
    kinds = (text, text, text, text, pyarrow.float32(), number, number, text, number, pyarrow.float64(), number, number, text)
    schema = pyarrow.schema(list(zip(COLUMNS, kinds, strict=True)))
    table = pyarrow.Table.from_pylist([{name: _utf8(row[name]) for name in COLUMNS} for row in rows], schema=schema)
    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_file(path, buffer.getvalue(), durable=False)


def _json(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _utf8(value: Any) -> Any:
    """Half a surrogate pair, which a sampled text may hold, cannot be stored: it becomes "?"."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
