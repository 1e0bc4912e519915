"""Rewards for questions with short answers in words, as open-domain question answering counts them (SQuAD's normalisation):
exact match, and F1 and precision of the answer's words. Choose one by name, e.g. ``vipfast.rewards.retrieval:em``.

The answer of a completion stands where ``extract.find`` says, else in its last line. A gold answer may be a text, or several (a
list, or a JSON list of texts): the best of them counts.
"""

import json
import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

from vipfast.rewards.base import Verdict
from vipfast.rewards.extract import find, plain
from vipfast.types import ZERO_ONE, RewardRange

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer_of(text: str) -> str:
    """A completion's answer as it stands, outside its thoughts; "" if there is none, or boxes that differ."""
    found = find(text)
    answers = {normalise(answer): answer for answer in map(plain, found.texts)}
    if len(answers) != 1:
        return ""
    answer = next(iter(answers.values())).strip()
    return (answer.splitlines() or [""])[-1].strip() if found.place == "nowhere" else answer


def normalise(answer: str) -> str:
    """Lower case, without punctuation, articles and spare spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def golds(answer: Any) -> list[str]:
    """The normalised gold answers that are not empty."""
    if isinstance(answer, str) and answer.lstrip().startswith("["):
        try:
            answer = json.loads(answer)
        except json.JSONDecodeError:
            pass  # a text that begins with a bracket
    several = answer if isinstance(answer, list | tuple) else [answer]
    return [gold for gold in (normalise(str(one)) for one in several if one is not None) if gold]


def em(completions: list[str], answers: list[Any], metadata: list[dict]) -> list[Verdict]:
    """1.0 where the answer equals a gold answer once both are normalised, else 0.0; None where there is no gold answer."""
    return _judged(completions, answers, lambda found, gold: float(found == gold))


def f1(completions: list[str], answers: list[Any], metadata: list[dict]) -> list[Verdict]:
    """Harmonic mean of precision and recall of the answer's words, repeated words counted; None as in ``em``."""
    return _judged(completions, answers, lambda found, gold: 2 * _common(found, gold) / (_words(found) + _words(gold)))


def precision(completions: list[str], answers: list[Any], metadata: list[dict]) -> list[Verdict]:
    """Share of the answer's words that are in the gold answer, repeated words counted; None as in ``em``."""
    return _judged(completions, answers, lambda found, gold: _common(found, gold) / max(_words(found), 1))


em.reward_range, f1.reward_range, precision.reward_range = ZERO_ONE, RewardRange(0.0, 1.0), RewardRange(0.0, 1.0)
em.has_answers = f1.has_answers = precision.has_answers = True


def _judged(completions: list[str], answers: list[Any], score: Callable[[str, str], float]) -> list[Verdict]:
    verdicts = []
    for text, answer in zip(completions, answers):
        found, right = normalise(answer_of(text)), golds(answer)
        verdicts.append(Verdict(max((score(found, gold) for gold in right), default=None), found or None))
    return verdicts


def _words(text: str) -> int:
    return len(text.split())


def _common(found: str, gold: str) -> int:
    return (Counter(found.split()) & Counter(gold.split())).total()
