"""Units behind numbers: which words are one, which only name what is counted, and which make another number of it."""

import re
from collections.abc import Sequence
from functools import lru_cache

from vipfast.rewards.tidy import LONGEST, TEXT

_UNITS = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre;cm centimeter centimetre;km kilometer kilometre;m meter metre;in inch inche;ft foot feet;"
        "yd yard;mi mile;mg milligram;kg kilogram;g gram;lb pound;oz ounce;ml milliliter;l liter litre;sec second s;min minute;"
        "h hour hr;day;week;month;year;cent;dollar buck usd;euro eur;yen jpy;rupee;mi/h mph;km/h kph kmh;degree;unit"
    ).split(";")
    for name in names.split()
}
_NO_UNIT = re.compile(
    r"\b(?:and|or|not|to|by|is|are|mod|if|for|when|where|with|than|more|less|fewer|plus|minus|times|over|point|below|above|one|two|squared|"
    r"cubed|factorial|half|halves|hundreds?|thousands?|millions?|billions?|trillions?|dozens?|score|gross|lakhs?|crores?|"
    r"thirds?|fourths?|quarters?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?|thousandths?)\b"
)
_LONGEST_UNIT = 100
_POWER = r"\s*(?:\^\s*\{?([23])\}?)?\.?$"
_IN_TEXT_UNIT = re.compile(
    rf"(?<=[^-+*/^_=(,{{<>\s])\s*{TEXT}\{{\s*((?:[^{{}}\\$]|\\(?:cdot|times|mu|Omega)(?![a-z])|\^\s?\{{-?\d\}})*?)\.?\s*\}}"
    + _POWER
)
_UNIT = re.compile(
    r"(?<=[\d}.])(?:\s+([A-Za-z]{4,20}(?:\s[A-Za-z]{2,20}){0,3}|[A-Za-z]{3}(?:\s[A-Za-z]{2,20}){1,3})|\s+([mgslh])|"
    r"\s*([A-Za-z]{2,12}|[A-Za-z]{1,12}\s?/\s?[A-Za-z]{1,12}))" + _POWER
)
_WORD = r"\\(?:text|mathrm)\{\s?([A-Za-z]{1,12})\s?\}"
_OF_TEXTS = re.compile(rf"{_WORD}\s?/\s?{_WORD}$|\\frac\{{{_WORD}\}}\{{{_WORD}\}}$")
_PRODUCT = re.compile(rf"(?<=[\d}}.])(?:\s?(?:\\cdot\s?)?{_WORD}(?:\s?\^\s?\{{?-?\d\}}?)?){{2,4}}$")
_SPACE_POWER = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_SCALE_FIRST = re.compile(r"(?:hundred|thousand|million|billion|trillion|dozen)\s+(.+)", re.IGNORECASE)


def unit(text: str) -> tuple[str, str | None]:
    """A tidied answer without the unit behind its number, and that unit (None: none, or none that is known).

    A unit is what stands in text behind a number, a known one, or words that turn no number; behind other formulas it has to be
    a known one.
    """
    return _unit(text) if len(text) <= LONGEST else _unit.__wrapped__(text)


@lru_cache(4096)
def _unit(text: str) -> tuple[str, str | None]:
    start = max(len(text) - _LONGEST_UNIT, 0)
    if text.endswith("}"):
        text = _OF_TEXTS.sub(lambda found: rf"\text{{{found[1] or found[3]}/{found[2] or found[4]}}}", text)
        if found := _PRODUCT.search(text, start):
            return text[: found.start()].strip(), None
    if "\\" in text and (found := _IN_TEXT_UNIT.search(text, start)):
        word, power = found[1], found[2]
        loose = text[: found.start()].rstrip()[-1:] in "0123456789}."
    elif found := _UNIT.search(text, start):
        word, power = next(name for name in found.groups()[:3] if name is not None), found[4]
        loose = found[3] is None
    else:
        return text, None
    if scaled := _SCALE_FIRST.fullmatch(word):  # million dollars
        return f"{text[: found.start()].strip()} {word[: scaled.start(1)].strip()}", _known_unit(scaled[1].lower(), power or "")
    known = _known_unit(word.lower(), power or "")
    if known is None and (not loose or _NO_UNIT.search(word.lower())):
        return text, None
    return text[: found.start()].strip(), known


def _known_unit(word: str, power: str) -> str | None:
    """One name for a unit: "cm2" for "square centimeters" and for "cm^2", "km/h" for "kilometers per hour"."""
    if (powered := re.fullmatch(r"(.*?)\s?\^\s?\{?([23])\}?", word)) and not power:
        word, power = powered.groups()
    first, _, rest = word.partition(" ")
    if first.rstrip(".") in _SPACE_POWER and rest and not power:
        word, power = rest, _SPACE_POWER[first.rstrip(".")]
    names = [_UNITS.get(part) or _UNITS.get(part.removesuffix("s")) for part in re.split(r"\s?/\s?|\sper\s", word)]
    return "/".join(names) + power if all(names) else None


def contradict(answers: Sequence[str]) -> bool:
    """Whether tidied answers name different units."""
    return len(answers) > 1 and len({named for answer in answers if (named := unit(answer)[1])}) > 1
