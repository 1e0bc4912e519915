"""Values as they stand among words: what a statement says beside its value, and the last value of a text that states none.

Everything here is linear in the text, which is sampled; ``last_value`` looks at the end of it alone.
"""

import re
from collections import deque
from collections.abc import Callable

LONGEST_TAIL = 4000
"""Characters at the end of a text among which its last formula or number is looked for."""

_MATHS = re.compile(
    r"\$\$?([^$]{1,500})\$\$?|(?<!\\)\\\(((?:(?!\\\)|(?<!\\)\\\().){1,500})\\\)|"
    r"(?<!\\)\\\[((?:(?!\\\]|(?<!\\)\\\[).){1,500})\\\]",
    re.DOTALL,
)
_HEDGE = re.compile(r"\bor\s+[\s$*]*$")

# What is said of a value behind it: "42, since 6 · 7 = 42", "72 (seventy-two)", "72, altogether".
_CLAUSE = re.compile(
    r"\s?,\s?(?:not|rather than|instead of)\b|(?<=[a-z])\sin(?=\s\d)|"
    r"(?:\s?,\s?|\s|\s?\(\s?)(?:because|since|as|which|where|so|when|hence|thus|therefore|for|that|from|after|given|see|i\.e|"
    r"in (?:total|all|the|this|our|both|each))\b"
)
_ASIDE = re.compile(r"\s?,\s(?=[a-z]{2}|I\s)|\s?[(\[](?=[A-Za-z])|\s[-–—]{1,3}\s(?=[A-Za-z])")
_TURNS = re.compile(
    r"\b(?:or|and|not|nor|but|except|unless|either|neither|maybe|perhaps|possibly|mod|base|to|more|less|fewer|plus|minus|times|squared|cubed|"
    r"hundreds?|thousands?|millions?|billions?|trillions?|dozens?)\b",
    re.IGNORECASE,
)
_BARE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_IN_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textrm|operatorname|begin|end)\s?\{[^{}]*\}")
_SENTENCE_END = re.compile(r"[.;]\s|[.;]$")


def turned(text: str) -> bool:
    """Whether words such as "or", "to" and "million" stand in a text, which make another value of a number beside them."""
    return _TURNS.search(text) is not None


def trimmed(statement: str, is_value: Callable[[str], bool]) -> str:
    """A statement on an answer line without what is only said about its value: further sentences, reasons, asides.

    Args:
        statement: as ``find`` gave it.
        is_value: whether a text is a number, with a unit or without. Words that may be the answer themselves stay whole.
    """
    first = _SENTENCE_END.split(statement, maxsplit=1)[0].strip()
    places = [(clause.start(), False) for clause in _CLAUSE.finditer(first)]
    places += [(aside.start(), True) for aside in _ASIDE.finditer(first)]
    for start, may_turn in sorted(places):
        value = first[:start].strip(" ,*_")
        if not (_MATHS.fullmatch(value) or is_value(value) or not _BARE_WORD.search(_IN_TEXT.sub("", value))):
            return first
        if value.count("{") != value.count("}") or value.count("$") % 2:  # inside a formula
            continue
        if value and not (may_turn and turned(first[start : start + 30])):
            return value
    return first


# Formulas as they stand in prose: runs of anything but white space and words, joined where a sign of arithmetic says so.
_RUN = re.compile(
    r"(?:\\(?:text|mathrm|mbox|textrm)\s?\{[^{}\n]{0,80}\}|[^\sA-Za-z\\]|\\[A-Za-z]+|\\|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z]))+"
)
_GOES_ON = re.compile(
    r"(?:[-+*/^_=<>×·÷≤≥−{(]|\\(?:times|cdot|div|pm|leq?|geq?)|"
    r"\\(?:frac|sqrt|log|ln|lg|sin|cos|tan|cot|sec|csc|binom|max|min|gcd)(?:[_^](?:\w|\{\w{1,9}\}))?)\Z"
)
_CONTINUES = re.compile(r"[+*/^_=<>×·÷≤≥%})]|[-−](?=\s)|\\(?:times|cdot|div|pm|leq?|geq?|%|text|mathrm|mbox)")
_MOST_IN_BRACKETS = 12
_NEAR = 200
"""Characters around the last digit among which its formula stands."""
_GROUPED = re.compile(r"\d{1,3}"), re.compile(r"\d{3}\b|\d+/\d+")
"""Digits, and what they may stand before at a space: 1 000, or 5 1/2."""
_LAST_SIDE = re.compile(r"(?<![<>!:])=(?!=)|≈|\\approx|→|⇒|->")
_AROUND = "*_`'\"“”‘’#:;,!?~$ "
_BULLET = re.compile(r"[-–—−+*•]\s+")
_SCALE = re.compile(r"\s(?:hundred|thousand|million|billion|trillion|dozen)\b")
_LONE = re.compile(r"[(\[{]\s*(-?[\d.,/]+%?)\s*[)\]}]")
_GLUED = re.compile(r"(-?[\d.,/]+)(?:\s?°\s?[CFK]?|[mgslhLNJWVKCF])")


def last_value(text: str) -> str | None:
    r"""The last formula or number of a text that states no answer, as written; None if there is none, or two joined by "or".

    Between dollars or the brackets of LaTeX a formula is taken whole. Elsewhere it is the stretch around the last number, so
    that 4 is not the answer of ``\frac{3}{4}``, nor 3 that of "−3".
    """
    text = text[-LONGEST_TAIL:]
    formula = next(iter(deque(_MATHS.finditer(text), maxlen=1)), None) if "$" in text or "\\" in text else None
    begin, value = _last_stretch(text, formula.end() if formula else 0)
    if value is None and formula is not None:
        begin, value = formula.start(), next(filter(None, formula.groups()))
    return None if value is None or _HEDGE.search(text[:begin][-20:]) else value


def _last_stretch(text: str, start: int) -> tuple[int, str | None]:
    """Where the stretch around the last number behind ``start`` begins, and the value in it."""
    digit = max(map(text.rfind, "0123456789"))
    start = max(start, text.rfind(" ", 0, max(0, digit - _NEAR)) + 1)
    runs = [(run.start(), run.end()) for run in _RUN.finditer(text, start, digit + _NEAR)]
    numbers = [i for i, run in enumerate(runs) if any(map(str.isdecimal, text[slice(*run)]))]
    if not numbers:
        return 0, None
    last = numbers[-1]
    first = _bracket_opens(text, runs, last)
    while last + 1 < len(runs) and _one_formula(text, runs[last], runs[last + 1]):
        last += 1
    while first > 0 and _one_formula(text, runs[first - 1], runs[first]):
        first -= 1
    begin, end = runs[first][0], runs[last][1]
    stretch = _BULLET.sub("", text[begin:end], count=1) if _BULLET.match(text, begin) else text[begin:end]
    if begin and text[begin - 1].isalpha():  # covid-19
        stretch = stretch.lstrip("-–")
    value = _balanced(_LAST_SIDE.split(stretch)[-1].strip(_AROUND).rstrip("." + _AROUND))
    value = value.rstrip("-–—/+=<>(").strip(_AROUND)
    if plain := _LONE.fullmatch(value) or _GLUED.fullmatch(value):
        value = plain[1]
    scale = _SCALE.match(text, end)
    return begin, value + (scale[0] if scale else "")


def _bracket_opens(text: str, runs: list[tuple[int, int]], last: int) -> int:
    """The run in which the bracket opens that the last one closes: (3, 4). The last one where there is none."""
    first = last
    while first >= 0 and last - first < _MOST_IN_BRACKETS:
        inside = text[runs[first][0] : runs[last][1]]
        if inside.count(")") <= inside.count("("):
            return first
        if first == 0 or not 0 < runs[first][0] - runs[first - 1][1] <= 2 or text[runs[first - 1][1]] == "\n":
            break
        first -= 1
    return last


def _one_formula(text: str, one: tuple[int, int], other: tuple[int, int]) -> bool:
    between = text[one[1] : other[0]]
    if between.strip() or "\n" in between or len(between) > 2:
        return False
    before, (digits, behind) = text[one[0] : one[1]], _GROUPED
    if digits.fullmatch(before) and behind.match(text, other[0]):
        return True
    return bool(_GOES_ON.search(before) or _CONTINUES.match(text, other[0]))


def _balanced(stretch: str) -> str:
    """A stretch without brackets around it that are closed or opened elsewhere in the sentence."""
    for opening, closing in ("()", "[]"):
        while stretch.endswith(closing) and stretch.count(closing) > stretch.count(opening):
            stretch = stretch[:-1].rstrip(_AROUND + ".")
        while stretch.startswith(opening) and stretch.count(opening) > stretch.count(closing):
            stretch = stretch[1:]
    return stretch
