"""Tokens that a tool put in are context: no loss, no length, no metric reads them, on any rank."""

import copy
import dataclasses
import threading

import numpy as np
import pytest
import torch
from ragged_steps import configured, exact, gradients, sampled, tiny

from vipfast import streams
from vipfast.distributed import ALONE
from vipfast.engine.base import Finished
from vipfast.learn.learner import Learner
from vipfast.learn.share import moved
from vipfast.learn.trainable import Trainable
from vipfast.ledger import Ledger
from vipfast.placement import Placement
from vipfast.rewards.base import Grades
from vipfast.telemetry.step import rollout_metrics
from vipfast.types import Finish, Prompt, PromptBatch, StepPlan

M = 16
REWARD = np.array([1, 0, 0, 1, 0], np.float32)


def with_tool_tokens(model):
    """Groups of 3 and 2; every rollout has 3 of its tokens put in, from its third on, but the last."""
    step = sampled(model, counts=[3, 2], lengths=[8, 6, 9, 7, 5], reward=REWARD)
    for start in step.token_offsets[:4]:
        step.loss_mask[start + 2 : start + 5] = False
    return step


@pytest.mark.parametrize(
    ("weighting", "length_term", "divisors"),
    [
        # 5, 3, 6 | 4, 5 tokens were sampled; of the padded lengths 8, 6, 9 | 7, 5 nothing is heard.
        ("prompt", "constant", [2 * 3 * M] * 3 + [2 * 2 * M] * 2),
        ("prompt", "sequence", [2 * 3 * 5, 2 * 3 * 3, 2 * 3 * 6, 2 * 2 * 4, 2 * 2 * 5]),
        ("prompt", "token", [2 * 14] * 3 + [2 * 9] * 2),
        ("rollout", "sequence", [5 * 5, 5 * 3, 5 * 6, 5 * 4, 5 * 5]),
        ("token", "constant", [23] * 5),
    ],
)
def test_the_gradient_is_that_of_the_sampled_tokens_in_their_context(weighting, length_term, divisors):
    model = exact(tiny())
    step = with_tool_tokens(model)
    config = configured(weighting=weighting, length_term=length_term, max_grad_norm=1e9)
    found, metrics = gradients(Learner(copy.deepcopy(model), config, 0), step)

    model.zero_grad()
    advantages = [1.0, -0.5, -0.5, 1.0, -1.0]  # a reward less the mean of the others in its group
    for i, (advantage, divisor) in enumerate(zip(advantages, divisors)):
        a, b = step.token_offsets[i : i + 2]
        row = torch.from_numpy(np.concatenate([step.prompts[i // 3].tokens, step.tokens[a:b]]))
        logp = torch.log_softmax(model(row[None]).logits[0], -1)[range(len(row) - 1), row[1:]][-(b - a) :]
        (-advantage / divisor * logp[torch.from_numpy(step.loss_mask[a:b])].sum()).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert max(grad.abs().max() for grad in expected.values()) > 1e-3
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=0, atol=1e-6)  # the ratio knows the sampler in float32
    assert metrics["train/trained_rollouts"] == 5


@pytest.mark.parametrize(
    ("kernels", "options"),
    [("off", dict(updates_per_step=2, beta=0.1)), ("required", dict())],
    ids=["torch, two updates and a KL term", "triton"],
)
def test_nothing_reads_the_log_probs_of_what_was_put_in(kernels, options):
    def trained(fill):
        model = tiny()
        step = with_tool_tokens(model)
        logp = np.where(step.loss_mask, step.sampler_logp, np.float32(fill))
        learner = Learner(model, configured(kernels=kernels, **options), 0, tiny(1))
        metrics = learner.update(dataclasses.replace(step, sampler_logp=logp), 0)
        return metrics, torch.cat([p.detach().ravel() for p in model.parameters()])

    (metrics, weights), (others, poisoned) = trained(0.0), trained(np.nan)
    assert torch.equal(weights, poisoned) and weights.isfinite().all() and metrics["train/grad_norm"] > 1e-3
    ours, theirs = ({k: v for k, v in m.items() if not k.startswith("time/")} for m in (metrics, others))
    assert ours == theirs


def test_sync_gap_and_entropy_are_over_sampled_tokens():
    model = tiny()
    step = sampled(model, counts=[40], lengths=[8] * 40, reward=np.arange(40, dtype=np.float32) % 2)
    step.loss_mask.reshape(40, 8)[:, 2:5] = False
    step.sampler_logp[~step.loss_mask] = -50
    assert Learner(model, configured(), 0).sync_gap(step) < 1e-6
    metrics = Learner(copy.deepcopy(model), configured(prompts_per_step=1, rollouts_per_prompt=40), 0).update(step, 0)
    assert metrics["policy/sync_gap"] < 1e-6 and metrics["policy/ratio_raw_max"] < 1.001

    with torch.no_grad():
        rows = torch.from_numpy(np.concatenate([np.tile(step.prompts[0].tokens, (40, 1)), step.tokens.reshape(40, 8)], 1))
        logp = torch.log_softmax(model(rows).logits[:, -9:-1].double(), -1)
    entropy = -(logp.exp() * logp).sum(-1).ravel()[torch.from_numpy(step.loss_mask)].mean()
    assert metrics["policy/entropy"] == pytest.approx(float(entropy), abs=1e-6)


class Two:
    """One of two ranks, each in a thread of its own."""

    size = 2

    def __init__(self, rank, shared):
        self.rank, self.shared = rank, shared

    def gather(self, value):
        slots, barrier = self.shared
        slots[self.rank] = value
        barrier.wait(20)
        found = list(slots)
        barrier.wait(20)
        return found

    def exchange(self, out):
        return [parts[self.rank] for parts in self.gather(out)]

    def split(self, size):
        return ALONE


def on_two_ranks(work):
    shared = [None, None], threading.Barrier(2)
    found = [None, None]
    threads = [threading.Thread(target=lambda r=r: found.__setitem__(r, work(Two(r, shared)))) for r in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


PUT_IN = 99


def collected(ranks):
    """Two prompts with three rollouts each, at home on different ranks; 99 marks tokens that were put in."""
    batch = PromptBatch([Prompt(f"uid{i}", "", np.array([1, 2])) for i in range(2)], 0, 0)
    ledger = Ledger(batch, streams.TRAIN, 1.0, Placement(ranks))
    for request in ledger.ask(np.array([3, 3])):
        rows = []
        for index in range(3):
            tokens = np.array([5, 6, *[PUT_IN] * (request.slot + index), 7])
            logp = np.where(tokens == PUT_IN, 0, -1).astype(np.float32)
            rows.append(Finished(request.slot, index, tokens, logp, Finish.STOP, tokens != PUT_IN))
        ledger.book(rows[::-1], Grades.plain([1, 0, 1]))
    return ledger.rollouts(StepPlan.plain([np.array([3, 3])])), ledger.tally


def test_every_rank_knows_what_was_sampled_on_any():
    (one, tally), (other, _) = on_two_ranks(collected)
    whole, _ = collected(ALONE)
    assert set(one.holder_R.tolist()) == {0, 1}
    assert not whole.loss_mask.all() and (whole.loss_mask == (whole.tokens != PUT_IN)).all()
    config = configured(prompts_per_step=2, rollouts_per_prompt=3)
    for rollouts in (one, other):
        np.testing.assert_array_equal(rollouts.loss_mask, whole.loss_mask)
        np.testing.assert_array_equal(Trainable.of(rollouts, config).length_R, [3] * 6)
        assert rollout_metrics(rollouts, tally)["budget/tokens"] == 18
        assert rollout_metrics(rollouts, tally)["rollout/tokens_max"] == 6


def test_rows_that_change_hands_keep_their_masks():
    def work(ranks):
        rollouts, _ = collected(ranks)
        return moved(rollouts, 1 - rollouts.holder_R, ranks)

    for rank, rollouts in enumerate(on_two_ranks(work)):
        held_T = np.repeat(rollouts.holder_R == rank, rollouts.lengths_R)
        assert held_T.any() and (rollouts.tokens[~held_T] == -1).all()
        np.testing.assert_array_equal(rollouts.loss_mask[held_T], rollouts.tokens[held_T] != PUT_IN)
