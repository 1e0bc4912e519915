r"""Whether a tidied answer is the gold's, as far as that needs no algebra: spelling, number, unit, name, choice and words.

``exact`` decides by this alone, ``maths`` hands what is left to algebra (equal.py). Both first bring gold and answer to one
form (``one_form``): a quantity that is named like ``a+b=12`` is its value where the gold names nothing, ``y=-2, x=3`` is the
pair ``(3,-2)``, and of the choice "(C) 12" the letter or the text is compared, whichever the gold has.
"""

import re
from functools import lru_cache

from vipfast.rewards import answers as read
from vipfast.rewards.base import Verdict
from vipfast.rewards.tidy import LONGEST, TEXT
from vipfast.rewards.units import unit

_LETTER = rf"(?:{TEXT}\s?\{{)?\s?"
_CHOICE = re.compile(
    rf"{_LETTER}(?:(?:option|choice|answer)\s?:?\s?)?"
    rf"(?:\(\s?([A-J])\s?\)|([A-J])\s?(?:\)|[.:](?=\s|\}}|$)|(?=\}}?$)))[\s}}]*(.*)",
    re.IGNORECASE,
)
_ANOTHER = re.compile(r"(?<![A-Za-z])[A-J]\s?\)")
_NAME = r"\\?[A-Za-z]{1,10}(?:_(?:\w|\{\w{1,9}\}))?'{0,3}"
_NAMED = re.compile(rf"({_NAME})\s?=\s?([^=<>]+)")
_NAMED_TOGETHER = re.compile(rf"\(\s?({_NAME}(?:\s?,\s?{_NAME}){{1,5}})\s?\)\s?=\s?\(([^=<>]+)\)")
_ENVELOPE = re.compile(r"\\(?:begin|end)\{(?:cases|array|matrix)\}(?:\{[lcr|]*\})?")
_BRACKETED = re.compile(r"\(([^()]*=[^()]*)\)|\\\{([^{}]*=[^{}]*)\\\}")
_HALF_DAY = re.compile(r"(?<=[\d\s{])([ap])\.?\s?m\b", re.IGNORECASE)
_CLOCK = re.compile(r"\d{1,2}:\d\d(?::\d\d)?")
_SEPARATOR = re.compile(
    rf"(?:,|;)?\s?{TEXT}\{{\s*(?:and|or|,)\s*\}}\s?|\s(?:and|or)\s|[,;]\s?|\s?\\\\\s?|"
    rf"\s?\\(?:land|wedge)(?![a-z])\s?|\s(?={_NAME}\s?=)"
)
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_EQUALS = re.compile(r"(?<![<>!:\\])=(?!=)")
_IMPLIES = re.compile(r"\\(?:implies|Rightarrow|Longrightarrow|therefore)(?![a-z])|⇒|⟹|∴")
_COMMAND = re.compile(
    r"\\(?:frac|sqrt|cdot|times|div|pi|log|ln|lg|sin|cos|tan|cot|sec|csc|pm|binom|left|right|circ|infty)(?![a-z])"
)
_WORDY = re.compile(TEXT + r"\{[^{}]*\}")
_TERM = (
    r"(?:\\d?frac\{[A-Za-z]{1,3}\}\{[A-Za-z]{1,3}\}|\\sqrt\{[A-Za-z]\}|[A-Za-z]\s?:\s?[A-Za-z]|E?\[[A-Z]{1,6}\]|"
    r"\\(?:text|mathrm|operatorname|overline|overrightarrow|widehat|vec|hat)\s?\{[^{}]*\}(?:\([^()]*\))?|"
    r"m?\s?\\(?:angle|triangle|measuredangle)\s?[A-Za-z]{1,4}|\|[A-Za-z\\{}() ]{1,20}\||[a-zA-Z]\s?\([A-Za-z0-9,\\ ]{1,20}\)|"
    r"(?:(?:\\[A-Za-z]++|[A-Za-z]{1,3}+(?![A-Za-z]))(?:_(?:\w|\{\w{1,9}\}))?'{0,3}\s?){1,4}+|[A-Za-z]{4,15})"
)
_QUANTITY = re.compile(rf"{_TERM}(?:\s?[-+]\s?{_TERM}){{0,5}}")
"""A name, a function's value, a length or angle, or sums of them: no numbers, powers or brackets of their own."""
_SPOKEN = re.compile(
    r"(?<![^\s(])(?!(?:and|or|sin|cos|tan|cot|sec|csc|arc\w+|log|exp|sqrt|mod|gcd|lcm|max|min|pi|theta|alpha|beta|gamma|lambda|"
    r"infinity|inf)\b)[A-Za-z]{4,}(?![^\s),.])"
)
"""A word that stands by itself, of which the parser of formulas would make a product of letters, or nothing."""
_RELATES = re.compile(r"[<>]|\\(?:leq?|geq?|neq?)(?![a-z]).*\b(?:and|or)\b")
_CONNECTS = re.compile(r"[\s,;]*(?:and|or)?[\s,;]*")


def one_form(gold: str, answer: str) -> tuple[str, str]:
    """Gold and answer in the form in which they can be compared."""
    if max(len(gold), len(answer)) > LONGEST:
        return gold, answer
    gold_choice = _choice(gold)
    choice = _choice(answer, signed=gold_choice is not None)
    if gold_choice and choice:
        contradicts = gold_choice[1] and choice[1] and by_value(gold_choice[1], choice[1]) is False
        return (gold, answer) if contradicts else (gold_choice[0], choice[0])
    if gold_choice and gold_choice[1]:
        gold = gold_choice[1]
    elif choice and choice[1]:
        answer = choice[1]
    answer = _IMPLIES.split(answer)[-1].strip()
    return _unnamed(gold, answer)


def _choice(text: str, signed: bool = False) -> tuple[str, str] | None:
    """Letter and text of a choice such as "(C) 12"; None for what is none.

    Args:
        signed: whether the text may begin with a sign or bar: "(C) -2" is one where the gold is a choice, else a difference.
    """
    found = _CHOICE.fullmatch(text)
    if found is None or found[3][:1] in tuple("*/^=<>,_" if signed else "+-*/^=<>,_|") or _ANOTHER.search(found[3]):
        return None
    return (found[1] or found[2]).upper(), found[3]


def _unnamed(gold: str, answer: str) -> tuple[str, str]:
    """Both without the names of their quantities, where that leaves nothing out that the other says."""
    if "=" not in gold + answer:
        return gold, answer.strip()
    ours, theirs = _values(gold), _values(answer)
    if ours and theirs and ours[0] != theirs[0]:
        return gold, answer
    if ours:
        gold = ours[1]
    if theirs:
        answer = theirs[1]
    if not (ours or theirs):
        sides, gold_sides = _EQUALS.split(answer), _EQUALS.split(gold)
        if len(gold_sides) == 1:
            answer = _value_of(sides, _letters(gold))
        elif len(sides) == 1:
            gold = _value_of(gold_sides, _letters(answer))
        elif sides[0].replace(" ", "") == gold_sides[0].replace(" ", ""):
            gold, answer = ("=".join(part[1:]).strip() for part in (gold_sides, sides))
    return gold, answer


def _value_of(sides: list[str], letters: set[str]) -> str:
    """The sides of an equation without the quantity that one end names, as ``a+b`` or ``f(x)`` do, and what stands for it in
    other letters than these; all of it where no end is a name, such as ``x^2+y^2=25``."""
    for names in (sides[0], sides[-1]):
        if len(sides) > 1 and _QUANTITY.fullmatch(names.strip()) and _letters(names) - letters:
            return "=".join(side for side in sides if not _letters(unit(side)[0]) - letters).strip() or "=".join(sides).strip()
    return "=".join(sides).strip()


def _values(text: str) -> tuple[tuple[str, ...], str] | None:
    """Names and values of ``y=-2, x=3``, by name, as a pair: ("x", "y"), "(3,-2)"; of ``x=1, x=2`` the list "1, 2"."""
    if "=" not in text:
        return None
    text = _ENVELOPE.sub("", text).replace("&", "").strip()
    if (inner := _BRACKETED.fullmatch(text)) is not None:
        text = inner[1] or inner[2]
    if (found := _NAMED_TOGETHER.fullmatch(text)) and len(names := _parts(found[1])) == len(values := _parts(found[2])):
        text = ",".join(f"{name}={value}" for name, value in zip(names, values))
    parts = _parts(text)
    named = [_NAMED.fullmatch(part) for part in parts] if len(parts) > 1 else [None]
    if not all(named):
        return None
    pairs = [(match[1], match[2].strip()) for match in named]
    names = {name for name, _ in pairs}
    if len(names) == 1:
        return tuple(names), ", ".join(value for _, value in pairs)
    if len(names) < len(pairs):
        return None
    pairs.sort(key=lambda pair: (pair[0].startswith("\\"), pair[0]))  # r before \theta
    return tuple(name for name, _ in pairs), f"({','.join(value for _, value in pairs)})"


def _parts(text: str) -> list[str]:
    """A list cut at the commas, "and" and "or" that no bracket holds."""
    parts, start, at, depth = [], 0, 0, 0
    for separator in _SEPARATOR.finditer(text):
        depth += sum(_BRACKETS.get(letter, 0) for letter in text[at : separator.start()])
        at = separator.start() if "{" not in separator[0] else separator.end()
        if depth == 0:
            parts.append(text[start : separator.start()].strip())
            start = separator.end()
    return [*parts, text[start:].strip()]


def _letters(side: str) -> set[str]:
    return set(re.findall(r"[A-Za-z]", _COMMAND.sub("", side)))


def by_value(gold: str, answer: str) -> bool | None:
    """Whether two answers in one form are one number, with its unit or in its base; None where one of them is no number."""
    gold_value, value = read.value(gold), read.value(answer)
    if gold_value is not None and value is not None:
        return gold_value.same(value)
    halves = [half[1].lower() for text in (gold, answer) if "m" in text.lower() and (half := _HALF_DAY.search(text))]
    if len(set(halves)) > 1:
        return False
    (gold_number, gold_unit), (number, found_unit) = unit(gold), unit(answer)
    if gold_unit is not None and found_unit is not None and gold_unit != found_unit:
        return False
    gold_value, value = read.value(gold_number), read.value(number)
    if gold_value is not None and value is not None:
        return gold_value.same(value)
    if _CLOCK.fullmatch(gold_number):
        return gold_number == number
    return _same_in_base(gold, answer)


def _same_in_base(gold: str, answer: str) -> bool | None:
    """Whether digits and base agree, a base left out being the question's; None where neither names one."""
    expected, found = read.in_base(gold), read.in_base(answer)
    if expected is None and found is None:
        return None
    (digits, base), (other_digits, other_base) = expected or (gold.upper(), None), found or (answer.upper(), None)
    return digits == other_digits and (base == other_base or None in (base, other_base))


def told_apart(gold: str, answer: str) -> Verdict | None:
    """The verdict on an answer where no algebra is needed: equal spellings, numbers, number bases, units and words."""
    short = len(gold) + len(answer) <= LONGEST
    return _told_apart(gold, answer) if short else _told_apart.__wrapped__(gold, answer)


@lru_cache(4096)  # a group's rollouts often agree
def _told_apart(gold: str, answer: str) -> Verdict | None:
    right, wrong = Verdict(1.0, spelling(gold)), Verdict(0.0, spelling(answer))
    if gold == answer:
        return right
    if not answer or len(answer) > LONGEST or (read.qualified(answer) and not read.qualified(gold)):
        return wrong
    if (same := by_value(gold, answer)) is None:
        tidied, (gold, answer) = (gold, answer), one_form(gold, answer)
        if gold == answer:
            return right
        same = by_value(gold, answer) if (gold, answer) != tidied else None
    if same is not None:
        return right if same else wrong
    if _RELATES.search(gold) and _joined_by(gold) != _joined_by(answer):
        return wrong
    gold_words = read.words(gold)
    if gold_words is not None and gold_words[0] == read.lowered(answer):
        return right
    # Formulas of a letter or two, such as xy, are words too; longer ones would be products that forget their order.
    if gold_words is not None and (gold_words[1] and len(gold_words[0]) > 1 or len(gold_words[0]) > 3):
        return wrong
    if _SPOKEN.search(gold):
        return right if read.lowered(gold) == read.lowered(answer) else None
    return wrong if _SPOKEN.search(unit(answer)[0]) or (_leaves_words(answer) and not _WORDY.search(gold)) else None


def _joined_by(text: str) -> set[str]:
    """Which of "and" and "or" join the parts of a relation."""
    return set(re.findall(r"\b(?:and|or)\b", text))


def _leaves_words(answer: str) -> bool:
    r"""Whether an answer says in words what a parser of formulas leaves out: ``5 \text{ or six}``."""
    rest = unit(answer)[0]
    return not all(_CONNECTS.fullmatch(read.lowered(words)) for words in _WORDY.findall(rest))


def plainly_usable(gold: str) -> bool | None:
    """What can be said of a tidied gold without parsing it; None: only the parser knows."""
    return _plainly_usable(gold) if 0 < len(gold) <= LONGEST else False


@lru_cache(4096)
def _plainly_usable(gold: str) -> bool | None:
    stripped = unit(gold)[0]
    if read.value(stripped) is not None or read.in_base(gold) is not None or _CLOCK.fullmatch(stripped):
        return True
    if (found := read.words(gold)) is not None and found[1]:
        return True
    return False if read.is_prose(gold) else True if found is not None else None


def spelling(text: str | None) -> str | None:
    """An answer as it counts in a vote: without unit, words in lower case, numbers in lowest terms."""
    if not text:
        return None
    if len(text) <= LONGEST and (found := read.words(text)) is not None:
        return read.bounded(found[0])
    return read.spelled(unit(text)[0])
