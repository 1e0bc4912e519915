"""Exact match, for datasets with short final answers: numbers by value, all else letter by letter. No partial credit."""

import re
from functools import lru_cache

from vipfast.rewards.answers import final_answers, gold_answer, qualified, spelled
from vipfast.rewards.base import Verdict
from vipfast.rewards.compare import by_value, one_form
from vipfast.rewards.tidy import LONGEST, TEXT
from vipfast.rewards.units import contradict, unit
from vipfast.types import ZERO_ONE

_IN_TEXT = re.compile(TEXT + r"\{([^{}]*)\}")
_SPACE = re.compile(r"(?<!\d) | (?!\d)")


def reward(completions: list[str], answers: list, metadata: list[dict]) -> list[Verdict]:
    """1.0 where the completion's final answer equals the gold answer, 0.0 where not; None where the gold is empty.

    Boxes of different values are right only where each of them equals the gold, or the gold is all of them.
    """
    return [_verdict("" if answer is None else gold_answer(str(answer)), text) for answer, text in zip(answers, completions)]


def _verdict(gold: str, completion: str) -> Verdict:
    found = final_answers(completion)
    short = len(gold) + sum(map(len, found)) <= LONGEST
    return _judged(gold, found) if short else _judged.__wrapped__(gold, found)


@lru_cache(4096)  # a group's rollouts often agree
def _judged(gold: str, found: tuple[str, ...]) -> Verdict:
    if not gold:
        return Verdict(None, _spelling(", ".join(found)))
    together = ", ".join(found)
    each = not contradict(found) and all(same(gold, answer) for answer in found)
    if found and (each or len(found) > 1 and same(gold, together)):
        return Verdict(1.0, _spelling(gold))
    return Verdict(0.0, _spelling(together))


def same(gold: str, answer: str) -> bool:
    """Whether two tidied answers are one number, or the same letters without regard to spaces."""
    if max(len(gold), len(answer)) > LONGEST:
        return gold == answer
    if qualified(answer) and not qualified(gold):
        return False
    if (found := by_value(gold, answer)) is None:
        tidied, (gold, answer) = (gold, answer), one_form(gold, answer)
        found = by_value(gold, answer) if (gold, answer) != tidied else None
    return _unspaced(gold) == _unspaced(answer) if found is None else found


def _unspaced(answer: str) -> str:
    """Without spaces, but for those that keep two numbers apart."""
    answer = _IN_TEXT.sub(r"\1", answer) if "\\" in answer else answer
    return _SPACE.sub("", answer) if " " in answer else answer


def _spelling(answer: str) -> str | None:
    return _unspaced(spelled(unit(answer)[0])) or None


reward.reward_range, reward.has_answers = ZERO_ONE, True
