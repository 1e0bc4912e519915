"""Predictor gp: what it makes of counts, degenerate inputs, bit-exact state, and what its allocations are worth."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vipfast.allocate.objective import rloo
from vipfast.allocate.solver import solve
from vipfast.predict import fit
from vipfast.predict.base import Prediction
from vipfast.predict.gp import GP
from vipfast.predict.logit import condition, sigmoid

RNG = np.random.default_rng(0)
X = RNG.normal(size=(600, 16)).astype(np.float32)
UIDS = [f"{i:03d}" for i in range(600)]


def embed(texts):
    return X[[int(text) for text in texts]]


def gp(**kwargs):
    return GP(embed, UIDS, **{"window": 100, **kwargs})


def feed(predictor, steps, B=32, first=0, n=8):
    rng = np.random.default_rng(first)
    for step in range(first, first + steps):
        uids = [UIDS[i % 600] for i in range(step * B, (step + 1) * B)]
        predictor.update(uids, uids, rng.binomial(n, 0.3, B), np.full(B, n), step)


def test_before_any_result_every_prompt_is_a_coin_nobody_has_seen():
    p, variance, signal = gp().predict(UIDS[:8], UIDS[:8])
    assert (p == p[0]).all() and (signal == signal[0]).all(), "so a first plan is uniform"
    assert p == pytest.approx(0.5) and (variance > 0.05).all() and signal == pytest.approx(p * (1 - p) - variance)


def test_one_failure_is_not_certainty():
    predictor = gp()
    predictor.update(["000"], ["000"], np.array([0]), np.array([1]), step=0)
    p, _, signal = predictor.predict(["000"], ["000"])
    assert 0.1 < p[0] < 0.5 and signal[0] > 0.05
    for step in range(1, 20):
        predictor.update(["000"], ["000"], np.array([2]), np.array([2]), step)
    assert predictor.predict(["000"], ["000"]).mean[0] > 0.8, "and it recovers"


def test_more_trials_are_surer_at_rates_of_0_and_1():
    def after(k, n):
        predictor = gp()
        feed(predictor, 2)
        predictor.update(["599"], ["599"], np.array([k]), np.array([n]), step=2)
        return predictor.predict(["599"], ["599"]).mean[0]

    assert 0 < after(0, 64) < after(0, 1) < after(1, 1) < after(64, 64) < 1


def test_a_pool_that_is_mostly_never_solved_is_seen_as_such():
    # 0 of 8 on every prompt so far says more than 0 of 8 on one: a new prompt's rate is put below 1 %.
    predictor = gp()
    for step in range(8):
        uids = UIDS[step * 32 : step * 32 + 32]
        predictor.update(uids, uids, np.zeros(32), np.full(32, 8), step)
    p, _, signal = predictor.predict(["599"], ["599"])
    assert p[0] < 0.01 and signal[0] < 0.01


def test_own_counts_are_remembered_after_they_left_the_window():
    predictor, other = gp(window=64), gp(window=64)
    predictor.update(["000", "001"], ["000", "001"], np.array([16, 0]), np.array([16, 16]), 0)
    feed(predictor, 4, first=1)
    feed(other, 4, first=1)
    assert "000" not in predictor.state_dict()["window"]
    mean, blank = predictor.predict(["000", "001"], ["000", "001"]).mean, other.predict(["000", "001"], ["000", "001"]).mean
    assert mean[0] > 0.65 > 0.4 > blank[0] and mean[1] < 0.15 < 0.2 < blank[1]


def test_a_lone_prompts_posterior_is_exact():
    # One prompt, 3 of 8: with nothing else in the window, E[p] is an integral of one variable.
    predictor = gp(drift=0.0)
    predictor.update(["000"], ["000"], np.array([3]), np.array([8]), 0)
    p, variance, signal = predictor.predict(["000"], ["000"])
    g = np.linspace(-40, 40, 200_001)
    state = predictor.state_dict()
    a, b, e = state["amplitudes"]
    log = -0.5 * g**2 / (4 + a * (state["X"][0] ** 2).sum() + b + e) + 3 * g - 8 * np.logaddexp(0, g)
    weight = np.exp(log - log.max())
    weight /= weight.sum()
    rate = 1 / (1 + np.exp(-g))
    assert p[0] == pytest.approx(weight @ rate, abs=1e-6)
    assert signal[0] == pytest.approx(weight @ (rate * (1 - rate)), abs=1e-6)
    assert variance[0] == pytest.approx(weight @ rate**2 - (weight @ rate) ** 2, abs=1e-6)


def test_age_widens_what_is_known():
    def spread(age):
        predictor = gp(drift=0.5)
        predictor.update(["000"], ["000"], np.array([4]), np.array([8]), step=0)
        predictor.update(["001"], ["001"], np.array([4]), np.array([8]), step=age)
        return predictor.predict(["000"], ["000"]).variance[0]

    assert spread(20) > 1.2 * spread(1)


def test_all_logits_follow_a_shared_shift():
    predictor = gp(window=200)
    feed(predictor, 6)
    before, shift = predictor.predict(UIDS[:32], UIDS[:32]).mean.mean(), predictor.state_dict()["shift"]
    uids = UIDS[300:364]
    predictor.update(uids, uids, np.full(64, 7), np.full(64, 8), step=6)
    assert predictor.state_dict()["shift"] > shift + 0.1
    assert predictor.predict(UIDS[:32], UIDS[:32]).mean.mean() > before + 0.03, "old prompts' own evidence moves along"


def test_a_shift_moves_the_windows_evidence_and_what_the_new_prompts_were_expected_to_be(monkeypatch):
    monkeypatch.setattr(fit, "DAMPING", 0.0)  # no sweep after the update: sites stay as the update puts them
    predictor = gp()
    feed(predictor, 2)
    before, uids = predictor.state_dict(), UIDS[300:340]
    mean, variance = predictor._fit.window.marginals(predictor._points(uids, uids), np.full(40, -1))
    predictor.update(uids, uids, np.full(40, 7), np.full(40, 8), step=2)
    after = predictor.state_dict()
    moved = after["shift"] - before["shift"]
    assert moved > 0.1 and after["window"] == (before["window"] + uids)[-100:]
    # A site N(m, 1/t) in the logit has natural m t: at m + moved it is m t + moved t.
    t = before["precision"][4:]
    assert (after["precision"][:60] == t).all() and after["natural"][:60] == pytest.approx(before["natural"][4:] + moved * t)
    # New prompts were expected that much higher before 7 of 8 came out, which were drawn after the shift.
    new = condition(mean + moved, variance, np.full(40, 7.0), np.full(40, 8.0), np.zeros(40))
    assert after["natural"][60:] == pytest.approx(new.natural_B, abs=1e-6)
    assert after["precision"][60:] == pytest.approx(new.precision_B, abs=1e-6)


def test_counts_from_before_a_shift_say_that_much_more_now():
    # Seen at step 0 and out of the window since; all logits have risen meanwhile.
    predictor = gp(window=32, drift=0.0)
    predictor.update(UIDS[:8], UIDS[:8], np.full(8, 2), np.full(8, 16), 0)
    for step in range(1, 7):
        uids = UIDS[40 * step : 40 * step + 40]
        predictor.update(uids, uids, np.full(40, min(step, 6)), np.full(40, 8), step)
    shift = predictor.state_dict()["shift"]
    assert shift > 0.5 and "000" not in predictor.state_dict()["window"]
    cavity = predictor._fit.window.marginals(predictor._points(UIDS[:1], UIDS[:1]), np.array([-1]))
    given = [condition(*cavity, np.array([2.0]), np.array([16.0]), np.array([moved])) for moved in (shift, 0.0)]
    expected, stale = ((posterior.weight_BQ * sigmoid(posterior.logit_BQ)).sum() for posterior in given)
    assert predictor.predict(UIDS[:1], UIDS[:1]).mean[0] == pytest.approx(expected, abs=1e-9) and expected > stale + 0.02


def test_window_keeps_the_last_distinct_prompts():
    predictor = gp(window=100)
    feed(predictor, 4)
    predictor.update(["040"], ["040"], np.array([1]), np.array([8]), step=9)
    state = predictor.state_dict()
    # 128 prompts seen, the last 100 are 28..127; 40 moves to the end, and one slot was already taken by it.
    uids = state["window"]
    assert len(uids) == len(set(uids)) == 100 and uids[-1] == "040" and set(uids) == set(UIDS[28:128])
    assert state["X"] * state["scale"] + state["centre"] == pytest.approx(embed(uids), abs=1e-5)
    assert len(state["history_uids"]) == 128


def test_a_batch_larger_than_the_window():
    predictor = gp(window=10)
    feed(predictor, 2)
    assert len(predictor.state_dict()["window"]) == 10
    assert np.isfinite(predictor.predict(UIDS, UIDS).mean).all()


def test_duplicates_and_unscored_prompts_in_a_batch():
    one, other = gp(), gp()
    one.update(["000", "001", "000", "002"], ["000", "001", "000", "002"], np.array([1, 3, 2, 0]), np.array([4, 8, 4, 0]), 0)
    other.update(["001", "000"], ["001", "000"], np.array([3, 3]), np.array([8, 8]), 0)
    for key, value in one.state_dict().items():
        assert np.array_equal(value, other.state_dict()[key]), key
    nothing = gp()
    nothing.update(["000"], ["000"], np.array([0]), np.array([0]), 0)
    assert nothing.state_dict()["window"] == [] and nothing.predict(["000"], ["000"]).mean[0] == pytest.approx(0.5)


def test_fifty_prompts_a_hundred_times_over_take_fifty_rows():
    predictor = gp()
    uids = UIDS[:50] * 100
    k = np.tile(np.arange(50) % 2, 100)
    predictor.update(uids, uids, k, np.ones(5000), 0)
    state = predictor.state_dict()
    assert len(state["window"]) == 50 and state["history"][1].tolist() == [100.0] * 50
    p = predictor.predict(uids, uids).mean
    assert len(p) == 5000 and p[0] < 0.02 and p[1] > 0.98 and (p[:50] == p[-50:]).all()


def test_equal_texts_under_two_uids_share_what_is_learned():
    predictor = gp()
    predictor.update(["a", "b"], ["000", "000"], np.array([8, 8]), np.array([8, 8]), 0)
    p = predictor.predict(["a", "c", "d"], ["000", "000", "001"]).mean
    assert p[0] > p[1] > p[2], "its own results say most, those of an equal text much, another text little"


def test_shuffling_a_batch_changes_no_bit():
    one, other = gp(), gp()
    feed(one, 3)
    feed(other, 3)
    order = np.random.default_rng(0).permutation(64)
    uids = np.array(UIDS[80:144])
    k, n = RNG.binomial(8, 0.3, 64), np.full(64, 8)
    for a, b in zip(one.predict(list(uids), list(uids)), other.predict(list(uids[order]), list(uids[order])), strict=True):
        assert (b == a[order]).all()
    one.update(list(uids), list(uids), k, n, 3)
    other.update(list(uids[order]), list(uids[order]), k[order], n[order], 3)
    assert all(np.array_equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "unplanned"])
def test_state_round_trip_predicts_the_same_bits(planned):
    def play(predictor, first, steps):
        for step in range(first, first + steps):
            uids = UIDS[step * 25 % 600 : step * 25 % 600 + 40]  # some come again
            if planned:
                predictor.predict(uids, uids)
            predictor.update(uids, uids, np.random.default_rng(step).binomial(8, 0.3, 40), np.full(40, 8), step)

    one, other = gp(), gp()
    play(one, 0, 5)
    other.load_state_dict(one.state_dict())
    for predictor in (one, other):
        play(predictor, 5, 3)
    for a, b in zip(one.predict(UIDS[:64], UIDS[:64]), other.predict(UIDS[:64], UIDS[:64]), strict=True):
        assert (a == b).all()
    assert all(np.array_equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())
    assert {type(value) for value in one.state_dict().values()} <= {list, np.ndarray, int, float}


def test_near_duplicate_rows_and_certain_points_keep_variance_finite_and_non_negative():
    near = np.repeat(X[:1], 200, 0) + np.linspace(0, 1e-7, 200)[:, None].astype(np.float32)
    predictor = GP(lambda texts: near[[int(text) for text in texts]], UIDS[:200], window=200)
    predictor.update(UIDS[:200], UIDS[:200], np.full(200, 5 * 10**9), np.full(200, 10**10), 0)
    p, variance, signal = predictor.predict(UIDS[:200], UIDS[:200])
    assert p == pytest.approx(0.5, abs=1e-3) and (variance >= 0).all() and (variance < 1e-3).all() and (signal > 0.24).all()
    mean, spread = predictor.posterior(near, variance=True)
    assert np.isfinite(mean).all() and (spread >= 0).all() and np.isfinite(spread).all()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 64), st.integers(0, 64)), min_size=1, max_size=40))
def test_any_counts_give_finite_probabilities(rows):
    predictor = gp()
    for step in range(2):
        uids = [UIDS[i] for i, _, _ in rows]
        predictor.update(uids, uids, np.array([min(k, n) for _, k, n in rows]), np.array([n for _, _, n in rows]), step)
    p, variance, signal = predictor.predict(UIDS[:64], UIDS[:64])
    assert ((p > 0) & (p < 1)).all() and (variance >= 0).all() and ((signal > 0) & (signal <= 0.25)).all()


@pytest.mark.parametrize("k", [0, 8], ids=["all fail", "all succeed"])
def test_rates_of_0_or_1_everywhere_for_many_steps(k):
    predictor = gp()
    for step in range(60):
        uids = UIDS[step % 10 * 10 : step % 10 * 10 + 10]
        predictor.predict(uids, uids)
        predictor.update(uids, uids, np.full(10, k), np.full(10, 8), step)
    p, _, signal = predictor.predict(UIDS[:20], UIDS[:20])
    assert np.isfinite(p).all() and ((p < 0.01) if k == 0 else (p > 0.99)).all() and (signal > 0).all()


def test_bad_input_is_named():
    predictor = gp()
    for bad in (np.nan, np.inf):
        broken = GP(lambda texts, bad=bad: np.where(np.array(texts)[:, None] == "b", bad, 1.0) * np.ones((1, 4)), ["a"])
        with pytest.raises(ValueError, match="prompt 'u2': its embedding has entries that are NaN or infinite"):
            broken.predict(["u1", "u2"], ["a", "b"])
        with pytest.raises(ValueError, match=r"prompt 'x': a predictor was given .* successes of"):
            predictor.update(["w", "x"], ["000", "001"], np.array([1.0, bad]), np.array([8.0, 8.0]), 0)
    with pytest.raises(ValueError, match="prompt 'x': a predictor was given 9 successes of 8 rollouts"):
        predictor.update(["x"], ["001"], np.array([9]), np.array([8]), 0)
    with pytest.raises(ValueError, match="nothing is observed yet"):
        predictor.posterior(X)


def test_a_pool_that_grew_or_was_reordered_is_matched_by_uid_and_said_so():
    texts = {f"u{i}": UIDS[i] for i in range(40)}
    old = GP(embed, list(texts.values())[:20], list(texts)[:20], window=50)
    old.update(["u1", "u2"], ["001", "002"], np.array([8, 0]), np.array([8, 8]), 0)
    expected = old.predict(["u1", "u2", "u3"], ["001", "002", "003"]).mean
    reordered = GP(embed, list(texts.values())[:20][::-1], list(texts)[:20][::-1], window=50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reordered.load_state_dict(old.state_dict())
    assert (reordered.predict(["u3", "u2", "u1"], ["003", "002", "001"]).mean == expected[::-1]).all()
    grown = GP(embed, list(texts.values())[2:], list(texts)[2:], window=50)
    with pytest.warns(UserWarning, match="1 of the 38 prompts here have results.* other 37 start at the prior.* 1 prompts"):
        grown.load_state_dict(old.state_dict())
    assert (grown.predict(["u1", "u2", "u3"], ["001", "002", "003"]).mean == expected).all()


class RawRates:
    """The trap: last observed rates taken at their word."""

    def __init__(self):
        self.rates = {}

    def predict(self, uids, texts):
        p = np.array([self.rates.get(uid, 0.5) for uid in uids])
        return Prediction(p, 0 * p, p * (1 - p))

    def update(self, uids, texts, successes, trials, step):
        self.rates.update(zip(uids, successes / trials, strict=True))


def realised_ratio(predictor, p, seed, epochs, B=64):
    """Reward variance of the predictor's own allocations relative to uniform, over ``epochs`` of the pool after the first."""
    rng, N, planned, uniform = np.random.default_rng(seed), len(p), 0.0, 0.0
    for step in range((epochs + 1) * N // B):
        batch = np.arange(step * B, (step + 1) * B) % N
        names = [UIDS[i] for i in batch]
        ties = rng.integers(0, 2**63, B).astype(np.uint64)
        counts = solve(predictor.predict(names, names).signal, 8 * B, 2, 32, ties, rloo)
        predictor.update(names, names, rng.binomial(counts, p[batch]), counts, step)
        if step >= N // B:
            a = p[batch] * (1 - p[batch])
            planned, uniform = planned + (a * rloo(counts)).sum(), uniform + (a / 7).sum()
    return planned / uniform


def test_the_trap_of_raw_rates_is_not_entered():
    p = np.random.default_rng(3).beta(0.4, 0.6, 256)
    assert realised_ratio(RawRates(), p, 0, epochs=4) > 1.2
    assert realised_ratio(gp(), p, 0, epochs=4) < 0.93


def test_texts_that_tell_pay_before_any_prompt_comes_again():
    # 70 % p = .002, rest Beta(.5, 2), sorted into families of like texts: the first pass over the pool, so no own history.
    rng = np.random.default_rng(0)
    p = np.sort(np.clip(np.where(rng.random(576) < 0.7, 0.002, rng.beta(0.5, 2, 576)), 1e-4, 1))
    order = rng.permutation(576)
    family = rng.normal(size=(18, 16))[order // 32] + 0.4 * rng.normal(size=(576, 16))
    predictor = GP(lambda texts: family[[int(text) for text in texts]].astype(np.float32), UIDS[:576], window=200)
    planned = uniform = 0.0
    for step in range(9):
        batch = np.arange(step * 64, step * 64 + 64)
        names, rates = [UIDS[i] for i in batch], p[order[batch]]
        counts = solve(predictor.predict(names, names).signal, 512, 2, 32, batch.astype(np.uint64), rloo)
        predictor.update(names, names, rng.binomial(counts, rates), counts, step)
        if step >= 3:
            planned, uniform = planned + (rates * (1 - rates) * rloo(counts)).sum(), uniform + (rates * (1 - rates) / 7).sum()
    assert planned / uniform < 0.75
