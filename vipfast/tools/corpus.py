"""Passages for the search tool: .jsonl, .parquet and .txt files, one or a folder of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vipfast.errors import DataError

SUFFIXES = (".jsonl", ".parquet", ".txt")
TEXT_FIELDS = ("text", "contents", "passage")


class Passage(NamedTuple):
    id: str
    title: str
    text: str


def files(place: str) -> list[Path]:
    """The corpus's files, in order of their names.

    Raises:
        DataError: nothing of the kind is there.
    """
    path = Path(place).expanduser()
    found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    if found := [file for file in found if file.suffix in SUFFIXES]:
        return found
    kinds = f"a {'/'.join(SUFFIXES)} file, or a folder of them"
    raise DataError(f"--search-corpus {place}: no file with passages is there; give {kinds}")


def passages(paths: list[Path]) -> Iterator[Passage]:
    """Rows with ``text`` (or ``contents``, ``passage``), optionally ``id`` and ``title``; of a .txt file its paragraphs. An id
    is <file>:<number> where none is given.

    Raises:
        DataError: a file that cannot be read as what its name says.
    """
    for path in paths:
        try:
            yield from {".jsonl": _jsonl, ".parquet": _parquet, ".txt": _txt}[path.suffix](path)
        except UnicodeDecodeError as error:
            raise DataError(f"--search-corpus {path}: is not UTF-8 ({error}); convert it, e.g. with iconv -t UTF-8") from error


def _txt(path: Path) -> Iterator[Passage]:
    paragraphs = [part.strip() for part in path.read_text(encoding="utf-8-sig").split("\n\n")]
    yield from (Passage(f"{path.name}:{i}", "", text) for i, text in enumerate(filter(None, paragraphs), 1))


def _jsonl(path: Path) -> Iterator[Passage]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # beyond bad JSON: numbers of thousands of digits, endless nesting
                raise DataError(f"--search-corpus {path}: line {number} is not JSON ({error})") from error
            yield _passage(row, path, number)


def _parquet(path: Path) -> Iterator[Passage]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield _passage(row, path, number)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"--search-corpus {path}: is not a parquet file ({error})") from error


def _passage(row: object, path: Path, number: int) -> Passage:
    text = next((row[name] for name in TEXT_FIELDS if row.get(name) is not None), None) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise DataError(f"--search-corpus {path}: row {number} has no text; give each a column {' or '.join(TEXT_FIELDS)}")
    own, title = (row.get(name) for name in ("id", "title"))
    if isinstance(own, list | dict) or isinstance(title, list | dict):
        raise DataError(f"--search-corpus {path}: row {number} has a list or an object as id or title; give text or numbers")
    passage = Passage(f"{path.name}:{number}" if own is None else str(own), "" if title is None else str(title), text)
    if any(part != part.encode("utf-8", "replace").decode() for part in passage):
        raise DataError(f"--search-corpus {path}: row {number} holds half a surrogate pair, which is no text; remove it")
    return passage
