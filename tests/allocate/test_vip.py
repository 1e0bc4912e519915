"""VIP end to end on counts: plans by its predictor's signal, learns afterwards, and reports how good the predictions were."""

import math
import warnings

import numpy as np
import pytest

from vipfast import xp
from vipfast.allocate.objective import OBJECTIVES
from vipfast.allocate.vip import Vip
from vipfast.allocation import make_allocator
from vipfast.config import Config
from vipfast.errors import BudgetError, CheckpointError, UsageError
from vipfast.predict import make_predictor
from vipfast.predict.base import Prediction
from vipfast.predict.gp import GP
from vipfast.predict.paper import PaperGP
from vipfast.resolve import resolve
from vipfast.types import Prompt, PromptBatch, Tally

UIDS = [f"u{i:03d}" for i in range(64)]
HARD = np.arange(64) % 2 == 0
# Hard and mixed prompts sit in two clusters of the text space.
X = (np.where(HARD, -3.0, 3.0)[:, None] * np.eye(8)[0] + np.random.default_rng(0).normal(size=(64, 8))).astype(np.float32)
P = np.where(HARD, 0.002, 0.5)


class Known:
    """A predictor that knows the answer, to test the allocator alone."""

    name = "known"

    def predict(self, uids, texts):
        p = P[[int(text) for text in texts]]
        return Prediction(p, 0 * p, p * (1 - p))

    def update(self, uids, texts, successes, trials, step):
        self.learned = (uids, texts, successes.tolist(), trials.tolist(), step)


def embed(texts):
    return X[[int(text) for text in texts]]


def vip(kind=GP):
    return Vip(kind(embed, [str(i) for i in range(64)]) if kind is not Known else Known(), "rloo", 2, 32)


def batch(rows, step=1):
    return PromptBatch([Prompt(UIDS[i], str(i), np.zeros(0, np.int64)) for i in rows], step, seed=0)


def step_of(allocator, rows, step=1, unscored=()):
    prompts = batch(rows, step)
    rounds = allocator.rounds(prompts, 8 * len(rows))
    counts = next(rounds)
    tally = Tally.empty(prompts.uids)
    for slot, i in enumerate(rows):
        rewards = (np.random.default_rng([i, step]).random(counts[slot]) < P[i]).astype(float)
        tally.add(slot, np.full(counts[slot], np.nan) if i in unscored else rewards, 1.0, tokens=0, truncated=0)
    with pytest.raises(StopIteration) as end:
        rounds.send(tally)
    return end.value.value, tally, allocator.learn(tally)


def test_plans_by_the_predicted_signal_and_notes_what_it_expects():
    plan, tally, _ = step_of(vip(Known), [0, 1, 2, 3], step=5)
    # a = [.002, .25, .002, .25]: gains of .25 beat those of .002 until n(n-1) > 125, so the easy ones stay at 2.
    assert plan.asked_KB.tolist() == [[2, 14, 2, 14]] and plan.predicted_B.tolist() == P[:4].tolist()
    a = P[:4] * (1 - P[:4])
    assert plan.note["alloc/ceiling"] == pytest.approx(np.sqrt(a).sum() ** 2 / (4 * a.sum()))
    expected = (2 * 0.25 / 13 + 2 * 0.001996) / (2 * (0.25 + 0.001996) / 7)
    assert plan.note["alloc/var_ratio_expected"] == pytest.approx(expected)
    assert (plan.note["alloc/at_min"], plan.note["alloc/at_max"]) == (0.5, 0.0)


def test_notes_how_many_prompts_are_at_the_upper_bound():
    allocator = Vip(Known(), "rloo", 2, 14)
    plan, _, _ = step_of(allocator, [0, 1, 2, 3])
    assert plan.asked_KB.tolist() == [[2, 14, 2, 14]]
    assert (plan.note["alloc/at_min"], plan.note["alloc/at_max"]) == (0.5, 0.5)


def test_learns_counts_of_scored_rollouts_and_judges_predictions_made_before():
    allocator = vip(Known)
    _, tally, metrics = step_of(allocator, [0, 1, 2, 3], step=5, unscored={1})
    uids, texts, successes, trials, step = allocator.predictor.learned
    assert (uids, texts, step) == (UIDS[:4], list("0123"), 5)
    assert trials == [2, 0, 2, 14] and successes == tally.successes.tolist()
    rate = tally.successes[[0, 2, 3]] / tally.scored[[0, 2, 3]]
    p = P[[0, 2, 3]]
    assert metrics["predict/brier"] == pytest.approx(np.mean(rate * (1 - p) ** 2 + (1 - rate) * p**2))


@pytest.mark.parametrize("kind", [GP, PaperGP])
def test_first_step_is_uniform_and_later_steps_favour_the_informative(kind):
    allocator = vip(kind)
    rng = np.random.default_rng(0)
    for step in range(6):
        rows = rng.permutation(64)[:32]
        plan, _, metrics = step_of(allocator, rows, step)
        assert plan.counts_B.sum() == 256 and plan.counts_B.min() >= 2 and plan.counts_B.max() <= 32
        assert set(metrics) == {"predict/brier", "predict/log_loss", "predict/corr", "predict/slope"}
        assert all(value is None or math.isfinite(value) for value in metrics.values())
        if step == 0:
            assert (plan.counts_B == 8).all() and metrics["predict/corr"] is None
    hard = HARD[rows]
    assert plan.counts_B[~hard].mean() > 1.5 * plan.counts_B[hard].mean()
    assert plan.note["alloc/var_ratio_expected"] < 1 and 0 < plan.note["alloc/ceiling"] < 1


def test_partial_credit_is_planned_by_the_rewards_variance():
    # Even prompts always earn .5, odd ones 0, .5 or 1: a success threshold of 1 would call both mostly failures.
    allocator = vip()
    for step in range(6):
        prompts = batch(range(64), step)
        rounds = allocator.rounds(prompts, 8 * 64)
        counts = next(rounds)
        tally = Tally.empty(prompts.uids)
        for slot in range(64):
            drawn = np.random.default_rng([slot, step]).integers(0, 3, counts[slot]) / 2
            tally.add(slot, np.full(counts[slot], 0.5) if HARD[slot] else drawn, 1.0, tokens=0, truncated=0)
        with pytest.raises(StopIteration):
            rounds.send(tally)
        metrics = allocator.learn(tally)
    assert counts[HARD].max() <= 4 < 10 < counts[~HARD].mean()
    assert 0 < metrics["predict/brier"] < 0.2


def test_a_predictor_that_is_no_help_is_told_of_once_even_across_a_resume():
    def noisy():
        allocator = vip(Known)
        allocator.predictor.state_dict, allocator.predictor.load_state_dict = dict, lambda state: None
        fixed = Prediction(np.full(8, 0.97), np.zeros(8), np.full(8, 0.1))
        allocator.predictor.predict = lambda uids, texts: fixed
        return allocator

    first = noisy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(15):
            step_of(first, range(8), step)
    second = noisy()
    second.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match="--predictor known: for 20 steps in a row .* no better than the pool's mean") as told:
        for step in range(15, 60):
            step_of(second, range(8), step)
    assert len(told) == 1


@pytest.mark.parametrize("kind", [GP, PaperGP])
def test_shuffling_prompts_shuffles_counts_and_changes_nothing_else(kind):
    one, other = vip(kind), vip(kind)
    rng = np.random.default_rng(1)
    for step in range(4):
        rows = rng.permutation(64)[:32]
        order = rng.permutation(32)
        plan, _, metrics = step_of(one, rows, step)
        shuffled, _, other_metrics = step_of(other, rows[order], step)
        assert (shuffled.counts_B == plan.counts_B[order]).all()
        assert (shuffled.predicted_B == plan.predicted_B[order]).all()
        for key, value in metrics.items():
            assert other_metrics[key] == (None if value is None else pytest.approx(value, rel=1e-6)), key


@pytest.mark.parametrize("kind", [GP, PaperGP])
def test_state_restores_bit_for_bit_also_into_a_reordered_dataset(kind):
    one = vip(kind)
    for step in range(3):
        step_of(one, np.arange(step * 16, step * 16 + 32) % 64, step)
    other = Vip(kind(embed, [str(i) for i in reversed(range(64))]), "rloo", 2, 32)
    other.load_state_dict(one.state_dict())
    for step in range(3, 6):
        rows = np.arange(step * 16, step * 16 + 32) % 64
        plan, _, metrics = step_of(one, rows, step)
        again, _, same_metrics = step_of(other, rows, step)
        assert (again.counts_B == plan.counts_B).all() and (again.predicted_B == plan.predicted_B).all()
        assert same_metrics == metrics


def test_state_of_another_predictor_is_refused():
    with pytest.raises(CheckpointError, match="--predictor gp: .* 'vip'"):
        vip(GP).load_state_dict(vip(PaperGP).state_dict())


@pytest.mark.parametrize("reward", [0.0, 1.0, np.nan], ids=["zeros", "ones", "unscored"])
@pytest.mark.parametrize("kind", [GP, PaperGP])
def test_steps_without_any_signal_go_on(kind, reward):
    allocator = vip(kind)
    for step in range(5):
        prompts = batch(range(32), step)
        counts = next(allocator.rounds(prompts, 256))
        assert counts.sum() == 256 and counts.min() >= 2
        tally = Tally.empty(prompts.uids)
        for slot in range(32):
            tally.add(slot, np.full(counts[slot], reward), 1.0, 0, 0)
        metrics = allocator.learn(tally)
        assert metrics["predict/slope"] is None and all(value is None or math.isfinite(value) for value in metrics.values())


def test_one_failure_never_starves_a_prompt():
    allocator = vip(PaperGP)
    tally = Tally.empty(UIDS[:2])
    next(allocator.rounds(batch([0, 1]), 16))
    tally.add(0, np.zeros(1), 1.0, 0, 0)
    tally.add(1, np.array([0.0, 1.0]), 1.0, 0, 0)
    allocator.learn(tally)
    assert next(allocator.rounds(batch([0, 1]), 16)).tolist() == [2, 14]
    tally = Tally.empty(UIDS[:2])
    tally.add(0, np.array([0.0, 1.0]), 1.0, 0, 0)
    allocator.learn(tally)
    assert next(allocator.rounds(batch([0, 1]), 16))[0] >= 8, "measured again at the lower bound, it recovers"


@pytest.mark.parametrize(
    "options, objective, low",
    [
        ({}, "rloo", 2),
        ({"estimator": "dr_grpo"}, "dr_grpo", 3),
        ({"estimator": "grpo"}, "dr_grpo", 3),
        ({"estimator": "grpo", "objective": "rloo", "min_rollouts": 4}, "rloo", 4),
    ],
)
def test_bounds_and_objective_follow_the_estimator(options, objective, low):
    allocator = make_allocator(Config(allocator="vip", **options))
    assert allocator.objective is OBJECTIVES[objective] and (allocator.low, allocator.high) == (low, 32)


def test_bad_bounds_fail_before_anything_is_loaded():
    with pytest.raises(BudgetError, match="C = 64 .* B = 64 .* L = 2 .* U = 32"):
        make_allocator(Config(allocator="vip", rollouts_per_prompt=1))
    with pytest.raises(UsageError, match="--min-rollouts 1: --objective rloo needs at least 2"):
        make_allocator(Config(allocator="vip", min_rollouts=1))


@pytest.mark.parametrize("name, given", [("p", np.nan), ("p", 1.5), ("signal", np.nan), ("signal", np.inf), ("signal", -1.0)])
def test_predictions_that_make_no_sense_are_refused_by_name(name, given):
    allocator = vip(Known)
    p, signal = np.full(4, 0.5), np.full(4, 0.25)
    (p if name == "p" else signal)[2] = given
    allocator.predictor.predict = lambda uids, texts: Prediction(p, 0 * p, signal)
    with pytest.raises(ValueError, match=f"prompt 'u002' .* {given}" if name == "p" else f"prompt 2 of 4 has {given}"):
        next(allocator.rounds(batch([0, 1, 2, 3]), 32))


def test_an_objective_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "mine_phi.py").write_text("def phi(n):\n    return 1 / n\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="--objective mine_phi:phi: give --min-rollouts too"):
        make_allocator(Config(allocator="vip", objective="mine_phi:phi"))
    allocator = make_allocator(Config(allocator="vip", objective="mine_phi:phi", min_rollouts=1, rollouts_per_prompt=3))
    allocator.predictor = Known()
    counts = next(allocator.rounds(batch(range(8)), 24))
    # sqrt(.25 / .001996) = 11.2 times as many, so the hard ones stay at 1 until the mixed have 5.
    assert counts.tolist() == [1, 5] * 4
    resolved = resolve(
        Config(allocator="vip", objective="mine_phi:phi", min_rollouts=1, device="cpu", threads=1, output_dir="x")
    ).config
    assert (resolved.objective, resolved.min_rollouts) == ("mine_phi:phi", 1)


def test_a_gpu_that_cannot_be_used_is_told_once(monkeypatch):
    monkeypatch.setattr(xp, "choose", lambda device: (np, "of this") if device == "cuda" else (np, None))
    with pytest.warns(UserWarning, match="--device cuda: allocation runs on the CPU, since of this"):
        assert make_allocator(Config(allocator="vip", device="cuda")).arrays is np
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_allocator(Config(allocator="vip", device="cpu"))


def test_predictors_by_name():
    assert isinstance(make_predictor("gp", []), GP) and isinstance(make_predictor("vip", []), PaperGP)
    with pytest.raises(UsageError, match="--predictor ridge: must be one of gp, kernel_beta, beta, vip"):
        make_predictor("ridge", [])
