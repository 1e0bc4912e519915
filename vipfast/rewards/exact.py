"""Exact-match reward for datasets with short final answers: extract, normalise, compare. No partial credit."""

import re
from fractions import Fraction

from vipfast.rewards.base import Verdict
from vipfast.types import ZERO_ONE

_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?")
# Bounded, since two runs of spaces side by side take quadratic time.
_ANSWER_LINE = re.compile(r"(?:####|[Aa]nswer\s{0,9}(?:is)?\s{0,9}:)\s*(.+)")
_BRACE = re.compile("[{}]")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Bounded, since the text is sampled: Fraction("1e999999999") alone would never return.
_RATIONAL = re.compile(r"-?(?:\d{1,64}(?:\.\d{1,64})?|\.\d{1,64})(?:/\d{1,64})?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def boxed(text: str) -> list[str]:
    r"""The contents of every ``\boxed{…}`` or ``\fbox{…}`` with balanced braces, in order."""
    found = []
    for part in _BOX.split(text)[1:]:
        depth = 1
        for brace in _BRACE.finditer(part):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                found.append(part[: brace.start()].strip())
                break
    return found


def final_answer(text: str) -> str | None:
    r"""A completion's final answer: what is in ``\boxed{}``, else the last ``####`` or ``Answer:`` line, else the last number.

    Boxes that differ are hedging, and no answer. A box or an answer line counts as it stands, words and all.
    """
    if boxes := {normalise(box) for box in boxed(text)}:
        return boxes.pop() if len(boxes) == 1 else None
    if lines := _ANSWER_LINE.findall(text):
        return normalise(lines[-1].strip().strip("*"))  # Markdown's bold: **Answer:** 5
    numbers = _NUMBER.findall(text)
    return normalise(numbers[-1]) if numbers else None


def gold_answer(text: str) -> str:
    """The answer column's answer: what stands in a box or after ``####`` in a worked solution, else the text itself."""
    if boxes := boxed(text):
        return normalise(boxes[-1])
    return normalise(text.rsplit("####", 1)[-1])


def normalise(answer: str) -> str:
    """One spelling per value: no dollar signs, spaces, thousands commas or closing dot; rationals as exact fractions."""
    short = answer.replace("\u2212", "-").strip().strip("$").rstrip(".").replace(" ", "")
    plain = _THOUSANDS.sub("", short)
    if not _RATIONAL.fullmatch(plain) or re.search(r"/0+$", plain):
        return short
    top, _, bottom = plain.partition("/")
    return str(Fraction(top) / Fraction(bottom or "1"))


def reward(completions: list[str], answers: list[str], metadata: list[dict]) -> list[Verdict]:
    """1.0 where the completion's final answer equals the gold answer, 0.0 where not; None where the gold is empty."""
    golds, found = [gold_answer(str(answer)) for answer in answers], [final_answer(text) for text in completions]
    return [Verdict(float(answer == gold) if gold else None, answer) for answer, gold in zip(found, golds)]


reward.reward_range, reward.has_answers = ZERO_ONE, True
