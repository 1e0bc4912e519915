"""Tool calls in a turn's text, in the form that Hermes and Qwen models write:

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "3 * 4"}}
    </tool_call>

Whatever else stands between the tags is a call too, one that is answered with an error from which a policy can learn.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vipfast.tools.base import Output, Tool

MOST_CALLS = 8
"""Calls of one turn that are run; the rest are left out, and the last output says so."""

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FORM = '{"name": <tool>, "arguments": {<parameter>: <text>}}'


@dataclass(frozen=True)
class Call:
    """A tool by its name and its arguments; ``error`` says what is wrong where no call could be read."""

    name: str = ""
    arguments: dict = field(default_factory=dict)
    error: str | None = None


def calls(text: str) -> list[Call]:
    """The calls of a turn, in order; a last one may be left open. Thoughts (``<think>…</think>``) call nothing."""
    said = text.rpartition("</think>")[2].partition("<think>")[0]
    return [_call(body) for body in _CALL.findall(said)]


def _call(body: str) -> Call:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else "too deep or too long"
        return Call(error=f"a tool call must be JSON of the form {_FORM}; this is none: {reason}")
    if not isinstance(given, dict) or not isinstance(given.get("name"), str) or not isinstance(given.get("arguments"), dict):
        return Call(error=f"a tool call must have the form {_FORM}")
    return Call(given["name"], given["arguments"])


def run(asked: Sequence[Call], tools: Mapping[str, Tool], time_s: float) -> list[Output]:
    """The outputs of a turn's calls, run one after the other, ``time_s`` seconds each at most."""
    outputs = [_run(call, tools, time_s) for call in asked[:MOST_CALLS]]
    if left := len(asked) - len(outputs):
        last = outputs[-1]
        text = f"{last.text}\n({left} more calls were not run: a turn may make {MOST_CALLS})"
        outputs[-1] = Output(text, last.error, last.found)
    return outputs


def _run(call: Call, tools: Mapping[str, Tool], time_s: float) -> Output:
    error = call.error or _mistake(call, tools)
    return Output(f"error: {error}", error=True) if error else tools[call.name](time_s, **call.arguments)


def _mistake(call: Call, tools: Mapping[str, Tool]) -> str | None:
    """What is wrong with a call that could be read."""
    if call.name not in tools:
        return f"there is no tool {call.name[:100]!r}; there is {', '.join(tools)}"
    wanted = tools[call.name].parameters
    if call.arguments.keys() != wanted.keys():
        return f"{call.name} takes the arguments {', '.join(wanted)} and no others"
    if wrong := [name for name, value in call.arguments.items() if not isinstance(value, str)]:
        return f"{', '.join(wrong)} must be text, in quotes"
    return None
