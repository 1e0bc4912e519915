"""Chats as datasets keep them, as plain messages [{"role": text, "content": text}, …].

    messages      {"role", "content"}; content is a text, or a list of parts, whose texts are joined by line breaks
    ShareGPT      {"from", "value"}; human and user ask, gpt, chatgpt, bing, model and assistant answer, system sets the scene
    as text       either of them as JSON
    with nulls    tables fill the keys that a message does not have: these count as absent

What cannot be shown to a model as text is refused by name: a message that calls tools, is null, or has parts of another kind.
"""

import re
from typing import Any, NamedTuple

import numpy as np

from vipfast.errors import DataError
from vipfast.tasks.values import Unreadable, as_json, plain

ROLES = {"system": "system"}
ROLES |= dict.fromkeys(("human", "user"), "user")
ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "model", "assistant"), "assistant")
"""ShareGPT's speakers."""

_CALLS = ("tool_calls", "function_call")
_MEDIA = re.compile("image|audio|video", re.IGNORECASE)
_BY_PYTHON = re.compile(r"\[\s*\{\s*'(role|content|from|value)'\s*:")


class NotShown(DataError):
    """A chat with pictures, sound or video, which no text can stand for."""


class Chat(NamedTuple):
    """Plain messages, and whether they were kept as ShareGPT's rows are."""

    messages: list[dict]
    sharegpt: bool


def read_chat(value: Any) -> Chat | None:
    """The chat in a column, or None for what is none: a text, a number, nothing.

    Raises:
        NotShown: it has pictures, sound or video.
        Unreadable: a chat of another kind, or a list or dict that is no chat.
    """
    value = plain(value) if isinstance(value, bytes) else _as_list(value)
    if isinstance(value, str):
        if _BY_PYTHON.match(value.lstrip()):
            raise Unreadable("holds a chat as Python prints it, which is no JSON; write it with json.dumps, or keep the list")
        found = as_json(value) if value.lstrip().startswith("[") else None
        return _read(found) if is_chat(found) else None
    if is_chat(value):
        return _read(value)
    if isinstance(value, list | dict):
        raise Unreadable(
            f"holds a {type(value).__name__} that is no chat, {value!r:.100}; give a text, or a list of messages with role and "
            "content, or name another column"
        )
    return None


def is_chat(value: Any) -> bool:
    """Whether this is a list of messages in either form, whatever stands in them: all have a speaker, one or more words."""
    value = _as_list(value)
    if not isinstance(value, list) or not all(isinstance(part, dict) and part.keys() & {"role", "from"} for part in value):
        return False
    return any({"role", "content"} <= part.keys() or {"from", "value"} <= part.keys() for part in value)


def split_reply(messages: list[dict]) -> tuple[list[dict], str | None]:
    """A dialogue up to where the assistant has the last word, and that word; None where it has not."""
    asked = list(messages)
    while asked[-1]["role"] == "assistant":
        asked.pop()
    return asked, messages[-1]["content"] if len(asked) < len(messages) else None


def _as_list(value: Any) -> Any:
    """Arrays and tuples as lists; what is in them stays, pictures too."""
    return value.tolist() if isinstance(value, np.ndarray) else list(value) if isinstance(value, tuple) else value


def _read(messages: list[dict]) -> Chat:
    filled = [{key: part for key, part in message.items() if part is not None} for message in _as_list(messages)]
    sharegpt = any("from" in message and "role" not in message for message in filled)
    read = [_message(message) for message in filled]
    if all(message["role"] == "assistant" for message in read):
        raise Unreadable("holds turns of the assistant alone, so nothing is asked; leave such rows out")
    return Chat(read, sharegpt)


def _message(message: dict) -> dict:
    """One message in the plain form; keys besides role and content stay, as a model's template may know them."""
    if called := next((name for name in _CALLS if _filled(message.get(name))), None):
        raise Unreadable(f"holds a message with {called}, which is no text; leave such rows out, or name a column without them")
    if _has_media(message):
        raise NotShown("holds a message with pictures, sound or video, which are not shown; give messages of text alone")
    speaker, said = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
    role, content = (message.pop(name, None) for name in (speaker, said))
    if not isinstance(role, str) or (speaker == "from" and role.lower() not in ROLES):
        known = ", ".join(ROLES) if speaker == "from" else "system, user, assistant"
        raise Unreadable(f"holds a message whose {speaker!r} is {role!r}; known are {known}: rename it, or leave such rows out")
    return {**plain(message), "role": ROLES[role.lower()] if speaker == "from" else role, "content": _text(content, said)}


def _text(content: Any, name: str) -> str:
    content = plain(content) if isinstance(content, bytes) else _as_list(content)
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    what = "null" if content is None else f"{content!r:.80}"
    raise Unreadable(f"holds a message whose {name!r} is {what}; give a text or text parts, or leave such rows out")


def _part(part: Any) -> str:
    if isinstance(part, dict):
        kind = str(part.get("type") or "text")
        if _MEDIA.search(kind) or _has_media(part):
            raise NotShown(f"holds a message with a part of type {kind!r}, which is not shown; give text parts alone")
        part = part.get("text") if "text" in kind else part
    if isinstance(part, str):
        return part
    raise Unreadable(f"holds a message with the part {part!r:.80}; give parts of the form {{'type': 'text', 'text': …}}")


def _has_media(part: dict) -> bool:
    return any(_MEDIA.match(str(key)) and _filled(value) for key, value in part.items())


def _filled(value: Any) -> bool:
    """Whether anything stands there: tables also fill in the inner keys of what is absent."""
    if isinstance(value, dict):
        return any(map(_filled, value.values()))
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)
