"""What an answer line says: its value, without what is only said about it."""

import re
from collections.abc import Iterator

from vipfast.rewards.tidy import TEXT, tidy
from vipfast.rewards.units import unit

MATHS = re.compile(
    r"\$\$?([^$]{1,500})\$\$?|(?<!\\)\\\(((?:(?!\\\)|(?<!\\)\\\().){1,500})\\\)|"
    r"(?<!\\)\\\[((?:(?!\\\]|(?<!\\)\\\[).){1,500})\\\]",
    re.DOTALL,
)

_BEGINS_MATHS = re.compile(r"[$\\]")
_SENTENCE_END = re.compile(r"[.;]\s|[.;]$")
_LABEL = re.compile(r"[A-Za-z][A-Za-z ]{2,30}:\s?(?=[-–−]?[\d$\\])")
_NUMBER = re.compile(
    r"[-–−]?[$€£¥]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+|\s?/\s?\d+|\s\d+/\d+)?(?:\s?\\?%)?(?!\w|\^|\.\d)"
)
_FRACTIONS = "third|fourth|quarter|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth"
_TURN = (
    "or|nor|but|divided|maybe|perhaps|possibly|except|unless|to|through|times|plus|minus|over|point|squared|cubed|factorial|half|halves|"
    "more|less|fewer|at most|at least|hundred|thousand|million|billion|trillion|dozen|score|gross|lakh|crore|" + _FRACTIONS
)
_TURNS = re.compile(rf"\b(?:{_TURN}|and|not|either|neither)s?\b", re.IGNORECASE)
_TURNS_NEXT = re.compile(
    rf"[\s,(]*(?:(?:{_TURN})s?\b|(?:and|by)\s(?:an?|one|two|half|[-$\d\\])|[-+*/^=<>×·!\d\\{{$_]|(?![mgslhaI])[A-Za-z](?![A-Za-z]))|\s[+*/=<>×·]",
    re.IGNORECASE,
)
_DASH = re.compile(r"\s?[-–—]{1,3}\s(?=[A-Za-z])|[–—]{1,3}(?=[A-Za-z])")
_UNIT_WORDS = re.compile(
    r"\s?(?:\\(?:text|mathrm)\{[^{}]{1,30}\}(?:\^\{?\d\}?)?|[A-Za-z]{1,20}(?:\^\{?\d\}?)?)(?:(?:\s|\s?/\s?)[A-Za-z]{1,20}){0,2}"
)
# What is said of a formula behind it: "x = 5, since …", "(1, 2), where …".
_CLAUSE = re.compile(
    r"(?:\s?,\s?|\s|\s?\(\s?)(?:because|since|as|which|where|so|when|hence|thus|therefore|for|that|from|after|given|see|i\.e|"
    r"not|rather than|instead of|in (?:total|all|the|this|our|both|each))\b|\s?,\s(?=[a-z]{2}|I\s)|\s[-–—]{1,3}\s(?=[A-Za-z])"
)
_BARE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_IN_TEXT = re.compile(rf"(?:{TEXT}|\\(?:operatorname|begin|end))\s?\{{[^{{}}]*\}}")


def formulas(text: str) -> Iterator[re.Match]:
    """The matches of ``MATHS`` from left to right, tried only where one can begin."""
    end = 0
    for sign in _BEGINS_MATHS.finditer(text):
        if sign.start() >= end and (formula := MATHS.match(text, sign.start())) is not None:
            yield formula
            end = formula.end()


def turned(text: str) -> bool:
    """Whether words such as "or", "to" and "million" stand in a text, which make another value of a number beside them."""
    return _TURNS.search(text) is not None


def trimmed(statement: str) -> str:
    """A statement on an answer line without what is only said about its value: further sentences, reasons, asides.

    Of a number or a formula set apart that stands in front, words behind it are left out unless they turn its value ("5 or 6",
    "5 hundred") or name its unit. Words that may be the answer themselves stay whole.

    Args:
        statement: as ``extract.find`` gave it.
    """
    first = _SENTENCE_END.split(statement, maxsplit=1)[0].strip()
    first = first[label.end() :] if (label := _LABEL.match(first)) else first
    lead = MATHS.match(first) or _NUMBER.match(first)
    if lead is None:
        return _before_clause(first)
    behind = first[lead.end() :]
    if not re.search(r"[^\W_]|[-+*/^=<>×·{\\]", behind):
        return lead[0]
    if _DASH.match(behind):
        return lead[0]
    if _TURNS_NEXT.match(behind):
        return first
    return lead[0] + _unit_of(behind)


def _unit_of(behind: str) -> str:
    """The words behind a number that are a known unit: " km per hour", or ""."""
    words = _UNIT_WORDS.match(behind)
    parts = re.findall(r"\s?\S+", words[0]) if words else []
    for end in range(len(parts), 0, -1):
        name = "".join(parts[:end])
        if unit(tidy(f"1 {name.strip()}"))[1] is not None:
            again = re.match(r"(?:\s(?:and\s)?)\d", behind[len(name) :])  # 5 feet 3 inches
            return behind if again else name
    return ""


def _before_clause(first: str) -> str:
    """A formula among words up to where it is spoken about; words themselves stay whole."""
    for clause in _CLAUSE.finditer(first):
        value = first[: clause.start()].strip(" ,*_")
        if _BARE_WORD.search(_IN_TEXT.sub("", value)):
            return first
        balanced = value.count("{") == value.count("}") and value.count("(") == value.count(")") and value.count("$") % 2 == 0
        if value and balanced and not _TURNS_NEXT.match(first[clause.start() :]):
            return value
    return first
