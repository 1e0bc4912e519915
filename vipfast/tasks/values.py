"""Values of a row: reaching into nested columns, and one rule by which what a table holds becomes plain values and text.

missing       null, NaN and NaT are nothing
decimals      text: all their digits, never an exponent; inside other values: a number where a float holds it, else text
floats        text: a whole one loses its ".0" (tables with gaps turn 5 into 5.0)
dates, times  ISO 8601; a duration is its seconds
bytes         the text they are in UTF-8; others are refused
UUIDs         as they are written
lists, dicts  text: JSON
NumPy         as Python's own
"""

import json
import math
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np

from vipfast.errors import DataError


class Unreadable(DataError):
    """Says what a value is and what would do instead, and not yet where it was found."""


def get(row: dict, field: str) -> Any:
    """The value of a column, dots reaching into nested ones (or JSON text); None where there is none, and for NaN."""
    value: Any = row.get(field) if field in row else row
    for part in () if field in row else field.split("."):
        value = as_json(value)
        value = value.get(part) if isinstance(value, dict) else None
    return None if isinstance(value, float) and math.isnan(value) else value


def plain(value: Any) -> Any:
    """The value as None, text, numbers, lists and dicts of these, by the rule above.

    Raises:
        Unreadable: nothing in the rule fits.
    """
    if value is None or isinstance(value, str | bool | int):
        return str(value) if isinstance(value, np.str_) else value
    if isinstance(value, float):  # np.float64 too
        return None if math.isnan(value) else float(value)
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, np.datetime64):
        return None if np.isnat(value) else str(value)
    if isinstance(value, np.timedelta64):
        return None if np.isnat(value) else plain(value / np.timedelta64(1, "s"))
    if isinstance(value, np.ndarray) and value.dtype.kind in "mM":
        return [plain(part) for part in value]  # tolist would give nanoseconds as mere integers
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Decimal):
        return _number(value)
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat() if value == value else None  # NaT is no date, and says it is one
    if isinstance(value, timedelta):
        return value.total_seconds() if value == value else None
    if isinstance(value, bytes):
        return _decoded(value)
    if isinstance(value, UUID):
        return str(value)
    raise Unreadable(
        f"holds {value!r:.80} of type {type(value).__name__}, which is no plain value; give numbers, texts or lists"
    )


def as_text(value: Any) -> str:
    """A value as text by the rule above: a text as it is, a number plainly, lists and dicts as JSON; null for nothing.

    Raises:
        Unreadable: as ``plain`` does.
    """
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Decimal) and value.is_finite():
        return format(value, "f")
    value = plain(value)
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return json.dumps(value, ensure_ascii=False)


def plain_answer(value: Any) -> str | None:
    """``as_text``; None where nothing stands there."""
    return None if plain(value) in (None, "") else as_text(value)


def as_json(value: Any) -> Any:
    """A value that some uploads keep as JSON text; None for a text that is no JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _number(value: Decimal) -> int | float | str | None:
    if value.is_nan():
        return None
    if value == value.to_integral_value() and value.is_finite():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else format(value, "f")


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise Unreadable(f"holds bytes that are no UTF-8 ({error}); store text there, or name another column") from error
