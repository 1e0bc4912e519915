"""The hostile corpus: every line gets its verdict within its time, whatever it does to the parser."""

import json
import re
import time
from pathlib import Path

import pytest

from vipfast.rewards.maths import Maths

CORPUS = Path(__file__).parents[1] / "data" / "hostile_maths.jsonl"
LINES = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
HANGING = [line for line in LINES if line.get("timed_out")]


@pytest.fixture(scope="module")
def maths():
    reward = Maths(workers=1, timeout_s=30)
    reward.pool.facts()
    yield reward
    reward.close()


def completion(line):
    """«x» stands for x repeated so many times."""
    return re.sub("«(.*?)»", lambda match: match[1] * line["repeat"], line["completion"])


def named(lines):
    return [pytest.param(line, id=f"{i}: {line['why']}") for i, line in enumerate(lines)]


@pytest.mark.parametrize("line", named([line for line in LINES if line not in HANGING]))
def test_verdict_within_its_time(maths, line):
    start = time.perf_counter()
    verdict = maths([completion(line)], [line["gold"]], [{}])[0]
    seconds = time.perf_counter() - start
    assert verdict.reward == line["reward"], verdict
    assert not verdict.timed_out and verdict.error is None and len(verdict.answer or "") <= 200
    assert seconds < line["limit_s"]


def test_what_hangs_costs_its_limit_and_is_wrong_and_counted():
    reward = Maths(workers=1, timeout_s=1)
    reward.pool.facts()
    for line in HANGING:
        start = time.perf_counter()
        verdict = reward([completion(line)] * 64, [line["gold"]] * 64, [{}] * 64)[0]
        assert verdict.reward == line["reward"] == 0 and verdict.timed_out
        assert time.perf_counter() - start < line["limit_s"], "a whole group with one hanging answer pays for it once"
    assert reward([r"\boxed{\sqrt4}"], ["2"], [{}])[0].reward == 1
    reward.close()


def test_the_corpus_covers_what_it_should():
    assert len(LINES) >= 120 and {line["reward"] for line in LINES} == {0, 1, None}
