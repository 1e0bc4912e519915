"""Exact-match reward for datasets with short final answers: extract, normalise, compare. No partial credit."""

import re
from fractions import Fraction

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_ANSWER_LINE = re.compile(r"(?:####|[Aa]nswer\s*(?:is)?\s*:)\s*(.+)")


def boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{…}`` with balanced braces, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for i in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i].strip()
    return None


def final_answer(text: str) -> str | None:
    r"""A completion's final answer: the last ``\boxed{}``, else the last ``####`` or ``Answer:`` line, else the last number."""
    answer = boxed(text)
    if answer is None and (lines := _ANSWER_LINE.findall(text)):
        answer = lines[-1].strip()
    if answer is None and (numbers := _NUMBER.findall(text)):
        answer = numbers[-1]
    return None if answer is None else normalise(answer)


def gold_answer(text: str) -> str:
    """The answer column's answer: what stands in a box or after ``####`` in a worked solution, else the text itself."""
    answer = boxed(text)
    if answer is None and "####" in text:
        answer = text.rsplit("####", 1)[1]
    return normalise(text if answer is None else answer)


def normalise(answer: str) -> str:
    """One spelling per value: no dollar signs, spaces, thousands commas or closing dot; rationals as exact fractions."""
    short = answer.strip().strip("$").rstrip(".").replace(" ", "")
    plain = short.replace(",", "")
    try:
        return str(Fraction(plain))
    except (ValueError, ZeroDivisionError):
        return short


def reward(completions: list[str], answers: list[str], metadata: list[dict]) -> list[float | None]:
    """1.0 where the completion's final answer equals the gold answer, 0.0 where not; None where the gold is empty."""
    rewards: list[float | None] = []
    for completion, answer in zip(completions, answers):
        gold = gold_answer(str(answer))
        rewards.append(float(final_answer(completion) == gold) if gold else None)
    return rewards
