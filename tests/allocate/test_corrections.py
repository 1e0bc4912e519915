"""VIGOR's corrections, measured on what the update really adds up: plan, advantages and weights of simulated steps.

A rollout with reward r ~ Bernoulli(p) has the score r - p, so a prompt's gradient sum_i w_i A_i (r_i - p) should be p (1-p)
times its weight. The share of that which each rule delivers is the table of biases below (p uniform on (0, 1), defaults of
VIGOR, 160 prompts): 1 for a fixed number of rollouts; .48 to .58 for VIGOR as published, 1.06 where its survivors alone enter;
1 for lagged baselines where rollouts weigh the same, .57 to .95 where prompts do; 1 for the last round alone; .25 to .52 for
each prompt's own last round. Sampling until the first success gives rare ones too much: 1.57 of the exact gradient at p = .05.
"""

import dataclasses
import heapq
from math import comb

import numpy as np
import pytest

import vipfast.allocation
from vipfast.allocate.uniform import Uniform
from vipfast.allocate.vigor import Schedule, Vigor
from vipfast.allocation import make_allocator
from vipfast.config import Config
from vipfast.engine.base import Finished
from vipfast.errors import CheckpointError, UsageError
from vipfast.kernels.policy_loss import group_advantages_ref
from vipfast.learn.advantage import rollout_weights
from vipfast.predict.base import Prediction
from vipfast.rewards.base import Grades
from vipfast.rollout import collect
from vipfast.types import ZERO_ONE, Finish, Prompt, PromptBatch, StepPlan, Tally

B, C, STEPS = 160, 1280, 120
PROMPTS = [Prompt(f"u{i}", f"text {i}", np.zeros(0, np.int64)) for i in range(B)]


class Guess:
    """Baselines that are no good, but were there before the step: any such baseline leaves the gradient exact."""

    name = "guess"

    def __init__(self):
        self.learned = []

    def predict(self, uids, texts):
        p = np.array([int(uid[1:]) * 0.37 % 1 for uid in uids])
        return Prediction(p, 0 * p, p * (1 - p))

    def update(self, uids, texts, successes, trials, step):
        self.learned.append((uids[0], texts[0], int(successes[0]), int(trials[0]), step))

    def state_dict(self):
        return {"steps": len(self.learned)}

    def load_state_dict(self, state):
        self.learned = [None] * state["steps"]


def play(allocator, p_B, step, rng):
    """The plan of one step, and its rewards float [R], rows by prompt and round."""
    batch = PromptBatch(PROMPTS[: len(p_B)], step, seed=0)
    tally, successes = Tally.empty(batch.uids), []
    rounds = allocator.rounds(batch, 8 * len(p_B))
    counts_B = next(rounds)
    while True:
        successes.append(rng.binomial(counts_B, p_B))
        tally.asked += counts_B
        tally.scored += counts_B
        tally.successes += successes[-1]
        tally.mean = tally.successes / np.maximum(tally.scored, 1)
        tally.m2 = tally.successes * (1 - tally.mean)
        try:
            counts_B = rounds.send(tally)
        except StopIteration as end:
            plan = end.value
            break
    won_BK = np.array(successes).T
    rewards_R = np.repeat(np.tile([1.0, 0.0], won_BK.size), np.stack([won_BK, plan.asked_KB.T - won_BK], -1).ravel())
    return plan, rewards_R, tally


def gradients(plan, rewards_R, p_B, weighting):
    """float64 [B], what each prompt adds to the gradient of the loss (completions of one token)."""
    counts_B = plan.counts_B
    offsets = np.concatenate([[0], np.cumsum(counts_B)])
    advantage_R = group_advantages_ref(rewards_R, offsets, plan.use_R, plan.baseline_B, "rloo").numpy()
    weight_R = rollout_weights(offsets, np.ones(len(rewards_R), int), plan, weighting, "constant", 1)
    group_R = np.repeat(np.arange(len(p_B)), counts_B)
    return np.bincount(group_R, weight_R * advantage_R * (rewards_R - p_B[group_R]), minlength=len(p_B))


def share(allocator, weighting, change=lambda plan: plan):
    """Mean share of the exact gradient that a used prompt gets over many steps, and its standard error."""
    rng = np.random.default_rng(0)
    got, exact = [], []
    for step in range(STEPS):
        p_B = rng.uniform(size=B)
        plan, rewards_R, _ = play(allocator, p_B, step, rng)
        plan = change(plan)
        used_B = plan.used_B
        weight_B = used_B / used_B.sum() if weighting == "rollout" else (used_B > 0) / (used_B > 0).sum()
        got.append(gradients(plan, rewards_R, p_B, weighting).sum())
        exact.append((weight_B * p_B * (1 - p_B)).sum())
    got, exact = np.array(got), np.array(exact)
    return got.mean() / exact.mean(), (got - exact * got.mean() / exact.mean()).std() / exact.mean() / np.sqrt(STEPS)


class UntilSolved:
    """Rounds of 8 for whoever has not succeeded, 4 at most."""

    def rounds(self, prompts, budget):
        asked_KB, open_B = [], np.ones(len(prompts), bool)
        while len(asked_KB) < 4 and open_B.any():
            asked_KB.append(8 * open_B)
            tally = yield asked_KB[-1]
            open_B = tally.successes == 0
        return StepPlan.plain(asked_KB)


def own_last_round(plan):
    asked = plan.asked_KB > 0
    last_B = len(asked) - 1 - np.argmax(asked[::-1], axis=0)
    return dataclasses.replace(plan, use_KB=np.arange(len(asked))[:, None] == last_B)


UNBIASED = {
    "fixed number": (Uniform(), "prompt"),
    "lagged, rollouts weigh the same": (Vigor(Schedule(2), correction="lagged", predictor=Guess()), "rollout"),
    "fresh": (Vigor(Schedule(2), correction="fresh"), "prompt"),
    "fresh, rollouts weigh the same": (Vigor(Schedule(2), correction="fresh"), "rollout"),
}
BIASED = {
    "as published": (Vigor(Schedule(2)), "prompt", lambda plan: plan, 0.48, 0.58),
    "as published, by posterior": (Vigor(Schedule(2), "posterior"), "prompt", lambda plan: plan, 0.48, 0.58),
    "lagged, prompts weigh the same": (
        Vigor(Schedule(2), correction="lagged", predictor=Guess()),
        "prompt",
        lambda plan: plan,
        0.57,
        0.95,
    ),
    "own last round": (Vigor(Schedule(2)), "prompt", own_last_round, 0.25, 0.52),
    # The rewards that chose the survivors, since they vary most, are among those that enter.
    "survivors of the last cut alone": (Vigor(Schedule(2), update_on="final"), "prompt", lambda plan: plan, 1.055, 1.065),
}


@pytest.mark.parametrize("name", UNBIASED)
def test_these_add_up_to_the_exact_gradient(name):
    ratio, error = share(*UNBIASED[name])
    assert error < 0.015 and abs(ratio - 1) < 4 * error


@pytest.mark.parametrize("name", BIASED)
def test_these_are_off_by_as_much_as_is_known(name):
    allocator, weighting, change, least, most = BIASED[name]
    ratio, error = share(allocator, weighting, change)
    assert error < 0.02 and least - 4 * error < ratio < most + 4 * error and abs(ratio - 1) > 6 * error


def test_stopping_at_the_first_success_overrates_rare_ones():
    # E[k/n (1 - k/n) n/(n - 1)] over the round t that ends it and its k successes of 8.
    p, expected = 0.05, 0.0
    for t, k in ((t, k) for t in range(1, 5) for k in range(1, 9)):
        n, chance = 8 * t, comb(8, k) * p**k * (1 - p) ** (8 * t - k)
        expected += chance * k / n * (1 - k / n) * n / (n - 1) / (p * (1 - p))
    rng, got = np.random.default_rng(2), []
    for step in range(100):
        plan, rewards_R, _ = play(UntilSolved(), np.full(B, p), step, rng)
        got.append(gradients(plan, rewards_R, np.full(B, p), "prompt").sum() / (p * (1 - p)))
    error = np.std(got) / np.sqrt(len(got))
    assert expected == pytest.approx(1.57, abs=0.005)
    assert error < 0.015 and abs(np.mean(got) - expected) < 4 * error


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_lagged_and_fresh_are_exact_for_hard_and_easy_prompts_alike(p):
    rng, p_B = np.random.default_rng(1), np.full(B, p)
    for allocator, weighting in (UNBIASED["lagged, rollouts weigh the same"], UNBIASED["fresh"]):
        got = []
        for step in range(60):
            plan, rewards_R, _ = play(allocator, p_B, step, rng)
            got.append(gradients(plan, rewards_R, p_B, weighting).sum() / (p * (1 - p)))
        error = np.std(got) / np.sqrt(len(got))
        assert abs(np.mean(got) - 1) < 4 * error + 1e-12


def test_lagged_plans_against_the_prediction_and_learns_afterwards():
    predictor = Guess()
    allocator = Vigor(Schedule(2), correction="lagged", predictor=predictor)
    plan, _, tally = play(allocator, np.full(B, 0.3), 7, np.random.default_rng(0))
    expected = predictor.predict(tally.uids, None)[0]
    assert plan.use_KB.all() and (plan.weight_B == 1).all() and plan.counts_B.sum() == C
    assert (plan.baseline_B == expected).all() and (plan.predicted_B == expected).all() and not predictor.learned
    metrics = allocator.learn(tally)
    assert predictor.learned == [("u0", "text 0", tally.successes[0], tally.scored[0], 7)]
    assert metrics["predict/brier"] > 0 and set(metrics) == {f"predict/{x}" for x in ("brier", "log_loss", "corr", "slope")}


def test_fresh_uses_the_last_round_of_those_alive_in_it():
    plan, *_ = play(Vigor(Schedule(2), correction="fresh"), np.full(B, 0.3), 1, np.random.default_rng(0))
    assert plan.counts_B.sum() == C and np.isnan(plan.baseline_B).all()
    assert not plan.use_KB[:-1].any() and (plan.use_KB[-1] == (plan.asked_KB[-1] > 0)).all()
    assert sorted(set(plan.used_B.tolist())) == [0, 16] and (plan.used_B > 0).sum() == 20
    # A step so small that the money is gone before the last round ends with the round that was played.
    plan, *_ = play(Vigor(Schedule(8), correction="fresh"), np.full(3, 0.3), 1, np.random.default_rng(0))
    assert len(plan.asked_KB) == 1 and plan.use_KB.all()


def test_only_lagged_keeps_a_state_and_it_must_be_its_own():
    assert Vigor(Schedule(2), correction="fresh").state_dict() == {}
    one, other = (Vigor(Schedule(2), correction="lagged", predictor=Guess()) for _ in range(2))
    _, _, tally = play(one, np.full(B, 0.3), 1, np.random.default_rng(0))
    one.learn(tally)
    assert one.state_dict() == {"predictor": "guess", "steps": 1}
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    with pytest.raises(CheckpointError, match="predictor guess: .* 'gp'"):
        other.load_state_dict({"predictor": "gp"})


def test_lagged_owns_a_predictor_of_each_prompts_history(monkeypatch):
    asked = []
    monkeypatch.setattr(vipfast.allocation, "make_predictor", lambda *arguments: asked.append(arguments) or Guess())
    config = Config(allocator="vigor", correction="lagged", weighting="rollout")
    assert make_allocator(config, [("u0", "text 0")]).predictor.name == "guess" and asked == [("beta", [("u0", "text 0")])]
    assert make_allocator(Config(allocator="vigor", correction="fresh")).predictor is None and len(asked) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "--correction lagged: --weighting prompt divides by counts .* use --weighting rollout, or --correction fresh"),
        ({"weighting": "token"}, "--correction lagged: --weighting token"),
        ({"weighting": "rollout", "update_on": "final"}, "--correction lagged: --update-on final leaves out"),
        ({"weighting": "rollout", "estimator": "grpo"}, "--estimator grpo divides .* use --estimator rloo or dr_grpo"),
    ],
)
def test_lagged_refuses_what_would_bring_the_bias_back(options, message):
    with pytest.raises(UsageError, match=message):
        Config(allocator="vigor", correction="lagged", **options)


@pytest.mark.parametrize("prediction", [np.nan, np.inf, -0.1, 1.1])
def test_a_prediction_that_is_no_probability_is_named(prediction):
    predictor = Guess()
    predictor.predict = lambda uids, texts: (np.where(np.arange(len(uids)) == 2, prediction, 0.5), None)
    with pytest.raises(ValueError, match=rf"predictor guess: expects prompt 'u2' .* {prediction}, .* \(1 of 160"):
        next(Vigor(Schedule(2), correction="lagged", predictor=predictor).rounds(PromptBatch(PROMPTS, 1, 0), C))


class Uneven:
    """Engine and grader of one-token completions, where right answers come back sooner than wrong ones, as they often do."""

    name, reward_range = "uneven", ZERO_ONE

    def __init__(self, p_B, rng):
        self.p_B, self.rng, self.rows = p_B, rng, []

    @property
    def pending(self):
        return len(self.rows)

    def submit(self, requests):
        for request in requests:
            won = self.rng.random(request.count) < self.p_B[request.slot]
            ends = self.rng.exponential(np.where(won, 1, 4)) + (self.rows[0][0] if self.rows else 0)
            for i in range(request.count):
                heapq.heappush(self.rows, (ends[i], request.slot, request.first_index + i, float(won[i])))

    def step(self):
        done = [heapq.heappop(self.rows) for _ in range(min(24, len(self.rows)))]
        self.rewards = [row[3] for row in done]
        return [Finished(slot, index, np.zeros(1, int), np.zeros(1, np.float32), Finish.STOP) for _, slot, index, _ in done]

    def grade(self, prompts, finished):
        return Grades.plain(self.rewards)


@pytest.mark.parametrize("mode", ["early", "streaming"])
@pytest.mark.parametrize("correction, weighting", [("lagged", "rollout"), ("fresh", "prompt")])
def test_corrections_hold_where_rounds_do_not_wait(mode, correction, weighting):
    predictor = Guess() if correction == "lagged" else None
    allocator = Vigor(Schedule(2), correction=correction, predictor=predictor, round_mode=mode)
    rng, got, exact = np.random.default_rng(0), [], []
    for step in range(40):
        p_B = rng.uniform(size=64)
        engine = Uneven(p_B, rng)
        rollouts, _, _ = collect(allocator, PromptBatch(PROMPTS[:64], step, 0), 512, engine, engine)
        used_B = rollouts.plan.used_B
        weight_B = used_B / used_B.sum() if weighting == "rollout" else (used_B > 0) / (used_B > 0).sum()
        got.append(gradients(rollouts.plan, rollouts.reward.astype(float), p_B, weighting).sum())
        exact.append((weight_B * p_B * (1 - p_B)).sum())
    got, exact = np.array(got), np.array(exact)
    ratio, error = got.mean() / exact.mean(), (got - exact * got.mean() / exact.mean()).std() / exact.mean() / np.sqrt(40)
    assert error < 0.05 and abs(ratio - 1) < 4 * error
