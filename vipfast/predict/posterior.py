"""The window's posterior at every prompt of a pool, streamed: no array is larger than a chunk of the pool by the window.

Per embedding x and row z, one product of [x, -|x|^2 / 2h^2, 1] and [z / h^2, 1, -|z|^2 / 2h^2] is the local part's exponent e.
No cancellation hurts, since x and z are centred; and a x.z = a h^2 (e + |x|^2 / 2h^2 + |z|^2 / 2h^2), so the linear part has no
need of a product of its own. Weights and factor come from the float64 fit, the cross block is float32. The code is NumPy's and
CuPy's.
"""

from typing import Any

import numpy as np

from vipfast.predict.covariance import CONSTANT, LOCAL_SQUARED
from vipfast.predict.fit import Fit
from vipfast.xp import namespace_of

CHUNK_BYTES = {False: 1 << 20, True: 256 << 20}
"""Of a cross block: what a core's cache holds, or what fills a GPU."""
BLOCK = 128
"""Rows of the triangular factor multiplied at once; what is above its diagonal is left out by blocks."""


def stream(fit: Fit, centre_D: np.ndarray, scale: float, X_ND: Any, variance: bool) -> tuple[Any, Any | None]:
    """Mean and, if asked for, variance of the logit of a new prompt at each embedding.

    Args:
        fit: the window's posterior.
        centre_D, scale: an embedding x enters as (x - centre) / scale.
        X_ND: floats [N, D], NumPy or CuPy.

    Returns:
        float32 [N] each, where X_ND lies; the variance (None unless asked for) is at least that of a prompt's own part.

    Raises:
        ValueError: an embedding is not finite; the message names its row.
    """
    xp, (N, D), W = namespace_of(X_ND), X_ND.shape, len(fit.sites)
    there = lambda array: xp.asarray(array, xp.float32)  # noqa: E731
    a, b, e = (float(amplitude) for amplitude in fit.amplitudes)
    Z_WD, bend = fit.sites.X, 0.5 / LOCAL_SQUARED
    right = there(np.concatenate([Z_WD / LOCAL_SQUARED, np.ones((W, 1)), -bend * (Z_WD**2).sum(1)[:, None]], 1).T)
    weight_W, along_D, centre_D = there(b * fit.weight_W), there(a * (Z_WD.T @ fit.weight_W)), there(centre_D)
    constant = CONSTANT * float(fit.weight_W.sum())
    if variance:
        # What row and column add to the covariance goes through the same product: two more columns, 1 and |x|^2 / 2h^2.
        whitener_WW = fit.factor.whiten(np.diag(fit.root_W))
        added_W2 = np.stack([a / 2 * (Z_WD**2).sum(1) + CONSTANT, np.full(W, a * LOCAL_SQUARED)], 1)
        whitener = there(np.concatenate([whitener_WW @ added_W2, whitener_WW], 1))
    mean_N, variance_N = xp.empty(N, xp.float32), xp.empty(N, xp.float32) if variance else None
    chunk = max(1, CHUNK_BYTES[xp is not np] // (4 * W))
    left, cross = xp.ones((chunk, D + 2), xp.float32), xp.ones((chunk, W + 2), xp.float32) if variance else None
    for start in range(0, N, chunk):
        part, num = slice(start, start + chunk), min(chunk, N - start)
        X = left[:num, :D]
        xp.subtract(X_ND[part], centre_D, out=X, casting="same_kind")
        X *= np.float32(1 / scale)
        bent = xp.einsum("nd,nd->n", X, X)
        bent *= np.float32(bend)
        left[:num, D] = -bent
        local = left[:num] @ right
        if variance:
            xp.multiply(local, np.float32(a * LOCAL_SQUARED), out=cross[:num, 2:])
        xp.exp(local, out=local)
        mean_N[part] = local @ weight_W + X @ along_D + np.float32(constant)
        if variance:
            local *= np.float32(b)
            cross[:num, 2:] += local
            cross[:num, 1] = bent
            variance_N[part] = _left(cross[:num], whitener, bent * np.float32(a / bend) + np.float32(CONSTANT + b + e))
            xp.maximum(variance_N[part], np.float32(e), out=variance_N[part])  # float32 cancels where much is known
    bad_N = ~xp.isfinite(mean_N)
    if bool(bad_N.any()):
        row = int(xp.argmax(bad_N))
        raise ValueError(f"embedding {row} of {N} has entries that are NaN or infinite ({int(bad_N.sum())} do)")
    return mean_N, variance_N


def _left(cross: Any, whitener: Any, prior: Any) -> Any:
    """Prior variance less what the window explains: |whitener row . cross|^2 summed over rows, in blocks below the diagonal."""
    xp = namespace_of(cross)
    for start in range(0, len(whitener), BLOCK):
        stop = start + BLOCK
        explained = cross[:, : stop + 2] @ whitener[start:stop, : stop + 2].T
        prior = prior - xp.einsum("nw,nw->n", explained, explained)
    return prior
