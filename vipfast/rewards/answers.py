r"""Tidied answers as text: the final ones of a completion, and what can be told of an answer without any algebra.

Everything here is linear in the text, since the text is sampled and nobody stops this process: spaces come one at a time once a
text is tidied, and what repeats is bounded, or ends where the next try begins.
"""

import hashlib
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from vipfast.rewards.extract import boxed, find
from vipfast.rewards.prose import last_value
from vipfast.rewards.statement import trimmed, turned
from vipfast.rewards.tidy import LONGEST, TEXT, tidy
from vipfast.rewards.units import unit

_LONGEST_SPELLING = 200
_MOST_WORDS = 5
_STATES = re.compile(
    r"(?:(?:so|thus|hence|then|therefore|we|get|gets|have|has|find|obtain|it|he|she|they|there|are|is|was|were|be|will|the|a|an|"
    r"total|totals|number|value|sum|amount|answer|result|final|of|in|all|equal|equals|to|that|this|exactly|just|only|cost|costs|"
    r"pay|pays|need|needs|sold|spent|made|makes|left|now|x|y)|[\s,:=$€£¥*])*",
    re.IGNORECASE,
)
"""Words in front of a number that state it and do nothing to it."""
_NUMBER_ALONE = re.compile(r"\s*(-?[0-9]{1,30})\s*")
MOST_BOXES = 16

_QUALIFIER = re.compile(r"(?i)\b(?:not|at least|at most|or more|or less|or fewer|maybe|unless)\b")

_DECIMAL = r"(?:\d{1,3}(?:,\d{3}){1,300}(?:\.\d{1,999})?|\d{1,999}(?:\.\d{0,999})?|\.\d{1,999})"
_RATIO = re.compile(rf"(-?)\s*({_DECIMAL})(?:\s*/\s*({_DECIMAL}))?")
_FRACTION = re.compile(rf"(-?)\s*\\frac\{{\s*(-?{_DECIMAL})\s*\}}\{{\s*({_DECIMAL})\s*\}}")
_MIXED = re.compile(r"(-?)\s*(\d{1,99})(?:\s+(\d{1,99})\s*/\s*(\d{1,99})|\s*\\frac\{(\d{1,99})\}\{(\d{1,99})\})")
_SCIENTIFIC = re.compile(rf"(-?)\s*({_DECIMAL})\s*(?:[eE]|(?:\\times|\\cdot)\s*10\s*\^)\s*\{{?\s*([-+]?\d{{1,3}})\s*\}}?")
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(rf"(.*[\d}}.])\s?(?:\\text\{{)?\s?(?<![A-Za-z])({'|'.join(_SCALES)})s?\s?\}}?", re.IGNORECASE)
_REPEATING = re.compile(r"(-?)\s*(\d{0,99})\.(\d{0,99})\\overline\{(\d{1,99})\}")
_BASE = re.compile(r"(-?\d[0-9A-Za-z]*)\s*_\s*(?:\{\s*)?(?:\\text\{\s*)?(\d{1,2})[\s}]*")
_TEXT = re.compile(rf"(?:{TEXT}|\\operatorname)\{{([^{{}}\\]*)\}}")
_LETTERS = re.compile(r"[a-z][a-z' -]*")
_IN_TEXT = re.compile(r"[a-z][a-z0-9',. -]*")


def final_answers(completion: str) -> tuple[str, ...]:
    r"""A completion's final answers, tidied: () if there is none, and several only where boxes differ.

    They stand where ``extract.find`` says; where nothing is stated the last formula or number is the answer. Of a sentence with
    a number in it the number counts, unless words turn its value.
    """
    if number := _NUMBER_ALONE.fullmatch(completion):
        return (number[1],)
    found = find(completion)
    if found.place == "nowhere":
        values = [last_value(text) or _short(text) for text in found.texts]
        return tuple(tidy(value) for value in values if value)
    if len(found.texts) > MOST_BOXES:
        return ()
    texts = [trimmed(text) for text in found.texts] if found.place == "line" else found.texts
    if len(texts) == 1:
        answer = _without_prose(texts[0])
        return (answer,) if answer else ()
    return tuple(filter(None, {spelled(answer): answer for answer in map(_without_prose, texts)}.values()))


def _short(text: str) -> str | None:
    """A text of a few words and no number, which is its own answer."""
    words = text.split()
    return " ".join(words).strip("*_") if len(words) <= _MOST_WORDS and not re.search(r"\d", text) else None


def _without_prose(text: str) -> str:
    """The number of a sentence that does nothing but state it; anything else as it stands."""
    return _read(text) if len(text) <= LONGEST else _read.__wrapped__(text)


@lru_cache(4096)
def _read(text: str) -> str:
    """The same, remembered where the text is short."""
    answer = tidy(text)
    if len(answer) > LONGEST or not is_prose(answer) or value(unit(answer)[0]) is not None:
        return answer
    number = last_value(text)
    if number is None or text.count(number) != 1 or not _STATES.fullmatch(text.partition(number)[0]) or turned(answer):
        return answer
    return tidy(number)


def gold_answer(answer: str) -> str:
    """The answer column's answer, tidied: what is in the last box or after ``####`` of a worked solution, else all of it."""
    if boxes := boxed(answer):
        return tidy(boxes[-1])
    return tidy(answer.rsplit("####", 1)[-1])


@dataclass(frozen=True)
class Value:
    """A rational number, and whether it was written with a decimal point or a percent sign."""

    number: Fraction
    decimal: bool
    percent: bool

    def same(self, other: "Value") -> bool:
        """Equal; a decimal may be rounded at its sixth place. 28 % is 28, .28 and 28 %: a gold is written either way."""
        decimal = self.decimal or other.decimal
        if _near(self.number, other.number, decimal):
            return True
        mine, theirs = (100 if one.percent else 1 for one in (self, other))
        return max(mine, theirs) > 1 and _near(self.number / mine, other.number / theirs, decimal)


def _near(a: Fraction, b: Fraction, decimal: bool) -> bool:
    return a == b or (decimal and abs(a - b) <= min(Fraction(1, 10**6), Fraction(2, 10**6) * max(abs(a), abs(b))))


def value(text: str) -> Value | None:
    """The value of a tidied answer that is a plain number: integer, decimal, fraction, mixed, repeating or scientific, with or
    without a word such as "million" behind it."""
    return None if len(text) > LONGEST else _value(text)


@lru_cache(4096)
def _value(text: str) -> Value | None:
    if text.isdecimal() and len(text) < 1000:
        return Value(Fraction(int(text)), False, False)
    plain = text.removesuffix("%").rstrip()
    number, scale = _rational(plain.removeprefix("+")), 1
    if number is None and (scaled := _SCALED.fullmatch(plain)):
        number, scale = _rational(scaled[1].rstrip()), _SCALES[scaled[2].lower()]
    return None if number is None else Value(number if scale == 1 else number * scale, "." in plain, plain != text)


def _rational(text: str) -> Fraction | None:
    if match := _RATIO.fullmatch(text) or _FRACTION.fullmatch(text):
        sign, top, bottom = match.groups()
        over, under = _decimal(top), _decimal(bottom or "1")
        return None if under == 0 else _signed(sign, over if under == 1 else over / under)
    if match := _MIXED.fullmatch(text):
        sign, whole, *parts = match.groups()
        top, bottom = (int(part) for part in parts if part is not None)
        return None if bottom == 0 else _signed(sign, int(whole) + Fraction(top, bottom))
    if match := _SCIENTIFIC.fullmatch(text):
        sign, front, power = match.groups()
        return _signed(sign, Fraction(front.replace(",", "")) * Fraction(10) ** int(power))
    if match := _REPEATING.fullmatch(text):
        sign, whole, first, again = match.groups()
        left = Fraction(int(whole + first or "0"), 10 ** len(first))
        return _signed(sign, left + Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(first)))
    return None


def _decimal(text: str) -> Fraction:
    digits = text.replace(",", "")
    return Fraction(int(digits)) if digits.isdecimal() else Fraction(digits)


def _signed(sign: str, number: Fraction) -> Fraction:
    return -number if sign == "-" else number


def in_base(text: str) -> tuple[str, str] | None:
    """Digits and base of ``1011_2``."""
    found = _BASE.fullmatch(text) if "_" in text else None
    return None if found is None else (found[1].upper(), found[2])


def words(text: str) -> tuple[str, bool] | None:
    r"""An answer in words, in lower case without brackets, and whether ``\text{}`` says that it is one; None for formulas."""
    plain, explicit = lowered(text), _TEXT.fullmatch(text) is not None
    return (plain, explicit) if (_IN_TEXT if explicit else _LETTERS).fullmatch(plain) else None


def lowered(text: str) -> str:
    r"""A tidied answer in lower case, without ``\text{}`` and brackets around it."""
    text = _TEXT.sub(r"\1", text) if "\\" in text else text
    return " ".join(text.lower().split()).strip("() .")


def is_prose(text: str) -> bool:
    r"""Whether a gold is a sentence rather than an answer: bare words, of which nobody can say when they are met."""
    bare = re.sub(r"\\[A-Za-z]+", " ", _TEXT.sub(" ", text)) if "\\" in text else text
    found = re.findall(r"[A-Za-z]{3,}", bare)
    return len(found) > 2 or re.match(r"\W*[A-Za-z]{3,}\W+[A-Za-z]{3,}", bare) is not None


def qualified(text: str) -> bool:
    """Whether words turn the value: "not 5", "5 or more"."""
    return _QUALIFIER.search(text) is not None


def spelled(text: str) -> str:
    """An answer for counting votes, of bounded length: one spelling per rational number, else as tidied."""
    found = value(text)
    return bounded(text if found is None else str(found.number))


def bounded(text: str) -> str:
    if len(text) <= _LONGEST_SPELLING:
        return text
    return text[: _LONGEST_SPELLING // 2] + hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
