"""What the extractor skips to be quick changes no answer: each shortcut against the whole search, on texts at its edges."""

import json
import random
from pathlib import Path

import pytest

from vipfast.rewards import answers, extract, prose, statement, thinking, tidy
from vipfast.rewards.exact import reward
from vipfast.rewards.maths import Maths

CORPUS = [json.loads(line) for line in (Path(__file__).parents[1] / "data" / "answers.jsonl").open(encoding="utf-8")]
TOKENS = (
    "answer|Anſwer |ANSWERS|answer: |the correct option is |best choİce: |choıce|right choice is |####|#|the final |"
    "is |isn't |not |\n|\n\n| |  |$|*|**|\\|\\\\|\\(|\\)|\\[|\\]|{|}|(|)|,|.|:|=|-|−|–|5|12.5|1,234|3/4|x|x=|"
    "1 000 000|_2|^2|^\\circ|°|√|²|½|&|`|~|<|>|or |and |to |between 3 and |at least |more than |"
    "less than or equal to |never |≠ |\\neq |minus |MINUſ |mınus |negative |square root of |sqrt(|log|half |"
    "reciprocal |differences (|is 5, |get 3, |through |[t|[THINK]|[/think]|◁think▷|◁/think▷|<think>|</think>|"
    "<answer>|</answer>|\\boxed{|\\text{|\\mathrm{|\\frac|\\dfrac|\\nicefrac|\\over |\\pmod{3}|(mod 5)|\\big|"
    "\\degree|\\left(|€|£|¥|₹|¢|\\$|\\%|percent|pct|US|Rs. |USD |\\euro|\\text{is }|\\color{red}|{,}|\\quad|\\,|"
    "\\approx|\\langle|\\varnothing|th|\u00a0"
).split("|")


def mixed(num, seed=0, longest=12):
    """Texts of random tokens, alone or behind a corpus completion."""
    pick = random.Random(seed)
    for _ in range(num):
        text = "".join(pick.choice(TOKENS) for _ in range(pick.randint(1, longest)))
        yield text if pick.random() < 0.7 else pick.choice(CORPUS)["completion"][:500] + text


def spans(matches):
    return [match.span() for match in matches]


def test_phrases_are_those_of_the_whole_search():
    texts = [*mixed(20_000), *(line["completion"] for line in CORPUS)]
    assert sum(len(spans(extract._phrases(text))) for text in texts) > 5000
    assert [text for text in texts if spans(extract._phrases(text)) != spans(extract._PHRASE.finditer(text))] == []


def test_formulas_are_those_of_the_whole_search():
    texts = [*mixed(20_000, 1), *(line["completion"] for line in CORPUS)]
    assert [text for text in texts if spans(statement.formulas(text)) != spans(statement.MATHS.finditer(text))] == []


def test_every_tag_of_a_thought_begins_as_the_quick_look_expects():
    for tag in (tag for pair in thinking.PAIRS for tag in pair):
        assert tag.startswith(thinking._SIGNS), tag
        for spelled in (tag, tag.upper(), tag.lower(), tag.title()):
            assert thinking.outside_thinking(f"a{spelled}b") != f"a{spelled}b", spelled


def test_every_rewrite_matches_only_what_holds_what_it_needs(monkeypatch):
    texts = [*mixed(20_000, 2, 6), *(line["answer"] for line in CORPUS)]
    quick = [tidy.tidy(text) for text in texts]
    assert all(any(pattern.search(text) for text in texts) for _, pattern, _ in tidy._REWRITES[:8])
    tidy._tidied.cache_clear()
    monkeypatch.setattr(tidy, "_REWRITES", [("", pattern, by) for _, pattern, by in tidy._REWRITES])
    assert [text for text, found in zip(texts, quick) if tidy.tidy(text) != found] == []
    tidy._tidied.cache_clear()


@pytest.mark.parametrize(
    "pattern, ends",
    [("_HEDGE", "_HEDGE_ENDS"), ("_QUALIFIED", "_QUALIFIED_ENDS"), ("_MINUS", "_MINUS_ENDS")],
)
def test_what_turns_a_value_ends_as_the_quick_look_expects(pattern, ends):
    met = [text for text in mixed(40_000, 3, 5) if getattr(prose, pattern).search(text[-60:])]
    assert len(met) > 200
    assert {text[-60:].rstrip("$*" + prose._SPACES)[-1:].lower() for text in met} <= getattr(prose, ends)


def test_a_functions_name_at_the_end_is_within_the_characters_looked_at():
    for text in (text[-60:] for text in mixed(40_000, 4, 5) if "(" not in text[-60:] and "of" not in text[-60:].lower()):
        whole, end = prose._COMPUTED.search(text), prose._COMPUTED.search(text, max(0, len(text) - prose._LONGEST_COMPUTED))
        assert (whole and whole.span()) == (end and end.span()), text


@pytest.mark.parametrize("text", ["7", " 42", "-5", "\n-5\n", "007", " 12 ", "-0", "9" * 30, "\t8\u00a0"])
def test_a_number_alone_is_the_last_value_of_its_text(text):
    assert answers.final_answers(text) == (tidy.tidy(prose.last_value(text)),)


def test_what_is_remembered_is_what_is_found_again():
    maths = Maths(workers=1, timeout_s=30)
    try:
        for grade in (reward, maths):
            first = [grade([line["completion"]], [line["answer"]], [{}]) for line in CORPUS[::40]]
            assert [grade([line["completion"]], [line["answer"]], [{}]) for line in CORPUS[::40]] == first
    finally:
        maths.close()


def test_long_answers_are_not_remembered():
    before = answers._read.cache_info().currsize
    for num in range(20):
        answers.final_answers(rf"\boxed{{{num} {'x' * 3000}}}")
    assert answers._read.cache_info().currsize == before
