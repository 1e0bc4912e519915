"""Distances without cancellation, the median heuristic, and a factor that always says when it failed."""

import numpy as np
import pytest

from vipfast.predict.kernel import Factor, length_scale, rbf, squared_distances

X = np.random.default_rng(0).normal(size=(600, 16)).astype(np.float32)


def test_distances_far_from_the_origin_are_exact_enough():
    points = np.random.default_rng(0).uniform(500, 501, (513, 1)).astype(np.float32)
    squares = squared_distances(points, points)
    assert (np.diag(squares) == 0).all() and squares.min() >= 0
    assert np.abs(squares - (points.astype(float) - points.astype(float).T) ** 2).max() < 1e-9
    assert np.linalg.eigvalsh(np.exp(-squares / 2)).min() > -1e-9


def test_length_scale_is_the_median_distance_and_ignores_order_and_duplicates():
    line = np.array([[0.0], [1.0], [3.0]])
    at = lambda texts: line[[int(text) for text in texts]]  # noqa: E731
    assert length_scale(at, ["0", "1", "2"]) == length_scale(at, ["2", "0", "1", "0", "0"]) == 2.0
    assert length_scale(at, ["1", "1"]) == 1.0


@pytest.mark.parametrize("size", [1, 63, 64, 65, 200])
def test_factor_whitens_solves_and_inverts_as_lapack_does(size):
    A = rbf(X[:size], X[:size], 5.0) + np.eye(size)
    right = np.random.default_rng(0).normal(size=(size, 3))
    factor = Factor(A)
    assert factor.whiten(right) == pytest.approx(np.linalg.solve(np.linalg.cholesky(A), right), abs=1e-12)
    assert factor.solve(right) == pytest.approx(np.linalg.solve(A, right), abs=1e-11)
    inverse = factor.inverse()
    assert inverse == pytest.approx(np.linalg.inv(A), abs=1e-11) and (inverse == inverse.T).all()


def test_jitter_escalates_then_gives_up_clearly():
    near = np.array([[0.0], [0.0], [1e-7]] + [[float(i)] for i in range(100)])
    singular = rbf(near, near, 50.0)
    factor = Factor(singular)
    assert 0 < factor.jitter < 1e-3 and np.isfinite(factor.whiten(np.eye(len(near)))).all()
    with pytest.raises(np.linalg.LinAlgError, match="3 prompts is not positive definite, even with jitter"):
        Factor(-np.eye(3))
    with pytest.raises(np.linalg.LinAlgError, match="not finite"):
        Factor(np.array([[1.0, np.nan], [np.nan, 1.0]]))
