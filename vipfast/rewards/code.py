"""Code reward: the program of a completion runs in the sandbox, test by test, and what comes out is compared here.

The program never holds an expected output. What it prints, or the value its function returns, has to be the right one;
exit codes, exceptions and anything it prints about itself only ever take away.
"""

import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

from vipfast.errors import DataError
from vipfast.rewards.base import Verdict
from vipfast.rewards.thinking import outside_thinking
from vipfast.sandbox import Limits, Output, Sandbox, SandboxError
from vipfast.types import ZERO_ONE, Prompt, RewardRange

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,9})?", re.ASCII)
MOST_TESTS_AT_LIMIT = 20
"""How many tests of a completion may take all their time; an honest program has its 40 at half of it."""
_FENCE = re.compile(r"([ \t]*)(`{3,}(?=[^`]*$)|~{3,})\s*(\S*)")
"""Indentation, marks and language; what follows the language says nothing."""
_PYTHON = ("python", "py", "python3")


class Code:
    """Runs programs against tests (a ``rewards.base.Reward``).

    A prompt's metadata holds ``tests``, a list of {"input", "output"}, and ``kind``: with "stdin" both are texts; with "call"
    the input is the list of arguments of ``function`` (or of that method of ``class Solution``) and the output its value.
    ``hidden_tests`` count too where ``use_hidden`` is true, as on held-out prompts, and only there.

    Args:
        shape: "all" pays 1 when every test passes and stops at the first that does not; "rate" pays the share that passes;
            tests after the time ran out, one's or all's, count as failed unseen.
        strength, workers: of the ``Sandbox``.
        timeout_s: wall time of a test.
        completion_s: wall time of all tests of a completion together; ``MOST_TESTS_AT_LIMIT`` times ``timeout_s`` unless given.
        memory_mb: memory of a program.

    Attributes: ``note`` str, what holds of the sandbox here.

    Raises:
        UsageError: the sandbox cannot be had here; the message names what is missing.
    """

    beside, has_answers = True, False

    def __init__(
        self, shape: str = "all", strength: str = "strict", *, timeout_s: float = 6.0, completion_s: float | None = None,
        memory_mb: int = 1024, workers: int | None = None,
    ):  # fmt: skip
        self._sandbox = Sandbox(strength, workers)
        self.reward_range = ZERO_ONE if shape == "all" else RewardRange(0.0, 1.0)
        self.note, self._shape, self._timeout_s, self._memory_mb = self._sandbox.note, shape, timeout_s, memory_mb
        self._completion_s = completion_s or MOST_TESTS_AT_LIMIT * timeout_s
        self._threads = ThreadPoolExecutor(self._sandbox.workers, "programs")

    def __call__(self, completions: list[str], answers: list[Any], metadata: list[dict]) -> list[Verdict]:
        """Verdicts: None where a prompt has no tests, 0 where a completion has no program or it does not pass.

        Raises:
            DataError: tests that are not as described above.
        """
        return list(self._threads.map(self._grade, completions, metadata))

    def check_golds(self, prompts: Sequence[Prompt], seed: int) -> list[str]:
        """Look at all prompts for tests; returns what there is to say about them.

        Raises:
            DataError: no prompt has any, or some are not as described above.
        """
        without = [prompt.text for prompt in prompts if not _tests(prompt.metadata)]
        if not without:
            return []
        what = f"{len(without)} of {len(prompts)} prompts have no tests, e.g. {without[0][:80]!r}"
        if len(without) == len(prompts):
            raise DataError(
                f"--reward code: {what}; give each kind ('stdin' or 'call', with its function) and tests, a list of input and "
                "output, as a LiveCodeBench file's public_test_cases or the metadata of prompts from Python, or choose another "
                "--reward"
            )
        return [f"warning: {what}; rollouts of such prompts stay unscored"]

    def close(self) -> None:
        self._sandbox.close()  # first, so that nothing begins another test
        self._threads.shutdown(cancel_futures=True)

    def _grade(self, completion: str, metadata: dict) -> Verdict:
        tests = _tests(metadata)
        source = program(completion)
        if not tests:
            return Verdict(None)
        if source is None:
            return Verdict(0.0)
        num_passed, timed_out, deadline = 0, False, time.monotonic() + self._completion_s
        for test in tests:
            try:
                output = self._run(source, test, metadata, min(self._timeout_s, deadline - time.monotonic()))
            except SandboxError as error:
                return Verdict(None, error=str(error))
            passed, timed_out = passes(output, test["output"], metadata["kind"]), output.ended == "time"
            num_passed += passed
            if timed_out or (self._shape == "all" and not passed):
                break
        share = num_passed / len(tests)
        return Verdict(float(share == 1) if self._shape == "all" else share, timed_out=timed_out)

    def _run(self, source: str, test: dict, metadata: dict, wall_s: float) -> Output:
        if wall_s <= 0:
            return Output("", "", "time")
        if metadata["kind"] == "stdin":
            limits = Limits(wall_s, self._memory_mb, max(1 << 20, 8 * len(test["output"])))
            return self._sandbox.run(source, stdin=test["input"], limits=limits)
        limits = Limits(wall_s, self._memory_mb)
        return self._sandbox.run(source, function=metadata["function"], arguments=test["input"], limits=limits)


def program(completion: str) -> str | None:
    """The program of a completion: its last fenced block of Python (or else without a language) after the thinking part.

    Fences are CommonMark's (three or more backticks or tildes, closed by at least as many of the same), at any indentation,
    since they may stand in lists; in an open block, one of Python that could have closed it opens anew. A block that is not
    closed was cut off and is none, and so is whatever stands in a thinking part that is not closed.
    """
    answer = outside_thinking(completion) or ""
    blocks: dict[bool, str] = {}
    indent, marks, language, lines = "", "", "", []  # of the open block
    for line in answer.split("\n"):
        fence = _FENCE.match(line)
        if fence and marks and not (fence[2].startswith(marks) and len(fence[1]) < len(indent) + 4):
            fence = None
        if fence and marks and not fence[3]:
            if language in ("", *_PYTHON):
                blocks[language != ""] = "\n".join(lines)
            marks = ""
        elif fence and (not marks or fence[3].lower() in _PYTHON):
            indent, marks, language, lines = fence[1], fence[2], fence[3].lower(), []
        elif marks:
            lines.append(line[min(len(indent), len(line) - len(line.lstrip(" \t"))) :])
    return blocks.get(True, blocks.get(False))


def passes(output: Output, expected: Any, kind: str) -> bool:
    """Whether a run is right: it ended by itself without an exception, and printed or returned what was expected."""
    if output.ended != "exit":
        return False
    if kind == "stdin":
        return same_text(output.stdout, expected)
    # Some values have longer spellings than others, none this much longer; what is cannot be right, and is not read.
    if output.result is None or len(output.result) > 8 * len(json.dumps(expected)) + 4096:
        return False
    try:
        value = json.loads(output.result, parse_constant=_refuse)
        return same_value(value, expected)
    except (ValueError, RecursionError):  # no JSON, or nested beyond any answer
        return False


def same_text(printed: str, expected: str) -> bool:
    """Line by line, without space around text and lines; lines of numbers by value, 1.0 being 1 (LiveCodeBench's rule)."""
    lines, wanted = printed.strip().split("\n"), expected.strip().split("\n")
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(line: str, wanted: str) -> bool:
    if line.strip() == wanted.strip():
        return True
    words, others = line.split(), wanted.split()
    numbers = len(words) == len(others) and all(map(_NUMBER.fullmatch, words + others))
    return numbers and all(Decimal(word) == Decimal(other) for word, other in zip(words, others))


def same_value(value: Any, expected: Any) -> bool:
    """Equality of JSON values: numbers by value whatever their type, but true is not 1, and every other type only equals its
    own; no tolerance."""
    if isinstance(expected, list | tuple):
        return isinstance(value, list) and len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(same_value(value[k], expected[k]) for k in value)
        )
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, int | float):
        return isinstance(value, int | float) and value == expected
    return type(value) is type(expected) and value == expected


def _tests(metadata: dict) -> list[dict]:
    tests = list(metadata.get("tests") or [])
    if metadata.get("use_hidden"):
        tests += metadata.get("hidden_tests") or []
    if not tests:
        return tests
    kind, calls = metadata.get("kind"), metadata.get("kind") == "call"
    if kind not in ("stdin", "call") or (calls and not isinstance(metadata.get("function"), str)):
        raise DataError(
            f"tests of kind {kind!r}, function {metadata.get('function')!r}: give 'stdin', or 'call' and a function"
        )
    for test in tests:
        right = isinstance(test.get("input"), list | tuple) if calls else isinstance(test.get("input"), str)
        if not right or "output" not in test or not (calls or isinstance(test["output"], str)):
            raise DataError(f"test {str(test)[:200]}: an input and output must be two texts, or with calls a list and a value")
    return tests


def _refuse(name: str):
    raise ValueError(f"{name} is no JSON")
