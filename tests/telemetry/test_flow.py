"""Time left by tokens: of the right order from a quarter on, whatever the lengths, and never past what the
length limit allows."""

from types import SimpleNamespace

import numpy as np
import pytest

from vipfast.engine.base import Finished, Request
from vipfast.telemetry import flow
from vipfast.telemetry.flow import Flow, remaining
from vipfast.types import Finish

STEP_S, LONGEST = 0.1, 400


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(flow, "_lengths", [])


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(flow.time, "monotonic", lambda: now.s)
    return now


class Engine:
    """Decodes rollouts of given lengths, a token each in a step of 0.1 s, all that were asked for at once."""

    max_new_tokens = LONGEST

    def __init__(self, clock, lengths):
        self.clock, self.lengths, self.rows = clock, list(lengths), {}

    @property
    def pending(self) -> int:
        return len(self.rows)

    def submit(self, requests) -> None:
        for request in requests:
            for index in range(request.first_index, request.first_index + request.count):
                self.rows[request.slot, index] = [self.lengths.pop(0), 0]

    def step(self) -> list[Finished]:
        self.clock.s += STEP_S
        for row in self.rows.values():
            row[1] += 1
        ended = [name for name, (length, made) in self.rows.items() if made == length]
        tokens = [self.rows.pop(name)[0] for name in ended]
        return [Finished(*name, np.zeros(n, int), np.zeros(n, np.float32), Finish.STOP) for name, n in zip(ended, tokens)]


def told(clock, lengths, chunk: int) -> list[tuple[float, float]]:
    """(seconds told, seconds it took) at each decode step of rollouts that are asked for ``chunk`` at a time."""
    engine = Engine(clock, lengths)
    seen, moments = Flow.of(engine, len(lengths)), []
    for first in range(0, len(lengths), chunk):
        request = Request(0, np.ones(1), "u", 0, first, min(chunk, len(lengths) - first), 0)
        engine.submit([request])
        seen.ask([request])
        while engine.pending:
            seen.advance(engine)
            moments.append((seen.left_s, clock.s))
    return [(left, clock.s - then) for left, then in moments]


LENGTHS = {
    "few short ones end first": [10, 20, 45] + [300] * 253,
    "geometric": np.minimum(np.random.default_rng(0).geometric(1 / 80, 256), LONGEST),
    "all alike": [120] * 256,
    "one in 64 goes on to the limit": 4 * ([LONGEST] + [30] * 63),
    "all run into the limit": [LONGEST] * 256,
}


@pytest.mark.parametrize("chunk", [256, 64], ids=["at once", "in four chunks"])
@pytest.mark.parametrize("kind", LENGTHS)
def test_time_left_is_of_the_right_order(clock, kind, chunk):
    moments = told(clock, LENGTHS[kind], chunk)
    late = moments[len(moments) // 4 : int(0.8 * len(moments))]
    ratios = [left / took for left, took in late]
    # By finished samples "few short ones end first" would tell 256 / 3 times the time that has gone by.
    assert 0.1 < min(ratios) and max(ratios) < 10
    assert moments[-1][0] == 0


def test_a_second_evaluation_of_the_same_kind_is_told_from_its_start(clock):
    lengths = np.minimum(np.random.default_rng(1).geometric(1 / 80, 512), LONGEST)
    told(clock, lengths[:256], 64)
    ratios = [left / took for left, took in told(clock, lengths[256:], 64)[20:-60]]
    assert 0.2 < min(ratios) and max(ratios) < 2


def test_what_a_rollout_needs_yet():
    known = np.array([10, 20, 60])
    assert remaining(0, known, None) == 30 and remaining(15, known, None) == 25
    assert remaining(60, known, None) == 60, "longer than any: it is expected to last as long again"
    assert remaining(60, known, 100) == 40 and remaining(60, known, 50) == 0
    assert remaining(0, np.array([]), 100) == 1


def test_before_the_first_token_nothing_is_told(clock):
    seen = Flow(4)
    assert seen.left_s is None
    seen.ask([Request(0, np.ones(1), "u", 0, 0, 4, 0)])
    assert seen.left_s is None
    seen.step([])
    assert seen.left_s is not None


def test_rollouts_that_an_engine_loses_are_not_waited_for(clock):
    engine = Engine(clock, [5, 5])
    seen = Flow.of(engine, 2)
    request = Request(0, np.ones(1), "u", 0, 0, 2, 0)
    engine.submit([request])
    seen.ask([request])
    del engine.rows[0, 1]
    while engine.pending:
        seen.advance(engine)
    assert not seen.running and seen.advance(engine) == []


def test_lengths_are_kept_of_the_last_rollouts_only():
    seen = Flow(1)
    for _ in range(3 * flow.KNOWN):
        seen.step([Finished(0, 0, np.zeros(1, int), np.zeros(1, np.float32), Finish.STOP)])
    assert flow.KNOWN <= len(flow._lengths) <= 2 * flow.KNOWN
