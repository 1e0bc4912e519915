"""Scores of a step's predictions by hand, and the one warning about a predictor that is no help."""

import warnings

import numpy as np
import pytest

from vipfast.predict.diagnostics import Watch, diagnose


def test_diagnostics_by_hand():
    metrics = diagnose(np.array([0.5, 0.2, 0.9]), np.array([1, 0, 0]), np.array([2, 4, 0]))
    # The third prompt has no trials. Brier: (.25 + .04) / 2; log loss: (ln 2 - ln .8) / 2; two points: corr 1.
    assert metrics["predict/brier"] == pytest.approx(0.145)
    assert metrics["predict/log_loss"] == pytest.approx((np.log(2) - np.log(0.8)) / 2)
    assert metrics["predict/corr"] == pytest.approx(1.0)
    assert set(diagnose(np.array([0.5]), np.array([0]), np.array([0])).values()) == {None}
    flat = diagnose(np.full(4, 0.5), np.array([0, 1, 2, 2]), np.full(4, 2))
    assert flat["predict/corr"] is None and flat["predict/slope"] is None and flat["predict/brier"] == pytest.approx(0.25)


def test_calibration_slope():
    logit = np.linspace(-3, 3, 41)
    rate = 1 / (1 + np.exp(-(0.3 + 0.5 * logit)))
    n = np.full(41, 10**6)
    assert diagnose(1 / (1 + np.exp(-logit)), np.round(rate * n), n)["predict/slope"] == pytest.approx(0.5, abs=1e-4)
    separated = diagnose(1 / (1 + np.exp(-logit)), np.where(logit > 0, n, 0), n)
    assert separated["predict/slope"] is None and separated["predict/corr"] > 0.8


def watched(guess, steps, watch=None, first=0):
    """Feed a watch ``steps`` steps of 64 prompts, p ~ Beta(.4, .6), predicted as guess(p, rng); its warnings, by step."""
    watch = watch or Watch("gp")
    told = []
    for step in range(first, first + steps):
        rng = np.random.default_rng(step)
        p = rng.beta(0.4, 0.6, 64)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch.see(guess(p, rng), rng.binomial(8, p), np.full(64, 8))
        told += [(step, str(warning.message)) for warning in caught]
    return told


def test_a_predictor_of_noise_is_told_of_once():
    told = watched(lambda p, rng: rng.beta(0.4, 0.6, 64), 80)
    # The first step only sets the pool's rate; the next PATIENCE are without an advantage.
    assert [step for step, _ in told] == [Watch.PATIENCE]
    assert told[0][1].startswith(
        "--predictor gp: for 20 steps in a row its predictions have been no better than the pool's mean"
    )


def test_a_predictor_stuck_at_a_poor_guess_is_told_of():
    assert len(watched(lambda p, rng: np.full(64, 0.9), 40)) == 1


def test_a_predictor_that_knows_something_is_left_alone():
    assert watched(lambda p, rng: np.clip(0.5 * p + 0.2, 0, 1), 120) == []


def test_steps_in_a_row_means_in_a_row():
    watch = Watch("gp")
    assert watched(lambda p, rng: np.full(64, 0.9), 8, watch) == [] and watch.steps == 7
    assert watched(lambda p, rng: p, 40, watch, first=8) == [] and watch.steps == 0


def test_nothing_scored_counts_for_nothing():
    watch = Watch("gp")
    for _ in range(50):
        watch.see(np.full(4, 0.9), np.zeros(4), np.zeros(4))
    assert watch.rate is None and watch.steps == 0


def test_a_resumed_watch_goes_on_counting_and_does_not_repeat_itself():
    def poor(p, rng):
        return np.full(64, 0.9)

    watch, resumed = Watch("gp"), Watch("gp")
    watched(poor, 10, watch)
    resumed.load_state_dict(watch.state_dict())
    assert watched(poor, 30, resumed, first=10) == watched(poor, 30, watch, first=10) != []
    again = Watch("gp")
    again.load_state_dict(watch.state_dict())
    assert watched(poor, 60, again, first=40) == []
