"""Packed tests of programming problems: what is unpacked, and that a pickle is never run."""

import base64
import json
import pickle
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vipfast.tasks import programs
from vipfast.tasks.programs import pickled_text, read_tests, unpacked

STDIN = {"input": "1\n", "output": "2\n", "testtype": "stdin"}
CALL = {"input": '"a"\nnull', "output": "[true, 1.5]", "testtype": "functional"}


def pack(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


class Runs:
    def __reduce__(self):
        return (exec, ("raise SystemExit('the pickle was run')",))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@given(text=st.text())
def test_a_pickled_text_is_read_back(protocol, text):
    assert pickled_text(pickle.dumps(text, protocol)) == text


@pytest.mark.parametrize("value", [Runs(), ["a", "b"], {"a": 1}, 5, b"bytes", [Runs(), "text"]], ids=str)
def test_any_other_pickle_is_refused_unrun(value):
    assert pickled_text(pickle.dumps(value)) is None and unpacked(pack(value)) is None


@given(st.binary(max_size=60))
def test_garbage_is_no_tests(data):
    assert unpacked(base64.b64encode(zlib.compress(data)).decode()) is None
    assert not isinstance(unpacked(data.decode("latin-1")), bytes)


def test_both_spellings_of_private_tests():
    assert unpacked(json.dumps([STDIN])) == [STDIN] == unpacked(pack(json.dumps([STDIN]))) == unpacked([STDIN])


def test_a_packed_bomb_is_left_alone(monkeypatch):
    monkeypatch.setattr(programs, "LARGEST_TESTS", 1000)
    assert unpacked(pack(json.dumps([STDIN] * 1000))) is None


def test_calls_read_arguments_line_by_line():
    row = {"public_test_cases": json.dumps([CALL]), "metadata": '{"func_name": "f"}'}
    test = {"input": ["a", None], "output": [True, 1.5]}
    assert read_tests(row) == ({"kind": "call", "function": "f", "tests": [test], "hidden_tests": []}, False)


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"public_test_cases": "[]", "private_test_cases": "not packed"},
        {"public_test_cases": [CALL]},  # nothing says which function
        {"public_test_cases": [{**CALL, "output": "no json"}], "metadata": {"func_name": "f"}},
        {"public_test_cases": [{**CALL, "output": ""}], "metadata": {"func_name": "f"}},
        {"public_test_cases": [{"input": "1"}]},
    ],
)
def test_rows_without_tests_that_can_be_read(row):
    assert read_tests(row) == (None, False)
