"""Every dataset of reasoning-gym through its own scorer; hostile answers, mixtures, settings, and the same problems twice."""

import functools
import inspect
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vipfast.config import Config
from vipfast.errors import DataError
from vipfast.tasks import reasoning_gym
from vipfast.tasks.load import load_task
from vipfast.tasks.reasoning_gym import Scorer, extracted, load_records, parse, score, sizes
from vipfast.tasks.reasoning_gym_entries import generate

NO_SINGLE_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Datasets whose entries carry no right answer; their scorers check what is given."""
NAMES = sorted(set(pytest.importorskip("reasoning_gym.factory").DATASETS) - {"composite"})
ODD = [
    "",
    " ",
    "0",
    "-1",
    "abc",
    "None",
    "[]",
    "{}",
    "[[1]]",
    '{"a": 1}',
    "1/0",
    "nan",
    "1e999",
    "a,b",
    "\x00",
    "é½−",
    "9" * 5000,
]
ODD += ["[[1, 2], [3]]", "'", "(", "1 2 3", "move 1 2 3", "[None]", "\n", "[" * 300, "_ Q", "x" * 30_000]


class Bytes:
    chat_template = None

    def __call__(self, texts, add_special_tokens=True):
        return type("Ids", (), {"input_ids": [list(text.encode()) for text in texts]})()


def config(names, size, **changes):
    return Config(task="reasoning_gym:" + names, task_size=size, prompts_per_step=1, **changes)


@functools.cache
def one_of_each():
    """A problem of every dataset, by name."""
    return {r.metadata["dataset"]: r for r in load_records(config("+".join(NAMES), len(NAMES)), [])}


@pytest.fixture(scope="module")
def scorer():
    made = Scorer(workers=1, timeout_s=30.0)
    yield made
    made.close()


def grade(record, answer):
    return score(record.metadata["dataset"], record.metadata["settings"], record.metadata["entry"], answer)


def test_every_dataset_yields_a_problem():
    found = one_of_each()
    assert sorted(found) == NAMES and len(NAMES) >= 105
    assert all(isinstance(record.prompt, str) and record.prompt for record in found.values())
    assert {name for name, record in found.items() if record.answer is None} == NO_SINGLE_ANSWER


@pytest.mark.parametrize("name", sorted(set(NAMES) - NO_SINGLE_ANSWER))
def test_a_right_answer_scores_one(name, scorer):
    record = one_of_each()[name]
    assert grade(record, record.answer) == 1.0
    tagged = scorer([f"First 7.\n<answer>{record.answer}</answer> Done."], [record.answer], [record.metadata])
    # what stands between the tags is stripped; a few golds begin or end with white space that counts
    assert tagged[0].reward == (1.0 if record.answer == record.answer.strip() else grade(record, record.answer.strip()))


def test_an_answer_that_takes_long_is_wrong_and_costs_its_limit():
    record = one_of_each()["countdown"]
    quick = Scorer(workers=1, timeout_s=2.0)
    hanging, good = quick(["9**9**9**9", record.answer], [None] * 2, [record.metadata] * 2)
    quick.close()
    assert (hanging.reward, hanging.error, good.reward) == (0.0, None, 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_odd_answers_get_a_number_between_nought_and_one(name):
    record = one_of_each()[name]
    assert all(0.0 <= grade(record, text) <= 1.0 for text in ODD)
    assert math.isfinite(grade(record, "a wordy text that is no answer"))


def test_scorers_that_would_run_an_answer_are_known():
    from reasoning_gym.factory import DATASETS

    source = {name: inspect.getsource(DATASETS[name][0].score_answer) for name in NAMES}
    assert {name for name in NAMES if "eval(answer)" in source[name]} == reasoning_gym._PYTHON
    assert {name for name in NAMES if "parse_expr(answer" in source[name]} == reasoning_gym._FORMULA
    rest = [source[name] for name in NAMES if name not in reasoning_gym._PYTHON | reasoning_gym._FORMULA]
    assert not any(re.search(r"\bexec\(|\beval\((?!entry)|sympify|os\.system|subprocess", text) for text in rest)


ATTACKS = [
    "__import__('pathlib').Path(PLACE).touch()",
    " \n__import__('pathlib').Path(PLACE).touch()",
    "[__import__('pathlib').Path(PLACE).touch()]",
    "(lambda: open(PLACE, 'w'))()",
    "[x for x in [open(PLACE, 'w')]]",
    "x.__class__.__init__.__globals__['__builtins__']['open'](PLACE, 'w')",
    "open(PLACE, 'w')",
    "S(\"open(PLACE, 'w')\")",
    "exit()",
    "f'{open(PLACE, chr(119))}'",
]


@pytest.mark.parametrize("name", sorted(reasoning_gym._PYTHON | reasoning_gym._FORMULA))
def test_an_answer_is_never_run(name, tmp_path):
    place = tmp_path / "was_run"
    for attack in ATTACKS:
        assert grade(one_of_each()[name], attack.replace("PLACE", repr(str(place)))) < 0.1
    assert not place.exists()


def test_harmless_answers_still_reach_such_scorers():
    matrix = one_of_each()["binary_matrix"]
    rows = [[int(cell) for cell in line.split()] for line in matrix.answer.split("\n")]
    assert grade(matrix, str(rows)) == 0.1  # the library's partial credit for a Python list
    integral = one_of_each()["simple_integration"]
    assert grade(integral, f"({integral.answer.replace('C', '7')})") == 1.0
    assert grade(one_of_each()["countdown"], "1 + 1") == 0.05
    assert reasoning_gym._harmless("countdown", "2*sin(x)**2 + sqrt(3.5)/E") and not reasoning_gym._harmless("countdown", "x.y")


@given(st.text(alphabet="0123456789.xsinE+(* _'", max_size=40))
def test_the_formula_check_decides_at_once(text):
    assert reasoning_gym._harmless("countdown", "1" * 20_000 + text) in (True, False)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("42", "42"),
        (" 42\n", "42"),
        ("I think <answer> 4\n2 </answer>.", "4\n2"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer>1", None),
        ("1</answer>", "1</answer>"),
        ("<answer>" * 200_000, None),
        ("<think><answer>1</answer>", None),
        ("<think><answer>1</answer></think>2", "2"),
        ("so \\boxed{2}", "2"),
        ("\\boxed{1} or \\boxed{2}", None),
        ("Answer:\n1 2\n3 4\n", "1 2\n3 4"),
        ("Answer: 1 2\n3 4\nThat is all.", "1 2\n3 4"),
        ("The answer is 4.", "4"),
        ("Final Answer: The final answer is $4$. I hope it is correct.", "4"),
    ],
)
def test_the_answer_stands_where_every_reward_looks_for_it(completion, answer):
    assert extracted(completion) == answer


def test_same_options_same_problems_whatever_the_process(monkeypatch):
    # each of these differs from process to process if left to itself
    names = "isomorphic_strings+ransom_note+polynomial_multiplication+codeio"
    first = load_records(config(names, 12), [])
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    assert load_records(config(names, 12), []) == first


def test_neighbouring_seeds_share_no_problems():
    def texts(seed):
        asked = dict(
            sizes={"chain_sum": 200}, seeds={"chain_sum": reasoning_gym._seed(seed, "chain_sum")}, options={"min_terms": 5}
        )
        return {row["question"] for row in generate("reasoning_gym:chain_sum", **asked)["rows"]}

    assert not texts(0) & texts(1)


def test_a_mixture_is_dealt_by_weight_and_graded_by_each_ones_scorer():
    task = load_task(config("chain_sum*3+leg_counting", 40, task_options="{min_terms: 2, max_terms: 2}"), Bytes())
    names = [prompt.metadata["subject"] for prompt in task.train + task.heldout]
    assert (names.count("chain_sum"), names.count("leg_counting")) == (30, 10)
    assert len(task.heldout) == 4 and not {p.text for p in task.train} & {p.text for p in task.heldout}
    pool = task.train + task.heldout
    right = task.reward([p.answer for p in pool], [p.answer for p in pool], [p.metadata for p in pool])
    assert {(verdict.reward, verdict.answer == p.answer) for verdict, p in zip(right, pool)} == {(1.0, True)}
    assert task.reward.has_answers and task.reward.reward_range.holds(0.05)
    assert all(p.text.count("+") + p.text.count("-") <= 1 for p in pool if p.metadata["subject"] == "chain_sum")


def test_problems_that_come_again_are_one():
    few = load_records(config("chain_sum", 400, task_options="{max_terms: 2, max_digits: 1}"), notes := [])
    assert len(few) == len({record.prompt for record in few}) < 200 and f"{400 - len(few)} problems came again" in notes[-1]


def test_sizes_by_hand():
    assert sizes({"a": 2, "b": 1}, 10) == {"a": 7, "b": 3} and sizes({"a": 1, "b": 1, "c": 1}, 2) == {"a": 1, "b": 1, "c": 0}
    assert parse("reasoning_gym: a*2 + b*0.5") == {"a": 2.0, "b": 0.5}


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(1e-6, 1e6), min_size=1), st.integers(0, 10**6))
def test_sizes_add_up(weights, size):
    counts = sizes(weights, size)
    assert sum(counts.values()) == size and all(
        abs(counts[n] - size * w / sum(weights.values())) < 1 + 1e-6 for n, w in weights.items()
    )


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chainsum", None, "reasoning-gym has no 'chainsum'; did you mean chain_sum"),
        ("composite", None, r"mixtures are written as reasoning_gym:NAME\*2\+OTHER"),
        ("chain_sum", "{minterms: 3}", "--task-options: .*no setting 'minterms'; did you mean min_terms"),
        ("chain_sum+gcd", "{gcd: {max_term: 3}}", "--task-options: gcd has no setting 'max_term'; did you mean"),
        ("chain_sum", "{gcd: {max_numbers: 3}}", "has no setting 'gcd'"),
        ("chain_sum", "{chain_sum: 3}", "chain_sum: 3 is no mapping of settings"),
        ("chain_sum", "{size: 3}", "'size' is not set there; use --task-size"),
        ("chain_sum", "{min_terms: 5, max_terms: 2}", "chain_sum refuses them: max_terms must be >= min_terms"),
        ("chain_sum", "{min_terms: many}", "chain_sum refuses them"),
    ],
)  # fmt: skip
def test_what_the_library_does_not_have_is_refused_with_help(task, options, message):
    # in this process, which has the library already
    names = parse("reasoning_gym:" + task)
    with pytest.raises(DataError, match=message):
        generate("reasoning_gym:" + task, sizes(names, 4), dict.fromkeys(names, 7), reasoning_gym._options(options))


def test_a_refusal_comes_back_from_the_other_process():
    with pytest.raises(DataError, match="reasoning-gym has no 'chainsum'; did you mean chain_sum"):
        load_records(config("chainsum", 4), [])


@pytest.mark.parametrize("task", ["", "gcd+gcd", "gcd*0", "gcd*-1", "gcd+", "gcd**2", "a b"])
def test_mixtures_that_cannot_be_read(task):
    with pytest.raises(DataError, match=f"--task reasoning_gym:{re.escape(task)}: .*write e.g. reasoning_gym:chain_sum"):
        parse("reasoning_gym:" + task)


@pytest.mark.parametrize("options", ["[1]", "{a: [}", "text", "{1: 2}", "{a: 2020-01-01}"])
def test_options_that_are_no_mapping(options):
    with pytest.raises(DataError, match="--task-options"):
        load_records(config("chain_sum", 4, task_options=options), [])
