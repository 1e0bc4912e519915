"""The one place that knows thinking: what a model thinks before it answers is never graded, by any reward.

A thought stands between a pair of tags. Where its closing tag is missing the completion was cut off while it still thought, so
there is no answer in it. Some chat templates open the thought themselves, at the end of the prompt; the completion then carries
no opening tag, and ``opened_by`` says what has to be put back before it can be read. Where a tag is a special token of the
tokenizer, ``Decoder`` keeps it while all other special tokens go.
"""

import re
from collections.abc import Sequence

PAIRS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<thoughts>", "</thoughts>"),
    ("<reasoning>", "</reasoning>"),
    ("<reflection>", "</reflection>"),
    ("<scratchpad>", "</scratchpad>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis", "<|channel|>final<|message|>"),
    ("<|channel|>commentary", "<|channel|>final<|message|>"),
)
"""What opens a thought and what ends it, in any case. The last two are channels of OpenAI's harmony format."""

_OPENING = re.compile("|".join(re.escape(opening) for opening, _ in PAIRS), re.IGNORECASE)
_CLOSING = re.compile("|".join(re.escape(closing) for closing in dict.fromkeys(closing for _, closing in PAIRS)), re.IGNORECASE)
_OPENED = re.compile(rf"(?:{_OPENING.pattern})\s*\Z", re.IGNORECASE)
_LONGEST = max(len(opening) for opening, _ in PAIRS) + 20
_SIGNS = ("<", "◁", "[t", "[T", "[/")
"""How every tag begins. Most texts hold none of these, and are spared the search for tags."""
_MARKERS = [tag.lower() for pair in PAIRS for tag in pair]


def outside_thinking(text: str) -> str | None:
    """What follows the last thought of a completion, or all of it where nothing is thought; None if a thought never ends."""
    if not any(map(text.__contains__, _SIGNS)):
        return text
    end = 0
    for closing in _CLOSING.finditer(text):
        end = closing.end()
    return None if _OPENING.search(text, end) else text[end:]


def opened_by(prompt: str) -> str:
    r"""The opening tag with which a prompt ends, and the white space behind it ("<think>\n"); "" where it opens no thought."""
    found = _OPENED.search(prompt, max(0, len(prompt) - _LONGEST))
    return found[0] if found else ""


class Decoder:
    """Turns ids into the text that is graded: without special tokens, except those that mark thoughts.

    Args:
        tokenizer: of the policy.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {id: str(token).lower() for id, token in added.items() if token.special}
        marking = {id for id, token in special.items() if any(token in marker for marker in _MARKERS)}
        self._dropped = {*special, *tokenizer.all_special_ids} - marking if marking else None

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The texts of rows of ids."""
        if self._dropped is None:
            return self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        kept = [[id for id in map(int, row) if id not in self._dropped] for row in rows]
        return self.tokenizer.batch_decode(kept, skip_special_tokens=False)
