"""Sampled text is read in linear time: nobody can stop the thread that reads it, and it keeps all others from running."""

import itertools
import random
import time

import pytest

from vipfast.rewards import answers, exact, retrieval
from vipfast.rewards.compare import told_apart
from vipfast.rewards.tidy import tidy

TOKENS = (
    "~ | |\n|\t|$|#|####|answer|Answer is|:|*|\\boxed{|\\text{|{|}|\\frac{|\\frac|1|1,|1 |111 |111,|1/|1.|(|)|√|√(|-|−|³|½|ﷺ|"
    "\\(|\\[|\\)|\\]|\\|\\\\|\\,|\\quad|or |<think>|</think>|<answer>|</answer>|per|cent|%|^|_|{2|a|ab |abcd |cm|\\overline{|"
    "10^|e|\\times|\\left|\\circ|^\\circ|°|\\sin|\\log_|\\approx|≈|´|[|]|and |.|"
    "x=|x=1,|C) |(C) |is |since |\\boxed|\\underline{|\\color{|\\begin{|&|€|<|>|\\over|answer is |answer to |hundred |1/a"
).split("|")
BEFORE = ("", "1\\text{", "1 ", "1e", "answer", "√", "<answer>", "\\(", "\\sin 1")
AFTER = ("", "x}", "\nx", "^")
READERS = {
    "a long completion": (20_000, answers.final_answers),
    "a long completion, exact": (20_000, lambda text: exact.reward([text], ["1/2"], [{}])),
    "a long completion, in words": (20_000, retrieval.answer_of),
    "a long box": (20_000, lambda text: [told_apart("5", answer) for answer in answers.final_answers(f"\\boxed{{{text}}}")]),
    "an answer": (1900, lambda text: told_apart("\\frac{1}{2}", tidy(text))),
    "a named answer": (1900, lambda text: told_apart("12", tidy(f"{text}=12"))),
    "a named gold": (1900, lambda text: told_apart(tidy(f"{text}=12"), "12")),
    "a line": (1900, lambda text: answers.final_answers(f"the answer is 5 {text}")),
    "prose": (1900, lambda text: answers.final_answers(f"{text} 5")),
    "boxes": (1900, lambda text: answers.final_answers("".join(f"\\boxed{{{i} {text} {i}}}" for i in range(16)))),
}


@pytest.mark.parametrize("reader", READERS)
def test_repeated_tokens_cost_milliseconds(reader):
    length, read = READERS[reader]
    pick = random.Random(0)
    tries = [(pick.choice(BEFORE), token, pick.choice(AFTER)) for token in TOKENS]
    tries += [("1\\text{", "~", "}x"), ("", "\n", ""), ("1e", " ", "x")]
    tries += [
        (before, pick.choice(TOKENS) + pick.choice(TOKENS), after)
        for before, after in itertools.product(BEFORE, AFTER)
        for _ in range(3)
    ]
    for before, token, after in tries:
        text = before + token * (length // len(token)) + after
        # Garbage of other tests may be collected in one of three tries.
        assert any(seconds(read, text) < 0.2 for _ in range(3)), (before, token, after)


def seconds(read, text):
    start = time.thread_time()
    read(text)
    return time.thread_time() - start
