"""A Gaussian times a binomial, against integration on a fine grid; sites within their bounds; the shared shift."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vipfast.predict.base import Prediction
from vipfast.predict.logit import LEAST_PRECISION, common_shift, condition, sigmoid

GRID = np.linspace(-60, 60, 24_001)


def by_grid(mean, variance, k, n, shift):
    """Moments of the logit, E[p] and E[p(1-p)] by brute force."""
    log = -0.5 * (GRID - mean) ** 2 / variance + k * (GRID - shift) - n * np.logaddexp(0, GRID - shift)
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    p = 1 / (1 + np.exp(-GRID))
    m = weight @ GRID
    return m, weight @ (GRID - m) ** 2, weight @ p, weight @ (p * (1 - p))


def one(mean, variance, k, n, shift=0.0):
    return condition(*(np.array([float(x)]) for x in (mean, variance, k, n, shift)))


@settings(max_examples=40, deadline=None)
@given(
    st.floats(-8, 8),
    st.floats(0.05, 40),
    st.integers(0, 64),
    st.floats(0, 1),
    st.floats(-2, 2),
)
def test_moments_are_those_of_the_product(mean, variance, n, share, shift):
    k = round(share * n)
    posterior = one(mean, variance, k, n, shift)
    m, v, p, signal = by_grid(mean, variance, k, n, shift)
    prediction = Prediction.of_nodes(sigmoid(posterior.logit_BQ), posterior.weight_BQ)
    got = float((posterior.weight_BQ * posterior.logit_BQ).sum())
    assert got == pytest.approx(m, abs=1e-3 * (1 + np.sqrt(v)))
    assert prediction.mean[0] == pytest.approx(p, abs=1e-4)
    assert prediction.signal[0] == pytest.approx(signal, rel=5e-3, abs=1e-6)
    assert prediction.signal[0] == pytest.approx(prediction.mean[0] * (1 - prediction.mean[0]) - prediction.variance[0])
    # A Gaussian with this site has the product's moments.
    t = posterior.precision_B[0]
    if LEAST_PRECISION < t < n / 4:
        assert 1 / (1 / variance + t) == pytest.approx(v, rel=2e-3)
        assert (mean / variance + posterior.natural_B[0]) * v == pytest.approx(m, abs=2e-3 * (1 + abs(m)))


def test_nothing_seen_changes_nothing():
    posterior = one(1.3, 2.0, 0, 0)
    assert posterior.precision_B[0] == pytest.approx(LEAST_PRECISION, abs=1e-12) and abs(posterior.natural_B[0]) < 1e-6
    assert (posterior.weight_BQ * posterior.logit_BQ).sum() == pytest.approx(1.3)


def test_certain_rates_are_finite_and_surer_with_more_trials():
    k, n = np.array([0.0, 0.0, 0.0, 1.0, 8.0, 64.0]), np.array([1.0, 8.0, 64.0, 1.0, 8.0, 64.0])
    posterior = condition(np.zeros(6), np.full(6, 9.0), k, n, np.zeros(6))
    p = Prediction.of_nodes(sigmoid(posterior.logit_BQ), posterior.weight_BQ).mean
    assert 0.5 > p[0] > p[1] > p[2] > 0 and p[3:] == pytest.approx(1 - p[:3])


def test_a_site_is_never_surer_than_the_binomials_steepest_curvature():
    n = np.array([1.0, 8.0, 1e3, 1e10])
    posterior = condition(np.zeros(4), np.full(4, 4.0), n / 2, n, np.zeros(4))
    assert (posterior.precision_B <= n / 4 + LEAST_PRECISION).all() and np.isfinite(posterior.natural_B).all()
    assert posterior.precision_B[2:] == pytest.approx(n[2:] / 4, rel=0.01)


def test_evidence_from_before_a_shift_moves_with_it():
    # 12 of 64 when logits were 1 lower: the same posterior as seen from a logit that is 1 higher.
    then, now = one(0.0, 4.0, 12, 64), one(1.0, 4.0, 12, 64, shift=1.0)
    assert now.logit_BQ == pytest.approx(then.logit_BQ + 1) and now.weight_BQ == pytest.approx(then.weight_BQ)


def test_common_shift_finds_what_all_prompts_share():
    rng = np.random.default_rng(0)
    g = rng.normal(size=400)
    posterior = condition(g, np.full(400, 1e-4), np.zeros(400), np.zeros(400), np.zeros(400))
    n = np.full(400, 8.0)
    k = rng.binomial(8, sigmoid(g + 0.5)).astype(float)
    wide = common_shift(posterior.logit_BQ, posterior.weight_BQ, k, n, 100.0)
    assert wide == pytest.approx(0.5, abs=0.12)
    narrow = common_shift(posterior.logit_BQ, posterior.weight_BQ, k, n, 1e-3)
    assert 0 < narrow < wide
    unmoved = common_shift(posterior.logit_BQ, posterior.weight_BQ, 8 * sigmoid(g), n, 0.01)
    assert abs(unmoved) < 1e-3


def test_one_step_moves_all_logits_by_no_more_than_one_and_a_half():
    # 8 of 8 where almost nothing was expected: Newton's first step alone would be (8 - 8 p) / (8 p (1 - p)), some e^4 or more.
    logit, weight, eight = np.full((64, 1), -4.0), np.ones((64, 1)), np.full(64, 8.0)
    for variance in (0.01, 1e6):
        assert common_shift(logit, weight, eight, eight, variance) == pytest.approx(1.5), "five steps of .3"
        assert common_shift(-logit, weight, 0 * eight, eight, variance) == pytest.approx(-1.5)
