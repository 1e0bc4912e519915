"""benchmarks/gradient_variance.py: its arithmetic against answers worked by hand, and its scores against plain autograd."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vipfast.allocate.uniform import Uniform
from vipfast.rollout import collect
from vipfast.starter.model import PAD_ID, make_model
from vipfast.types import Finish, Prompt, PromptBatch, Rollouts, StepPlan

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    """The benchmark as a module; its neighbour common.py is found as it is when the file runs as a script."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("gradient_variance", BENCHMARKS / "gradient_variance.py")
        sys.modules["gradient_variance"] = module = importlib.util.module_from_spec(spec)  # dataclasses look it up there
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))
        sys.modules.pop("gradient_variance", None)
        sys.modules.pop("common", None)


def rollouts_of(prompts, completions, counts):
    """A step of ``counts`` rollouts per prompt with these completions; rewards 1, 0, 1, 0, …"""
    lengths = [len(completion) for completion in completions]
    offsets = lambda values: np.concatenate([[0], np.cumsum(values)]).astype(np.int64)  # noqa: E731
    rows = len(completions)
    return Rollouts(
        prompts=[Prompt(f"p{i}", "", np.array(tokens)) for i, tokens in enumerate(prompts)],
        prompt_tokens=np.concatenate(prompts),
        prompt_offsets=offsets([len(tokens) for tokens in prompts]),
        group_offsets=offsets(counts),
        token_offsets=offsets(lengths),
        tokens=np.concatenate(completions),
        loss_mask=np.ones(sum(lengths), bool),
        sampler_logp=np.zeros(sum(lengths), np.float32),
        reward=np.arange(1, rows + 1, dtype=np.float32) % 2,
        index=np.arange(rows),
        round=np.zeros(rows, np.int64),
        finish=np.full(rows, Finish.STOP, np.uint8),
        plan=StepPlan.plain([np.array(counts)]),
    )


def test_two_gradients_by_hand(bench):
    moments = bench.Moments.of(np.array([[1.0, 0.0], [3.0, 0.0]]), np.array([1.0, 1.0]))
    assert moments == (5.0, 3.0, 2.0, 2.0)  # mean (2, 0): (2 * 4 - 5) / 1
    assert moments.error() == 3.0  # (1 + 5) / 2
    assert moments.bias() == 1.0 and moments.square - moments.mean_square == 2.0
    assert moments.length() == 1.0


def test_shrinking_gains_nothing_once_rescaled(bench):
    rng = np.random.default_rng(0)
    truth_BD, noise = rng.normal(size=(6, 5)), 2 * rng.normal(size=(6, 50, 5))
    columns = lambda scale: bench.Moments(  # noqa: E731
        *np.array([bench.Moments.of(scale * (truth + part), truth) for truth, part in zip(truth_BD, noise)]).T
    )
    row = bench.compare(columns(0.3), columns(1.0))
    assert row["mse_ratio"] < 0.5 and row["rescaled"] == 1.0
    assert row["rescaled_interval"] == [1.0, 1.0] and row["mse_ratio_interval"][1] < 0.7


def test_uniform_draws_have_the_error_of_the_estimator(bench):
    # Rewards 0 and 1 with scores -1 and 1: two leave-one-out rollouts give 0 or 1 with probability 1/2 each; the truth is 1/2.
    # A common shift of the scores must not matter: a policy's have mean 0.
    pool = bench.Pool(
        rollouts_of([[5]], [[7], [8]], [2]), np.array([0, 1]), np.array([[0, 1]]), np.array([[0.0, 1.0]]),
        np.array([[-1.0], [1.0]], np.float32) + 10,
    )  # fmt: skip
    truth_D = pool.truth() @ pool.score_UD
    gradients = []
    for draw in range(400):
        sampler = bench.Sampler(pool.reward_BK, np.random.default_rng(draw))
        batch = PromptBatch([Prompt("a", "", np.array([5]))], 1, draw)
        rollouts, _, _ = collect(Uniform(), batch, 2, sampler, sampler)
        gradients.append(pool.estimate(rollouts, "rloo", "prompt") @ pool.score_UD)
    assert truth_D == pytest.approx([0.5])
    assert set(np.round(np.ravel(gradients), 5)) == {0.0, 1.0}
    assert bench.Moments.of(np.array(gradients), truth_D).error() == pytest.approx(0.25)
    assert np.mean(gradients) == pytest.approx(0.5, abs=0.075)  # three standard errors
    assert pool.variance_B == pytest.approx([0.0])  # (r - p) s is 1/2 for both


def test_scores_are_those_of_autograd_and_folding_keeps_lengths(bench):
    model = make_model(0).eval()
    trainer = SimpleNamespace(
        model=model, config=SimpleNamespace(temperature=0.8), tokenizer=SimpleNamespace(pad_token_id=PAD_ID)
    )
    prompts, completions = [[5, 6], [9, 9, 9]], [[1, 2, 3], [4], [7, 7]]
    rollouts, rows = rollouts_of(prompts, completions, [2, 1]), np.array([0, 1, 2])
    found = {}
    for rows_u, parts in bench.score_gradients(trainer, rollouts, rows):
        found.update(zip(rows_u, zip(torch.cat(parts, 1), bench.fold(parts))))
    for i, prompt in enumerate([prompts[0], prompts[0], prompts[1]]):
        ids = torch.tensor([prompt + completions[i]])
        logp = (model(ids).logits[0, :-1] / 0.8).log_softmax(-1).gather(1, ids[0, 1:, None])
        model.zero_grad()
        logp[len(prompt) - 1 :].sum().backward()
        expected = torch.cat([weight.grad.flatten() for weight in model.parameters()])
        whole, folded = found[i]
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
        assert np.linalg.norm(folded) == pytest.approx(float(expected.norm()), rel=0.1)
