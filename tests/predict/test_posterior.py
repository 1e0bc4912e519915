"""The streamed posterior over a pool against the float64 one, and what it must never need."""

import tracemalloc

import numpy as np
import pytest

from vipfast import xp
from vipfast.predict import posterior
from vipfast.predict.fit import Fit, Sites
from vipfast.predict.gp import GP

CUPY, WHY_NOT = xp.choose("cuda")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(3000, 24)) + 3.0
X = (X / np.linalg.norm(X, axis=1, keepdims=True)).astype(np.float16)


@pytest.fixture
def predictor():
    names = [str(i) for i in range(150)]
    predictor = GP(lambda texts: X[[int(text) for text in texts]], names, window=150)
    predictor.update(names, names, RNG.binomial(8, 0.3, 150), np.full(150, 8), 0)
    return predictor


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 600 * 7], ids=["large chunks", "chunks of 7"])
def test_agrees_with_float64_whatever_the_chunks(predictor, monkeypatch, chunk_bytes):
    monkeypatch.setitem(posterior.CHUNK_BYTES, False, chunk_bytes)
    monkeypatch.setattr(posterior, "BLOCK", 64)
    mean, variance = predictor.posterior(X[:600], variance=True)
    state = predictor.state_dict()
    points = (X[:600].astype(np.float64) - state["centre"]) / state["scale"]
    # A prompt of the window is asked for here as a new prompt of that text.
    exact_mean, exact_variance = predictor._fit.window.marginals(points, np.full(600, -1))
    assert mean.dtype == variance.dtype == np.float32
    assert mean == pytest.approx(exact_mean, abs=1e-4) and variance == pytest.approx(exact_variance, rel=1e-4)
    assert (variance >= np.float32(state["amplitudes"][2])).all()
    alone, none = predictor.posterior(X[:600])
    assert none is None and alone == pytest.approx(mean, abs=1e-5)


def test_variance_is_at_least_a_prompts_own_part_where_float32_cancels():
    # A text far from the centre, 64 prompts of it known exactly: of a prior variance near 1e4, e (1 + 1/64) is left.
    for x in np.linspace(9, 11, 20):
        fit = Fit(Sites(np.full((64, 1), x), np.zeros(64), np.full(64, 1e6)), np.array([100.0, 0.05, 0.05]))
        exact = fit.window.marginals(np.full((1, 1), x), np.array([-1]))[1]
        variance = posterior.stream(fit, np.zeros(1), 1.0, np.full((1, 1), x), variance=True)[1]
        assert exact == pytest.approx([0.05 * 65 / 64], rel=1e-3) and variance == pytest.approx(exact, abs=0.02)
        assert variance[0] >= np.float32(0.05)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_any_float_and_any_size(predictor, dtype):
    mean, variance = predictor.posterior(X.astype(dtype), variance=True)
    assert mean.shape == variance.shape == (3000,) and np.isfinite(mean).all() and (variance > 0).all()
    assert predictor.posterior(X[:0].astype(dtype))[0].shape == (0,)


def test_memory_is_a_chunk_and_the_answers(predictor, monkeypatch):
    monkeypatch.setitem(posterior.CHUNK_BYTES, False, 1 << 16)
    large = np.tile(X, (40, 1))
    predictor.posterior(large[:200], variance=True)
    tracemalloc.start()
    predictor.posterior(large, variance=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 4 * len(large) + 2**20, "N x W in float32 would be 72 MB"


@pytest.mark.skipif(CUPY is np, reason=f"no GPU for CuPy: {WHY_NOT}")
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_on_a_gpu_it_is_the_same(predictor, dtype):
    there = predictor.posterior(CUPY.asarray(X.astype(dtype)), variance=True)
    for on_gpu, on_cpu in zip(there, predictor.posterior(X.astype(dtype), variance=True), strict=True):
        assert isinstance(on_gpu, CUPY.ndarray) and on_gpu.get() == pytest.approx(on_cpu, rel=1e-4, abs=1e-4)


def test_a_bad_embedding_is_named(predictor):
    broken = X.copy()
    broken[2345, 3] = np.nan
    with pytest.raises(ValueError, match="embedding 2345 of 3000 has entries that are NaN or infinite \\(1 do\\)"):
        predictor.posterior(broken, variance=True)
