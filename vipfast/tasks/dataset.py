"""Prompts from files, folders and the hub: rows (reading.py) in a known layout (layouts.py) become distinct records."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches

from vipfast.config import Config
from vipfast.cores import counted
from vipfast.errors import DataError
from vipfast.tasks.base import Merger, Record
from vipfast.tasks.chat import NotShown
from vipfast.tasks.layouts import (
    ANSWER_FIELDS,
    CODE,
    EXACT,
    LAST_TURN,
    PROMPT_FIELDS,
    Layout,
    answer_of,
    detail_columns,
    details,
    dialogue,
    formulas_graded_as_exact,
    has_pictures,
    own,
    posed,
    recognise,
)
from vipfast.tasks.programs import read_tests, wording
from vipfast.tasks.reading import rows_of
from vipfast.tasks.values import Unreadable, as_json, as_text, get, plain

SAMPLE = 1000
"""Rows by whose columns a layout is recognised."""


def load_records(config: Config, notes: list[str]) -> tuple[list[Record], str]:
    """Read the rows of ``config.task``.

    Values become text by one rule (values.py), and chats plain messages (chat.py). Rows without a prompt or an answer (null,
    NaN or empty) and those with pictures are left out, and equal rows merged, before anything is tokenised.

    Returns:
        Distinct records, and the verifier their answers want: "maths", "exact" or "code". ``notes`` gets a sentence on the
        layout, and one that counts what was left out or merged.

    Raises:
        DataError: file not found or not readable, unknown format, missing column, a value that is no text, or no rows.
    """
    rows = rows_of(config, notes)
    sample = list(itertools.islice(rows, SAMPLE))
    layout = _layout(config, sample)
    graded = "" if config.reward and "task" not in config.reward else f", graded as {layout.verifier}"
    notes.append(f"layout: {layout.name} ({layout.prompt}, {layout.answer}){graded}")
    if layout.name == "GSM8K" and layout.verifier == EXACT and graded:
        notes[-1] += " (as maths once math-verify is installed: pip install 'vipfast[tasks]')"
    if layout.verifier == EXACT and not config.reward:
        records = _records(config.task, iter(sample), layout, [], (), Counter())
        notes += formulas_graded_as_exact([record.answer for record in records])
    carried = [name for name in ("gold_ids", "supporting") if any(get(row, name) is not None for row in sample)]
    carried += [_field("--metadata-fields", name, (), sample) for name in config.metadata_fields]
    merger, counts = Merger(), Counter()
    rows = itertools.chain(sample, rows)
    records = merger.distinct(_records(config.task, rows, layout, detail_columns(sample), carried, counts))
    if not records:
        what = "a test that can be read" if layout.verifier == CODE else f"both {layout.prompt!r} and {layout.answer!r}"
        empty = [name for name in (layout.prompt, layout.answer) if name != LAST_TURN and not _filled(name, sample)]
        what += f": {empty[0]!r} is a column but empty" if empty else ""
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
    if Config.heldout_prompts != config.heldout_prompts > len(records) // 10:
        notes.append(f"of --heldout-prompts {config.heldout_prompts} there are {len(records) // 10}, a tenth of the problems")
    return records, layout.verifier


def check_layout(config: Config) -> None:
    """Raise the DataError of ``load_records`` that its first rows are enough for: nothing there, or no usable columns."""
    _layout(config, list(itertools.islice(rows_of(config, []), SAMPLE)))


def _layout(config: Config, sample: Sequence[dict]) -> Layout:
    if not sample:
        raise DataError(f"--task {config.task}: holds no rows")
    layout = None if config.prompt_field or config.answer_field else recognise(sample, config.task)
    return layout or _own(config, sample)


def _records(
    task: str, rows: Iterator[dict], layout: Layout, columns: list, carried: Sequence[str], counts: Counter
) -> Iterator[Record]:
    for row in rows:
        counts["rows"] += 1
        place = f"--task {task}: row {counts['rows']}, column"
        try:
            record = _record(place, row, layout, counts)
        except NotShown:
            counts["pictures"] += 1
            continue
        if record is not None:
            counts["kept"] += 1
            record.metadata.update(details(row, columns))
            for name in carried:
                with _placed(place, name):
                    record.metadata[name.rpartition(".")[2]] = plain(get(row, name))
            yield record


@contextmanager
def _placed(place: str, column: str) -> Iterator[None]:
    """Say where a value was found that cannot be read."""
    try:
        yield
    except Unreadable as error:
        raise DataError(f"{place} {column} {error}") from error


def _record(place: str, row: dict, layout: Layout, counts: Counter) -> Record | None:
    """A row's prompt and answer, or None where one of them is missing; raises NotShown where it comes with pictures."""
    if has_pictures(row, layout):
        raise NotShown
    if layout.verifier == CODE:
        with _placed(place, layout.answer):
            return _program(row, layout, counts)
    with _placed(place, layout.prompt):
        prompt, reply = posed(row, layout)
    with _placed(place, layout.answer):
        answer = answer_of(row, layout, reply)
    return None if prompt is None or answer is None else Record(prompt, answer)


def _own(config: Config, sample: Sequence[dict]) -> Layout:
    """The columns that the options name, or the usual ones; of dialogues without an answer column the last turn."""
    prompt = _field("--prompt-field", config.prompt_field, PROMPT_FIELDS, sample)
    if not config.answer_field and not any(_filled(name, sample) for name in ANSWER_FIELDS):
        replies = []
        for number, row in enumerate(sample, 1):
            with suppress(NotShown), _placed(f"--task {config.task}: row {number}, column", prompt):
                replies.append(posed(row, own(prompt, LAST_TURN))[1])
        if found := [reply for reply in replies if reply is not None]:
            return dialogue(prompt, found)
    return own(prompt, _field("--answer-field", config.answer_field, ANSWER_FIELDS, sample, taken=prompt))


def _program(row: dict, layout: Layout, counts: Counter) -> Record | None:
    question, (tests, private_only) = row.get(layout.prompt), read_tests(row)
    if not isinstance(question, str) or not question.strip() or tests is None:
        return None
    counts["private only"] += private_only
    return Record(wording(row, question), None, tests)


def _field(option: str, given: str | None, known: tuple[str, ...], rows: Sequence[dict], taken: str | None = None) -> str:
    """The column that an option names, or the first of the known ones that holds anything.

    Args:
        option: to be told where there is no such column.
        given: its value.
        known: columns to try where none is given.
        rows: of the dataset, as many as are looked at.
        taken: a column that has another use, so that it is not proposed.

    Raises:
        DataError: there is no such column, or only empty ones.
    """
    names = (given,) if given else known
    for name in names:
        if _filled(name, rows):
            return name
    empty = {as_text(column) for row in rows for column in row if not _filled(column, rows)}
    columns = sorted({as_text(column) for row in rows for column in row} - empty - {taken})
    others = f"name one of {', '.join(columns)} with {option}" if columns else "there is no other column with anything in it"
    if exists := next((name for name in names if any(_has(row, name) for row in rows)), None):
        where = f"the first {SAMPLE} rows" if len(rows) == SAMPLE else f"all {counted(len(rows), 'row')}"
        head = f"{option} {given}: is" if given else f"{option}: {exists} is"
        raise DataError(f"{head} a column but empty in {where}; {others}")
    if given:
        close = get_close_matches(given, columns, n=1)
        guess = f"did you mean {close[0]}? " if close else ""
        raise DataError(f"{option} {given}: no row has such a column; {guess}the columns are {', '.join(columns)}")
    raise DataError(f"{option}: none of {', '.join(known)} is a column of the dataset; {others}")


def _has(row: dict, name: str) -> bool:
    """Whether a row has this column, whatever stands in it."""
    outer, _, inner = name.rpartition(".")
    holder = as_json(get(row, outer)) if outer else row
    return name in row or isinstance(holder, dict) and inner in holder


def _filled(name: str, rows: Sequence[dict]) -> bool:
    """Whether any row has something in this column; nulls, NaNs and empty texts are nothing."""
    return any(value is not None and value != "" for value in (get(row, name) for row in rows))
