"""Objectives: the two of the paper, a user's own, and what is refused because the exact solver could not rest on it."""

import numpy as np
import pytest

from vipfast.allocate import solver
from vipfast.allocate.objective import OBJECTIVES, dr_grpo, find_objective, gains, least_rollouts, rloo
from vipfast.config import Config
from vipfast.errors import UsageError
from vipfast.resolve import resolve


def test_the_papers_objectives_by_hand():
    assert rloo(np.array([2.0, 5.0])).tolist() == [1, 0.25]
    assert dr_grpo(np.array([1.0, 2.0, 4.0])).tolist() == [0, 0.25, 3 / 16]
    assert gains(rloo, 2, 4) == pytest.approx([1 / 2, 1 / 6])
    assert gains(dr_grpo, 3, 5) == pytest.approx([2 / 9 - 3 / 16, 3 / 16 - 4 / 25])


@pytest.mark.parametrize("name, low", [("rloo", 2), ("dr_grpo", 3)])
def test_gains_keep_every_bit_of_the_papers_objectives(name, low):
    n = np.arange(low, 4097.0)
    plain = OBJECTIVES[name](n)[:-1] - OBJECTIVES[name](n)[1:]
    assert (gains(OBJECTIVES[name], low, 4096) == plain).all() and (np.diff(plain) < 0).all()


def test_least_rollouts_follow_the_objective():
    assert least_rollouts("rloo", None) == 2 and least_rollouts("dr_grpo", None) == 3
    assert least_rollouts("rloo", 5) == 5 and least_rollouts("mine:phi", 0) == 0
    with pytest.raises(UsageError, match="--min-rollouts 2: --objective dr_grpo needs at least 3"):
        least_rollouts("dr_grpo", 2)
    with pytest.raises(UsageError, match="--objective mine:phi: give --min-rollouts too"):
        least_rollouts("mine:phi", None)


def bent(n):
    """Falls by 1, 1, 2, 1: the third step is too large."""
    return np.array([5.0, 4, 3, 1, 0])[n.astype(int)]


@pytest.mark.parametrize(
    "objective, low, high, message",
    [
        (dr_grpo, 2, 32, "objective dr_grpo: not discretely convex at n = 3: the rollout before .* 0.0277778, .* 0.0347222"),
        (bent, 0, 4, "objective bent: not discretely convex at n = 2: .* by 1, .* by 2,"),
        (rloo, 1, 32, "objective rloo: is inf at n = 1; --min-rollouts"),
        (lambda n: np.where(n == 6, np.nan, 1 / n), 1, 32, "is nan at n = 6"),
        (lambda n: 0.5, 1, 32, r"gives shape \(\) for 32 rollout counts"),
    ],
    ids=["dr_grpo from 2", "bent", "infinite", "nan", "a number"],
)
def test_what_the_solver_could_not_rest_on_is_refused_by_its_first_n(objective, low, high, message):
    with pytest.raises(UsageError, match=message):
        gains(objective, low, high)


def test_straight_lines_are_convex_whatever_their_rounding():
    gain = gains(lambda n: 1 - 0.1 * n, 0, 1000)
    assert gain == pytest.approx(0.1) and (np.diff(gain) <= 0).all()
    assert (gains(lambda n: (n - 3) ** 2, 0, 6) == [5, 3, 1, -1, -3, -5]).all(), "losses are gains below 0"


def test_a_function_of_ones_own_by_module_and_name(tmp_path, monkeypatch):
    (tmp_path / "own_objective.py").write_text("def phi(n):\n    return 1 / n\n\nbent = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_objective("own_objective:phi")(np.array([4.0])) == 0.25
    for name, message in (
        ("rlo", "--objective rlo: must be rloo, dr_grpo, or a function of your own as module:function"),
        ("own_objective:", "must be rloo"),
        ("own_objective:psi", "module own_objective has no function psi"),
        ("own_objective:bent", "has no function bent"),
        ("no_such_module:phi", "module no_such_module cannot be imported .* PYTHONPATH"),
    ):
        with pytest.raises(UsageError, match=message):
            find_objective(name)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"objective": "rlo"}, "--objective rlo: must be"),
        ({"objective": "numpy:sin", "min_rollouts": 2}, "objective sin: not discretely convex at n = "),
        ({"objective": "numpy:log"}, "--objective numpy:log: give --min-rollouts too"),
    ],
)
def test_refused_before_anything_is_loaded(options, message):
    with pytest.raises(UsageError, match=message):
        resolve(Config(allocator="vip", device="cpu", threads=1, **options))


def fails(n):
    raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("objective", "message"),
    [(fails, "objective fails: fails on an array of 5 .*KeyError"), (lambda n: 1j / n, "gives values of type complex128")],
)
def test_what_a_users_function_does_wrong_is_named(objective, message):
    with pytest.raises(UsageError, match=message):
        gains(objective, 2, 6)


def test_a_users_function_is_only_ever_given_arrays_and_may_write_on_them():
    def listed(n):
        return np.array([1 / x for x in n])

    def in_place(n):
        return np.divide(1.0, n, out=n)

    a_B, counts_B = np.array([0.1, 0.2]), np.array([3, 4])
    for phi in (listed, in_place):
        assert gains(phi, 2, 6) == pytest.approx(gains(lambda n: 1 / n, 2, 6))
        assert solver.variance_ratio(a_B, counts_B, phi) == pytest.approx(solver.variance_ratio(a_B, counts_B, lambda n: 1 / n))
    assert counts_B.tolist() == [3, 4]
