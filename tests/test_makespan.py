"""benchmarks/makespan.py: its engine by hand, and early and streaming rounds against rounds that wait on one small setting."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from vipfast.engine.base import Request

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    """The benchmark as a module; its neighbour common.py is found as it is when the file runs as a script."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("makespan", BENCHMARKS / "makespan.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))
        sys.modules.pop("common", None)


def request(slot, first, count):
    return Request(slot, np.zeros(1, np.int64), f"p{slot}", 1, first, count, 1)


def run(engine, *submissions):
    rows = []
    for requests in submissions:
        engine.submit(requests)
        while engine.pending:
            rows += engine.step()
    return {(row.slot, row.index): len(row.tokens) for row in rows}


def test_the_clock_counts_tokens_and_slots_bound_what_is_decoded_at_once(bench):
    requests = [request(0, 0, 4), request(1, 0, 3)]
    alone, two, free = (bench.SimulatedEngine(0, 2, slots, 0.8) for slots in (1, 2, None))
    lengths = run(alone, requests)
    assert run(two, requests) == run(free, requests) == lengths and len(lengths) == 7
    assert alone.clock == sum(lengths.values()) and free.clock == max(lengths.values())
    ends = [0, 0]  # each of two places takes the next rollout in order
    for name in sorted(lengths):
        ends[np.argmin(ends)] += lengths[name]
    assert two.clock == max(ends)


def test_rollouts_do_not_depend_on_rounds_and_lengths_are_lognormal(bench):
    split, whole = bench.SimulatedEngine(3, 1, None, 0.8), bench.SimulatedEngine(3, 1, None, 0.8)
    assert run(split, [request(0, 0, 2)], [request(0, 2, 2998)]) == run(whole, [request(0, 0, 3000)])
    logs = np.log([len(row.tokens) for row in rows_of(bench.SimulatedEngine(3, 1, None, 0.8), 3000)])
    assert logs.mean() == pytest.approx(np.log(256), abs=0.06) and logs.std() == pytest.approx(0.8, abs=0.04)
    engine = bench.SimulatedEngine(3, 1, None, 0.8)
    rewards = engine.grade([None] * 3000, rows_of(engine, 3000)).reward
    assert rewards.mean() == pytest.approx(engine.p_B[0], abs=0.04) and set(rewards) <= {0.0, 1.0}


def rows_of(engine, count):
    engine.submit([request(0, 0, count)])
    rows = []
    while engine.pending:
        rows += engine.step()
    return rows


def test_rounds_that_do_not_wait_end_sooner(bench):
    with pytest.warns(UserWarning, match="only 5 of --prompts-per-step 40"):
        found = bench.makespans(4, (40, 64, 0.8, 0.0))
    assert found["barrier"]["makespan"] > found["early"]["makespan"] > found["streaming"]["makespan"] > 0.5
    assert found["early"]["signal"] == found["early"]["tokens"] == 1.0 and 0.9 < found["streaming"]["signal"] < 1.1
    low, high = found["early"]["interval"]
    assert low < found["early"]["makespan"] < high
