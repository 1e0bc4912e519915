"""pass@k and maj@k against enumeration and by hand; the interval covers what it says it does."""

from itertools import combinations, permutations

import numpy as np
import pytest

from vipfast.evaluate import majority_right
from vipfast.evaluation.scores import expected_majority, interval, majority_B, pass_B

A, B, N = "a", "b", None  # "a" is the right answer


def enumerated(answers, right, k):
    """Over every k-subset in every order, a tie going to the answer that comes first."""
    draws = list(permutations(range(len(answers)), k))
    return np.mean([majority_right([answers[i] for i in draw], np.array([right[i] for i in draw])) for draw in draws])


@pytest.mark.parametrize(
    ("answers", "k", "expected"),
    [
        ([A, A, B], 1, 2 / 3),
        ([A, A, B], 2, 1 / 3 + 2 / 3 * 1 / 2),  # aa wins, ab is a tie
        ([A, A, B, B, B], 3, 3 / 10),  # of 10 triples aab (3 of them) alone
        ([A, N, N], 2, 2 / 3),  # no vote, no win: aN and Na of the three pairs
        ([N, N, N], 2, 0.0),
        ([B, B, "c"], 2, 0.0),
        ([A, B, "c", "d"], 3, 3 / 4 * 1 / 3),  # a is drawn, and is one of three tied
    ],
    ids=str,
)
def test_majority_of_fewer_samples_by_hand(answers, k, expected):
    right = [answer == A for answer in answers]
    assert expected_majority(answers, right, k) == pytest.approx(expected, abs=1e-12)
    assert enumerated(answers, right, k) == pytest.approx(expected)


def test_majority_of_fewer_samples_is_the_mean_over_all_draws():
    rng = np.random.default_rng(0)
    for _ in range(60):
        num = int(rng.integers(2, 7))
        answers = [(None, "a", "b", "c", "d")[i] for i in rng.integers(0, 5, num)]
        right = [answer == "a" or (answer == "b" and rng.random() < 0.5) for answer in answers]  # "b" in some samples only
        for k in range(1, num):
            assert expected_majority(answers, right, k) == pytest.approx(enumerated(answers, right, k), abs=1e-12)


def test_majority_of_many_samples_agrees_with_simulation():
    rng = np.random.default_rng(1)
    answers = [*("a" * 60), *("b" * 50), *("c" * 40), *map(str, range(70)), *[None] * 36]
    right = np.array([answer == "a" for answer in answers])
    draws = [rng.permutation(256)[:32] for _ in range(4000)]
    share = np.mean([majority_right([answers[i] for i in draw], right[draw]) for draw in draws])
    assert expected_majority(answers, right, 32) == pytest.approx(share, abs=4 * np.sqrt(0.25 / 4000))


def test_all_samples_have_trainings_majority_a_tie_going_to_the_first():
    answers = [[A, B, B, A], [B, A, A, B], [B, B, A, A]]
    right = np.array([[answer == A for answer in row] for row in answers])
    assert majority_B(right, answers, 4).tolist() == [1.0, 0.0, 0.0]
    assert majority_B(right, answers, 2) == pytest.approx([0.5] * 3)


def test_pass_is_the_share_of_subsets_with_a_right_one():
    right = np.array([[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
    for k in range(1, 6):
        expected = [np.mean([any(row[list(draw)]) for draw in combinations(range(5), k)]) for row in right]
        assert pass_B(right, k) == pytest.approx(expected)


def test_interval_covers_the_truth_about_19_times_in_20():
    rng, truth, inside = np.random.default_rng(2), 0.3, 0
    for trial in range(120):
        # Prompts differ, four samples each: what varies is both which prompts there are and what is sampled.
        rates = rng.beta(0.6, 1.4, 80)
        low, high = interval(trial, rng.binomial(4, rates) / 4)
        inside += low <= truth <= high
    assert 0.87 * 120 <= inside <= 120


def test_interval_is_seeded_and_narrows_with_prompts():
    values = np.random.default_rng(3).beta(0.6, 1.4, 400)
    assert interval(0, values) == interval(0, values) != interval(1, values)
    widths = [high - low for low, high in (interval(0, values[:50]), interval(0, values))]
    assert widths[1] < 0.6 * widths[0]


def test_interval_of_a_mean_over_tasks_is_narrower_than_each():
    rng = np.random.default_rng(4)
    one, two = (rng.binomial(1, 0.5, 100).astype(float) for _ in range(2))
    low, high = interval(0, one, two)
    assert low < (one.mean() + two.mean()) / 2 < high
    single_low, single_high = interval(0, one)
    assert high - low < 0.85 * (single_high - single_low)


@pytest.mark.parametrize("values", [[], [0.5], [1.0, 1.0, 1.0]], ids=str)
def test_no_interval_where_resampling_says_nothing(values):
    assert interval(0, np.array(values)) is None
