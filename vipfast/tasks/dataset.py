"""Prompts from a .jsonl, .parquet or .csv file, or from the hub through the ``datasets`` library."""

import csv
import json
import math
from pathlib import Path
from typing import Any

from vipfast.config import Config
from vipfast.errors import DataError
from vipfast.tasks.base import Record

PROMPT_FIELDS = ("prompt", "question", "problem")
ANSWER_FIELDS = ("reward_model.ground_truth", "answer", "ground_truth", "solution")
"""Columns tried in this order when --prompt-field / --answer-field are not given (DAPO-Math-17k, GSM8K and MATH layouts)."""


LONGEST_CSV_FIELD = 2**31 - 1


def load_records(config: Config, notes: list[str]) -> list[Record]:
    """Read the rows of ``config.task``.

    Answers become text by one rule: numbers and strings as written, lists as JSON; rows without a prompt or an answer (null or
    NaN) are left out, and ``notes`` gets a sentence that counts them.

    Raises:
        DataError: file not found or not readable, unknown format, missing column, or no rows.
    """
    rows = _read(config)
    if not rows:
        raise DataError(f"--task {config.task}: holds no rows")
    prompt_field = _field("--prompt-field", config.prompt_field, PROMPT_FIELDS, rows)
    answer_field = _field("--answer-field", config.answer_field, ANSWER_FIELDS, rows)
    records = []
    for row in rows:
        prompt, answer = _get(row, prompt_field), _get(row, answer_field)
        if prompt is not None and answer is not None:
            messages = isinstance(prompt, list) and all(isinstance(part, dict) and "content" in part for part in prompt)
            records.append(Record(prompt if messages else _as_text(prompt), _as_text(answer)))
    if not records:
        raise DataError(f"--task {config.task}: no row has both {prompt_field!r} and {answer_field!r}")
    if num_left_out := len(rows) - len(records):
        notes.append(f"{num_left_out} of {len(rows)} rows left out: no {prompt_field} or no {answer_field}")
    return records


def _read(config: Config) -> list[dict]:
    path = Path(config.task)
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".csv": _read_csv}
    if path.suffix in readers:
        if not path.is_file():
            raise DataError(f"--task {config.task}: no such file")
        try:
            return readers[path.suffix](path)
        except UnicodeDecodeError as error:
            raise DataError(f"--task {path}: is not UTF-8 ({error}); convert it, e.g. with iconv -t UTF-8") from error
    if path.exists() or config.task.count("/") != 1:
        known = ", ".join(readers)
        raise DataError(f"--task {config.task}: give 'arithmetic', a file that ends in {known}, or a hub id like openai/gsm8k")
    return _read_hub(config)


def _read_jsonl(path: Path) -> list[dict]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(f"--task {path}: line {number} is not JSON ({error})") from error
            if not isinstance(rows[-1], dict):
                raise DataError(f"--task {path}: line {number} is not a JSON object")
    return rows


def _read_parquet(path: Path) -> list[dict]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"--task {path}: is not a parquet file ({error})") from error


def _read_csv(path: Path) -> list[dict]:
    csv.field_size_limit(LONGEST_CSV_FIELD)
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            return list(csv.DictReader(file))
        except csv.Error as error:
            raise DataError(f"--task {path}: is not a CSV file ({error})") from error


def _read_hub(config: Config) -> list[dict]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DataError(
            f"--task {config.task}: a hub dataset needs the datasets library; pip install 'vipfast[gpu]'"
        ) from error
    names = datasets.get_dataset_config_names(config.task)
    return list(datasets.load_dataset(config.task, "main" if "main" in names else names[0], split=config.task_split))


def _field(option: str, given: str | None, known: tuple[str, ...], rows: list[dict]) -> str:
    for name in (given,) if given else known:
        if any(_get(row, name) is not None for row in rows):
            return name
    columns = ", ".join(sorted({str(column) for row in rows for column in row}))
    if given:
        raise DataError(f"{option} {given}: no row has such a column; the columns are {columns}")
    raise DataError(f"{option}: none of {', '.join(known)} is a column of the dataset; name one of {columns} with {option}")


def _get(row: dict, field: str) -> Any:
    value: Any = row
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return None if isinstance(value, float) and math.isnan(value) else value


def _as_text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
