"""Planning on a GPU, shown on a CPU: arrays that, like CuPy's, refuse to mix with NumPy's and count what leaves the device."""

import contextlib
import sys

import numpy as np
import pytest

from vipfast import xp
from vipfast.allocate import solver
from vipfast.allocate.vip import Vip
from vipfast.predict import window as window_module
from vipfast.predict.fit import Fit, Sites
from vipfast.predict.gp import GP
from vipfast.types import Prompt, PromptBatch

RNG = np.random.default_rng(0)
TEXTS = [f"text {i}" for i in range(48)]
POINTS = dict(zip(TEXTS, RNG.normal(size=(48, 6))))


class Away(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that is elsewhere: only ``get`` brings it here."""

    __array_priority__ = 100
    downloads = 0

    def __init__(self, here):
        self.here = here

    shape = property(lambda self: self.here.shape)
    dtype = property(lambda self: self.here.dtype)
    size = property(lambda self: self.here.size)
    T = property(lambda self: Away(self.here.T))

    def get(self):
        Away.downloads += 1
        return np.array(self.here)

    def __len__(self):
        return len(self.here)

    def __iter__(self):
        return iter([Away(row) for row in self.here])

    def _refuse(self, *_):
        raise AssertionError("the device was waited for")

    __array__ = __bool__ = __float__ = __int__ = __index__ = _refuse

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **kwargs):
        assert method == "__call__"
        result = ufunc(*map(within, inputs), **({"out": tuple(map(within, out))} if out else {}), **kwargs)
        return out[0] if out else Away(result)

    def __getitem__(self, at):
        return Away(self.here[within(at)])

    def __setitem__(self, at, values):
        self.here[within(at)] = within(values)

    def __getattr__(self, name):
        """Methods: sum, max, astype."""
        method = getattr(self.here, name)
        return lambda *args, **kwargs: Away(method(*map(within, args), **kwargs))


def within(value):
    """What an ``Away`` holds; NumPy arrays are refused as CuPy refuses them, scalars and slices pass."""
    if isinstance(value, tuple):
        return tuple(map(within, value))
    assert not isinstance(value, np.ndarray), "NumPy and CuPy arrays do not mix"
    return value.here if isinstance(value, Away) else value


class Double:
    """The part of CuPy's namespace that planning uses."""

    ndarray, float64 = Away, np.float64

    def asarray(self, value, dtype=None):
        return value if isinstance(value, Away) else Away(np.array(value, dtype))

    array = asarray

    def stack(self, arrays):
        return Away(np.stack([array.here for array in arrays]))

    def __getattr__(self, name):
        function = getattr(np, name)

        def call(*args, **kwargs):
            given = {key: within(value) for key, value in kwargs.items()}
            return Away(function(*map(within, args), **given))

        return call


@pytest.fixture
def cupy(monkeypatch):
    double = Double()
    monkeypatch.setitem(sys.modules, "cupy", double)
    monkeypatch.setattr(xp, "scope", lambda module: contextlib.nullcontext())
    monkeypatch.setattr("vipfast.predict.gp.scope", lambda module: contextlib.nullcontext())
    here = xp.solve_triangular
    triangular = lambda L, right: Away(here(L.here, right.here)) if isinstance(L, Away) else here(L, right)  # noqa: E731
    monkeypatch.setattr(window_module, "solve_triangular", triangular)
    monkeypatch.setattr(Away, "downloads", 0)
    return double


def embed(texts):
    return np.array([POINTS[text] for text in texts])


def trained(arrays, steps=3):
    predictor, rng = GP(embed, TEXTS, window=24, arrays=arrays), np.random.default_rng(1)
    for step in range(1, steps + 1):
        names = [TEXTS[i] for i in rng.permutation(48)[:16]]
        predictor.predict(names, names)
        predictor.update(names, names, rng.binomial(8, 0.3, 16), np.full(16, 8), step)
    return predictor


@pytest.mark.parametrize("steps", [0, 3])
def test_a_gpu_predicts_what_the_cpu_does_and_nothing_leaves_it(cupy, steps):
    """Prompts inside and outside the window, in an order that is not that of their uids."""
    names = [TEXTS[i] for i in np.random.default_rng(2).permutation(48)]
    here, away = trained(np, steps).predict(names, names), trained(cupy, steps).predict(names, names)
    assert Away.downloads == 0
    for ours, theirs in zip(away, here):
        assert isinstance(ours, Away) and ours.here == pytest.approx(theirs, rel=1e-6)


def test_a_prompt_known_to_the_last_digit_has_a_cavity_still():
    # Prior variance 4 + 6 + 6 = 16 and t = 4^30: 1 + 16 t is 16 t in float64, so k** - v.v is exactly 0 where 1/t is due.
    fit = Fit(Sites(np.zeros((1, 1)), np.zeros(1), np.array([4.0**30])), np.array([1.0, 6.0, 6.0]))
    mean, variance = fit.window.marginals(np.zeros((1, 1)), np.array([0]))
    assert mean.tolist() == [0.0] and variance == pytest.approx([16.0]), "nobody else is there: the prior"


def test_learning_does_not_depend_on_where_plans_are_made(cupy):
    here, away = trained(np).state_dict(), trained(cupy).state_dict()
    assert all(np.array_equal(here[name], away[name]) for name in ("X", "natural", "precision", "amplitudes", "history"))


def test_a_step_has_one_download_and_the_cpus_integers(cupy, monkeypatch):
    """With NumPy's solver behind the GPU's: tests/allocate/test_bisection.py shows that the kernel gives its integers."""
    here = solver.solve
    there = lambda utility, *rest: Away(here(utility.here, *rest)) if isinstance(utility, Away) else here(utility, *rest)  # noqa: E731
    monkeypatch.setattr(solver, "solve", there)
    batch = PromptBatch([Prompt(text, text, np.zeros(1, np.int64)) for text in TEXTS[:16]], 4, 0)
    counts = {}
    for arrays, downloads in ((np, 0), (cupy, 1)):
        vip, before = Vip(trained(arrays), "rloo", 2, 32, arrays=arrays), Away.downloads
        counts[downloads] = next(vip.rounds(batch, 128))
        assert Away.downloads - before == downloads
    assert np.array_equal(counts[0], counts[1]) and counts[0].sum() == 128
