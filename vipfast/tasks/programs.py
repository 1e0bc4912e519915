"""LiveCodeBench rows: the wording of a programming problem, and its public and private tests in one plain form.

A prompt's metadata is then: ``kind`` "stdin" or "call"; ``tests`` and ``hidden_tests``, lists of {"input", "output"}: texts for
"stdin", and for "call" a list of arguments and a result, as JSON values; for "call" also ``function``, the name to be called.
"""

import base64
import binascii
import json
import pickletools
import zlib
from typing import Any

from vipfast.tasks.values import as_json, as_text

LARGEST_TESTS = 2**30
"""Bytes that a problem's packed tests may grow to."""

_ONE_TEXT = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP"}
_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}


def wording(row: dict, question: str) -> str:
    """The problem as it is asked: question, starter code if any, and the form of the answer."""
    starter = row.get("starter_code")
    if isinstance(starter, str) and starter.strip():
        form = f"Complete this program and give it whole in a fenced block:\n\n```python\n{starter.rstrip()}\n```"
    else:
        form = "Write a Python program that reads standard input and prints the answer. Give it in a fenced ```python block."
    return f"{question.strip()}\n\n{form}"


def read_tests(row: dict) -> tuple[dict[str, Any] | None, bool]:
    """``kind``, ``tests``, ``hidden_tests`` (and ``function``) of a row, and whether it has private tests only; None where it
    has no test, or one that cannot be read.

    Public tests are for training and private ones for evaluation. Of a row that has only private tests, every second one (the
    1st, 3rd, …) is for training and the others are for evaluation.
    """
    public, private = _tests(row.get("public_test_cases")), _tests(unpacked(row.get("private_test_cases")))
    if not public and not private:
        return None, False
    function = _function_name(row)
    called = any(test.get("testtype") == "functional" for test in public + private)
    if called and function is None:
        return None, False
    read = _call if called else _stdin
    public, private = [read(test) for test in public], [read(test) for test in private]
    if None in public or None in private:
        return None, False
    if private_only := not public:
        public, private = private[::2], private[1::2]
    found = {"kind": "call" if called else "stdin", "tests": public, "hidden_tests": private}
    return found | ({"function": function} if called else {}), private_only


def unpacked(tests: Any) -> Any:
    """Private tests: JSON, or JSON text that was pickled, compressed and written in base64. Nothing else is unpickled."""
    content = as_json(tests)
    if content is not None or not isinstance(tests, str):
        return content
    try:
        unzip = zlib.decompressobj()
        pickled = unzip.decompress(base64.b64decode(tests, validate=True), LARGEST_TESTS)
        return None if unzip.unconsumed_tail else as_json(pickled_text(pickled))
    except (binascii.Error, zlib.error, ValueError):
        return None


def pickled_text(pickled: bytes) -> str | None:
    """The text in a pickle that holds one text and nothing else, read without running it; None for any other pickle."""
    texts = []
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in _TEXTS:
            texts.append(argument)
        elif opcode.name not in _ONE_TEXT:
            return None
    return texts[0] if len(texts) == 1 else None


def _tests(column: Any) -> list[dict]:
    content = as_json(column)
    return [test for test in content if isinstance(test, dict)] if isinstance(content, list) else []


def _function_name(row: dict) -> str | None:
    metadata = as_json(row.get("metadata"))
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) and name else None


def _stdin(test: dict) -> dict | None:
    if test.get("input") is None or test.get("output") is None:
        return None
    return {"input": as_text(test["input"]), "output": as_text(test["output"])}


def _call(test: dict) -> dict | None:
    """A call's arguments stand on a line each, its result is one JSON value."""
    if not isinstance(test.get("input"), str) or not isinstance(test.get("output"), str):
        return None
    try:
        arguments = [json.loads(line) for line in test["input"].split("\n") if line.strip()]
        return {"input": arguments, "output": json.loads(test["output"])}
    except (ValueError, RecursionError):
        return None
