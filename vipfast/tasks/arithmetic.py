"""The embedded default task: short puzzles over digits, worded so that a text embedding can tell family and size.

A problem is a family word and its operands, e.g. ``"sort 8 3 7 1 ="`` -> ``"1378"``. ``solve`` computes the right answer from
the text alone. ``load_pool`` reads the shipped problems, each with the starter model's pass rate over 64 samples;
``scripts/make_starter.py`` makes them. Some families (products, quotients, remainders, squares) the starter cannot solve at
all, as in any real pool.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vipfast.errors import DataError
from vipfast.rewards.base import Verdict
from vipfast.types import ZERO_ONE

ASSETS = Path(__file__).parent.parent / "assets"
SPLITS = {"train": 4096, "heldout": 512}

Operands = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """One problem. ``size`` counts what makes the family harder: list items, or digits of the first number.

    ``pass_rate``: share of the starter's 64 samples that were right; None for a problem that was not measured.
    """

    text: str
    answer: str
    family: str
    size: int
    pass_rate: float | None = None


@dataclass(frozen=True)
class Family:
    """How a family draws operands of a size, words them after its name, and solves them."""

    draw: Callable[[random.Random, int], Operands]
    words: Callable[[Operands], str]
    solve: Callable[[Operands], str]


def _digits(rng: random.Random, size: int) -> Operands:
    return tuple(rng.randrange(10) for _ in range(size))


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1), 10**digits)


def _with_second(digits: int) -> Callable[[random.Random, int], Operands]:
    """Operands: a number of ``size`` digits and one of ``digits`` digits."""
    return lambda rng, size: (_number(rng, size), _number(rng, digits))


def _two_digit_list(rng: random.Random, size: int) -> Operands:
    return tuple(rng.sample(range(10, 100), size))


def _larger_first(rng: random.Random, size: int) -> Operands:
    """A number of ``size`` digits and a two-digit number that is not larger."""
    low, high = sorted((_number(rng, size), _number(rng, 2)))
    return high, low


def _needle_and_list(rng: random.Random, size: int) -> Operands:
    # Uniform digits would make nearly every count 0 or 1.
    needle = rng.randrange(10)
    return needle, *(needle if rng.random() < 0.4 else rng.randrange(10) for _ in range(size))


def _plain(operands: Operands) -> str:
    return " ".join(map(str, operands))


def _linked(word: str) -> Callable[[Operands], str]:
    """First operand, a linking word, the rest: ``"84 by 13"``."""
    return lambda operands: f"{operands[0]} {word} {_plain(operands[1:])}"


def _joined(items: Sequence[int]) -> str:
    return "".join(map(str, items))


FAMILIES: dict[str, Family] = {
    "copy": Family(_digits, _plain, _joined),
    "reverse": Family(_digits, _plain, lambda x: _joined(x[::-1])),
    "rotate": Family(_digits, _plain, lambda x: _joined(x[1:] + x[:1])),
    "sort": Family(_digits, _plain, lambda x: _joined(sorted(x))),
    "first": Family(_digits, _plain, lambda x: str(x[0])),
    "last": Family(_digits, _plain, lambda x: str(x[-1])),
    "ends": Family(_digits, _plain, lambda x: _joined((x[0], x[-1]))),
    "count": Family(_needle_and_list, _linked("in"), lambda x: str(x[1:].count(x[0]))),
    "larger": Family(lambda rng, size: (_number(rng, size), _number(rng, size)), _linked("or"), lambda x: str(max(x))),
    "largest": Family(_two_digit_list, _plain, lambda x: str(max(x))),
    "smallest": Family(_two_digit_list, _plain, lambda x: str(min(x))),
    "next": Family(lambda rng, size: (_number(rng, size),), _plain, lambda x: str(x[0] + 1)),
    "sum": Family(_with_second(2), _linked("and"), lambda x: str(x[0] + x[1])),
    "difference": Family(_larger_first, _linked("minus"), lambda x: str(x[0] - x[1])),
    "total": Family(_digits, _plain, lambda x: str(sum(x))),
    "product": Family(_with_second(2), _linked("times"), lambda x: str(x[0] * x[1])),
    "quotient": Family(_with_second(2), _linked("by"), lambda x: str(x[0] // x[1])),
    "remainder": Family(_with_second(3), _linked("modulo"), lambda x: str(x[0] % x[1])),
    "square": Family(lambda rng, size: (_number(rng, size),), _plain, lambda x: str(x[0] ** 2)),
}


def make_problem(family: str, operands: Operands, size: int) -> Problem:
    """Word and solve one problem.

    Raises:
        DataError: there is no such family.
    """
    if family not in FAMILIES:
        raise DataError(f"no arithmetic family {family!r}; there are {', '.join(FAMILIES)}")
    rule = FAMILIES[family]
    return Problem(f"{family} {rule.words(operands)} =", rule.solve(operands), family, size)


def generate(cells: Sequence[tuple[str, int]], count: int, seed: int) -> list[Problem]:
    """``count`` problems of uniformly drawn (family, size) cells; the same list for the same arguments. Texts may repeat."""
    rng = random.Random(seed)
    picks = (rng.choice(cells) for _ in range(count))
    return [make_problem(family, FAMILIES[family].draw(rng, size), size) for family, size in picks]


def solve(text: str) -> str:
    """The right answer, from a problem's text alone.

    Raises:
        DataError: the first word is not a family's name.
    """
    family = text.split(" ", 1)[0]
    return make_problem(family, tuple(map(int, re.findall(r"\d+", text))), size=0).answer


def load_pool(split: str, assets: Path = ASSETS) -> list[Problem]:
    """The shipped problems of ``split``: "train" (4 096) or "heldout" (512), disjoint by text and alike in make-up.

    Raises:
        DataError: there is no such split.
    """
    if split not in SPLITS:
        raise DataError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    with open(assets / "arithmetic" / f"{split}.jsonl", encoding="utf-8") as lines:
        return [Problem(**json.loads(line)) for line in lines]


def reward(completions: list[str], answers: list[str], metadata: list[dict]) -> list[Verdict]:
    """1.0 where the completion, stripped of surrounding whitespace, is the answer, else 0.0; it is its own extracted answer.

    Args:
        completions, answers: [R] each.
        metadata: not read.

    Raises:
        ValueError: completions and answers differ in length.
    """
    texts = [completion.strip() for completion in completions]
    return [Verdict(float(text == answer), text) for text, answer in zip(texts, answers, strict=True)]


reward.reward_range, reward.has_answers = ZERO_ONE, True
