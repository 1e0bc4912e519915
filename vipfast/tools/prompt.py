"""How a prompt offers tools: by its chat template where that knows how, else in words in front of it."""

import json
from collections.abc import Callable, Sequence

OFFER = (
    'You may call tools. To do so, write <tool_call>{{"name": the tool, "arguments": its arguments as JSON}}</tool_call> and '
    "end your turn; what it gives then stands between <tool_response> and </tool_response>, and you go on. The tools:\n{tools}"
)


def in_words(tools: Sequence[dict], text: str) -> str:
    """``text`` with the offer of ``tools``, JSON schemas (``tools.describe``), in front of it."""
    offer = OFFER.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    return f"{offer}\n\n{text}"


def in_chat(tools: Sequence[dict], messages: Sequence[dict], show: Callable[..., str]) -> str:
    """Messages as a chat template shows them, with the offer; in words in the first of them where the template ignores tools,
    or would have them called in another form than the one that is read.

    Args:
        tools: JSON schemas (``tools.describe``).
        messages: [{"role", "content"}, …], at least one.
        show: shows messages, and tools if told ``tools=``, as the chat template does.
    """
    shown = show(messages, tools=list(tools))
    if all(word in shown and word not in show(messages) for word in ("<tool_call>", '"arguments"')):
        return shown
    first, *others = messages
    return show([{**first, "content": in_words(tools, first["content"])}, *others])
