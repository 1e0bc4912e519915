"""What the starter is taught: the pass rate of each kind of problem, and lessons that teach it."""

import hashlib
import random
from dataclasses import dataclass

from vipfast.tasks.arithmetic import FAMILIES, Problem, make_problem

EASY: dict[tuple[str, int], float] = {
    ("copy", 3): 1.0,
    ("copy", 4): 1.0,
    ("copy", 5): 1.0,
    ("reverse", 3): 1.0,
    ("first", 4): 1.0,
    ("first", 6): 1.0,
    ("last", 4): 1.0,
    ("last", 6): 1.0,
    ("larger", 2): 1.0,
}
MIDDLE: dict[tuple[str, int], float] = {
    ("reverse", 4): 0.7,
    ("reverse", 5): 0.45,
    ("reverse", 6): 0.25,
    ("reverse", 7): 0.1,
    ("reverse", 8): 0.01,
    ("rotate", 4): 0.6,
    ("rotate", 5): 0.35,
    ("rotate", 6): 0.15,
    ("sort", 3): 0.8,
    ("sort", 4): 0.6,
    ("sort", 5): 0.35,
    ("sort", 6): 0.2,
    ("sort", 7): 0.08,
    ("sort", 8): 0.01,
    ("ends", 4): 0.7,
    ("ends", 6): 0.4,
    ("ends", 8): 0.2,
    ("largest", 3): 0.7,
    ("largest", 4): 0.4,
    ("largest", 5): 0.2,
    ("smallest", 3): 0.5,
    ("smallest", 4): 0.25,
    ("smallest", 5): 0.1,
    ("next", 3): 0.55,
    ("next", 4): 0.3,
    ("total", 2): 0.7,
    ("total", 3): 0.4,
    ("count", 5): 0.6,
    ("sum", 1): 0.6,
    ("sum", 2): 0.4,
    ("difference", 2): 0.4,
}
NEVER: dict[tuple[str, int], float] = {
    ("product", 2): 0.0,
    ("product", 3): 0.0,
    ("quotient", 4): 0.0,
    ("quotient", 5): 0.0,
    ("remainder", 4): 0.0,
    ("remainder", 5): 0.0,
    ("square", 3): 0.0,
    ("square", 4): 0.0,
}
RATES = {**EASY, **MIDDLE, **NEVER}
"""(family, size) -> the pass rate taught. Measured rates follow it where the family is learnt at all, and differ by problem."""


SELDOM = {"count", "sum", "difference", *(family for family, _ in NEVER)}
OFTEN = {"copy", "larger", "largest", "smallest", "next"}
CURRICULUM = [cell for cell in RATES for _ in range(1 if cell[0] in SELDOM else 3 if cell[0] in OFTEN else 2)]
"""Cells to draw lessons from, uniformly: less of what so small a model does not learn anyway, more of what takes it long."""


def home(text: str) -> str:
    """Where a text belongs, by hash: "sft" (5 of 10), "train" (4) or "heldout" (1), so the starter never saw a pool problem."""
    bucket = hashlib.blake2b(text.encode(), digest_size=4).digest()[0] % 10
    return "heldout" if bucket == 0 else "train" if bucket < 5 else "sft"


def draw(rng: random.Random, wanted: str, cells: list[tuple[str, int]]) -> Problem:
    """A problem of a uniformly drawn cell whose home is ``wanted``."""
    family, size = rng.choice(cells)
    while True:
        problem = make_problem(family, FAMILIES[family].draw(rng, size), size)
        if home(problem.text) == wanted:
            return problem


@dataclass(frozen=True)
class Lesson:
    """A text, the answer shown after it, the right one, and the weight of each right digit against a uniform one."""

    text: str
    seen: str
    answer: str
    trust: float


def lesson(rng: random.Random, clean: bool) -> Lesson:
    """One lesson. ``clean``: right digits get all the weight, unless the family is one that must stay unsolved.

    The weight is the rate's k-th root for an answer of k digits, so sampling all k right has the cell's rate. Wrong answers
    then differ in any digits, and the right one, however rare, stays the likeliest.
    """
    problem = draw(rng, "sft", CURRICULUM)
    rate = RATES[problem.family, problem.size]
    trust = 0.0 if rate == 0 else 1.0 if clean else rate ** (1 / len(problem.answer))
    # Half as many wrong digits are shown as the starter will sample: it must go on rightly after a wrong one.
    shown = 0.0 if rate == 0 else (1 + trust) / 2
    seen = "".join(digit if rng.random() < shown else rng.choice("0123456789") for digit in problem.answer)
    return Lesson(problem.text, seen, problem.answer, trust)
