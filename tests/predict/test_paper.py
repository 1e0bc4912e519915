"""The paper's noise-free predictor against its own recursion, written out with the full matrix."""

import numpy as np
import pytest

from vipfast.predict.kernel import length_scale, rbf
from vipfast.predict.paper import PaperGP

X = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)
UIDS = [str(i) for i in range(200)]


def embed(texts):
    return X[[int(text) for text in texts]]


def paper(**kwargs):
    return PaperGP(embed, UIDS, **kwargs)


def logit(p):
    return np.log(p / (1 - p))


def test_follows_the_recursion_of_the_paper():
    rng, predictor = np.random.default_rng(1), paper(eps=0.01)
    K = rbf(X, X, length_scale(embed, UIDS))
    m = np.zeros(200)
    for step in range(6):
        batch = np.sort(rng.choice(200, 20, replace=False))
        names = sorted(UIDS[i] for i in batch)
        rows = [int(name) for name in names]
        k, n = rng.binomial(8, 0.4, 20), np.full(20, 8)
        target = logit(np.clip(k / n, 0.01, 0.99))
        m += K[:, rows] @ np.linalg.solve(K[np.ix_(rows, rows)] + 1e-6 * np.eye(20), target - m[rows])
        m[rows] = target
        predictor.update(names, names, k, n, step)
        p, _, signal = predictor.predict(UIDS, UIDS)
        assert logit(p) == pytest.approx(m, abs=1e-4)
        assert signal == pytest.approx(p * (1 - p))


def test_nothing_known_is_one_half():
    p, _, signal = paper().predict(UIDS[:3], UIDS[:3])
    assert p.tolist() == [0.5] * 3 and signal.tolist() == [0.25] * 3


def test_a_rate_of_0_or_1_is_clipped_at_eps_and_recovers():
    predictor = paper()
    predictor.update(["0", "150"], ["0", "150"], np.array([0, 64]), np.array([1, 64]), 0)
    p, _, signal = predictor.predict(["0", "150"], ["0", "150"])
    assert p == pytest.approx([1e-6, 1 - 1e-6], rel=1e-3) and (signal > 0).all()
    predictor.update(["0"], ["0"], np.array([1]), np.array([2]), 1)
    assert predictor.predict(["0"], ["0"])[0][0] == pytest.approx(0.5, abs=1e-6)


def test_equal_texts_in_one_batch_need_the_jitter():
    predictor = paper()
    predictor.update(["a", "b"], ["0", "0"], np.array([8, 0]), np.array([8, 8]), 0)
    p, _, signal = predictor.predict(["a", "b", "c"], ["0", "0", "1"])
    assert np.isfinite(p).all() and np.isfinite(signal).all() and p[0] > 0.99 and p[1] < 0.01


def test_prompts_without_trials_are_skipped_and_duplicates_merged():
    one, other = paper(), paper()
    one.update(["0", "1", "0", "2"], ["0", "1", "0", "2"], np.array([1, 3, 2, 0]), np.array([4, 8, 4, 0]), 0)
    other.update(["1", "0"], ["1", "0"], np.array([3, 3]), np.array([8, 8]), 0)
    assert all(np.array_equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())


def test_shuffling_a_batch_changes_no_bit():
    one, other = paper(), paper()
    rng, names = np.random.default_rng(2), np.array(UIDS)
    for step in range(4):
        batch, order = rng.choice(200, 40, replace=False), rng.permutation(40)
        uids, shuffled = list(names[batch]), list(names[batch][order])
        k, n = rng.binomial(8, 0.3, 40), np.full(40, 8)
        p, q = one.predict(uids, uids)[0], other.predict(shuffled, shuffled)[0]
        assert (q == p[order]).all()
        one.update(uids, uids, k, n, step)
        other.update(shuffled, shuffled, k[order], n[order], step)


def test_state_round_trip_predicts_the_same_bits():
    one, other = paper(), paper()
    rng = np.random.default_rng(3)
    rounds = [(list(rng.choice(UIDS, 30, replace=False)), rng.binomial(8, 0.3, 30)) for _ in range(6)]

    def play(predictor, part):
        for step, (uids, k) in enumerate(part):
            predictor.predict(uids, uids)
            predictor.update(uids, uids, k, np.full(30, 8), step)

    play(one, rounds[:3])
    other.load_state_dict(one.state_dict())
    play(one, rounds[3:])
    play(other, rounds[3:])
    assert (one.predict(UIDS, UIDS)[0] == other.predict(UIDS, UIDS)[0]).all()
    assert {type(value) for value in one.state_dict().values()} <= {list, np.ndarray, int, float}
