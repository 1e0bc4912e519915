"""Reading calls from a turn, and answering what is wrong with them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vipfast.tools.base import Output
from vipfast.tools.calculator import Calculator
from vipfast.tools.calls import MOST_CALLS, Call, calls, run

TOOLS = {"calculator": Calculator()}


def written(expression):
    return f"<tool_call>\n{json.dumps({'name': 'calculator', 'arguments': {'expression': expression}})}\n</tool_call>"


def answers(text):
    return [(output.text, output.error) for output in run(calls(text), TOOLS, 1.0)]


def test_calls_are_run_in_order():
    assert answers(f"first {written('1+1')} then {written('2*3')} done") == [("2", False), ("6", False)]


def test_a_turn_without_calls_has_none():
    assert calls('The call {"name": "calculator"} stands in no tags; </tool_call> alone neither.') == []


def test_a_call_left_open_at_the_turns_end_counts():
    assert answers(written("5-3").removesuffix("</tool_call>")) == [("2", False)]


def test_thoughts_call_nothing():
    assert answers(f"<think>shall I? {written('1')}</think>{written('2')}") == [("2", False)]
    assert calls(f"<think>still thinking {written('1')}") == []


def test_a_response_in_the_text_is_no_call_and_no_response():
    assert answers(f"{written('1+1')}<tool_response>\n7\n</tool_response>") == [("2", False)]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("", "must be JSON"),
        ("{'name': 'calculator'}", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ('{"name": "calculator", "arguments": {"expression": ' + "1" * 5000 + "}}", "must be JSON"),
        ("[1]", "must have the form"),
        ('{"name": 3, "arguments": {}}', "must have the form"),
        ('{"name": "calculator"}', "must have the form"),
        ('{"name": "calculator", "arguments": "1+1"}', "must have the form"),
        ('{"name": "shell", "arguments": {}}', "there is no tool 'shell'; there is calculator"),
        ('{"name": "calculator", "arguments": {}}', "takes the arguments expression"),
        ('{"name": "calculator", "arguments": {"expression": "1", "time_s": "9"}}', "takes the arguments expression"),
        ('{"name": "calculator", "arguments": {"expression": 5}}', "must be text"),
        ('{"name": "calculator", "arguments": {"expression": null}}', "must be text"),
    ],
)
def test_what_is_wrong_is_answered(body, why):
    [(text, error)] = answers(f"<tool_call>{body}</tool_call>")
    assert error and text.startswith("error: ") and why in text and len(text) < 400


def test_only_so_many_calls_are_run_and_the_last_output_says_so():
    found = answers("<tool_call></tool_call>" * 3 + written("1+1") * 1000)
    assert len(found) == MOST_CALLS and found[-1] == ("2\n(995 more calls were not run: a turn may make 8)", False)


@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name":', "}", "x", "\ud800"])).map(
        "".join
    )
)
def test_no_text_raises(text):
    found = calls(text)
    assert all(isinstance(call, Call) for call in found)
    assert all(isinstance(output, Output) for output in run(found, TOOLS, 1.0))
