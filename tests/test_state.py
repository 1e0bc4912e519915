"""Everything a run keeps comes back exactly, without pickles; what cannot be kept is refused by its place."""

import math
import random

import numpy as np
import pytest
import torch

from vipfast.state import load_state, rng_state, save_state, set_rng_state


def assert_same(a, b):
    """Equal in value, type, dtype and shape; NaN equals NaN."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    elif isinstance(a, np.ndarray | np.generic):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    else:
        assert a == b or (math.isnan(a) and math.isnan(b))


def test_state_comes_back_exactly(tmp_path):
    state = {
        "plain": [None, True, 0, -(2**70), 0.1, -0.0, 1e-320, float("nan"), float("-inf"), "ü\n\ud800"],
        "tuple": ((1, 2), [], {}),
        "int keys": {0: {"exp_avg": torch.randn(3, 2)}, (1, "a"): None, "$tensor": 5},
        "arrays": [
            np.arange(6, dtype=np.uint64).reshape(2, 3).T + np.uint64(2**63),
            np.array(5, np.int16),
            np.array([True, False]),
            np.array([0.1, np.nan], np.float16),
            np.zeros((0, 3)),
            np.array(["a", "bcd"]),
            np.random.default_rng(0).normal(size=7)[::2],
        ],
        "scalars": [np.float64(0.1), np.uint64(2**64 - 1), np.bool_(True), np.str_("x")],
        "tensors": [
            torch.tensor(3.5),
            torch.randn(4, dtype=torch.float64),
            torch.randn(2).bfloat16(),
            torch.ones(2, dtype=bool),
        ],
    }
    save_state(tmp_path, state)
    assert_same(load_state(tmp_path), state)


def test_a_saved_view_does_not_carry_its_whole_storage(tmp_path):
    save_state(tmp_path, {"row": torch.zeros(1000, 1000)[0]})
    assert (tmp_path / "state.pt").stat().st_size < 10_000


@pytest.mark.parametrize("bad", [{1, 2}, object(), np.array([{}]), np.longdouble(1), b"x"], ids=lambda bad: type(bad).__name__)
def test_what_cannot_be_kept_is_refused_by_place(tmp_path, bad):
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\]"):
        save_state(tmp_path, {"a": [0, bad]})


def test_state_needs_no_pickle(tmp_path):
    save_state(tmp_path, {"rng": rng_state(), "k": np.arange(3)})
    tensors = torch.load(tmp_path / "state.pt", weights_only=True)
    assert tensors and all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())


def test_global_generators_continue(tmp_path):
    def draw():
        return random.random(), np.random.normal(), torch.rand(()).item()

    draw()
    np.random.normal()  # leaves a cached second normal behind
    save_state(tmp_path, rng_state())
    expected = draw()
    set_rng_state(load_state(tmp_path))
    assert draw() == expected
