"""Prompts from files, folders and the hub: rows (reading.py) in a known layout (layouts.py) become distinct records."""

import itertools
from collections.abc import Iterator, Sequence

from vipfast.config import Config
from vipfast.errors import DataError
from vipfast.tasks.base import Merger, Record
from vipfast.tasks.layouts import (
    ANSWER_FIELDS,
    CODE,
    PROMPT_FIELDS,
    Layout,
    detail_columns,
    details,
    formulas_graded_as_exact,
    has_pictures,
    own,
    prompt_of,
    recognise,
)
from vipfast.tasks.programs import read_tests, wording
from vipfast.tasks.reading import rows_of
from vipfast.tasks.values import as_text, get

SAMPLE = 1000
"""Rows by whose columns a layout is recognised."""


def load_records(config: Config, notes: list[str]) -> tuple[list[Record], str]:
    """Read the rows of ``config.task``.

    Answers become text by one rule: a text stays as written, a whole float loses its ".0", everything else is written as JSON.
    Rows without a prompt or an answer (null, NaN or empty) are left out, and equal rows merged, before anything is tokenised.

    Returns:
        Distinct records, and the verifier their answers want: "maths", "exact" or "code". ``notes`` gets a sentence on the
        layout, and one that counts what was left out or merged.

    Raises:
        DataError: file not found or not readable, unknown format, missing column, or no rows.
    """
    rows = rows_of(config, notes)
    sample = list(itertools.islice(rows, SAMPLE))
    if not sample:
        raise DataError(f"--task {config.task}: holds no rows")
    layout = None if config.prompt_field or config.answer_field else recognise(sample, config.task)
    layout = layout or own(
        _field("--prompt-field", config.prompt_field, PROMPT_FIELDS, sample),
        _field("--answer-field", config.answer_field, ANSWER_FIELDS, sample),
    )
    notes.append(f"layout: {layout.name} ({layout.prompt}, {layout.answer}), graded as {layout.verifier}")
    notes += [] if config.reward else formulas_graded_as_exact(sample, layout)
    carried = [name for name in ("gold_ids", "supporting") if any(get(row, name) is not None for row in sample)]
    carried += [_field("--metadata-fields", name, (), sample) for name in config.metadata_fields]
    merger, counts = Merger(), {"rows": 0, "kept": 0, "pictures": 0, "private only": 0}
    records = merger.distinct(_records(itertools.chain(sample, rows), layout, detail_columns(sample), carried, counts))
    if not records:
        what = "a test that can be read" if layout.verifier == CODE else f"both {layout.prompt!r} and {layout.answer!r}"
        pictures = f", without pictures ({counts['pictures']} have some)" if counts["pictures"] else ""
        raise DataError(f"--task {config.task}: no row has {what}{pictures}")
    if counts["pictures"]:
        notes.append(f"{counts['pictures']} of {counts['rows']} rows left out: they come with pictures, which are not shown")
    if num_left_out := counts["rows"] - counts["kept"] - counts["pictures"]:
        wanted = "tests that can be read" if layout.verifier == CODE else layout.answer
        missing = f"no {layout.prompt} or no {wanted}"
        notes.append(f"{num_left_out} of {counts['rows']} rows left out: {missing}")
    if counts["private only"]:
        notes.append(f"{counts['private only']} rows have private tests only: every second one trains, the others evaluate")
    notes += merger.notes()
    return records, layout.verifier


def _records(
    rows: Iterator[dict], layout: Layout, columns: list, carried: Sequence[str], counts: dict[str, int]
) -> Iterator[Record]:
    for row in rows:
        counts["rows"] += 1
        if has_pictures(row, layout):
            counts["pictures"] += 1
            continue
        record = _program(row, layout, counts) if layout.verifier == CODE else _problem(row, layout)
        if record is not None:
            counts["kept"] += 1
            record.metadata.update(details(row, columns))
            record.metadata.update({name.rpartition(".")[2]: get(row, name) for name in carried})
            yield record


def _problem(row: dict, layout: Layout) -> Record | None:
    prompt, answer = prompt_of(row, layout), get(row, layout.answer)
    answer = None if answer is None else layout.final(answer)
    return None if prompt is None or answer is None else Record(prompt, answer)


def _program(row: dict, layout: Layout, counts: dict[str, int]) -> Record | None:
    question, (tests, private_only) = row.get(layout.prompt), read_tests(row)
    if not isinstance(question, str) or not question.strip() or tests is None:
        return None
    counts["private only"] += private_only
    return Record(wording(row, question), None, tests)


def _field(option: str, given: str | None, known: tuple[str, ...], rows: Sequence[dict]) -> str:
    for name in (given,) if given else known:
        if any(get(row, name) is not None for row in rows):
            return name
    columns = ", ".join(sorted({as_text(column) for row in rows for column in row}))
    if given:
        raise DataError(f"{option} {given}: no row has such a column; the columns are {columns}")
    raise DataError(f"{option}: none of {', '.join(known)} is a column of the dataset; name one of {columns} with {option}")
