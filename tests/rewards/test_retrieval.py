"""EM, F1 and precision of answers in words: worked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vipfast.rewards.base import Verdict
from vipfast.rewards.retrieval import answer_of, em, f1, golds, normalise, precision


def score(reward, text, answer):
    [verdict] = reward([text], [answer], [{}])
    return verdict.reward


def test_normalisation():
    assert normalise(" The  Eiffel-Tower, an icon! ") == "eiffeltower icon"
    assert normalise("theatre") == "theatre"  # no article inside a word


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("I think <answer>no</answer>, no: <answer> Ida Brekke </answer>.", "Ida Brekke"),
        (r"so \boxed{Ida Brekke}", "Ida Brekke"),
        (r"\boxed{a} or \boxed{b}", ""),
        ("Because of this.\nAnswer: **Ida Brekke**", "Ida Brekke"),
        ("It was built by\n\nIda Brekke\n", "Ida Brekke"),
        ("<think><answer>x</answer></think>y", "y"),
        ("<think>so <answer>x</answer>", ""),
        ("The answer is Ida Brekke", "Ida Brekke"),
        ("", ""),
    ],
)
def test_the_answer_of_a_completion(text, answer):
    assert answer_of(text) == answer


def test_exact_match_takes_any_of_several_gold_answers():
    assert score(em, "<answer>The Beatles!</answer>", ["Rolling Stones", "Beatles"]) == 1.0
    assert score(em, "<answer>Beatles</answer>", '["Rolling Stones", "The Beatles"]') == 1.0  # as datasets spell a list
    assert score(em, "<answer>Beatle</answer>", "Beatles") == 0.0
    assert score(em, "<answer>[a] b</answer>", "[a] b") == 1.0  # no list after all


def test_f1_and_precision_by_hand():
    # found "ida brekke of tolsund" (4 words), gold "ida marie brekke" (3): 2 in common; P = 2/4, R = 2/3, F1 = 4/7.
    assert score(f1, "<answer>Ida Brekke of Tolsund</answer>", "Ida Marie Brekke") == pytest.approx(4 / 7)
    assert score(precision, "<answer>Ida Brekke of Tolsund</answer>", "Ida Marie Brekke") == 0.5
    # A word counts as often as it is in both: "no no" against "no" is 1 of 2.
    assert score(precision, "no no", "no") == 0.5 and score(f1, "no no", "no") == pytest.approx(2 / 3)


def test_no_gold_answer_is_unscored_and_no_answer_is_wrong():
    for reward in (em, f1, precision):
        assert [score(reward, "x", gold) for gold in (None, "", [], [None], "the")] == [None] * 5
        assert score(reward, "", "x") == 0.0


def test_verdicts_carry_the_normalised_answer():
    assert em(["The Sun"], ["sun"], [{}]) == [Verdict(1.0, "sun")] and em.has_answers and f1.reward_range.holds(0.3)


@given(st.text(), st.text() | st.lists(st.text() | st.none(), max_size=3))
def test_any_text_scores_within_bounds_and_a_right_one_exactly_1(text, gold):
    for reward in (em, f1, precision):
        value = score(reward, text, gold)
        assert value is None if not golds(gold) else 0 <= value <= 1
        if right := golds(gold):
            assert score(reward, f"<answer>{right[0]}</answer>", gold) == 1.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<answer>a</answer> or <answer>b</answer>", "b"),
        ("<answer>a <answer>b</answer>", "b"),
        ("<answer>a</answer></answer>", "a"),
        ("<answer>a</answer> <answer>cut off", "a"),
        ("<answer></answer> c", ""),
        ("</answer><answer>\nAnswer: d", ""),
        ("</answer> e", "</answer> e"),
    ],
)
def test_the_last_tag_that_closes_counts(text, found):
    assert answer_of(text) == found
