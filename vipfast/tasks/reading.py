"""Rows of a dataset, one at a time: .parquet, .jsonl, .json and .csv files, folders of them, and the hub.

Rows come as an iterator, so that of a file with a million copies only the distinct ones are ever held together.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vipfast.config import Config
from vipfast.errors import DataError

LONGEST_CSV_FIELD = 2**31 - 1
ROWS_AT_ONCE = 4096
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
SPLITS = frozenset("train training test testing validation valid val dev eval".split())
"""Words by which files and folders of a dataset are told to be one of its splits."""

_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "state.json")
"""What the datasets library puts beside the files it saves."""


def rows_of(config: Config, notes: list[str]) -> Iterator[dict]:
    """The rows of ``config.task``; ``notes`` gets a sentence about files or hub configurations that were left out.

    Raises:
        DataError: nothing there, a format that is not known, or, once the rows are drawn, a row that cannot be read.
    """
    path = Path(config.task).expanduser()
    if path.is_dir():
        return _folder(path, config, notes)
    if path.suffix in READERS:
        if not path.is_file():
            raise DataError(f"--task {config.task}: no such file")
        return _file(path)
    if path.exists() or not HUB_ID.fullmatch(config.task):
        known = ", ".join(READERS)
        raise DataError(
            f"--task {config.task}: give 'arithmetic', a file that ends in {known}, a folder of such files, a hub id like "
            "openai/gsm8k, or reasoning_gym:NAME"
        )
    return _hub(config, notes)


def _folder(folder: Path, config: Config, notes: list[str]) -> Iterator[dict]:
    """The files of a folder in the order of their names: those of --task-split, or all of them where none names a split."""
    found = sorted(file for file in folder.rglob("*") if file.suffix in READERS and file.name not in _NOT_DATA)
    formats = sorted({file.suffix for file in found})
    if len(formats) != 1:
        what = f"holds files of several formats ({', '.join(formats)})" if formats else f"holds no {', '.join(READERS)} file"
        raise DataError(f"--task {config.task}: the folder {what}; name a folder whose files have one format, or one file")
    split = config.task_split
    splits = [_splits(file.relative_to(folder), split) for file in found]
    files = [file for file, named in zip(found, splits) if split in named]
    if not files and (split != "train" or any(splits)):
        names = ", ".join(str(file.relative_to(folder)) for file in found[:8])
        raise DataError(
            f"--task-split {split}: no file of --task {config.task} is named after it, nor is its folder; there are {names}; "
            "give the --task-split they are named after, or a file or folder in there as --task"
        )
    files = files or found
    if len(files) < len(found):
        notes.append(f"{len(files)} of {len(found)} files read: those named after {split!r} (--task-split)")
    return (row for file in files for row in _file(file))


def _splits(path: Path, wanted: str) -> set[str]:
    """Of ``wanted`` and SPLITS those that a file is named after, or the nearest of its folders that is named after any."""
    for part in map(str.lower, reversed(path.parts)):
        words = set(re.findall("[a-z]+", part))
        named = words & SPLITS - {wanted}
        if part.startswith(wanted.lower()) or wanted.lower() in words:
            named.add(wanted)
        if named:
            return named
    return set()


def _file(path: Path) -> Iterator[dict]:
    try:
        yield from READERS[path.suffix](path)
    except UnicodeDecodeError as error:
        raise DataError(f"--task {path}: is not UTF-8 ({error}); convert it, e.g. with iconv -t UTF-8") from error


def _jsonl(path: Path) -> Iterator[dict]:
    with path.open(encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # beyond bad JSON: numbers of thousands of digits, endless nesting
                raise DataError(f"--task {path}: line {number} is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise DataError(f"--task {path}: line {number} is not a JSON object")
            yield row


def _json(path: Path) -> Iterable[dict]:
    """A list of objects, an object with one such list in it, or lines as in .jsonl."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if str(error).startswith("Extra data"):
            return _jsonl(path)
        raise DataError(f"--task {path}: is not JSON ({error})") from error
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 else [content]
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise DataError(f"--task {path}: is no list of JSON objects; give one object per row")
    return content


def _parquet(path: Path) -> Iterator[dict]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS_AT_ONCE):
                yield from _rows(batch, str(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"--task {path}: is not a parquet file that can be read ({error})") from error


def _csv(path: Path) -> Iterator[dict]:
    csv.field_size_limit(LONGEST_CSV_FIELD)
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            yield from csv.DictReader(file)
        except csv.Error as error:
            raise DataError(f"--task {path}: is not a CSV file ({error})") from error


def _rows(batch: Any, task: str) -> list[dict]:
    """The rows of an Arrow table or batch.

    Raises:
        DataError: times before the year 1 or after 9999, or finer than Python's.
    """
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError) as error:
        raise DataError(
            f"--task {task}: a value has no form in Python ({error}); store times as text or as timestamp[us], years 1 to 9999"
        ) from error


READERS = {".parquet": _parquet, ".jsonl": _jsonl, ".json": _json, ".csv": _csv}


def _hub(config: Config, notes: list[str]) -> Iterator[dict]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DataError(
            f"--task {config.task}: a hub dataset needs the datasets library; pip install 'vipfast[tasks]'"
        ) from error
    name, _, wanted = config.task.partition(":")
    try:
        names = datasets.get_dataset_config_names(name)
        if wanted and wanted not in names:
            raise DataError(f"--task {config.task}: there is no configuration {wanted!r}; {name} has {', '.join(names)}")
        chosen = wanted or ("main" if "main" in names else names[0])
        found = datasets.load_dataset(name, chosen, split=config.task_split)
    except (datasets.exceptions.DatasetsError, OSError, RuntimeError) as error:
        raise _unloadable(config, error) from error
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise _unloadable(config, error) from error
    if len(names) > 1 and not wanted:
        others = ", ".join(other for other in names if other != chosen)
        notes.append(f"configuration {chosen} of {name}; the others are {others} (--task {name}:CONFIG)")
    return (row for batch in found.with_format("arrow").iter(ROWS_AT_ONCE) for row in _rows(batch, name))


def _unloadable(config: Config, error: Exception) -> DataError:
    first = str(error).strip().split("\n")[0] or type(error).__name__
    return DataError(
        f"--task {config.task}: the datasets library cannot load it, split {config.task_split!r} ({first}); check name and "
        "--task-split, or download a file and give its path"
    )
