"""Tool outputs as the tokens that go between two turns: the chat template's words around them, the outputs as plain text."""

import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np

CUT = "\n[… cut …]\n"
"""Stands where the middle of a long output was left out."""

LONGEST_TOKEN = 32
"""Characters of an output that are looked at, per token it may take."""

_TURN, _OUTPUT = "\ue000turn\ue001", "\ue000output {}\ue001"
"""Private-use letters: no template holds them."""


class Replies:
    """Turns outputs into tokens. Sampled ids are never decoded and tokenised anew: only what comes after them is made here.

    Args:
        tokenizer: of the policy. Its chat template says what goes around the outputs of a turn; where it has none, or one
            that does not show tool messages, they stand between ``<tool_response>`` tags.
        max_tool_tokens: tokens of one output at most; of a longer one beginning and end are kept.
    """

    def __init__(self, tokenizer, max_tool_tokens: int):
        self.tokenizer, self.max_tool_tokens = tokenizer, max_tool_tokens
        control = dict.fromkeys([*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids])
        self._control = {id: token for id in control if len(token := tokenizer.convert_ids_to_tokens(id)) > 1}
        # Tokens may overlap in the text, so every place where one begins is looked for.
        longest_first = sorted(self._control.values(), key=len, reverse=True)
        self._begins = re.compile(f"(?={'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._around = cache(self._around)

    def tokens(self, outputs: Sequence[str], stop_id: int) -> np.ndarray:
        """int64 [t], what follows a turn that ended with ``stop_id`` up to the first id of the next.

        Args:
            outputs: of the turn's calls, in order; at least one.
        """
        first, *others = self._around(len(outputs), stop_id)
        ids = list(first)
        for output, after in zip(outputs, others, strict=True):
            ids += self._output(output)
            ids += after
        return np.array(ids, np.int64)

    def plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a control token, whatever it spells: "<|im_end|>" is some ten letters here."""
        text = text.encode("utf-8", "replace").decode()
        places = [place.start() + 1 for place in self._begins.finditer(text)] if self._begins else []
        parts = [text[start:end] for start, end in pairwise([0, *places, len(text)])]
        ids = [id for part in parts if part for id in self._encode(part)]
        # Some tokenizers rewrite text before they look for control tokens (full-width letters, say).
        return [id for id in ids if id not in self._control]

    def _output(self, text: str) -> list[int]:
        most = self.max_tool_tokens
        letters = most * LONGEST_TOKEN
        long = len(text) > 2 * letters
        head, tail = (self.plain(text[:letters]), self.plain(text[-letters:])) if long else (self.plain(text), [])
        if not long and len(head) <= most:
            return head
        mark = self.plain(CUT)
        kept = most - len(mark)
        if kept < 2:
            return head[:most]
        return [*head[: kept - kept // 2], *mark, *(tail or head)[-(kept // 2) :]]

    def _around(self, num_outputs: int, stop_id: int) -> list[list[int]]:
        """Ids before, between and behind so many outputs; the template's own control tokens are control tokens here."""
        pieces = self._of_template(num_outputs)
        if pieces is None:
            between = ["\n</tool_response>\n<tool_response>\n"] * (num_outputs - 1)
            pieces = ["\n<tool_response>\n", *between, "\n</tool_response>\n"]
        else:
            # The turn's own end is sampled already.
            pieces[0] = pieces[0].removeprefix(self.tokenizer.decode([stop_id]))
        return [self._encode(piece) if piece else [] for piece in pieces]

    def _of_template(self, num_outputs: int) -> list[str] | None:
        """The template's text after a turn, cut at the outputs; None where it does not show each once and in order."""
        if not getattr(self.tokenizer, "chat_template", None):
            return None
        from jinja2 import TemplateError

        marks = [_OUTPUT.format(i) for i in range(num_outputs)]
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        messages += [{"role": "tool", "name": "tool", "content": mark} for mark in marks]
        try:
            shown = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError:
            return None
        pieces = []
        for mark in (_TURN, *marks):
            before, found, shown = shown.partition(mark)
            if not found:
                return None
            pieces.append(before)
        return [*pieces[1:], shown]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
