"""Known datasets by their columns: where prompt and answer stand, and which verifier an answer of that kind wants."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vipfast.rewards.exact import boxed
from vipfast.tasks.values import as_text, get, is_messages, plain_answer

MATHS, EXACT, CODE = "maths", "exact", "code"

PROMPT_FIELDS = ("prompt", "question", "problem")
ANSWER_FIELDS = ("reward_model.ground_truth", "answer", "ground_truth", "solution")
"""Columns tried in this order where no layout fits and --prompt-field / --answer-field are not given."""

DETAILS = {
    "level": ("level", "difficulty"),
    "subject": ("subfield", "subject", "type", "domain", "ability"),
    "source": ("data_source", "source", "platform"),
    "year": ("year",),
}
"""What goes into a prompt's metadata, under which name, from the first of these columns that a row fills."""

_LEVEL = re.compile(r"Level (\d{1,3})")
_MATHS_NAMES = re.compile(r"aime|amc|math|minerva|olympiad|gaokao|dapo|cmimc|hmmt", re.IGNORECASE)


@dataclass(frozen=True)
class Layout:
    """Where a dataset keeps its problems.

    Attributes:
        name: what it is called when said.
        prompt, answer: columns; dots reach into nested ones.
        verifier: "maths", "exact" or "code".
        final: the answer as it is graded, from what stands in the column; None: the row has none.
    """

    name: str
    prompt: str
    answer: str
    verifier: str
    final: Callable[[Any], str | None] = plain_answer


def after_hashes(solution: Any) -> str | None:
    """GSM8K: what follows the last #### of a worked solution."""
    return as_text(solution).rsplit("####", 1)[-1].strip() or None


def in_last_box(solution: Any) -> str | None:
    r"""MATH: the last ``\boxed{}`` of a worked solution; a solution without one has no answer that could be graded."""
    found = boxed(as_text(solution))
    return found[-1] if found and found[-1] else None


def joined(final: Any) -> str | None:
    """OlympiadBench: a list of answers, several of which are asked for together."""
    answers = final if isinstance(final, list) else [final]
    return ", ".join(as_text(answer).strip() for answer in answers if answer is not None) or None


def recognise(sample: Sequence[dict], task: str) -> Layout | None:
    """The layout of rows of this kind, or None for one that is not known.

    Args:
        sample: the first rows.
        task: the dataset's name, which says what a mere question and answer are about.
    """
    columns = {str(column).lower(): str(column) for row in sample for column in row}

    def having(*names: str) -> str | None:
        return next((columns[name] for name in names if name in columns), None)

    problem = having("problem", "question", "prompt")
    if having("question_content") and having("public_test_cases", "private_test_cases"):
        return Layout("LiveCodeBench", columns["question_content"], "public_test_cases, private_test_cases", CODE)
    if having("prompt") and any(get(row, "reward_model.ground_truth") is not None for row in sample):
        return Layout("DAPO-Math", "prompt", "reward_model.ground_truth", MATHS)
    if problem and having("final_answer"):
        return Layout("OlympiadBench", problem, columns["final_answer"], MATHS, joined)
    answer = having("answer")
    if problem and answer:
        values = [row[answer] for row in sample if row.get(answer) is not None]
        if values and all(isinstance(value, str) and "####" in value for value in values):
            return Layout("GSM8K", problem, answer, EXACT, after_hashes)
        if having("unique_id") or (having("level") and having("subject", "type")):
            return Layout("MATH-500", problem, answer, MATHS)
        if having("id", "year", "problem_idx", "problem number", "url") and _all_numbers(values):
            return Layout("AIME or AMC", problem, answer, MATHS)
        if _MATHS_NAMES.search(Path(task).name) or having("solution"):
            return Layout("maths problem and answer", problem, answer, MATHS)
        return None
    solution = having("solution")
    if solution and problem and any(in_last_box(row.get(solution) or "") for row in sample):
        return Layout("MATH or Minerva", problem, solution, MATHS, in_last_box)
    return None


def own(prompt: str, answer: str) -> Layout:
    """Columns given by name, or the usual ones of a dataset that is not known."""
    return Layout("own fields", prompt, answer, EXACT)


def detail_columns(sample: Iterable[dict]) -> list[tuple[str, list[str]]]:
    """Which of these rows' columns tell a level, subject, source or year, in the order of preference."""
    columns = {str(column).lower(): column for row in sample for column in row}
    found = ((key, [columns[name] for name in names if name in columns]) for key, names in DETAILS.items())
    return [(key, names) for key, names in found if names]


def details(row: dict, columns: list[tuple[str, list[str]]]) -> dict[str, str | int | float | bool]:
    """Level, subject, source and year of a row, as far as it has them: the keys of tables per level. "Level 3" is 3."""
    found = {}
    for key, names in columns:
        for name in names:
            value = row.get(name)
            if not isinstance(value, str | int | float) or value != value or value == "":
                continue
            if isinstance(value, str) and (number := _LEVEL.fullmatch(value)):
                value = int(number.group(1))
            found[key] = int(value) if isinstance(value, float) and value.is_integer() else value
            break
    return found


def prompt_of(value: Any) -> str | list[dict]:
    """Chat messages as they are, everything else as text."""
    return value if is_messages(value) else as_text(value)


def _all_numbers(values: Iterable) -> bool:
    return all(re.fullmatch(r"-?\d+(\.\d+)?", as_text(value).strip()) for value in values)
