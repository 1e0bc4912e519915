r"""One spelling of what looks the same: Unicode signs as LaTeX, and nothing that only dresses an answer up.

Everything here is linear in the answer, which is sampled: white space comes one at a time once a text is tidied, and what
repeats is bounded.
"""

import re
import unicodedata
from functools import lru_cache

LONGEST = 2000
"""Characters of an answer beyond which it is compared letter by letter only."""

TEXT = r"\\(?:text|mathrm|mbox|textrm)"
"""Pattern of the commands that set words in a formula, without their braces."""

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_INVISIBLE = re.compile("[\u200b-\u200f\u2060-\u2064\ufeff\u00ad]")
_SIGNS = {
    "−": "-", "﹣": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/",
    "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "∞": r"\infty ", "°": r"^\circ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "∅": r"\emptyset ", "±": r"\pm ", "π": r"\pi ",
    "≈": r"\approx ", "⟨": r"\langle ", "⟩": r"\rangle ", "〈": r"\langle ", "〉": r"\rangle ", "￡": "£",
}  # fmt: skip
_SIGN = re.compile("|".join(_SIGNS))
_DRESS = (
    "underline|emph|textbf|textit|texttt|textsf|textsc|textnormal|mathbf|mathit|mathsf|mathtt|mathnormal|boldsymbol|bm|"
    "ensuremath|hbox|pmb|uline"
)
_BRACES = re.compile(rf"\\(?:{_DRESS}|(?:text|f)?color(?:box)?\s?\{{[^{{}}]*\}}(?:\{{[^{{}}]*\}}(?=\s?\{{))?)\s?\{{|\\?[{{}}]")


def _over(match: re.Match) -> str:
    top, bottom = (part.strip() for part in match.groups() if part is not None)
    return rf"\frac{{{top}}}{{{bottom}}}"


_REWRITES = [
    (needed, re.compile(pattern), by)
    for needed, pattern, by in (
        ("", r"^[-–—](?=[\d.\\])", "-"),  # a dash in front is a minus; between numbers it may be a range
        ("√", r"√\s*(\w+|\([^()]*\))", r"\\sqrt{\1}"),
        ("$", r"^(-?)\s?\\?\$\s?(-?[\d.,]+)$", r"\1\2 dollar"),
        ("\\", r"\\[$%]", lambda match: {"$": "", "%": "%"}[match[0][1]]),
        ("", r"^(?:US|AU|CA|HK|NZ|A|C)(?=\$\s?\d)|\$|\\[()]|\\displaystyle|\\(?:left|right)(?![a-z])|\\!|\*\*|`", ""),
        (r"\[", r"^\\\[(.*)\\\]$", r"\1"),
        ("", r"\\(?:begin|end)\{(?:equation|align|aligned|gather|gathered|displaymath|math)\*?\}|&(?==)|(?:\\\\|\\)$", ""),
        ("\\", r"\\(?:color|textcolor|colorbox|hspace|vspace|phantom|label|tag)\*?\s?(?:\[[^][{}]*\])?\{[^{}]*\}", ""),
        (
            "\\",
            r"\\(?:bf|rm|it|sf|tt|bfseries|itshape|tiny|small|normalsize|[lL]arge|LARGE|[hH]uge|textstyle|scriptstyle|limits|"
            r"hfill|strut)(?![A-Za-z])",
            " ",
        ),
        ("{", r"^\{([^{}]*)\}\.?$", r"\1"),
        (r"\text{", r"^\\text\{(?!\s?\(?[A-J]\s?[:.)])[^{}]{0,60}(?:\b(?:is|are|equals?)|[:=])\s*\}", ""),
        ("ig", r"\\[bB]igg?[lrm]?(?![A-Za-z])", ""),
        ("\\", r"\\(?:mathbf|mathrm|mathit|boldsymbol)\s(?=\d)", ""),
        ("\\", r"\\(?:left|right)\s?\.", ""),
        (r"\nicefrac", r"\\nicefrac(?![a-z])", r"\\frac"),
        ("^", r"(?<=\d)\s?\^\s?\{?\s?(?:\\(?:text|mathrm)\s?\{)?\s?(?:st|nd|rd|th)\s?\}{0,2}$", ""),
        (r"\text{", r"^\\text\{\s?([-+]?[\d.,/]+[^{}]*|[A-Za-z]\s?=[^{}]*)\}$", r"\1"),
        ("mod", r"\s?(?:\\pmod\s?(?:\{[^{}]*\}|\d)|\\text\{\s?\(mod\s?\d+\)\s?\}|\(\s?\\?(?:bmod|mod)\s?\d+\s?\))$", ""),
        ("n", r"^(?:minus|negative)\s(?=[\d.\\])", "-"),
        (r"\approx", r"^\\approx(?![a-z])", ""),
        (r"\langle", r"\\langle(?![a-z])", "("),
        (r"\rangle", r"\\rangle(?![a-z])", ")"),
        ("<", r"^<(.*,.*)>$", r"(\1)"),
        ("\\", r"\\(?:pounds|textsterling)(?![a-z])", "£"),
        ("euro", r"\\(?:euro|texteuro)(?![a-z])", "€"),
        ("dollar", r"\\text\{\s?\\textdollar\s?\}|\\(?:text|math)dollar(?![a-z])", ""),
        ("", r"^\\text\{\s?(?:USD|EUR|GBP|Rs\.?|US|\$)\s?\}\s?(?=\d)|^Rs\.?\s?(?=\d)", ""),
        (r"\text{", r"^\\text\{\s?([€£¥₹₩₽])\s?([\d.,]+)\s?\}$", r"\2\1"),
        ("", r"\s?(?:¢|\\cent(?![a-z]))$", " cent"),
        ("\\", r"\\(?:text|mathrm)\{\s*([€£¥₹₩₽])\s*\}", r"\1"),
        ("", r"^(?:USD?|AUD?|CAD?|HKD?|NZD?)(?=\s?\d)", ""),
        ("", r"^(-?)\s?([€£¥₹₩₽])\s?(?=[-\d.\\])(.*)$", r"\1\3\2"),
        ("€", r"\s?€$", " euro"),
        ("", r"\s?[£₩₽]$", ""),
        ("¥", r"\s?¥$", " yen"),
        ("₹", r"\s?₹$", " rupee"),
        (r"\over", r"^\{([^{}]*)\\over(?![a-z])([^{}]*)\}$|^([^{}]*)\\over(?![a-z])([^{}]*)$", _over),
        ("frac", r"\\[dtc]frac", r"\\frac"),
        ("\\", TEXT + r"\{\s*([-+]?[\d.,/]+)\s*\}", r"\1"),
        ("\\", TEXT + r"\{\s*\}", ""),
        ("p", r"\s*(?:\\text\{\s*)?(?:per\s?cent(?:age)?|pct)\b\.?\s*\}?$", "%"),
        ("{,}", r"\{,\}", ","),
        ("", r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])", " "),
        (r"\frac", r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}"),
        (r"\frac", r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\frac", r"(\\frac\{[^{}]*\})\s*(\d)(?!\d)", r"\1{\2}"),
        # \log_2 3 and \sin^2 3: a digit with a bracket of its own is no half of a mixed number
        ("\\", r"(\\(?:log|lg|ln|sin|cos|tan|cot|sec|csc)\s?[_^])\s?(10(?!\d)|\d)", r"\1{\2}"),
        (" ", r"(?<=\d) (?=\d{3}(?:[ .,]|$))(?=(?:\d{3}[ ]?){1,12}(?:\.\d{1,99})?$)", ""),  # 1 000 000
        (r"\varnothing", r"\\varnothing(?![a-z])", r"\\emptyset"),
        ("\\", r"\^\s?(?:\{\s?\\circ\s?\}|\\circ)|\\degree", r"^\\circ"),
    )
]
"""What every match contains, the pattern, and what takes its place."""
_PLAIN = re.compile(r"-?\d+(?:\.\d+|/\d+)?")
_OF_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DEGREES = re.compile(
    r"((?<![\d.])\d{1,19}(?:\.\d{1,19})?|\\frac\{[^{}]{1,50}\}\{[^{}]{1,50}\}|\\[a-z]{1,9}|[A-Za-z]|\([^()]{1,99}\))\s?\^\\circ"
)


def tidy(answer: str) -> str:
    """One spelling of what looks the same: Unicode signs and digits as LaTeX, no dollars, thin spaces, sizes or closing dot."""
    if len(answer) > LONGEST:
        return _single_spaced(answer)
    return _tidied(answer)


@lru_cache(4096)  # a group's rollouts often agree, and all share a gold
def _tidied(answer: str) -> str:
    text = _single_spaced(answer if answer.isascii() else _in_ascii(answer))
    if len(text) > LONGEST:  # one letter may stand for eighteen
        return text
    if _PLAIN.fullmatch(text):
        return text
    text = _undressed(text) if "\\" in text else text
    for needed, pattern, by in _REWRITES:
        if needed in text:
            text, changed = pattern.subn(by, text)
            text = _single_spaced(text) if changed else text
    if r"^\circ" in text:
        of_angle = _OF_ANGLE.search(text) is not None  # elsewhere a degree is a unit like any other
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text) if of_angle else _single_spaced(text.replace(r"^\circ", ""))
    return text.rstrip(".,;: ")


def _in_ascii(answer: str) -> str:
    """A text with its Unicode signs and digits as LaTeX, as far as they have a name there."""
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", answer)
    text = _VULGAR.sub(lambda match: f" {match[0]} ", text)
    text = _SIGN.sub(lambda match: _SIGNS[match[0]], _INVISIBLE.sub("", text))
    return _SIGN.sub(lambda match: _SIGNS[match[0]], unicodedata.normalize("NFKC", text))


def _undressed(text: str) -> str:
    """A text without the commands that only change how it looks, and the braces of each."""
    kept, at, dressed = [], 0, []
    for brace in _BRACES.finditer(text):
        if brace[0] in ("\\{", "\\}"):
            continue
        is_dress = bool(dressed) and dressed.pop() if brace[0] == "}" else brace[0] != "{"
        if brace[0] != "}":
            dressed.append(is_dress)
        if is_dress:
            kept.append(text[at : brace.start()])
            at = brace.end()
    return "".join([*kept, text[at:]])


def _single_spaced(text: str) -> str:
    return " ".join(text.split())
