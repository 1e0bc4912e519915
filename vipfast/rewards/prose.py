"""The last value of a text that states no answer. It looks at the end of the text alone, which is sampled."""

import re

from vipfast.rewards.statement import formulas, turned
from vipfast.rewards.tidy import TEXT

LONGEST_TAIL = 4000
"""Characters at the end of a text among which its last formula or number is looked for."""

_HEDGE = re.compile(
    r"(?:\bor|(?<=[\d%)])\s(?:to|and|through|:)|\bbetween\s\S{1,20}\sand|"
    r"\b(?:get|is|are|be|have|find|obtain|equals)\s[-−]?[\d.]{1,20},)\s+[\s$*]*$"
)
_QUALIFIED = re.compile(
    r"(?:\b(?:not|at least|at most|(?:less|more|greater|fewer|smaller|larger) than(?: or equal to)?|isn['’]t|never)|≠|\\neq?)"
    r"\s+[\s$*]*$",
    re.IGNORECASE,
)
_MINUS = re.compile(r"\b(?:minus|negative)\s+$", re.IGNORECASE)
_COMPUTED = re.compile(
    r"\b(?:roots?|squares?|cubes?|powers?|sum|product|difference|quotient|ratio|reciprocal|inverse|negation|half|twice|double|"
    r"triple|sqrt|cbrt|log|ln|lg|exp|sin|cos|tan|abs|max|min|floor|ceil|gcd|lcm)(?:\s?(?:of\s|\()|\s?\(?$)",
    re.IGNORECASE,
)

_SPACES = "".join(filter(str.isspace, map(chr, range(0x3001))))
_HEDGE_ENDS, _QUALIFIED_ENDS, _MINUS_ENDS = set("rodh:,"), set("tnoreq≠"), set("sſe")
"""The last characters, in lower case, that each has before white space, dollars and stars: most texts are told by these."""
_LONGEST_COMPUTED = 20
"""Characters of a function's name, and of what may follow it up to its argument."""

# Formulas as they stand in prose: runs of anything but white space and words, joined where a sign of arithmetic says so.
_RUN = re.compile(
    rf"(?:{TEXT}\s?\{{[^{{}}\n]{{0,80}}\}}|" + r"[\d.,:;!?%°√π∞$€£¥#~'\"“”‘’`_^{}()\[\]|*/+=<>≤≥≠≈×·÷±−–—﹣‐‑∛∜⁰¹²³⁴-⁹½¼¾-]|"
    r"\\[A-Za-z]+|\\|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z]))+"
)
_TAG = re.compile(r"</?[A-Za-z][A-Za-z0-9]{0,9}\s?/?>|<\|[^|<>\n]{1,30}\|>")
_GOES_ON = re.compile(
    r"(?:[-+*/^_=<>×·÷≤≥≠−{(]|\\(?:times|cdot|div|pm|leq?|geq?)|"
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
_EXPONENT = re.compile(r"\$?\^\{?[23]\}?\$?\W*|[a-zA-Z]{1,3}(?:/[a-zA-Z]{1,3})?\^\{?-?\d\}?\W*")
_NEXT_WORD = re.compile(r"\s(\w+)")
_LONE = re.compile(r"[(\[{]\s*(-?[\d.,/]+%?)\s*[)\]}]")
_GLUED = re.compile(r"(-?[\d.,/]+)(?:\s?°\s?[CFK]?|[mgslhLNJWVKCF])")


def last_value(text: str) -> str | None:
    r"""The last formula or number of a text that states no answer, as written; None if there is none, or two joined by "or".

    Between dollars or the brackets of LaTeX a formula is taken whole. Elsewhere it is the stretch around the last number, so
    that 4 is not the answer of ``\frac{3}{4}``, nor 3 that of "−3".
    """
    text = _TAG.sub(" ", text[-LONGEST_TAIL:])
    formula = next((found for found in reversed(list(formulas(text))) if not _EXPONENT.fullmatch(found[0])), None)
    begin, value = _last_stretch(text, formula.end() if formula else 0)
    if value is None and formula is not None:
        begin, value = formula.start(), next(filter(None, formula.groups()))
    if value is None:
        return None
    before = text[max(0, begin - 60) : begin]
    last = before.rstrip("$*" + _SPACES)[-1:].lower()
    if last in _HEDGE_ENDS and _HEDGE.search(before) or last in _QUALIFIED_ENDS and _QUALIFIED.search(before):
        return None
    anywhere = "(" in before or "of" in before.lower()
    if function := _COMPUTED.search(before, 0 if anywhere else max(0, len(before) - _LONGEST_COMPUTED)):
        return before[function.start() :] + value  # sqrt(5), the square root of 5
    return f"-{value}" if last in _MINUS_ENDS and _MINUS.search(before) else value


def _last_stretch(text: str, start: int) -> tuple[int, str | None]:
    """Where the stretch around the last number behind ``start`` begins, and the value in it."""
    digit = max(map(text.rfind, "0123456789"))
    start = max(start, text.rfind(" ", 0, max(0, digit - _NEAR)) + 1)
    runs = [(run.start(), run.end()) for run in _RUN.finditer(text, start, digit + _NEAR)]
    last = len(runs) - 1
    while last >= 0 and (not any(map(str.isdecimal, text[slice(*runs[last])])) or _is_exponent(text, runs[last])):
        last -= 1
    if last < 0:
        return 0, None
    first = _bracket_opens(text, runs, last)
    while last + 1 < len(runs) and _one_formula(text, runs[last], runs[last + 1]):
        last += 1
    while first > 0 and _one_formula(text, runs[first - 1], runs[first]):
        first -= 1
    begin, end = runs[first][0], runs[last][1]
    stretch = text[begin:end]
    if bullet := _BULLET.match(stretch):
        starts_line = not text[:begin].rpartition("\n")[2].strip()
        is_minus = stretch[0] in "-−" and not starts_line
        stretch = ("-" if is_minus else "") + stretch[bullet.end() :]
    if begin and text[begin - 1].isalpha():  # covid-19
        stretch = stretch.lstrip("-–")
    value = _balanced(_LAST_SIDE.split(stretch)[-1].strip(_AROUND).rstrip("." + _AROUND))
    value = value.rstrip("-–—/+=<>(").strip(_AROUND)
    if plain := _LONE.fullmatch(value) or _GLUED.fullmatch(value):
        value = plain[1]
    behind = _NEXT_WORD.match(text, end)
    letter = behind and len(behind[1]) == 1 and behind[1] not in "mgslhaI"  # 5 x
    turns = (
        letter
        or behind
        and turned(behind[1])
        and behind[1].lower() not in ("and", "or", "to", "but", "not", "more", "less", "fewer")
    )
    return begin, value + (behind[0] if turns else "")


def _is_exponent(text: str, run: tuple[int, int]) -> bool:
    """Whether a run is the power of a unit: that of "5 cm^2" or "5 m/s^2"."""
    if not _EXPONENT.fullmatch(text, *run):
        return False
    if text[run[0]] in "$^":
        return text[run[0] - 1 : run[0]].isalpha()
    return re.search(r"\d\s$", text[: run[0]][-3:]) is not None


def _bracket_opens(text: str, runs: list[tuple[int, int]], last: int) -> int:
    """The run in which the bracket opens that the last one closes: (3, 4). The last one where there is none."""
    first = last
    while first >= 0 and last - first < _MOST_IN_BRACKETS:
        inside = text[runs[first][0] : runs[last][1]]
        if sum(map(inside.count, ")]}")) <= sum(map(inside.count, "([{")):
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
