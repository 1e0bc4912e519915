"""benchmarks/predictors.py: what it replays is what was recorded, and its intervals against answers worked by hand."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from vipfast import cli
from vipfast.predict.base import Prediction

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
MODULES = ("predictors", "predictor_pools", "predictor_baselines", "common")


@pytest.fixture(scope="module")
def bench():
    """The benchmark as a module; its neighbours are found as they are when the file runs as a script."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("predictors")
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in MODULES:
            sys.modules.pop(name, None)


def record(bench, successes, trials, step=None):
    R = len(successes)
    uids = [f"u{i}" for i in range(R)]
    steps = np.zeros(R, int) if step is None else np.array(step)
    return bench.Recorded("record", steps, uids, uids, np.array(successes), np.array(trials))


def test_outcomes_are_the_recorded_ones_each_once(bench):
    # 32 recorded: all of them, in some order. 33 and 32 successes: at most the one failure is left out.
    orders = set()
    for seed in range(60):
        (step,) = record(bench, [0, 5, 31, 32, 32, 1], [32, 32, 32, 32, 33, 64]).steps(seed)
        found = step.outcomes.sum(1).tolist()
        assert step.outcomes.shape == (6, 32)
        assert found[:4] == [0, 5, 31, 32] and found[4] in (31, 32) and found[5] in (0, 1)
        orders.add(tuple(np.flatnonzero(step.outcomes[1])))
    assert len(orders) > 50, "another order in every replay"


def test_a_long_record_is_drawn_from_evenly(bench):
    # 16 of 64: 32 of them hold 8 on average, and vary as drawing without replacement does, 32 (1/4) (3/4) (64 - 32) / 63.
    drawn = [next(record(bench, [16], [64]).steps(seed)).outcomes for seed in range(400)]
    sums = np.array([outcomes.sum() for outcomes in drawn])
    assert sums.mean() == pytest.approx(8, abs=0.35) and sums.var() == pytest.approx(6 * 32 / 63, rel=0.25)
    assert np.mean([outcomes[0, 0] for outcomes in drawn]) == pytest.approx(0.25, abs=0.09)


def test_signal_is_the_unbiased_estimate_and_steps_are_the_records_own(bench):
    first, second = record(bench, [8, 0, 32], [32, 32, 64], step=[3, 3, 7]).steps(0)
    assert first.rows.tolist() == [0, 1] and second.rows.tolist() == [2]
    assert first.signal == pytest.approx([8 * 24 / (32 * 31), 0.0]) and second.signal == pytest.approx([32 * 32 / (64 * 63)])
    assert [part.tolist() for part in second.judged] == [[32], [64]]


class Listens:
    """Asks for as much as it can get of the first prompt, and keeps what it is told."""

    def __init__(self, embed, uids, texts):
        self.told = []

    def predict(self, uids, texts):
        return Prediction(np.full(len(uids), 0.5), np.zeros(len(uids)), np.array([1.0, *[0.0] * (len(uids) - 1)]))

    def update(self, uids, texts, successes, trials, step):
        self.told.append((successes.tolist(), trials.tolist()))


def test_a_replay_never_tells_of_more_than_was_recorded(bench, monkeypatch):
    monkeypatch.setattr(bench.Recorded, "embeddings", lambda self, seed: (self.uids, self.texts, np.zeros((8, 1))))
    pool, kept = record(bench, [20, 0, *[32] * 6], [32] * 8), []
    play = bench.replay(pool, lambda *known: kept.append(Listens(*known)) or kept[-1], seed=0)
    ((successes, trials),) = kept[0].told
    assert trials[0] == 32 and sum(trials) == 64 and successes[0] == 20, "all 32 of it, so all its successes"
    assert successes[1:] == [0, *trials[2:]]
    # One prompt of the eight has any variance: 1/31 against 1/7.
    assert play.var_ratio == pytest.approx(7 / 31) and play.ceiling == pytest.approx(1 / 8)


def test_a_record_with_too_few_rollouts_of_a_prompt_is_refused(bench, tmp_path):
    path = tmp_path / "short.csv"
    path.write_text("step,uid,text,successes,trials\n1,a,a,3,40\n1,b,b,3,31\n")
    with pytest.raises(SystemExit, match="a prompt has 31 scored rollouts, a replay needs 32 of each"):
        bench.read(path)


def test_a_refusal_names_a_command_that_keeps_every_rollout(bench, tmp_path):
    with pytest.raises(SystemExit) as refusal:
        bench.read(tmp_path)
    command = str(refusal.value).partition("scripts/train.py ")[2].split()
    config = cli.parse([*command, "--output-dir", str(tmp_path / "run")]).config
    assert (config.allocator, config.rollouts_per_prompt, config.sample_rollouts) == ("uniform", 64, "all")


def plays(bench, *pairs):
    made = [bench.Play() for _ in pairs]
    for play, (planned, uniform) in zip(made, pairs):
        play.planned, play.uniform = list(planned), list(uniform)
    return made


def test_interval_over_seeds_by_hand(bench):
    # .8, .9 and 1: mean .9, standard deviation .1, and Student's t of 2 degrees at 97.5 % is 4.3027.
    found = bench.over_seeds(plays(bench, ([1, 3], [2, 3]), ([9], [10]), ([5], [5])))
    assert found == pytest.approx((0.9, 0.9 - 4.3027 * 0.1 / 3**0.5, 0.9 + 4.3027 * 0.1 / 3**0.5), abs=1e-4)
    assert np.isnan(bench.over_seeds(plays(bench, ([9], [10])))[1:]).all(), "one seed has no interval"


def test_interval_over_steps_by_hand(bench):
    # Replays are averaged first: 1 and 3 against 2 and 2. Two steps drawn of the two: 2/4, 4/4 (half the time) or 6/4.
    assert bench.over_steps(plays(bench, ([0, 2], [2, 2]), ([2, 4], [2, 2]))) == (1.0, 0.5, 1.5)
    # Steps of different size but one ratio leave nothing open, since both sums are over the same steps.
    assert bench.over_steps(plays(bench, ([1, 4, 16], [2, 8, 32]))) == (0.5, 0.5, 0.5)
    # 64 steps of 0 or 2 against 1: a standard error of 1/8.
    ratio, low, high = bench.over_steps(plays(bench, ([0, 2] * 32, [1] * 64)))
    assert ratio == 1 and (low, high) == pytest.approx((1 - 1.96 / 8, 1 + 1.96 / 8), abs=0.02)
