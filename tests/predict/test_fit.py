"""Expectation propagation over a window, against the dense textbook formulas and brute-force integration."""

import numpy as np
import pytest

from vipfast.predict.covariance import CONSTANT, LOCAL_SQUARED, covariance, prior_variance, text_parts
from vipfast.predict.fit import AMPLITUDES, Fit, Sites
from vipfast.predict.logit import condition

RNG = np.random.default_rng(0)
X = RNG.normal(size=(80, 6)) / np.sqrt(6)
A = np.array(AMPLITUDES)


def dense(X, amplitudes):
    """The prior covariance written out, entry by entry."""
    a, b, e = amplitudes
    squares = ((X[:, None] - X) ** 2).sum(-1)
    return CONSTANT + a * (X @ X.T) + b * np.exp(-squares / (2 * LOCAL_SQUARED)) + e * np.eye(len(X))


def counts(num, seed=0, n=8):
    rng = np.random.default_rng(seed)
    return rng.binomial(n, 1 / (1 + np.exp(-2 * X[:num, 0] - rng.normal(size=num)))).astype(float), np.full(num, float(n))


def settled(num, sweeps=30):
    """Sites at the fixed point, amplitudes held."""
    k, n = counts(num)
    start = condition(np.zeros(num), prior_variance(X[:num], A), k, n, np.zeros(num))
    fit = Fit(Sites(X[:num], start.natural_B, start.precision_B), A)
    for _ in range(sweeps):
        fit = Fit(fit.improved(k, n, np.zeros(num)).sites, A)
    return fit, k, n


def test_covariance_has_its_parts_and_an_exact_diagonal():
    dot, local = text_parts(X, X)
    assert (np.diag(local) == 1).all() and local.max() <= 1 + 1e-12
    K = covariance(dot, local, A)
    np.fill_diagonal(K, prior_variance(X, A))
    assert K == pytest.approx(dense(X, A), abs=1e-12)
    assert np.linalg.eigvalsh(K).min() > 0.9 * A[2], "what is a prompt's own keeps the matrix well away from singular"


def test_marginals_are_those_of_the_sites_gaussian_without_a_prompts_own_row():
    sites = Sites(X[:40], RNG.normal(size=40), RNG.uniform(0.1, 2, 40))
    fit = Fit(sites, A)
    mean, variance = fit.window.marginals(X[30:50], np.where(np.arange(30, 50) < 40, np.arange(30, 50), -1))
    K = dense(X, A)
    for i, q in enumerate(range(30, 50)):
        others = [j for j in range(40) if j != q]
        noisy = K[np.ix_(others, others)] + np.diag(1 / sites.precision[others])
        left = K[q, others] @ np.linalg.inv(noisy)
        assert mean[i] == pytest.approx(left @ (sites.natural / sites.precision)[others], abs=1e-8)
        assert variance[i] == pytest.approx(K[q, q] - left @ K[others, q], rel=1e-8)


def test_the_fixed_point_matches_every_rows_exact_moments():
    fit, k, n = settled(60)
    row = np.arange(60)
    mean, variance = fit.window.marginals(fit.sites.X, row)
    exact = condition(mean, variance, k, n, np.zeros(60))
    assert fit.sites.precision == pytest.approx(exact.precision_B, rel=1e-4)
    assert fit.sites.natural == pytest.approx(exact.natural_B, abs=1e-4)


def test_two_rows_agree_with_brute_force_integration():
    # Two prompts of equal text, 0 of 8 and 7 of 8: the posterior mean of the first by a fine two-dimensional sum.
    rows, k, n = np.repeat(X[:1], 2, 0), np.array([0.0, 7.0]), np.array([8.0, 8.0])
    start = condition(np.zeros(2), prior_variance(rows, A), k, n, np.zeros(2))
    fit = Fit(Sites(rows, start.natural_B, start.precision_B), A)
    for _ in range(40):
        fit = Fit(fit.improved(k, n, np.zeros(2)).sites, A)
    K = dense(rows, A)
    K[0, 1] = K[1, 0] = K[0, 0] - A[2]
    g = np.linspace(-25, 25, 501)
    G = np.stack(np.meshgrid(g, g, indexing="ij"), -1)
    log = -0.5 * np.einsum("abi,ij,abj->ab", G, np.linalg.inv(K), G) + G @ k - np.logaddexp(0, G) @ n
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    p = (weight.sum(1) / (1 + np.exp(-g))).sum()
    mean, variance = fit.window.marginals(rows, np.arange(2))
    posterior = condition(mean, variance, k, n, np.zeros(2))
    assert (posterior.weight_BQ / (1 + np.exp(-posterior.logit_BQ))).sum(1)[0] == pytest.approx(p, abs=0.01)


def test_neighbours_that_fail_add_up():
    # The more prompts of one text fail, the lower an unseen one of that text is put; a half-count logit stops near -2.8.
    def logit(num):
        rows, k, n = np.repeat(X[:1], num, 0), np.zeros(num), np.full(num, 8.0)
        start = condition(np.zeros(num), prior_variance(rows, A), k, n, np.zeros(num))
        fit = Fit(Sites(rows, start.natural_B, start.precision_B), A)
        for _ in range(20):
            fit = Fit(fit.improved(k, n, np.zeros(num)).sites, A)
        return fit.window.marginals(X[:1], np.array([-1]))[0][0]

    assert logit(1) > logit(8) > logit(64) and logit(64) < -4.5


def test_without_evidence_amplitudes_go_back_to_their_prior_medians():
    # Nothing observed: log prior -(log a - log A)^2 / (2 s^2) alone, a parabola, so one step of scoring ends at its top.
    blank, away = np.zeros(20), np.array([0.4, -0.3, 0.45])
    fit = Fit(Sites(X[:20], blank, np.full(20, 1e-8)), A * np.exp(away))
    assert fit.improved(blank, blank, blank).amplitudes == pytest.approx(A, rel=1e-5)


def test_amplitudes_wait_for_enough_rows():
    def after(num):
        k, n = counts(num)
        start = condition(np.zeros(num), prior_variance(X[:num], A), k, n, np.zeros(num))
        return Fit(Sites(X[:num], start.natural_B, start.precision_B), A).improved(k, n, np.zeros(num)).amplitudes

    assert (after(15) == A).all() and (np.abs(np.log(after(16) / A)) > 1e-3).all()


@pytest.mark.parametrize("truth", [(9.0, 0.1, 0.1), (0.1, 0.1, 6.0)], ids=["text explains", "text says nothing"])
def test_amplitudes_follow_the_evidence(truth):
    rng = np.random.default_rng(1)
    points = rng.normal(size=(300, 4)) / 2
    logit = np.linalg.cholesky(dense(points, np.array(truth))) @ rng.normal(size=300)
    k, n = rng.binomial(16, 1 / (1 + np.exp(-logit))).astype(float), np.full(300, 16.0)
    start = condition(np.zeros(300), prior_variance(points, A), k, n, np.zeros(300))
    fit = Fit(Sites(points, start.natural_B, start.precision_B), A)
    for _ in range(30):
        fit = fit.improved(k, n, np.zeros(300))
    linear, _, own = fit.amplitudes
    assert (linear > 4 and own < 0.6) if truth[0] > 1 else (linear < 1 and own > 3)
