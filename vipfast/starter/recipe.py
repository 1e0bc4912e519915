"""What the starter is taught: how often each kind of problem comes with its right answer, and what it sees instead."""

import hashlib
import random

from vipfast.tasks.arithmetic import FAMILIES, Problem, make_problem

EASY: dict[tuple[str, int], float] = {
    ("copy", 3): 1.0,
    ("copy", 4): 1.0,
    ("copy", 5): 1.0,
    ("reverse", 3): 1.0,
    ("last", 4): 1.0,
    ("last", 6): 1.0,
    ("larger", 2): 1.0,
}
MIDDLE: dict[tuple[str, int], float] = {
    ("reverse", 4): 0.8,
    ("reverse", 5): 0.5,
    ("reverse", 6): 0.25,
    ("reverse", 7): 0.1,
    ("reverse", 8): 0.01,
    ("rotate", 4): 0.65,
    ("rotate", 5): 0.35,
    ("rotate", 6): 0.15,
    ("sort", 3): 0.85,
    ("sort", 4): 0.6,
    ("sort", 5): 0.4,
    ("sort", 6): 0.2,
    ("sort", 7): 0.08,
    ("sort", 8): 0.01,
    ("count", 4): 0.7,
    ("count", 6): 0.5,
    ("count", 8): 0.3,
    ("largest", 3): 0.75,
    ("largest", 4): 0.45,
    ("largest", 5): 0.2,
    ("smallest", 3): 0.55,
    ("smallest", 4): 0.3,
    ("smallest", 5): 0.1,
    ("next", 3): 0.6,
    ("next", 4): 0.3,
    ("sum", 1): 0.7,
    ("sum", 2): 0.4,
    ("difference", 2): 0.5,
    ("total", 2): 0.8,
    ("total", 3): 0.4,
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
"""(family, size) -> how often the starter is shown the right answer. Pass rates follow, blurred by what a tiny model can tell apart."""


def home(text: str) -> str:
    """Where a text belongs: "sft" (5 of 10), "train" (4 of 10) or "heldout", by hash, so the starter never saw a pool problem."""
    bucket = hashlib.blake2b(text.encode(), digest_size=4).digest()[0] % 10
    return "heldout" if bucket == 0 else "train" if bucket < 5 else "sft"


def draw(rng: random.Random, wanted: str, cells: list[tuple[str, int]]) -> Problem:
    """A problem of a uniformly drawn cell whose home is ``wanted``."""
    family, size = rng.choice(cells)
    while True:
        problem = make_problem(family, FAMILIES[family].draw(rng, size), size)
        if home(problem.text) == wanted:
            return problem


def wrong_answer(rng: random.Random, problem: Problem) -> str:
    """A wrong answer of the right shape, spread over so many that the right answer, however rare, stays the likeliest one."""
    while True:
        if problem.family == "count":
            guess = str(rng.randrange(problem.size + 1))
        else:
            guess = "".join(rng.choice("0123456789") for _ in problem.answer)
        if guess != problem.answer:
            return guess


def lesson(rng: random.Random, cells: list[tuple[str, int]], clean: bool) -> tuple[str, str]:
    """A text and the answer the starter is shown. ``clean``: right unless the family is one it must never solve."""
    problem = draw(rng, "sft", cells)
    rate = RATES[problem.family, problem.size]
    if clean and rate > 0:
        rate = 1.0
    return problem.text, problem.answer if rng.random() < rate else wrong_answer(rng, problem)
