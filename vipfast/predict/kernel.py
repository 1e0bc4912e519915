"""The Gaussian processes' linear algebra: distances without cancellation, RBF, and a factor that always says when it failed."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.linalg

from vipfast.predict.embed import text_hash
from vipfast.xp import cholesky, namespace_of, solve_triangular

SCALE_SAMPLE = 256
"""Prompts whose pairwise distances set the length scale; drawn by text hash, so the order of a dataset does not matter."""

NUM_JITTERS = 10


def squared_distances(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """float64 [len(X), len(Y)], >= 0, exactly 0 on the diagonal when Y is X."""
    same = Y is X
    # |x|^2 + |y|^2 - 2 x.y cancels badly far from the origin, so move the origin among the points.
    centre = X.mean(0, dtype=np.float64)
    X = X - centre
    Y = X if same else Y - centre
    squares = X @ Y.T
    squares *= -2.0
    squares += (X * X).sum(1)[:, None]
    squares += (Y * Y).sum(1)
    if same:
        np.fill_diagonal(squares, 0.0)
    return np.maximum(squares, 0.0, out=squares)


def rbf(X: np.ndarray, Y: np.ndarray, scale: float) -> np.ndarray:
    """float64 [len(X), len(Y)], exp(-|x - y|^2 / (2 scale^2))."""
    exponent = squared_distances(X, Y)
    exponent *= -0.5 / scale**2
    return np.exp(exponent, out=exponent)


def scale_sample(texts: Sequence[str]) -> list[str]:
    """Up to SCALE_SAMPLE distinct texts, the same ones whatever the order."""
    return sorted(set(texts), key=text_hash)[:SCALE_SAMPLE]


def length_scale(embed: Callable[[Sequence[str]], np.ndarray], texts: Sequence[str]) -> float:
    """Median heuristic: the median distance between a sample of distinct texts; 1 where there are not two different vectors."""
    sample = scale_sample(texts)
    if len(sample) < 2:
        return 1.0
    X = embed(sample).astype(np.float64)
    distances = np.sqrt(squared_distances(X, X)[np.triu_indices(len(X), 1)])
    distances = distances[distances > 0]
    return float(np.median(distances)) if len(distances) else 1.0


class Factor:
    """A = L L^T of a symmetric matrix [W, W], after adding the smallest of ten growing jitters that makes it positive definite.

    Raises:
        numpy.linalg.LinAlgError: no jitter helps, or the matrix is not finite.
    """

    def __init__(self, A: Any):
        xp = namespace_of(A)
        self.jitter = 0.0
        for level in range(NUM_JITTERS):
            if level == 1:  # only now, since asking a GPU makes it wait
                if not bool(xp.isfinite(A).all()):
                    raise np.linalg.LinAlgError(f"covariance of {len(A)} prompts has entries that are not finite")
                mean = float(xp.trace(A)) / len(A)
            if level:
                self.jitter = mean * 10.0 ** (level - 11)
            self.lower = cholesky(A + self.jitter * xp.eye(len(A)) if level else A)
            if self.lower is not None:
                return
        raise np.linalg.LinAlgError(
            f"covariance of {len(A)} prompts is not positive definite, even with jitter {self.jitter:.1g}"
        )

    def whiten(self, right: Any) -> Any:
        """L^-1 right, for right float64 [W, M]; products of two whitened sides are r^T A^-1 s."""
        return solve_triangular(self.lower, right)

    def solve(self, right: np.ndarray) -> np.ndarray:
        """A^-1 right for right float64 [W] or [W, M], on the CPU."""
        return scipy.linalg.cho_solve((self.lower, True), right, check_finite=False)

    def inverse(self) -> np.ndarray:
        """A^-1, on the CPU."""
        inverse, info = scipy.linalg.lapack.dpotri(self.lower, lower=1)
        assert info == 0, "the diagonal of a factor has no zero"
        inverse += np.tril(inverse, -1).T  # LAPACK fills the lower triangle; above it are the factor's zeros
        return inverse
