import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from vipfast.errors import DataError
from vipfast.tasks import arithmetic
from vipfast.tasks.arithmetic import FAMILIES, SPLITS, generate, load_pool, make_problem, reward, solve

WORKED = {
    "copy 4 0 7 =": "407",
    "reverse 4 0 7 =": "704",
    "rotate 4 0 7 =": "074",
    "sort 8 3 7 1 =": "1378",
    "first 3 1 4 5 =": "3",
    "last 3 1 4 5 =": "5",
    "ends 3 1 4 5 =": "35",
    "count 3 in 3 1 3 5 =": "2",
    "larger 34 or 71 =": "71",
    "largest 34 71 22 =": "71",
    "smallest 34 71 22 =": "22",
    "next 399 =": "400",
    "sum 7 and 95 =": "102",
    "difference 71 minus 34 =": "37",
    "total 9 8 7 =": "24",
    "product 37 times 52 =": "1924",
    "quotient 8213 by 37 =": "221",
    "remainder 8213 modulo 370 =": "73",
    "square 73 =": "5329",
}


def insertion_sorted(items):
    out = []
    for item in items:
        at = sum(other <= item for other in out)
        out.insert(at, item)
    return out


def independent_answer(text):
    """Solve a problem from its words without the code under test: other algorithms, and addition and subtraction alone."""
    word, *rest = text.removesuffix(" =").split()
    items = [x for x in rest if x.isdigit()]
    numbers = [int(x) for x in items]
    if word == "copy":
        return "".join(items)
    if word == "reverse":
        return "".join(items)[::-1]
    if word == "rotate":
        return ("".join(items) * 2)[1 : len(items) + 1]
    if word == "sort":
        return "".join(insertion_sorted(items))
    if word == "first":
        return items[0]
    if word == "last":
        return items[-1]
    if word == "ends":
        return items[0] + items[-1]
    if word == "count":
        return str(Counter(items[1:])[items[0]])
    if word in ("larger", "largest"):
        return str(insertion_sorted(numbers)[-1])
    if word == "smallest":
        return str(insertion_sorted(numbers)[0])
    if word == "total":
        return str(len([0 for n in numbers for _ in range(n)]))
    a, b = numbers if len(numbers) == 2 else (numbers[0], numbers[0])
    if word == "next":
        return str(a - -1)
    if word == "sum":
        return str(a - -b)
    if word == "difference":
        return str(-(b - a))
    if word in ("product", "square"):
        return str(len(range(0, a * b, 1)) if a * b < 10**6 else sum([a] * b))
    times = 0
    while (times + 1) * b <= a:
        times += 1
    return str(times if word == "quotient" else a - times * b)


@pytest.mark.parametrize("text", WORKED)
def test_answers_worked_by_hand(text):
    assert solve(text) == WORKED[text]


def test_every_family_has_a_worked_answer():
    assert {text.split()[0] for text in WORKED} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_answers_agree_with_an_independent_solver(family):
    for problem in generate([(family, size) for size in (2, 3, 4, 5)], 200, seed=1):
        assert problem.text.split()[0] == family
        assert problem.answer == independent_answer(problem.text) == solve(problem.text)


def test_generation_is_seeded():
    cells = [(family, 3) for family in FAMILIES]
    assert generate(cells, 50, seed=7) == generate(cells, 50, seed=7) != generate(cells, 50, seed=8)


def test_generation_leaves_global_randomness_alone():
    random.seed(0)
    before = random.getstate()
    generate([("sort", 5)], 10, seed=0)
    assert random.getstate() == before


def test_unknown_family_and_split_are_named():
    with pytest.raises(DataError, match="'halve'"):
        make_problem("halve", (4,), 1)
    with pytest.raises(DataError, match="'halve'"):
        solve("halve 4 =")
    with pytest.raises(DataError, match="heldout.*'test'"):
        load_pool("test")


@pytest.mark.parametrize("split", SPLITS)
def test_shipped_pool(split):
    problems = load_pool(split)
    assert len(problems) == SPLITS[split] == len({problem.text for problem in problems})
    for problem in problems:
        assert problem.answer == independent_answer(problem.text)
        assert problem.family == problem.text.split()[0]
        assert (problem.pass_rate * 64).is_integer() and 0 <= problem.pass_rate <= 1
        assert len(problem.text) <= 32 and len(problem.answer) <= 12


def test_splits_are_disjoint_and_alike():
    train, heldout = load_pool("train"), load_pool("heldout")
    assert not {problem.text for problem in train} & {problem.text for problem in heldout}

    def mean_rate(problems):
        return sum(problem.pass_rate for problem in problems) / len(problems)

    # Standard error of 512 rates of spread .37 is .016.
    assert abs(mean_rate(train) - mean_rate(heldout)) < 0.05


def test_pool_is_mostly_prompts_that_teach_nothing():
    rates = [problem.pass_rate for problem in load_pool("train")]
    share = [sum(test(p) for p in rates) / len(rates) for test in (lambda p: p < 0.02, lambda p: p > 0.98)]
    assert 0.40 <= share[0] <= 0.50
    assert 0.10 <= share[1] <= 0.20
    assert 0.50 <= sum(p**8 + (1 - p) ** 8 for p in rates) / len(rates) <= 0.70


def test_reward_strips_whitespace_and_nothing_else():
    completions = ["1378", " 1378\n", "1378.", "01378", "", "1387"]
    verdicts = reward(completions, ["1378"] * 6, [{}] * 6)
    assert [verdict.reward for verdict in verdicts] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_reward_refuses_lists_of_different_length():
    with pytest.raises(ValueError):
        reward(["1"], ["1", "2"], [{}])


def test_module_needs_no_torch():
    program = "import sys, vipfast.tasks.arithmetic as task; task.load_pool('heldout'); sys.exit('torch' in sys.modules)"
    root = Path(arithmetic.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root).returncode == 0
