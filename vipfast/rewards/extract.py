r"""Where a completion's answer stands. Every reward that looks for an answer asks here, so that all of them agree on it.

Nothing that was thought counts (thinking.py). Outside of it an answer is stated, in this order, between ``<answer>`` tags, in
``\boxed{}``, or on the last line behind ``####`` or a phrase such as "the answer is". Where nothing is stated, what is left is
up to the reward: the last formula or number (prose.py) for maths, the last line for answers in words.

Everything here is linear in the text, since the text is sampled and nobody stops this process: what repeats is bounded, or ends
where the next try begins.
"""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from vipfast.rewards.thinking import outside_thinking
from vipfast.rewards.tidy import TEXT

_MOST_PHRASES = 16

_BRACE = re.compile("[{}]")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_UNBRACED = re.compile(r"[^\n$]{1,80}?(?=\$|\\[)\]]|\n|\Z)")
_TAG = re.compile(r"<(/?)(?:final_)?answer>", re.IGNORECASE)

_ADVERB = (
    "therefore|thus|then|hence|so|simply|just|exactly|precisely|indeed|clearly|obviously|finally|now|also|again|still|actually|"
    "really|only|in fact|of course|consequently|accordingly|approximately|about|roughly|equal to|given by|found to be|"
    "as follows|in the end|as expected|nothing but|none other than|always|[a-z]{2,14}ly"
)
_NEGATED = r"(?:is|was)(?:n['’]t| not)|(?:can|will|would|should)(?:not| not|n?['’]t) be|won['’]t be"
_PHRASE = re.compile(
    rf"####|\b(?:answers?|(?:correct|right|best) (?:option|choice))\b[*_]{{0,3}}"
    rf"(?:\s?\([^()\n]{{0,40}}\)|\s(?:to|for|of)\b[^.:=\n]{{1,80}}?)?(?:,\s?(?:{_ADVERB}|though|however),)?"
    rf"(?:\s{{0,9}}[*_]{{0,3}}(?::|=(?!=))|\s{{1,9}}(?:(?P<negated>{_NEGATED})|"
    rf"is|are|was|equals|becomes|"
    rf"(?:should|must|would|will|can only|has to) be|"
    rf"(?:comes|turns) out to be)\b)"
    rf"(?:[\s,*_]{{0,9}}(?:{_ADVERB})\b){{0,3}}[*_]{{0,3}}(?:\s{{0,9}}[:=])?"
    r"|^[#*_ ]{0,9}(?:the |my |our )?(?:final )?answer[*_ ]{0,9}:?[*_ ]{0,3}$",
    re.IGNORECASE | re.MULTILINE,
)
_WORDS = {"answer": (0,), "####": (0,), "option": (5, 6, 8), "choice": (5, 6, 8)}
"""The words of which each phrase holds one, in lower case, and how many characters before the word it may begin: with "best ",
"right " or "correct "."""
_MOST_BEFORE = 20
"""Characters between the beginning of a line and its "answer", where the phrase is the line: "### The final answer"."""
_SAYS_NOTHING = re.compile(
    r"\W{0,9}(?:in)?(?:correct|right|wrong|helpful|useful|clear|reasonable|consistent|complete|valid|verified)\b", re.IGNORECASE
)
_UNSURE = re.compile(
    r"\b(?:if|whether|(?:don['’]t|do not) (?:think|believe)|doubt|unlikely)\b[^.!?;:\n]{0,40}\Z", re.IGNORECASE
)
_MARKUP = re.compile(r"</?(?!answer|think)[A-Za-z][A-Za-z0-9]{0,9}\s?/?>|<\|[^|<>\n]{1,30}\|>")
_FRAME = re.compile(r"^[^\w\\$€£¥({\[|+\-−–—﹣‐‑.√∛π<>#]+|[*_\s\"“”‘’«»「」]+\.?$")
_FENCE = re.compile(r"^```\w*$", re.MULTILINE)
_INSTEAD = re.compile(r"\b(?:it is|it['’]s|but)\b", re.IGNORECASE)
_DISPLAY = re.compile(r"\s{0,99}(\\\[|\$\$)")
_BEGIN_END = re.compile(r"\\(?:begin|end)\{(?:equation|align|aligned|gather|gathered|displaymath|math)\*?\}")

_TEXT = re.compile(rf"(?:{TEXT}|\\(?:textbf|textit|mathbf))\s?\{{([^{{}}]*)\}}")
_MARKS = re.compile(r"\$|\\[][()]")
_NEXT_SENTENCE = re.compile(r"(?<=[\w$)])(?<!\b[A-Z])(?<!\b[A-Z][a-z])(?<!\b[A-Z][a-z]{2})\.\s+(?=[A-Z])")

Place = Literal["tags", "box", "line", "nowhere"]


class Found(NamedTuple):
    """Where a completion states its answer, and what stands there.

    Attributes:
        place: "tags", "box", "line", or "nowhere" for a text that states none.
        texts: what stands there, as written: several boxes are several texts; () where there is no answer at all, because a
            thought, a tag or a box never ends. Of "nowhere" it is the whole text outside the thoughts.
        block: of a "line" that ends with its phrase, all that follows it, and of one that goes on in rows of as many words, all
            of these: a grid of several lines.
    """

    place: Place
    texts: tuple[str, ...]
    block: str | None = None


def find(completion: str) -> Found:
    """Where a completion states its answer, outside its thoughts."""
    text = outside_thinking(completion)
    if text is None:
        return Found("nowhere", ())
    tagged = _in_tags(text)
    if tagged == "":
        return Found("tags", ())
    inside = text if tagged is None else tagged
    if len(parts := _BOX.split(inside)) > 1:
        return Found("box", tuple(dict.fromkeys(_contents(parts[1:]))))
    return _on_line(inside) or Found("nowhere" if tagged is None else "tags", (inside,))


def plain(statement: str) -> str:
    r"""A statement in words or lines as it reads: without dollars, ``\text{}`` and the sentence behind it."""
    return _MARKS.sub("", _TEXT.sub(r"\1", _NEXT_SENTENCE.split(statement, maxsplit=1)[0])).strip()


def boxed(text: str) -> list[str]:
    r"""What stands in every ``\boxed{…}`` or ``\fbox{…}`` with balanced braces, and behind every ``\boxed 7``, in order."""
    return _contents(_BOX.split(text)[1:])


def _contents(parts: list[str]) -> list[str]:
    """What each box holds, of the texts behind their commands; a box that never closes holds nothing."""
    found = []
    for part in parts:
        if not part.startswith("{"):
            found += _unbraced(part)
            continue
        depth = 0
        for brace in _BRACE.finditer(part):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                found.append(part[1 : brace.start()].strip())
                break
    return found


def _unbraced(part: str) -> list[str]:
    r"""Of what follows ``\boxed`` without a brace: up to the end of its formula, or where it stands in prose its first word."""
    stretch = _UNBRACED.match(part)
    if stretch is None:
        return []
    in_formula = part[stretch.end() : stretch.end() + 1] not in ("", "\n")
    words = stretch[0].split()
    return [(stretch[0] if in_formula else words[0]).strip().rstrip(".,;:!?")] if words else []


def _in_tags(text: str) -> str | None:
    """What stands in the last ``<answer>`` that is closed; None where no such tag is opened, "" where none is closed."""
    if "<" not in text:
        return None
    opened, inside = None, None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            opened = tag.end()
        elif opened is not None:
            inside, opened = text[opened : tag.start()].strip(), None
    return inside if inside is not None or opened is None else ""


def _on_line(text: str) -> Found | None:
    """The statement behind the last phrase that has one."""
    for phrase in list(_phrases(text))[: -_MOST_PHRASES - 1 : -1]:
        behind, _, after = text[phrase.end() :].partition("\n")
        line, block = _bare(behind), None
        if not line or _opens_display(behind):
            block = f"{behind}\n{after}".strip()
            line = _first_block(block)
        elif rows := _further_rows(line, after):
            block = "\n".join([line, *rows])
        if not line or _SAYS_NOTHING.match(line):
            continue
        if phrase["negated"] or _UNSURE.search(text, max(0, phrase.start() - 60), phrase.start()):
            # "the answer isn't 5, it is 6"
            line = _INSTEAD.split(line, maxsplit=1)[-1].strip() if _INSTEAD.search(line) else f"not {line}"
        return Found("line", (line,), block)
    return None


def _phrases(text: str) -> Iterator[re.Match]:
    """The matches of ``_PHRASE`` from left to right, tried only where one can begin."""
    lower = text.replace("ſ", "s").replace("ı", "i").replace("İ", "i").lower()  # as IGNORECASE takes them, letter for letter
    end = 0
    for start in sorted(_starts(lower)):
        if start >= end and (phrase := _PHRASE.match(text, start)) is not None:
            yield phrase
            end = phrase.end()


def _starts(lower: str) -> set[int]:
    """Where a phrase can begin: at its word or so many characters before it, or at the beginning of a line."""
    starts = set()
    for word, before in _WORDS.items():
        at = lower.find(word)
        while at >= 0:
            starts.update(at - num for num in before if num <= at)
            if word == "answer":
                starts.add(lower.rfind("\n", max(at - _MOST_BEFORE, 0), at) + 1)
            at = lower.find(word, at + 1)
    return starts


def _further_rows(line: str, after: str) -> list[str]:
    """The lines right behind one of several words that have as many."""
    width, rows = len(line.split()), []
    for row in after.split("\n", 64)[:64]:
        if width < 2 or len(row.split()) != width:
            break
        rows.append(row)
    return rows


def _opens_display(line: str) -> bool:
    found = _DISPLAY.match(line)
    return found is not None and not line[found.end() :].strip()


def _first_block(text: str) -> str:
    """The formula a text begins with where it is set apart, over several lines or not; else its first line."""
    text = _FENCE.sub("", _BEGIN_END.sub("", text)).strip()
    opening = _DISPLAY.match(text)
    if opening is None:
        return _bare(text.partition("\n")[0])
    closing = {"\\[": "\\]", "$$": "$$"}[opening[1]]
    inside, closed, _ = text[opening.end() :].partition(closing)
    return inside.strip() if closed else ""


def _bare(line: str) -> str:
    """A line without the marks of Markdown, tags and quotes around it."""
    return _FRAME.sub("", _MARKUP.sub(" ", line)).strip()
