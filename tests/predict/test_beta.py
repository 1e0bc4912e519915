"""Predictors from counts alone: a prompt's own history, and pseudo-counts lent by like texts."""

import numpy as np
import pytest

from vipfast.predict import PREDICTORS, make_predictor
from vipfast.predict.beta import Beta
from vipfast.predict.kernel_beta import KernelBeta

X = np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32)
UIDS = [f"{i:03d}" for i in range(400)]


def embed(texts):
    return X[[int(text) for text in texts]]


def kernel_beta(**kwargs):
    return KernelBeta(embed, UIDS, **kwargs)


def test_beta_by_hand():
    predictor = Beta(drift=0.0)
    predictor.update(["a", "b"], ["", ""], np.array([3, 0]), np.array([8, 8]), 0)
    p, variance, signal = predictor.predict(["a", "b", "new"], [""] * 3)
    # Beta(3.5, 5.5), Beta(.5, 8.5), Beta(.5, .5): mean a/s, E p(1-p) = ab/(s(s+1)).
    assert p == pytest.approx([3.5 / 9, 0.5 / 9, 0.5])
    assert signal == pytest.approx([3.5 * 5.5 / 90, 0.5 * 8.5 / 90, 0.125])
    assert variance == pytest.approx(p * (1 - p) - signal)


def test_beta_forgets():
    predictor = Beta(drift=0.1)
    predictor.update(["a"], [""], np.array([8]), np.array([8]), 0)
    soon = predictor.predict(["a"], [""])
    predictor.update(["b"], [""], np.array([8]), np.array([8]), 500)
    late = predictor.predict(["a"], [""])
    assert soon.mean[0] > late.mean[0] > 0.5 and late.variance[0] > soon.variance[0]


def families(num):
    """Prompts of 20 texts each; the first half of the families is always solved, the rest never."""
    X = np.random.default_rng(1).normal(size=(num, 8))
    return np.repeat(X, 20, 0).astype(np.float32), np.repeat(np.arange(num) < num // 2, 20)


def test_kernel_beta_lends_counts_where_texts_are_alike():
    X, solved = families(10)
    predictor = KernelBeta(lambda texts: X[[int(text) for text in texts]], UIDS[:200])
    rng = np.random.default_rng(0)
    order = rng.permutation(200)
    for step in range(5):
        batch = [UIDS[i] for i in order[step * 30 : step * 30 + 30]]
        predictor.update(batch, batch, 8 * solved[order[step * 30 : step * 30 + 30]], np.full(30, 8), step)
    rest = order[150:]
    names = [UIDS[i] for i in rest]
    p, _, signal = predictor.predict(names, names)
    assert (p[solved[rest]] > 0.8).all() and (p[~solved[rest]] < 0.2).all() and signal.max() < 0.1


def test_kernel_beta_leaves_a_prompts_own_counts_to_itself():
    # Two prompts one length scale apart, 8 of 8 and 0 of 8. The smallest scale and strength win: w = e^-8, s = 1/2, r = 1/2.
    predictor = KernelBeta(lambda texts: np.array([[float(text)] for text in texts]), ["0", "1"], drift=0.0)
    predictor.update(["0", "1"], ["0", "1"], np.array([8, 0]), np.array([8, 8]), 0)
    w, p = np.exp(-8), predictor.predict(["0", "1", "new"], ["0", "1", "0"]).mean
    others = 8 * 0.5 / (8 + 8 * w), (8 * 0.5 + 8 * w) / (8 + 8 * w)
    assert p[:2] == pytest.approx([(8 + 0.5 * others[0]) / 8.5, 0.5 * others[1] / 8.5])
    assert p[2] == pytest.approx((8 * 0.5 + 8) / (8 + 8 + 8 * w)), "a new prompt of that text is lent them"


def test_kernel_beta_forgets_what_its_tuning_rests_on():
    # Twins, one of them with a blank score, learn one more step: what is left of the old score is 95 %.
    one, other = kernel_beta(), kernel_beta()
    rng = np.random.default_rng(0)
    one.update(UIDS[:40], UIDS[:40], rng.binomial(8, 0.3, 40), np.full(40, 8), 0)
    old = one.state_dict()["score"]
    other.load_state_dict({**one.state_dict(), "score": 0 * old})
    k = rng.binomial(8, 0.3, 40)
    for predictor in (one, other):
        predictor.update(UIDS[40:80], UIDS[40:80], k, np.full(40, 8), 1)
    assert old.std() > 1 and one.state_dict()["score"] == pytest.approx(0.95 * old + other.state_dict()["score"])


@pytest.mark.parametrize("rates, strength", [((0.5, 0.5), 16.0), ((0.02, 0.98), 0.5)], ids=["alike", "all or nothing"])
def test_kernel_beta_is_as_sure_as_its_pool_is_alike(rates, strength):
    predictor, rng = kernel_beta(), np.random.default_rng(0)
    for step in range(10):
        batch = UIDS[step * 32 : step * 32 + 32]
        predictor.update(batch, batch, rng.binomial(8, np.tile(rates, 16)), np.full(32, 8), step)
    p, variance, _ = predictor.predict(UIDS[330:], UIDS[330:])
    assert p * (1 - p) / variance - 1 == pytest.approx(strength), "pseudo-counts of a prompt without any of its own"


def test_kernel_beta_falls_back_on_the_pool_where_texts_tell_nothing():
    predictor = kernel_beta()
    rng = np.random.default_rng(0)
    rates = rng.random(400) < 0.3  # all or nothing, whatever the text
    for step in range(10):
        batch = UIDS[step * 32 : step * 32 + 32]
        predictor.update(batch, batch, 8 * rates[step * 32 : step * 32 + 32], np.full(32, 8), step)
    p, _, signal = predictor.predict(UIDS[330:], UIDS[330:])
    assert np.abs(p - 0.3).max() < 0.2 and signal.max() < 0.12, "near the pool's rate, but known to be all or nothing"
    assert predictor.predict(UIDS[:1], UIDS[:1]).mean[0] == pytest.approx(float(rates[0]), abs=0.1), "own counts come first"


@pytest.mark.parametrize("make", [Beta, kernel_beta], ids=["beta", "kernel_beta"])
def test_order_changes_no_bit_and_a_state_comes_back_whole(make):
    one, other, resumed = make(), make(), make()
    rng = np.random.default_rng(2)
    for step in range(6):
        uids, order = list(rng.choice(UIDS, 40, replace=False)), rng.permutation(40)
        shuffled = [uids[i] for i in order]
        k, n = rng.binomial(8, 0.3, 40), np.full(40, 8)
        for a, b in zip(one.predict(uids, uids), other.predict(shuffled, shuffled), strict=True):
            assert (b == a[order]).all()
        one.update(uids, uids, k, n, step)
        other.update(shuffled, shuffled, k[order], n[order], step)
        if step == 3:
            resumed.load_state_dict(one.state_dict())
        elif step > 3:
            resumed.update(uids, uids, k, n, step)
    for predictor in (other, resumed):
        assert all(np.array_equal(value, predictor.state_dict()[key]) for key, value in one.state_dict().items())
    assert {type(value) for value in one.state_dict().values()} <= {list, np.ndarray, int, float}


@pytest.mark.parametrize("make", [Beta, kernel_beta], ids=["beta", "kernel_beta"])
def test_bad_input_unscored_steps_and_lone_prompts(make):
    predictor = make()
    predictor.update(["000"], ["000"], np.array([0]), np.array([0]), 0)
    assert predictor.predict(["000"], ["000"]).mean[0] == pytest.approx(0.5)
    predictor.update(["000"], ["000"], np.array([0]), np.array([1]), 1)
    p, variance, signal = predictor.predict(["000"], ["000"])
    assert 0 < p[0] < 0.5 and variance[0] > 0 and signal[0] > 0
    with pytest.raises(ValueError, match="prompt '000': a predictor was given nan successes of 8 rollouts"):
        predictor.update(["000"], ["000"], np.array([np.nan]), np.array([8]), 2)


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_changed_pool_is_told_by_every_predictor(name):
    old = make_predictor(name, [(f"u{i}", f"text {i}") for i in range(4)])
    grown = make_predictor(name, [(f"u{i}", f"text {i}") for i in range(6)])
    with pytest.warns(UserWarning, match="0 of the 6 prompts here have results"):
        grown.load_state_dict(old.state_dict())
