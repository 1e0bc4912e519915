"""How alike two prompts' logits are: a constant, a linear and a local part of their texts, and a part that is a prompt's own.

k(x, y) = c + a x.y + b exp(-|x - y|^2 / (2 h^2)) + e [same prompt], on embeddings moved to the pool's centre and scaled so that
the median squared distance is 2. The amplitudes a, b and e are learnt (``fit.Fit.improved``); c and h are fixed. Texts of one
pool crowd in a corner of the sphere, and there the linear part learns from fewer prompts than an RBF wide enough to match it.

The code is NumPy's and CuPy's alike, in the dtype of its arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vipfast.predict.kernel import length_scale, scale_sample
from vipfast.predict.rows import check_points
from vipfast.xp import namespace_of

CONSTANT = 4.0
"""c, prior variance of the pool's mean logit."""
LOCAL_SQUARED = 0.5
"""h^2: a quarter of the median squared distance."""
LINEAR, LOCAL, OWN = range(3)
"""Positions of a, b and e among the amplitudes."""


def text_parts(X: Any, Y: Any) -> tuple[Any, Any]:
    """x.y and the local part, both [len(X), len(Y)]; where Y is X, the diagonal of the latter is exactly 1."""
    xp = namespace_of(X)
    dot = X @ Y.T
    local = dot * (1 / LOCAL_SQUARED)
    local -= (X * X).sum(1)[:, None] * (0.5 / LOCAL_SQUARED)
    local -= (Y * Y).sum(1) * (0.5 / LOCAL_SQUARED)
    xp.exp(local, out=local)
    if Y is X:
        xp.fill_diagonal(local, 1.0)
    return dot, local


def covariance(dot: Any, local: Any, amplitudes: np.ndarray) -> Any:
    """[len(X), len(Y)], the covariance of different prompts from their text parts, which are left as they are."""
    out = local * float(amplitudes[LOCAL])
    out += dot * float(amplitudes[LINEAR])
    out += CONSTANT
    return out


def prior_variance(X: Any, amplitudes: np.ndarray) -> Any:
    """[len(X)], variance of each prompt's logit before anything is observed."""
    a, b, e = (float(amplitude) for amplitude in amplitudes)
    return (X * X).sum(1) * a + (CONSTANT + b + e)


def centre_and_scale(embed: Callable[[Sequence[str]], np.ndarray], texts: Sequence[str]) -> tuple[np.ndarray, float]:
    """The mean embedding float64 [D] of a sample of distinct texts, and the length that makes their median squared distance 2.

    Raises:
        ValueError: an embedding is not finite; the message names the text.
    """
    sample = scale_sample(texts)
    X = np.asarray(embed(sample), np.float64)
    check_points(X, sample)
    return X.mean(0), length_scale(embed, sample) / 2**0.5
