"""Values of a row: reaching into nested columns, and one rule by which answers become text."""

import json
import math
from typing import Any


def get(row: dict, field: str) -> Any:
    """The value of a column, dots reaching into nested ones (or JSON text); None where there is none, and for NaN."""
    value: Any = row.get(field) if field in row else row
    for part in () if field in row else field.split("."):
        value = as_json(value)
        value = value.get(part) if isinstance(value, dict) else None
    return None if isinstance(value, float) and math.isnan(value) else value


def as_text(value: Any) -> str:
    """A text as it is, a whole float without its ".0" (tables with gaps turn 5 into 5.0), everything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def plain_answer(value: Any) -> str | None:
    """``as_text``; None where nothing stands there."""
    return as_text(value) if value is not None and value != "" else None


def is_messages(value: Any) -> bool:
    """Whether this is a chat: a list of {"role": text, "content": text}."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value)
    )


def as_json(value: Any) -> Any:
    """A value that some uploads keep as JSON text; None for a text that is no JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
