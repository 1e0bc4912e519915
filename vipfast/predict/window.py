"""What a window of observed prompts says of the step's prompts: all that planning needs, on the CPU or on a GPU.

Learning (``fit``) is float64 algebra of W x W matrices on the CPU, where small matrices cost less than a GPU's launches. What
it ends with is uploaded once, and every plan's kernel matrix, posterior and integrals then run where the arrays lie.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vipfast.predict.covariance import covariance, prior_variance, text_parts
from vipfast.xp import namespace_of, solve_triangular

LEAST_VARIANCE = 1e-9


@dataclass(frozen=True, eq=False)
class Window:
    """The posterior over W observed prompts, in the notation of ``fit``; float64, NumPy or CuPy."""

    X: Any  # [W, D], embeddings, centred and scaled
    natural: Any  # [W], nu
    precision: Any  # [W], t > 0
    weight: Any  # [W], alpha
    lower: Any  # [W, W], the lower factor of B
    amplitudes: np.ndarray  # float64 [3], always on the host

    def on(self, xp: Any) -> "Window":
        """The same in arrays of this namespace."""
        if xp is np:
            return self
        arrays = {name: xp.asarray(value) for name, value in vars(self).items() if name != "amplitudes"}
        return replace(self, **arrays)

    def marginals(self, X_BD: Any, row_B: np.ndarray) -> tuple[Any, Any]:
        """Mean and variance (> 0), float64 [B], of prompts' logits given every other prompt of the window.

        Args:
            X_BD: float64 [B, D], embeddings, centred and scaled, where the window lies.
            row_B: int64 [B] on the host, each prompt's own row in the window, -1 where it has none.
        """
        xp = namespace_of(X_BD)
        cross_BW = covariance(*text_parts(X_BD, self.X), self.amplitudes)
        prior_B = prior_variance(X_BD, self.amplitudes)
        own = np.flatnonzero(row_B >= 0)
        own, row = xp.asarray(own), xp.asarray(row_B[own])
        cross_BW[own, row] = prior_B[own]
        mean_B = cross_BW @ self.weight
        explained_WB = solve_triangular(self.lower, (cross_BW * xp.sqrt(self.precision)).T)
        # k** - v.v cancels where a prompt is known almost exactly.
        variance_B = xp.maximum(prior_B - (explained_WB**2).sum(0), LEAST_VARIANCE)
        # Others cannot know more of a prompt than all of them with itself do, nor less than nothing.
        left = xp.maximum(1 / variance_B[own] - self.precision[row], 1 / prior_B[own])
        mean_B[own] = (mean_B[own] / variance_B[own] - self.natural[row]) / left
        variance_B[own] = 1 / left
        return mean_B, variance_B
