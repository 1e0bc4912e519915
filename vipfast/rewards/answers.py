r"""Final answers as text: where a completion's stands, one spelling of it, and what can be told without any algebra.

Everything here is linear in the text, since the text is sampled and nobody stops this process: spaces come one at a time once a
text is tidied, and what repeats is bounded, or ends where the next try begins.
"""

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from vipfast.rewards.exact import boxed

LONGEST = 2000
"""Characters of an answer beyond which it is compared letter by letter only."""
_LONGEST_SPELLING = 200
MOST_BOXES = 16

_ANSWER_LINE = re.compile(r"(?:####|(?i:answer)[\s*]{0,9}(?:is\b\s{0,9}:?|:))[\s*]{0,9}(\S.*)")
_MATHS = re.compile(
    r"\$\$?([^$]{1,500})\$\$?|(?<!\\)\\\(((?:(?!\\\)|(?<!\\)\\\().){1,500})\\\)|"
    r"(?<!\\)\\\[((?:(?!\\\]|(?<!\\)\\\[).){1,500})\\\]",
    re.DOTALL,
)
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?(?:\s?\\?%)?")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_HEDGE = re.compile(r"\bor\s+[\s$*]*$")

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_INVISIBLE = re.compile("[\u200b-\u200f\u2060-\u2064\ufeff\u00ad]")
_SIGNS = {
    "−": "-", "﹣": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/",
    "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "∞": r"\infty ", "°": r"^\circ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "∅": r"\emptyset ", "±": r"\pm ", "π": r"\pi ",
    "≈": r"\approx ",
}  # fmt: skip
_SIGN = re.compile("|".join(_SIGNS))
_REWRITES = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"^[-–](?=[\d.\\])", "-"),  # a dash in front is a minus; between numbers it may be a range
        (r"√\s*(\w+|\([^()]*\))", r"\\sqrt{\1}"),
        (r"\\[$%]", lambda match: {"$": "", "%": "%"}[match[0][1]]),
        (r"\$|\\[()]|\\displaystyle|\\(?:left|right)(?![a-z])|\\!|\*\*|`", ""),
        (r"^\\\[(.*)\\\]$", r"\1"),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\(?:mathbf|textbf|boldsymbol|bm|mathit|textit)\{([^{}]*)\}", r"\1"),
        (r"\\(?:text|mathrm|mbox|textrm)\{\s*([-+]?[\d.,/]+)\s*\}", r"\1"),
        (r"\\(?:text|mathrm|mbox|textrm)\{\s*\}", ""),
        (r"\s*(?:\\text\{\s*)?(?:per\s?cent(?:age)?|pct)\b\.?\s*\}?$", "%"),
        (r"\{,\}", ","),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])", " "),
        (r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\{[^{}]*\})\s*(\d)(?!\d)", r"\1{\2}"),
        # \log_2 3 and \sin^2 3: a digit with a bracket of its own is no half of a mixed number
        (r"(\\(?:log|lg|ln|sin|cos|tan|cot|sec|csc)\s?[_^])\s?(10(?!\d)|\d)", r"\1{\2}"),
        (r"(?<=\d) (?=\d{3}(?:[ .,]|$))(?=(?:\d{3}[ ]?){1,12}(?:\.\d{1,99})?$)", ""),  # 1 000 000
        (r"\\varnothing(?![a-z])", r"\\emptyset"),
        (r"\^\s?(?:\{\s?\\circ\s?\}|\\circ)|\\degree", r"^\\circ"),
    )
]
_OF_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DEGREES = re.compile(
    r"((?<![\d.])\d{1,19}(?:\.\d{1,19})?|\\frac\{[^{}]{1,50}\}\{[^{}]{1,50}\}|\\[a-z]{1,9}|[A-Za-z]|\([^()]{1,99}\))\s?\^\\circ"
)
_UNITS = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre;cm centimeter centimetre;km kilometer kilometre;m meter metre;in inch inche;ft foot feet;"
        "yd yard;mi mile;mg milligram;kg kilogram;g gram;lb pound;oz ounce;ml milliliter;l liter litre;sec second s;min minute;"
        "h hour hr;day;week;month;year;cent;dollar;mph;degree"
    ).split(";")
    for name in names.split()
}
_NO_UNIT = re.compile(r"\b(?:and|or|not|to|hundred|thousand|million|billion|trillion|dozen|half|halves|thirds?|quarters?)\b")
_LONGEST_UNIT = 100
_UNIT = re.compile(
    r"(?<=[\d}.])(?:\s*\\(?:text|mathrm|mbox|textrm)\{\s*([^{}\\$]*?)\.?\s*\}|\s+([A-Za-z]{4,20}(?:\s[A-Za-z]{2,20}){0,3}|"
    r"[A-Za-z]{3}(?:\s[A-Za-z]{2,20}){1,3})|\s+([mgslh])|\s*([A-Za-z]{2,12}))\s*(?:\^\s*\{?([23])\}?)?\.?$"
)
_QUALIFIER = re.compile(r"(?i)\b(?:not|at least|at most|or more|or less|or fewer|maybe|unless)\b")

_DECIMAL = r"(?:\d{1,3}(?:,\d{3}){1,300}(?:\.\d{1,999})?|\d{1,999}(?:\.\d{0,999})?|\.\d{1,999})"
_RATIO = re.compile(rf"(-?)\s*({_DECIMAL})(?:\s*/\s*({_DECIMAL}))?")
_FRACTION = re.compile(rf"(-?)\s*\\frac\{{\s*(-?{_DECIMAL})\s*\}}\{{\s*({_DECIMAL})\s*\}}")
_MIXED = re.compile(r"(-?)\s*(\d{1,99})(?:\s+(\d{1,99})\s*/\s*(\d{1,99})|\s*\\frac\{(\d{1,99})\}\{(\d{1,99})\})")
_SCIENTIFIC = re.compile(rf"(-?)\s*({_DECIMAL})\s*(?:[eE]|(?:\\times|\\cdot)\s*10\s*\^)\s*\{{?\s*([-+]?\d{{1,3}})\s*\}}?")
_REPEATING = re.compile(r"(-?)\s*(\d{0,99})\.(\d{0,99})\\overline\{(\d{1,99})\}")
_BASE = re.compile(r"(-?\d[0-9A-Za-z]*)\s*_\s*(?:\{\s*)?(?:\\text\{\s*)?(\d{1,2})[\s}]*")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textrm|operatorname)\{([^{}\\]*)\}")
_LETTERS = re.compile(r"[a-z][a-z' -]*")
_IN_TEXT = re.compile(r"[a-z][a-z0-9',. -]*")


def outside_thinking(text: str) -> str | None:
    """What follows the last ``</think>``, the whole text where nothing is thought; None if the thinking never ends."""
    after = text.rpartition("</think>")[2]
    return None if "<think>" in after else after


def final_answer(completion: str) -> str | None:
    r"""A completion's final answer, tidied; None if there is none.

    It is looked for outside the thinking part: in ``\boxed{}`` (``\fbox{}``), else on the last line with ``####``, ``Answer:``
    or "answer is", else the last formula or number. Boxes of different values are all of them together, which only a gold of
    that many values can equal.
    """
    text = outside_thinking(completion)
    if text is None:
        return None
    boxes = dict.fromkeys(boxed(text))
    if boxes or _BOX.search(text):  # a box that never closes was cut off
        distinct = {spelled(box): box for box in map(tidy, boxes)} if len(boxes) <= MOST_BOXES else {}
        return ", ".join(distinct.values()) if distinct else None
    if lines := _ANSWER_LINE.findall(text):
        return tidy(re.split(r"[.;]\s", lines[-1], maxsplit=1)[0])
    text = text[-2 * LONGEST :]
    found = max([*_MATHS.finditer(text), *_NUMBER.finditer(text)], key=lambda match: match.end(), default=None)
    if found is None or _HEDGE.search(text[: found.start()][-20:]):
        return None
    return tidy(next(filter(None, found.groups()), found[0]))


def gold_answer(answer: str) -> str:
    """The answer column's answer, tidied: what is in the last box or after ``####`` of a worked solution, else all of it."""
    if boxes := boxed(answer):
        return tidy(boxes[-1])
    return tidy(answer.rsplit("####", 1)[-1])


def tidy(answer: str) -> str:
    """One spelling of what looks the same: Unicode signs and digits as LaTeX, no dollars, thin spaces, sizes or closing dot."""
    if len(answer) > LONGEST:
        return _single_spaced(answer)
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", answer)
    text = _VULGAR.sub(lambda match: f" {match[0]} ", text)
    text = _SIGN.sub(lambda match: _SIGNS[match[0]], _INVISIBLE.sub("", text))
    text = _single_spaced(_SIGN.sub(lambda match: _SIGNS[match[0]], unicodedata.normalize("NFKC", text)))
    if len(text) > LONGEST:  # one letter may stand for eighteen
        return text
    for pattern, by in _REWRITES:
        text = _single_spaced(pattern.sub(by, text))
    if r"^\circ" in text:
        of_angle = _OF_ANGLE.search(text) is not None  # elsewhere a degree is a unit like any other
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text) if of_angle else _single_spaced(text.replace(r"^\circ", ""))
    return text.rstrip(".,;: ")


def _single_spaced(text: str) -> str:
    return " ".join(text.split())


def unit(text: str) -> tuple[str, str | None]:
    """A tidied answer without the unit behind its number, and that unit (None: none, or none that is known).

    A unit is what stands in text there, a known one, or words that turn no number.
    """
    found = _UNIT.search(text, max(len(text) - _LONGEST_UNIT, 0))
    if found is None:
        return text, None
    in_text, spaced, letter, glued, power = found.groups()
    word = next(name for name in (in_text, spaced, letter, glued) if name is not None).lower()
    known = _UNITS.get(word) or _UNITS.get(word.removesuffix("s"))
    if known is None and (glued is not None or _NO_UNIT.search(word)):
        return text, None
    return text[: found.start()].strip(), known and known + (power or "")


@dataclass(frozen=True)
class Value:
    """A rational number, and whether it was written with a decimal point or a percent sign."""

    number: Fraction
    decimal: bool
    percent: bool

    def same(self, other: "Value") -> bool:
        """Equal; a decimal may be rounded at its sixth place. 28 % is 28, .28 and 28 %: a gold is written either way."""
        return any(
            _near(self.number / mine, other.number / theirs, self.decimal or other.decimal)
            for mine, theirs in {(1, 1), (100 if self.percent else 1, 100 if other.percent else 1)}
        )


def _near(a: Fraction, b: Fraction, decimal: bool) -> bool:
    return a == b or (decimal and abs(a - b) <= min(Fraction(1, 10**6), Fraction(2, 10**6) * max(abs(a), abs(b))))


def value(text: str) -> Value | None:
    """The value of a tidied answer that is a plain number: integer, decimal, fraction, mixed, repeating or scientific."""
    if len(text) > LONGEST:
        return None
    plain = text.removesuffix("%").rstrip()
    number = _rational(plain.removeprefix("+"))
    return None if number is None else Value(number, "." in plain, plain != text)


def _rational(text: str) -> Fraction | None:
    if match := _RATIO.fullmatch(text) or _FRACTION.fullmatch(text):
        sign, top, bottom = match.groups(default="1")
        under = Fraction(bottom.replace(",", ""))
        return None if under == 0 else _signed(sign, Fraction(top.replace(",", "")) / under)
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


def _signed(sign: str, number: Fraction) -> Fraction:
    return -number if sign == "-" else number


def in_base(text: str) -> tuple[str, str] | None:
    """Digits and base of ``1011_2``."""
    found = _BASE.fullmatch(text)
    return None if found is None else (found[1].upper(), found[2])


def words(text: str) -> tuple[str, bool] | None:
    r"""An answer in words, in lower case without brackets, and whether ``\text{}`` says that it is one; None for formulas."""
    plain, explicit = lowered(text), _TEXT.fullmatch(text) is not None
    return (plain, explicit) if (_IN_TEXT if explicit else _LETTERS).fullmatch(plain) else None


def lowered(text: str) -> str:
    r"""A tidied answer in lower case, without ``\text{}`` and brackets around it."""
    return " ".join(_TEXT.sub(r"\1", text).lower().split()).strip("() .")


def is_prose(text: str) -> bool:
    r"""Whether a gold is a sentence rather than an answer: bare words, of which nobody can say when they are met."""
    bare = re.sub(r"\\[A-Za-z]+", " ", _TEXT.sub(" ", text))
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
