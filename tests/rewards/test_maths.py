"""The maths verifier: votes of one spelling, golds checked at the start, and robustness of what reads the text."""

import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vipfast.errors import DataError, RewardError
from vipfast.rewards import answers as read
from vipfast.rewards.answers import final_answers
from vipfast.rewards.compare import told_apart
from vipfast.rewards.maths import Maths
from vipfast.rewards.pool import Outcome
from vipfast.rewards.tidy import tidy
from vipfast.types import Prompt


@pytest.fixture(scope="module")
def maths():
    reward = Maths(workers=2, timeout_s=30)
    yield reward
    reward.close()


def prompts(*golds):
    return [Prompt(str(i), "p", np.array([1]), gold, {}) for i, gold in enumerate(golds)]


def test_all_right_answers_are_one_vote_and_wrong_ones_their_value(maths):
    texts = [
        rf"\boxed{{{answer}}}"
        for answer in (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}", r"\sqrt{2}/2", "0.5", r"\frac12", "50\\%")
    ]
    verdicts = maths(texts, [r"\frac{\sqrt{2}}{2}"] * 6, [{}] * 6)
    assert [verdict.reward for verdict in verdicts] == [1, 1, 1, 0, 0, 0]
    assert len({verdict.answer for verdict in verdicts[:3]}) == 1
    assert maths([texts[4]], ["3"], [{}])[0].answer == maths([texts[3]], ["3"], [{}])[0].answer == "1/2"


def test_golds_are_text_numbers_or_anything_that_prints(maths):
    verdicts = maths([r"\boxed{5}"] * 4, [5, "5", 5.0, None], [{}] * 4)
    assert [verdict.reward for verdict in verdicts[:3]] == [1, 1, 1] and verdicts[3].reward is None


def test_good_golds_say_nothing_and_quickly(maths):
    golds = [*map(str, range(5000)), r"\frac{\sqrt{3}}{2}", r"\text{Monday}", "#### 5", r"thus $\boxed{x+1}$"]
    start = time.perf_counter()
    assert maths.check_golds(prompts(*golds), seed=0) == []
    assert time.perf_counter() - start < 5


def test_a_few_bad_golds_are_told_and_many_are_refused(maths):
    golds = ["5"] * 95 + ["see the figure"] * 5
    (note,) = maths.check_golds(prompts(*golds), seed=0)
    assert note.startswith("warning: 5 of 100 answers looked at cannot be graded against, e.g. 'see the figure'")
    with pytest.raises(DataError, match="--answer-field: 100 of 100 .*We add both sides.*final answers"):
        maths.check_golds(prompts(*["We add both sides and divide by two, which gives the claim."] * 100), seed=0)
    assert maths.check_golds([], seed=0) == []


def test_thirty_two_threads_agree(maths):
    from concurrent.futures import ThreadPoolExecutor

    texts = [rf"\boxed{{\sqrt{{{n}}}}}" for n in range(2, 42)]
    with ThreadPoolExecutor(32) as threads:
        found = list(threads.map(lambda text: maths([text], [r"\sqrt{7}"], [{}])[0].reward, texts))
    assert [text for text, reward in zip(texts, found) if reward] == [r"\boxed{\sqrt{7}}"]


def test_a_worker_that_dies_is_an_error_and_not_a_wrong_answer(maths, monkeypatch):
    monkeypatch.setattr(
        maths.pool, "map", lambda tasks: [Outcome(error="the worker process died of the task, twice")] * len(tasks)
    )
    verdict = maths([r"\boxed{y+1}"], ["5"], [{}])[0]
    assert verdict.reward is None and "died" in verdict.error
    monkeypatch.undo()
    assert maths([r"\boxed{y+1}"], ["5"], [{}])[0].reward == 0, "an error is not remembered"


@settings(max_examples=300, deadline=1000)
@given(st.text(max_size=3000) | st.text(alphabet="\\boxed{frac}0123456789.,-+/^_$%()[] \n½²−", max_size=3000))
@example("\\boxed{" * 500)
@example("√" * 2000)
def test_any_text_is_read(text):
    assert tidy(tidy(text)) is not None
    for answer in final_answers(text):
        verdict = told_apart("5", answer)
        assert verdict is None or verdict.reward in (0.0, 1.0)
        assert len(read.spelled(answer)) <= 200


@settings(max_examples=200)
@given(st.fractions(max_denominator=10**6), st.booleans())
def test_every_spelling_of_a_rational_has_its_value(number, minus_sign):
    top, bottom = abs(number.numerator), number.denominator
    sign = "" if number >= 0 else "−" if minus_sign else "-"
    spellings = [f"{sign}{top}/{bottom}", rf"${sign}\dfrac{{{top}}}{{{bottom}}}$", rf"{sign}\frac{{{top:,}}}{{{bottom}}}"]
    if bottom == 1:
        spellings += [
            f"{sign}{top}",
            f"{sign}{top:,}",
            f"{sign}{top}.0",
            f"{sign}{top}.",
            rf"\text{{{sign.replace('−', '-')}{top}}}",
        ]
    if top > bottom > 1:
        spellings += [f"{sign}{top // bottom} {top % bottom}/{bottom}"]
    for text in spellings:
        assert read.value(tidy(text)).number == number, text


@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
def test_equal_means_equal(a, b):
    verdict = told_apart(str(a), str(b))
    assert (verdict.reward == 1.0) == (a == b)


def test_rounding_is_forgiven_at_the_sixth_place_only():
    value = lambda text: read.value(tidy(text))  # noqa: E731
    assert value("0.333333").same(value("1/3")) and not value("0.3333").same(value("1/3"))
    assert not value("0.0000001").same(value("0.0000002")) and not value("1000000").same(value("1000000.5"))
    assert value(r"0.1\overline{6}").number == Fraction(1, 6) and value("1e999").number == 10**999 and value("1e9999") is None


def test_workers_import_no_torch():
    modules = "vipfast.rewards.equal, vipfast.rewards.own, vipfast.rewards.maths, vipfast.rewards.choose"
    check = f"import sys, {modules}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, cwd=Path(__file__).parents[2])


def test_a_gold_that_kills_its_worker_is_an_error_and_not_remembered(maths, monkeypatch):
    monkeypatch.setattr(maths.pool, "map", lambda tasks: [Outcome(error="the worker process died")] * len(tasks))
    assert "comparing 'z+3' with 'z+3': the worker process died" in maths(["Answer: z+3"], ["z+3"], [{}])[0].error
    with pytest.raises(RewardError, match="gold answer 'z\\+3' could not be checked: the worker process died"):
        maths.check_golds(prompts("z+3"), seed=0)
    monkeypatch.undo()
    assert maths(["Answer: z+3"], ["z+3"], [{}])[0].reward == 1


def test_a_gold_that_hangs_is_unscored_and_costs_its_limit_once(maths, monkeypatch):
    asked, gold = [], r"w^5+\sin(xw)=\cos(x^{7}+w)"

    def give_up(tasks):
        asked.extend(tasks)
        return [Outcome(gave_up="time")] * len(tasks)

    monkeypatch.setattr(maths.pool, "map", give_up)
    verdicts = maths([r"\boxed{x+1}", rf"\boxed{{{gold}}}"], [gold] * 2, [{}] * 2)
    assert [(verdict.reward, verdict.timed_out) for verdict in verdicts] == [(None, True)] * 2
    num_asked = len(asked)
    assert maths([r"\boxed{x+2}"], [gold], [{}])[0].reward is None and len(asked) == num_asked
