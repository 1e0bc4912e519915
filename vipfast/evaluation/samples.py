"""``OUT/samples.jsonl``: a line per sample, task by task, prompt by prompt, written in chunks, read again to go on."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vipfast.checkpoint import is_full_disk
from vipfast.engine.base import ToolUse
from vipfast.errors import CheckpointError, UsageError
from vipfast.types import Finish

FINISHES = tuple(finish.name.lower() for finish in Finish)
KEYS = ("task", "uid", "index", "reward", "answer", "finish", "tokens", "text")
"""Of a line; where there are tools and the rollout was not lost, "tools" too."""

USE = ("turns", "calls", "errors", "found")
"""Of "tools": all of ``ToolUse`` but the seconds, in which no two evaluations are alike."""


class Sample(NamedTuple):
    """What is remembered of a line; its text stays on the disk. ``reward`` None: unscored; ``answer`` None: none extracted;
    ``use`` None: no tools, or lost."""

    reward: float | None
    answer: str | None
    finish: str
    tokens: int
    use: ToolUse | None = None


class Samples:
    """The file, held by one evaluation at a time.

    Args:
        path: the file; made if absent.
        chunks: what it will hold, in order: a list of (task, uid) per chunk, ``num_samples`` lines for each.

    Attributes: ``rows``, Samples read or appended, in order; ``num_chunks``, how many chunks are there.

    Raises:
        UsageError: another evaluation is writing it, or a line is not the one that belongs there.
    """

    def __init__(self, path: Path, chunks: Sequence[Sequence[tuple[str, str]]], num_samples: int):
        self.path, self.rows, self.num_chunks = path, [], 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _lock(self._file, path)
            # What does not fill its chunk is cut off, so that every chunk is sampled in the same company as without a kill.
            os.truncate(self._file, self._read(chunks, num_samples))
        except UsageError:
            self.close()
            raise

    def _read(self, chunks: Sequence[Sequence[tuple[str, str]]], num_samples: int) -> int:
        """Take in the whole chunks there are; returns where they end (bytes)."""
        end = 0
        with open(self.path, "rb") as file:
            lines = enumerate(file, 1)
            for chunk in chunks:
                rows, size = [], 0
                for task, uid in chunk:
                    for index in range(num_samples):
                        number, line = next(lines, (0, b""))
                        if not line.endswith(b"\n"):  # torn, or the end
                            return end
                        rows.append(self._parsed(line, number, (task, uid, index)))
                        size += len(line)
                self.rows += rows
                self.num_chunks += 1
                end += size
            extra = next(lines, None)
        if extra and extra[1].endswith(b"\n"):
            raise self._damaged(extra[0], "nothing more belongs to this evaluation")
        return end

    def append(self, rows: Sequence[dict]) -> None:
        """Write a chunk's lines (keys of KEYS, and "tools" where there are tools).

        Raises:
            CheckpointError: the disk is full; what was there before can be gone on with.
        """
        data = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            if not is_full_disk(error):
                raise
            raise CheckpointError(
                f"--output-dir {self.path.parent}: the disk is full, so the newest samples were not kept ({error}); free some "
                "space, then start the same command again to go on"
            ) from error
        self.rows += map(_sample, rows)
        self.num_chunks += 1

    def close(self) -> None:
        """Give the file back, lock and all."""
        os.close(self._file)

    def _parsed(self, line: bytes, number: int, wanted: tuple[str, str, int]) -> Sample:
        try:
            row = json.loads(line, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise self._damaged(number, "it is no JSON") from error
        if not isinstance(row, dict) or row.keys() - {"tools"} != set(KEYS):
            raise self._damaged(number, f"it is no object with the keys {', '.join(KEYS)}")
        found = (row["task"], row["uid"], row["index"])
        if found != wanted or type(row["index"]) is not int:
            raise self._damaged(number, f"sample {wanted[2]} of prompt {wanted[1]} of {wanted[0]} belongs there")
        if not all(_well_formed(row)):
            raise self._damaged(number, "a value is of the wrong kind")
        return _sample(row)

    def _damaged(self, number: int, why: str) -> UsageError:
        return UsageError(
            f"--output-dir {self.path.parent}: line {number} of {self.path.name} is damaged: {why}. Delete the file from that "
            "line on to sample the rest anew, or give another folder"
        )


def _sample(row: dict) -> Sample:
    use = None
    if tools := row.get("tools"):
        use = ToolUse(tools["turns"], tools["calls"], tools["errors"], found=tuple(tools["found"]))
    return Sample(row["reward"], row["answer"], row["finish"], row["tokens"], use)


def _well_formed(row: dict) -> Iterator[bool]:
    reward = row["reward"]
    yield reward is None or type(reward) is float and math.isfinite(reward)
    yield isinstance(row["answer"], str | None)
    yield row["finish"] in FINISHES
    yield _is_count(row["tokens"])
    yield isinstance(row["text"], str)
    if "tools" in row:
        use = row["tools"]
        yield isinstance(use, dict) and use.keys() == set(USE)
        yield all(_is_count(use[name]) for name in USE[:3])
        yield isinstance(use["found"], list) and all(isinstance(id, str) for id in use["found"])


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _lock(file: int, path: Path) -> None:
    """Of two evaluations in one folder the second is refused; the kernel drops a dead one's lock."""
    import fcntl  # not on Windows, where nothing else of this runs either, but --help does

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"--output-dir {path.parent}: another evaluation is writing there; wait for it, or give another folder"
        ) from error
