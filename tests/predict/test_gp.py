"""The noise-aware GP: known answers, degenerate inputs, bit-exact state, and what its allocations are worth in simulation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vipfast.allocate.solver import rloo, solve
from vipfast.predict.diagnostics import diagnose
from vipfast.predict.gp import GP, expectations, observed
from vipfast.predict.kernel import Factor, length_scale, rbf, squared_distances

RNG = np.random.default_rng(0)
X = RNG.normal(size=(600, 16)).astype(np.float32)
UIDS = [f"{i:03d}" for i in range(600)]


def embed(texts):
    return X[[int(text) for text in texts]]


def gp(**kwargs):
    return GP(embed, UIDS, **kwargs)


def feed(predictor, steps, B=32, first=0, n=8):
    rng = np.random.default_rng(first)
    for step in range(first, first + steps):
        uids = [UIDS[i % 600] for i in range(step * B, (step + 1) * B)]
        predictor.update(uids, uids, rng.binomial(n, 0.3, B), np.full(B, n), step)


def test_targets_by_hand():
    # 0 of 1: log(.5/1.5) = -1.0986, 1/.5 + 1/1.5 = 2.667; 4 of 8: 0, 2/4.5; 0 and 64 of 64: -+4.8598.
    y, v = observed(np.array([0, 4, 0, 64]), np.array([1, 8, 64, 64]))
    assert y == pytest.approx([-1.0986, 0, -4.8598, 4.8598], abs=1e-4)
    assert v == pytest.approx([2.6667, 0.4444, 2.0155, 2.0155], abs=1e-4)


def test_expectations_by_hand():
    # No variance: the sigmoid itself. Symmetric: E p = .5. Wide variance pushes p to 0 or 1, so E p(1-p) falls.
    p, signal = expectations(np.array([0.0, np.log(3), 0.0, 0.0]), np.array([0.0, 0.0, 1.0, 9.0]))
    assert p == pytest.approx([0.5, 0.75, 0.5, 0.5])
    # E p(1-p) of N(0, 1) and N(0, 9) by a fine Riemann sum.
    z = np.linspace(-12, 12, 200001)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) * (z[1] - z[0])
    riemann = [(density / (2 + np.exp(s * z) + np.exp(-s * z))).sum() for s in (1, 3)]
    assert signal == pytest.approx([0.25, 0.1875, *riemann], abs=1e-4)


def test_before_any_result_every_prompt_is_alike():
    p, signal = gp().predict(UIDS[:8], UIDS[:8])
    assert (p == p[0]).all() and p[0] == pytest.approx(0.5) and (signal == signal[0]).all() and 0 < signal[0] < 0.25


def test_one_failure_is_not_certainty():
    predictor = gp()
    predictor.update(["000"], ["000"], np.array([0]), np.array([1]), step=0)
    p, signal = predictor.predict(["000"], ["000"])
    assert 0.1 < p[0] < 0.5 and signal[0] > 0.05
    for step in range(1, 20):
        predictor.update(["000"], ["000"], np.array([2]), np.array([2]), step)
    assert predictor.predict(["000"], ["000"])[0][0] > 0.6, "and it recovers"


def test_more_trials_are_surer_at_rates_of_0_and_1():
    def after(k, n):
        predictor = gp()
        feed(predictor, 2)
        predictor.update(["599"], ["599"], np.array([k]), np.array([n]), step=2)
        return predictor.predict(["599"], ["599"])[0][0]

    assert 0 < after(0, 64) < after(0, 1) < after(1, 1) < after(64, 64) < 1


def test_repeated_small_counts_add_up_as_counts():
    # 0 of 2 for ten steps must go below what a single 0 of 2 says (logit -1.6), as 0 of 20 does.
    predictor = gp(drift=0.0, shift_var=1e-12)
    for step in range(10):
        predictor.update(["000"], ["000"], np.array([0]), np.array([2]), step)
    state = predictor.state_dict()
    assert state["trials"].tolist() == [20.0] and state["successes"].tolist() == [0.0]


def test_old_counts_shrink_by_what_drift_has_made_of_them():
    # v(4 of 8) = 2/4.5; after 2 steps of drift .1 the factor is v / (v + .2).
    predictor = gp(drift=0.1)
    predictor.update(["000"], ["000"], np.array([4]), np.array([8]), step=0)
    predictor.update(["000"], ["000"], np.array([1]), np.array([2]), step=2)
    kept = (2 / 4.5) / (2 / 4.5 + 0.2)
    state = predictor.state_dict()
    assert state["trials"][0] == pytest.approx(2 + 8 * kept) and state["successes"][0] == pytest.approx(1 + 4 * kept)


def test_age_widens_what_is_known():
    def spread(age):
        predictor = gp(drift=0.5)
        predictor.update(["000"], ["000"], np.array([4]), np.array([8]), step=0)
        predictor.update(["001"], ["001"], np.array([4]), np.array([8]), step=age)
        return predictor.logits(["000"], ["000"])[1][0]

    assert spread(20) > spread(1)


def test_all_logits_follow_a_shared_shift():
    predictor = gp()
    feed(predictor, 6)
    before = predictor.predict(UIDS[:32], UIDS[:32])[0].mean()
    old = predictor.state_dict()["shift"]
    uids = UIDS[300:364]
    predictor.update(uids, uids, np.full(64, 7), np.full(64, 8), step=6)
    new = predictor.state_dict()["shift"]
    moved = new[:-64] - old
    assert moved.min() > 0.3 and np.ptp(moved) < 1e-12 and (new[-64:] == 0).all()
    assert predictor.predict(UIDS[:32], UIDS[:32])[0].mean() > before + 0.05


def test_window_keeps_the_last_distinct_prompts():
    predictor = gp(window=100)
    feed(predictor, 4)
    predictor.update(["040"], ["040"], np.array([1]), np.array([8]), step=9)
    uids = predictor.state_dict()["uids"]
    # 128 prompts seen, the last 100 are 28..127; 40 moves to the end, and one slot was already taken by it.
    assert len(uids) == len(set(uids)) == 100 and uids[-1] == "040" and set(uids) == set(UIDS[28:128])


@pytest.mark.parametrize("order", [range(90), [*range(60), *range(20, 50), *range(5, 40, 3), 99]], ids=["fresh", "seen again"])
def test_the_windows_matrix_grown_row_by_row_is_that_of_its_rows(order):
    predictor, order = gp(window=50), list(order)
    for step, first in enumerate(range(0, len(order), 15)):
        uids = [UIDS[i] for i in order[first : first + 15]]
        predictor.update(uids, uids, np.full(len(uids), 3), np.full(len(uids), 8), step)
    state = predictor.state_dict()
    rows = state["embeddings"].astype(np.float64)
    assert np.array_equal(rows, embed(state["uids"]).astype(np.float64))
    assert np.allclose(state["rbf"], rbf(rows, rows, state["scale"]), atol=1e-12)
    assert (np.diag(state["rbf"]) == 1).all()


def test_a_batch_larger_than_the_window():
    predictor = gp(window=10)
    feed(predictor, 2)
    assert len(predictor.state_dict()["uids"]) == 10
    assert np.isfinite(predictor.predict(UIDS, UIDS)[0]).all()


def test_duplicates_and_unscored_prompts_in_a_batch():
    one, other = gp(), gp()
    one.update(["000", "001", "000", "002"], ["000", "001", "000", "002"], np.array([1, 3, 2, 0]), np.array([4, 8, 4, 0]), 0)
    other.update(["001", "000"], ["001", "000"], np.array([3, 3]), np.array([8, 8]), 0)
    for key, value in one.state_dict().items():
        assert np.array_equal(value, other.state_dict()[key]), key
    nothing = gp()
    nothing.update(["000"], ["000"], np.array([0]), np.array([0]), 0)
    assert nothing.state_dict()["uids"] == []


def test_equal_texts_under_two_uids_share_what_is_learned():
    predictor = gp()
    predictor.update(["a", "b"], ["000", "000"], np.array([8, 8]), np.array([8, 8]), 0)
    p, _ = predictor.predict(["a", "c", "d"], ["000", "000", "001"])
    assert p[0] > p[1] > p[2], "its own results say most, those of an equal text much, another text little"


def test_shuffling_a_batch_changes_no_bit():
    one, other = gp(), gp()
    feed(one, 3)
    feed(other, 3)
    order = np.random.default_rng(0).permutation(64)
    uids = np.array(UIDS[80:144])
    k, n = RNG.binomial(8, 0.3, 64), np.full(64, 8)
    p, signal = one.predict(list(uids), list(uids))
    q, other_signal = other.predict(list(uids[order]), list(uids[order]))
    assert (q == p[order]).all() and (other_signal == signal[order]).all()
    one.update(list(uids), list(uids), k, n, 3)
    other.update(list(uids[order]), list(uids[order]), k[order], n[order], 3)
    assert all(np.array_equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())


def test_state_round_trip_predicts_the_same_bits():
    one = gp()
    feed(one, 5)
    other = gp()
    other.load_state_dict(one.state_dict())
    for predictor in (one, other):
        feed(predictor, 3, first=5)
    for a, b in zip(one.predict(UIDS[:64], UIDS[:64]), other.predict(UIDS[:64], UIDS[:64])):
        assert (a == b).all()
    kinds = {type(value) for value in one.state_dict().values()}
    assert kinds <= {list, np.ndarray, int, float}


def test_near_duplicate_rows_and_certain_points_keep_variance_finite_and_non_negative():
    near = np.repeat(X[:1], 200, 0) + np.linspace(0, 1e-7, 200)[:, None].astype(np.float32)
    predictor = GP(lambda texts: near[[int(text) for text in texts]], UIDS[:200])
    predictor.update(UIDS[:200], UIDS[:200], np.full(200, 5 * 10**9), np.full(200, 10**10), 0)
    mean, variance = predictor.logits(UIDS[:200], UIDS[:200])
    assert np.isfinite(mean).all() and (variance >= 0).all()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 64), st.integers(0, 64)), min_size=1, max_size=40))
def test_any_counts_give_finite_probabilities(rows):
    predictor = gp()
    for step in range(2):
        uids = [UIDS[i] for i, _, _ in rows]
        predictor.update(uids, uids, np.array([min(k, n) for _, k, n in rows]), np.array([n for _, _, n in rows]), step)
    p, signal = predictor.predict(UIDS[:64], UIDS[:64])
    assert ((p > 0) & (p < 1)).all() and ((signal > 0) & (signal <= 0.25)).all()


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
def test_factor_whitens_as_lapack_does(size):
    A = rbf(X[:size], X[:size], 5.0) + np.eye(size)
    right = np.random.default_rng(0).normal(size=(size, 3))
    assert Factor(A).whiten(right) == pytest.approx(np.linalg.solve(np.linalg.cholesky(A), right), abs=1e-12)


def test_jitter_escalates_then_gives_up_clearly():
    near = np.array([[0.0], [0.0], [1e-7]] + [[float(i)] for i in range(100)])
    singular = rbf(near, near, 50.0)
    factor = Factor(singular)
    assert 0 < factor.jitter < 1e-3 and np.isfinite(factor.whiten(np.eye(len(near)))).all()
    with pytest.raises(np.linalg.LinAlgError, match="3 prompts is not positive definite, even with jitter"):
        Factor(-np.eye(3))
    with pytest.raises(np.linalg.LinAlgError, match="not finite"):
        Factor(np.array([[1.0, np.nan], [np.nan, 1.0]]))


def realised_ratio(features, seed=0, N=2048, B=64, steps=40):
    """Reward variance of the allocation relative to uniform, on a mostly degenerate pool: 70 % p = .002, rest Beta(.5, 2)."""
    rng = np.random.default_rng(seed)
    p = np.clip(np.where(rng.random(N) < 0.7, 0.002, rng.beta(0.5, 2, N)), 1e-6, 1 - 1e-6)
    vectors = rng.normal(size=(N, 16))
    if features == "telling":
        family = np.argsort(np.argsort(np.log(p / (1 - p)) + 0.5 * rng.normal(size=N))) * 20 // N
        vectors = rng.normal(size=(20, 16))[family] + 0.4 * vectors
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    uids = [str(i) for i in range(N)]
    predictor = GP(lambda texts: vectors[[int(text) for text in texts]], uids)
    planned = uniform = 0.0
    for step in range(steps):
        batch = rng.permutation(N)[:B]
        names = [uids[i] for i in batch]
        counts = solve(predictor.predict(names, names)[1], 8 * B, 2, 32, rng.integers(0, 2**63, B).astype(np.uint64), rloo)
        predictor.update(names, names, rng.binomial(counts, p[batch]), counts, step)
        if step >= 8:
            a = p[batch] * (1 - p[batch])
            planned, uniform = planned + (a * rloo(counts)).sum(), uniform + (a / 7).sum()
    return planned / uniform


def test_features_that_tell_beat_uniform_on_a_degenerate_pool():
    assert np.mean([realised_ratio("telling", seed) for seed in range(2)]) < 0.9


def test_features_that_tell_nothing_cost_nothing():
    assert np.mean([realised_ratio("random", seed) for seed in range(2)]) < 1.05


class RawRates:
    """The trap: last observed rates taken at their word."""

    def __init__(self):
        self.rates = {}

    def predict(self, uids, texts):
        p = np.array([self.rates.get(uid, 0.5) for uid in uids])
        return p, p * (1 - p)

    def update(self, uids, texts, successes, trials, step):
        self.rates.update(zip(uids, successes / trials))


def revisited_ratio(predictor, vectors, seed, epochs=8, N=256, B=64):
    """As ``realised_ratio``, on prompts that come again every epoch and texts that tell nothing; p ~ Beta(.4, .6)."""
    rng = np.random.default_rng(seed)
    p, planned, uniform = rng.beta(0.4, 0.6, N), 0.0, 0.0
    for step in range(epochs * N // B):
        batch = np.arange(step * B, (step + 1) * B) % N
        names = [UIDS[i] for i in batch]
        counts = solve(predictor.predict(names, names)[1], 8 * B, 2, 32, rng.integers(0, 2**63, B).astype(np.uint64), rloo)
        predictor.update(names, names, rng.binomial(counts, p[batch]), counts, step)
        if step >= N // B:
            a = p[batch] * (1 - p[batch])
            planned, uniform = planned + (a * rloo(counts)).sum(), uniform + (a / 7).sum()
    return planned / uniform


def test_the_trap_of_raw_rates_is_not_entered():
    assert np.mean([revisited_ratio(RawRates(), X, seed) for seed in range(3)]) > 1.2
    assert np.mean([revisited_ratio(gp(), X, seed) for seed in range(3)]) < 0.97


def test_diagnostics_by_hand():
    metrics = diagnose(np.array([0.5, 0.2, 0.9]), np.array([1, 0, 0]), np.array([2, 4, 0]))
    # The third prompt has no trials. Brier: (.25 + .04) / 2; log loss: (ln 2 - ln .8) / 2; two points: corr 1.
    assert metrics["predict/brier"] == pytest.approx(0.145)
    assert metrics["predict/log_loss"] == pytest.approx((np.log(2) - np.log(0.8)) / 2)
    assert metrics["predict/corr"] == pytest.approx(1.0)
    assert set(diagnose(np.array([0.5]), np.array([0]), np.array([0])).values()) == {None}
    flat = diagnose(np.full(4, 0.5), np.array([0, 1, 2, 2]), np.full(4, 2))
    assert flat["predict/corr"] is None and flat["predict/slope"] is None and flat["predict/brier"] == pytest.approx(0.25)


def test_calibration_slope():
    logit = np.linspace(-3, 3, 41)
    rate = 1 / (1 + np.exp(-(0.3 + 0.5 * logit)))
    n = np.full(41, 10**6)
    assert diagnose(1 / (1 + np.exp(-logit)), np.round(rate * n), n)["predict/slope"] == pytest.approx(0.5, abs=1e-4)
    separated = diagnose(1 / (1 + np.exp(-logit)), np.where(logit > 0, n, 0), n)
    assert separated["predict/slope"] is None and separated["predict/corr"] > 0.8
