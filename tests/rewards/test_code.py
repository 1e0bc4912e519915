"""The code reward: which program is run, what counts as right, and that nothing but a right output earns anything."""

import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vipfast.config import Config
from vipfast.errors import DataError, UsageError
from vipfast.rewards import code
from vipfast.rewards.choose import choose_reward
from vipfast.rewards.code import Code, passes, same_text, same_value
from vipfast.sandbox import Output, SandboxError
from vipfast.trainer import Trainer
from vipfast.types import Prompt

STDIN = {"kind": "stdin", "tests": [{"input": f"{n}\n", "output": f"{n * n}\n"} for n in (0, 1, 3, 5)]}
CALL = {
    "kind": "call",
    "function": "add",
    "tests": [{"input": [1, 2], "output": 3}, {"input": [[1], [2]], "output": [1, 2]}],
}


def fenced(source: str) -> str:
    return f"Here it is.\n```python\n{source}\n```\nThat is it."


@pytest.fixture(scope="module")
def reward():
    reward = Code(workers=2, timeout_s=5.0)
    yield reward
    reward.close()


@pytest.fixture(scope="module")
def rate():
    rate = Code("rate", workers=1, timeout_s=1.0)
    yield rate
    rate.close()


def grade(reward, source, metadata):
    return reward([fenced(source)], [None], [metadata])[0]


@pytest.mark.parametrize(
    ("printed", "expected", "right"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("  1 2  \r\n3   \n\n\n", "1 2\n3", True),
        ("1\n\n3", "1\n3", False),
        ("1 2 3", "1 2\n3", False),
        ("1.0", "1", True),
        ("1  2", "1 2.00", True),
        ("0.1", "0.10000001", False),
        ("1e2", "100", True),
        ("1e999999999", "2e999999999", False),
        ("1e99999999999999999999", "1", False),
        ("nan", "nan", True),  # as texts
        ("sNaN 1", "1 sNaN", False),
        ("Infinity", "inf", False),
        ("yes", "Yes", False),
        ("a 1.0", "a 1", False),
        ("", "", True),
        ("", "1", False),
        ("1" * 10_000, "1" * 10_000 + ".0", True),
        ("\u0661", "1", False),
    ],
)
def test_texts_are_compared_line_by_line_and_numbers_by_value(printed, expected, right):
    assert same_text(printed, expected) is right


@pytest.mark.parametrize(
    ("value", "expected", "right"),
    [
        (1, 1.0, True),
        (1.0, 1, True),
        (True, 1, False),
        (1, True, False),
        (0, False, False),
        (True, True, True),
        (None, None, True),
        (None, False, False),
        (None, 0, False),
        ("1", 1, False),
        ([1, 2], (1, 2), True),
        ([1, 2], [2, 1], False),
        ([], {}, False),
        ({"a": [1]}, {"a": [1.0]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (0.1 + 0.2, 0.3, False),
        ([[True]], [[1]], False),
        ("", None, False),
        (10**400, 1e308, False),
    ],
)
def test_values_are_equal_by_type_and_value(value, expected, right):
    assert same_value(value, expected) is right


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None)
@given(JSON, JSON)
def test_equality_is_reflexive_and_symmetric(one, other):
    assert same_value(one, one) and same_value(one, other) == same_value(other, one)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=30) | st.sampled_from([b"NaN", b"[1e999]", b"[" * 100_000, b"1" * 5000, b"\xff", b'"\\ud800"', b"3 3"])
)
def test_bytes_that_are_not_the_right_json_never_pass(result):
    assert passes(Output("", "", "exit", result), 3, "call") is (result.strip(b" \t\r\n") in (b"3", b"3.0"))


@pytest.mark.parametrize("ended", ["error", "signal", "time", "memory", "output", "disk", "threads"])
def test_a_right_output_of_a_run_that_did_not_end_well_does_not_count(ended):
    assert not passes(Output("3", "", ended, b"3"), "3", "stdin") and not passes(Output("3", "", ended, b"3"), 3, "call")


def test_all_or_nothing_and_the_share(reward, rate):
    for source, all_of_them, share in (
        ("print(int(input()) ** 2)", 1.0, 1.0),
        ("print(input())", 0.0, 0.5),  # 0 and 1 are their own squares
        ("print('no')", 0.0, 0.0),
        ("n = int(input())\nif n == 3:\n    raise ValueError\nprint(n * n)", 0.0, 0.75),
    ):
        assert grade(reward, source, STDIN).reward == all_of_them and grade(rate, source, STDIN).reward == share


def test_functions_and_methods(reward):
    assert grade(reward, "def add(a, b):\n    return a + b", CALL).reward == 1
    assert grade(reward, "class Solution:\n    def add(self, a: List[int], b):\n        return a + b", CALL).reward == 1
    assert grade(reward, "def add(a, b):\n    return 3", CALL).reward == 0
    assert grade(reward, "def minus(a, b):\n    return a + b", CALL).reward == 0


def test_tests_share_no_state(reward):
    """A program cannot answer a later test with what it saw in an earlier one."""
    counting = "calls = []\ndef add(a, b):\n    calls.append(1)\n    return a + b if len(calls) == 1 else None"
    assert grade(reward, counting, CALL).reward == 1


@pytest.mark.parametrize("expected", ["", None])
def test_raising_where_nothing_is_expected_is_zero(reward, expected):
    metadata = {"kind": "call", "function": "solve", "tests": [{"input": [1], "output": expected}]}
    assert grade(reward, "def solve(x):\n    raise ValueError", metadata).reward == 0
    assert grade(reward, "raise ValueError", {"kind": "stdin", "tests": [{"input": "", "output": ""}]}).reward == 0


def test_hidden_tests_count_on_held_out_prompts_alone(reward):
    source = "n = int(input())\nprint(n * n if n < 10 else 0)"
    hidden = STDIN | {"hidden_tests": [{"input": "11\n", "output": "121\n"}]}
    assert grade(reward, source, hidden).reward == 1
    assert grade(reward, source, hidden | {"use_hidden": True}).reward == 0


def test_no_tests_are_unscored_and_no_program_is_zero(reward):
    verdicts = reward([fenced("print(1)"), "no program"], [None] * 2, [{"kind": "stdin", "tests": []}, STDIN])
    assert [verdict.reward for verdict in verdicts] == [None, 0.0] and not any(verdict.error for verdict in verdicts)
    assert reward([fenced("print(1)")], [None], [{}])[0].reward is None


def prompts(*metadata) -> list[Prompt]:
    return [Prompt(f"{i}", f"problem {i}", np.zeros(1), None, each) for i, each in enumerate(metadata)]


HIDDEN = {"kind": "stdin", "tests": [], "hidden_tests": STDIN["tests"]}


def test_prompts_without_tests_are_told_before_anything_runs(reward):
    assert reward.check_golds(prompts(STDIN, CALL, HIDDEN | {"use_hidden": True}), 0) == []
    (note,) = reward.check_golds(prompts(STDIN, {}, CALL, HIDDEN), 0)
    assert note.startswith("warning: 2 of 4 prompts have no tests, e.g. 'problem 1'") and "unscored" in note
    with pytest.raises(DataError, match=r"3 of 3 prompts have no tests.*kind .*tests.*public_test_cases"):
        reward.check_golds(prompts({}, {"tests": []}, HIDDEN), 0)
    with pytest.raises(DataError, match="tests of kind 'file'"):
        reward.check_golds(prompts(STDIN, STDIN | {"kind": "file"}), 0)


@pytest.mark.parametrize("names", [("code",), ("exact", "code")])
def test_a_run_that_could_grade_nothing_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch, names):
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{n} + 1 =", "answer": f"#### {n + 1}"}) for n in range(40)))
    monkeypatch.setattr("vipfast.trainer.load_policy", lambda config: pytest.fail("a model was loaded"))
    common = dict(prompts_per_step=4, device="cpu", threads=1, reward=names, reward_workers=1, allocator="uniform")
    with pytest.raises(DataError, match="--reward code: 40 of 40 prompts have no tests"):
        Trainer(Config(task=str(path), output_dir=str(tmp_path / "file"), **common))
    with pytest.raises(DataError, match="--reward code: 40 of 40 prompts have no tests"):
        Trainer(Config(output_dir=str(tmp_path / "own"), **common), prompts=[f"{n} + 1 =" for n in range(40)])


def test_time_out_is_zero_counted_and_ends_the_share(rate):
    slow = {"kind": "stdin", "tests": [{"input": str(n), "output": str(n)} for n in range(40)]}
    start = time.monotonic()
    verdict = grade(rate, "n = input()\nwhile n == '2':\n    pass\nprint(n)", slow)
    assert verdict.reward == 2 / 40 and verdict.timed_out and time.monotonic() - start < 8


@pytest.mark.parametrize(("shape", "earned"), [("all", 0.0), ("rate", None)])
def test_tests_of_a_completion_share_a_time_whose_end_is_counted(shape, earned):
    """Each test passes well within its own time, so that nothing but the completion's bounds them."""
    tests = {"kind": "stdin", "tests": [{"input": "1", "output": "1"}] * 12}
    reward = choose_reward(Config(reward=("code",), code_reward=shape, reward_timeout=1.0, reward_workers=1), "exact")
    start = time.monotonic()
    slow, quick = reward(
        [fenced("import time\ntime.sleep(0.3)\nprint(input())"), fenced("print(input())")], [None] * 2, [tests] * 2
    )
    assert time.monotonic() - start < 3 and slow.timed_out and slow.error is None
    assert slow.reward == earned or (earned is None and 1 / 12 <= slow.reward <= 3 / 12)
    assert quick.reward == 1 and not quick.timed_out
    reward.close()


def test_time_of_a_completion_leaves_room_for_forty_tests(reward, monkeypatch):
    """At half of each test's time by default; every run is given what is left, at most a test's own."""
    clock, given = [0.0], []

    def run(source, stdin, limits):
        given.append(limits.wall_s)
        clock[0] += 2.5
        return Output(stdin, "", "exit")

    monkeypatch.setattr(code.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(reward._sandbox, "run", run)
    forty = {"kind": "stdin", "tests": [{"input": "1", "output": "1"}] * 40}
    assert reward._grade(fenced(""), forty).reward == 1 and given == [5.0] * 39 + [2.5]
    given.clear()
    verdict = reward._grade(fenced(""), forty | {"tests": forty["tests"] + forty["tests"][:1]})
    assert verdict.reward == 0 and verdict.timed_out and len(given) == 40


def test_a_sandbox_that_fails_is_unscored_with_its_reason(reward, monkeypatch):
    def fail(*args, **kwargs):
        raise SandboxError("the sandbox's server died")

    monkeypatch.setattr(reward._sandbox, "run", fail)
    verdict = grade(reward, "print(1)", STDIN)
    assert verdict.reward is None and "server died" in verdict.error


@pytest.mark.parametrize(
    "metadata",
    [
        {"tests": [{"input": "", "output": ""}]},
        {"kind": "file", "tests": [{"input": "", "output": ""}]},
        {"kind": "call", "tests": [{"input": [], "output": 1}]},
        {"kind": "call", "function": "f", "tests": [{"input": "[1]", "output": 1}]},
        {"kind": "stdin", "tests": [{"input": "", "output": 1}]},
        {"kind": "stdin", "tests": [{"input": ""}]},
    ],
)
def test_tests_that_are_none_are_an_error_not_a_verdict(reward, metadata):
    with pytest.raises(DataError):
        grade(reward, "print(1)", metadata)


def test_many_threads_at_once_and_each_gets_its_own_verdict(reward):
    verdicts: dict[int, float] = {}

    def call(n):
        metadata = {"kind": "stdin", "tests": [{"input": str(n), "output": str(n)}]}
        verdicts[n] = reward([fenced("print(input())"), fenced("print('x')")], [None] * 2, [metadata] * 2)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all([verdict.reward for verdict in verdicts[n]] == [1.0, 0.0] for n in range(32))


def test_large_inputs_and_outputs_pass(reward):
    text = "\n".join(map(str, range(400_000)))
    assert (
        grade(
            reward,
            "import sys\nsys.stdout.write(sys.stdin.read())",
            {"kind": "stdin", "tests": [{"input": text, "output": text}]},
        ).reward
        == 1
    )


def test_a_machine_without_what_it_takes_is_refused(monkeypatch):
    def refuse(*args):
        raise UsageError("--sandbox strict: this machine lacks Landlock")

    monkeypatch.setattr(code, "Sandbox", refuse)
    with pytest.raises(UsageError, match="--sandbox strict"):
        Code()


class Printing(Code):
    """Takes a completion for what the program prints: the starter knows no Python."""

    def __call__(self, completions, answers, metadata):
        return super().__call__([fenced(f"print({text.strip()!r})") for text in completions], answers, metadata)


def test_five_steps_train_on_what_programs_print(tmp_path):
    prompts = [
        {"prompt": f"sort {' '.join(word)} =", "kind": "stdin", "tests": [{"input": "", "output": "".join(sorted(word))}]}
        for word in (f"{n:02d}" for n in range(10, 40))
    ]
    config = Config(
        allocator="uniform", steps=5, prompts_per_step=4, rollouts_per_prompt=4, heldout_prompts=2, eval_samples=1,
        eval_every=0, output_dir=str(tmp_path / "run"), threads=1, device="cpu",
    )  # fmt: skip
    reward = Printing(workers=1)
    trainer = Trainer(config, prompts=prompts, reward=reward)
    assert trainer.grader.beside and trainer.run() == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"]]
    assert len(steps) == 5 and all(line["reward/unscored"] == line["reward/errors"] == 0 for line in steps)
    assert any(0 < line["reward/mean"] < 1 for line in steps) and lines[-1]["eval/maj@1"] is None
    reward.close()
