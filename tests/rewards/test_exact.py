"""Exact match: which spellings are one answer, and that hedging does not pay."""

import time

import pytest

from vipfast.rewards.answers import gold_answer
from vipfast.rewards.exact import reward
from vipfast.rewards.extract import boxed


def scores(completions, answers, metadata):
    return [verdict.reward for verdict in reward(completions, answers, metadata)]


@pytest.mark.parametrize(
    "text,answer",
    [
        (r"so \boxed{42}.", "42"),
        (r"so \boxed{\frac{1}{2}}", "1/2"),
        (r"\boxed{7}, again \boxed{7.0}", "7"),
        (r"\boxed{1} or \boxed{2}", "1,2"),
        ("**Answer:** 5", "5"),
        ("Answer: **(3, 4)**", "(3,4)"),
        ("Answer: 2*x", "2*x"),
        ("Answer: \u22125", "-5"),
        ("Answer: Paris.", "Paris"),
        ("… is 3.\n#### 1,234", "1234"),
        ("Answer: 0.50", "1/2"),
        ("4 and 5 make 9 apples", "9"),
        ("costs $1,000.00.", "1000"),
        ("-7", "-7"),
        ("there is no number in this line", None),
        (r"\boxed{unclosed", None),
        ("1/0", "1/0"),
        ("12 km", "12"),
    ],
)
def test_the_answer_as_it_counts_in_a_vote(text, answer):
    assert reward([text], ["gold"], [{}])[0].answer == answer


def test_boxed_balances_braces():
    assert boxed(r"\boxed{a{b}c} tail \boxed{2}") == ["a{b}c", "2"]
    assert boxed(r"\boxed{cut {off} and \boxed 2") == ["2"]


@pytest.mark.parametrize("text", ["Answer: 1e30000000", r"\boxed{1e999999999}", "9" * 5000, "1/" + "9" * 5000])
def test_sampled_text_cannot_hang_the_grader(text):
    start = time.perf_counter()
    assert scores([text], ["5"], [{}]) == [0.0]
    assert time.perf_counter() - start < 1


def test_gold_of_a_worked_solution_is_its_answer():
    assert gold_answer("48/2 = <<48/2=24>>24 … so 72\n#### 72") == "72"
    assert gold_answer("(A)") == "(A)"


def test_reward_is_all_or_nothing_and_empty_gold_is_unscored():
    assert scores(["#### 72", "72 or 73", "", "72"], ["#### 72", "72", "72", " "], [{}] * 4) == [1.0, 0.0, 0.0, None]


@pytest.mark.parametrize(
    "completion,gold,value",
    [
        ("Answer: 5 or 6", "6", 0.0),  # hedging
        ("Answer: (3, 4)", "(3, 4)", 1.0),
        ("Answer: (3, 4)", "4", 0.0),
        ("Answer: x+1", "x+1", 1.0),
        ("2*3", "23", 0.0),
        (r"\boxed{2*x}", "2*x", 1.0),
        ("Answer: 0.5", "1/2", 1.0),
        ("Answer: .5", "1/2", 1.0),
        ("Answer: .5", "5", 0.0),
        (r"\boxed{.5}", "5", 0.0),
        (r"\boxed{\sqrt{5}}", "5", 0.0),
        ("Answer: x^5", "5", 0.0),
        ("Answer: 5!", "5", 1.0),  # cheering
        (r"\boxed{5!}", "5", 0.0),
        ("it is .5", "0.5", 1.0),
        ("Answer: -5", "5", 0.0),
        ("Answer: 15", "5", 0.0),
        ("Answer: 34", "3, 4", 0.0),
        ("Answer: 1,234,567", "1234567", 1.0),
    ],
)
def test_graded_pairs(completion, gold, value):
    assert scores([completion], [gold], [{}]) == [value]
