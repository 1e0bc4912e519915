"""Known datasets by their columns: where prompt and answer stand, and which verifier an answer of that kind wants."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vipfast.errors import DataError
from vipfast.rewards.extract import boxed
from vipfast.tasks.chat import is_chat, read_chat, split_reply
from vipfast.tasks.reading import READERS, SPLITS
from vipfast.tasks.values import as_json, as_text, get, plain, plain_answer

MATHS, EXACT, CODE = "maths", "exact", "code"
OWN = "own fields"

DIALOGUES = ("messages", "conversations", "conversation")
PROMPT_FIELDS = ("prompt", "question", "problem", *DIALOGUES)
ANSWER_FIELDS = ("reward_model.ground_truth", "answer", "ground_truth", "solution")
"""Columns tried in this order where no layout fits and --prompt-field / --answer-field are not given."""
LAST_TURN = "last turn of the assistant"
"""Where the answer stands in dialogues without a column for it."""

DETAILS = {
    "level": ("level", "difficulty"),
    "subject": ("subfield", "subject", "type", "domain", "ability"),
    "source": ("data_source", "source", "platform"),
    "year": ("year",),
    "contest_date": ("contest_date",),
}
"""What goes into a prompt's metadata, under which name, from the first of these columns that a row fills."""

_LEVEL = re.compile(r"Level (\d{1,3})")
_MATHS_NAMES = re.compile(r"aime|amc|math|minerva|olympiad|gaokao|dapo|cmimc|hmmt", re.IGNORECASE)
_SAYS_NOTHING = SPLITS | {suffix[1:] for suffix in READERS} | set("data main default snapshots of part shard".split())
"""Words of files and folders that tell a dataset's parts apart, and not the dataset."""

_LATEX = re.compile(r"\\[A-Za-z]{2,}|^\s*\$.*\$\s*$", re.DOTALL)
_CODE = ("code", "coding", "programming")


@dataclass(frozen=True)
class Layout:
    """Where a dataset keeps its problems.

    Attributes:
        name: what it is called when said.
        prompt, answer: columns; dots reach into nested ones. The answer may be LAST_TURN of the prompt's dialogue.
        verifier: "maths", "exact" or "code".
        final: the answer as it is graded, from what stands in the column; None: the row has none.
        context: a column whose text belongs in front of the prompt, where a row fills it.
    """

    name: str
    prompt: str
    answer: str
    verifier: str
    final: Callable[[Any], str | None] = plain_answer
    context: str | None = None


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


def in_verl(task: str, gold: Any) -> str | None:
    """verl's form: the gold as it is; what no gold of mathematics looks like is refused."""
    content = as_json(gold) if not isinstance(gold, str) or gold.lstrip()[:1] in ("{", "[") else None
    first = content[0] if isinstance(content, list) and content else content
    if isinstance(first, dict) and first:
        raise _not_maths(task, "a JSON object as reward_model.ground_truth")
    return plain_answer(gold)


def _not_maths(task: str, what: str) -> DataError:
    return DataError(
        f"--task {task}: a row in verl's form has {what}: tests of a program or the like, which the maths verifier cannot "
        "grade; keep the maths rows alone, give programs LiveCodeBench's columns, or name the columns with --prompt-field and "
        "--answer-field and what grades them with --reward module:function"
    )


def dataset_name(task: str) -> str:
    """The last part of a file's, folder's or hub dataset's name that says more than which split or part of it this is:
    minervamath of minervamath/data/test-00000.parquet."""
    path = Path(task).expanduser()
    for part in reversed((path.absolute() if path.exists() else path).parts):
        words = set(re.findall("[a-z]+", part.lower()))
        if not words <= _SAYS_NOTHING and not re.fullmatch("[0-9a-f]{40}", part):  # a commit, in a hub cache
            return part
    return ""


def recognise(sample: Sequence[dict], task: str) -> Layout | None:
    """The layout of rows of this kind, or None for one that is not known.

    Args:
        sample: the first rows.
        task: the dataset's name, which says what a mere question and answer are about.

    Raises:
        DataError: rows in verl's form that are no mathematics.
    """
    columns = {str(column).lower(): str(column) for row in sample for column in row}

    def having(*names: str) -> str | None:
        return next((columns[name] for name in names if name in columns), None)

    problem = having("problem", "question", "prompt", *DIALOGUES)
    if having("question_content") and having("public_test_cases", "private_test_cases"):
        return Layout("LiveCodeBench", columns["question_content"], "public_test_cases, private_test_cases", CODE)
    if having("prompt") and any(get(row, "reward_model.ground_truth") is not None for row in sample):
        if any(str(get(row, "ability")).strip().lower() in _CODE for row in sample):
            raise _not_maths(task, "the ability 'code'")
        return Layout("DAPO-Math", "prompt", "reward_model.ground_truth", MATHS, partial(in_verl, task))
    if problem and having("final_answer"):
        return Layout("OlympiadBench", problem, columns["final_answer"], MATHS, joined, columns.get("context"))
    answer = having("answer")
    if problem and answer:
        values = [row[answer] for row in sample if row.get(answer) is not None]
        if values and all(isinstance(value, str) and "####" in value for value in values):
            return Layout("GSM8K", problem, answer, maths_if_installed(), after_hashes)
        if having("unique_id") or (having("level") and having("subject", "type")):
            return Layout("MATH-500", problem, answer, MATHS)
        if having("id", "year", "problem_idx", "problem number", "url") and _all_numbers(values):
            return Layout("AIME or AMC", problem, answer, MATHS)
        if _MATHS_NAMES.search(dataset_name(task)) or having("solution"):
            return Layout("maths problem and answer", problem, answer, MATHS)
        return None
    solution = having("solution")
    if solution and problem and any(isinstance(row.get(solution), str) and in_last_box(row[solution]) for row in sample):
        return Layout("MATH or Minerva", problem, solution, MATHS, in_last_box)
    return None


def maths_if_installed() -> str:
    """Numbers are graded by the maths verifier where its library is there, and compared by value where it is not."""
    return MATHS if find_spec("math_verify") else EXACT


def own(prompt: str, answer: str) -> Layout:
    """Columns given by name, or the usual ones of a dataset that is not known."""
    return Layout(OWN, prompt, answer, EXACT)


def dialogue(prompt: str, replies: Sequence[str]) -> Layout:
    """Dialogues whose last turn is the answer: the last box of it where there are any, else what follows #### in all of them,
    else all of it."""
    if any(map(in_last_box, replies)):
        return Layout("dialogues", prompt, LAST_TURN, MATHS, in_last_box)
    if all("####" in reply for reply in replies):
        return Layout("dialogues", prompt, LAST_TURN, maths_if_installed(), after_hashes)
    return Layout("dialogues", prompt, LAST_TURN, EXACT)


def detail_columns(sample: Iterable[dict]) -> list[tuple[str, list[str]]]:
    """Which of these rows' columns tell a level, subject, source, year or date, in the order of preference."""
    columns = {str(column).lower(): column for row in sample for column in row}
    found = ((key, [columns[name] for name in names if name in columns]) for key, names in DETAILS.items())
    return [(key, names) for key, names in found if names]


def details(row: dict, columns: list[tuple[str, list[str]]]) -> dict[str, str | int | float | bool]:
    """Level, subject, source, year and date of a row, as far as it has them: the keys of tables per level. "Level 3" is 3."""
    found = {}
    for key, names in columns:
        for name in names:
            value = row.get(name)
            value = None if isinstance(value, bytes | list | dict) else plain(value)
            if value is None or value == "":
                continue
            if isinstance(value, str) and (number := _LEVEL.fullmatch(value)):
                value = int(number.group(1))
            found[key] = int(value) if isinstance(value, float) and value.is_integer() else value
            break
    return found


def posed(row: dict, layout: Layout) -> tuple[str | list[dict] | None, str | None]:
    """What is asked of the policy, a text or plain messages, None for nothing; and of a dialogue what the assistant said last.

    A column ``prompt`` is all prompt, so a last turn of the assistant in it is a beginning that the policy goes on with, as in
    TRL; dialogues in other columns, and ShareGPT's, end with the solution, which is no part of the prompt.

    Raises:
        Unreadable: as ``read_chat`` and ``as_text`` do.
    """
    value = get(row, layout.prompt)
    if value is None or value in ("", []):
        return None, None
    before = row.get(layout.context) if layout.context else None
    before = f"{before.strip()}\n\n" if isinstance(before, str) and before.strip() else ""
    chat = read_chat(value)
    if chat is None:
        return before + as_text(value), None
    if asked := next((message for message in chat.messages if message["role"] == "user"), None):
        asked["content"] = before + asked["content"]
    all_prompt = layout.prompt.rpartition(".")[2].lower() == "prompt" and not chat.sharegpt
    return (chat.messages, None) if all_prompt else split_reply(chat.messages)


def answer_of(row: dict, layout: Layout, reply: str | None) -> str | None:
    """The answer as it is graded, of a row whose dialogue ended with ``reply``; None where there is none.

    Raises:
        Unreadable: as ``read_chat`` and ``as_text`` do.
    """
    value = reply if layout.answer == LAST_TURN else get(row, layout.answer)
    if is_chat(value):
        value = read_chat([{"role": "user", "content": ""}, *value]).messages[-1]["content"]
    return None if value is None else layout.final(value)


def has_pictures(row: dict, layout: Layout) -> bool:
    """Whether a row of a known layout fills a column image, images, image_1, …, or says that it is multimodal."""
    if layout.name == OWN:
        return False
    for column, value in row.items():
        name = str(column).lower()
        if name.startswith("image") and re.fullmatch(r"images?(_\d+)?", name):
            if value not in (None, "", []) and value == value:
                return True
        elif name == "modality" and isinstance(value, str) and value.lower() == "multimodal":
            return True
    return False


def formulas_graded_as_exact(answers: Sequence[str]) -> list[str]:
    """A sentence on answers that would be compared letter by letter and look as if they were formulas, if there are any."""
    formulas = [answer for answer in answers if _LATEX.search(answer)]
    if not formulas:
        return []
    what = f"{len(formulas)} of the first {len(answers)} answers look like formulas, e.g. {formulas[0][:60]!r}"
    return [f"{what}, and are graded as exact, letter by letter; use --reward maths"]


def _all_numbers(values: Iterable) -> bool:
    written = (as_text(value).strip() if isinstance(value, str | int | float | Decimal) else "" for value in values)
    return all(re.fullmatch(r"-?\d+(\.\d+)?", text) for text in written)
