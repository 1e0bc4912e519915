import copy
import dataclasses
import io
import math

import numpy as np
import pytest
import torch
from ragged_steps import COUNTS, configured, exact, gradients, params, same, sampled, tiny

from vipfast.errors import NonFiniteError, SyncError, UsageError
from vipfast.learn.learner import Learner
from vipfast.state import load_state, save_state
from vipfast.types import Finish, StepPlan

NAMES = {
    "policy/entropy", "policy/kl", "policy/clip_frac_low", "policy/clip_frac_high", "policy/ratio_raw_mean",
    "policy/ratio_raw_max", "policy/sync_gap", "train/loss", "train/grad_norm", "train/lr", "train/skipped",
    "train/padding_share", "train/trained_rollouts", "train/advantage_abs_mean", "time/logprob_s", "time/update_s",
}  # fmt: skip


def naive_gradients(model, step, temperature=1.0, M=16):
    """prompt x constant, rloo, on-policy: -sum A/(B n M) v rho by autograd through dense logits, one rollout at a time."""
    model = copy.deepcopy(model).double()
    B, total = int((step.counts_B > 0).sum()), 0.0
    for q in range(step.num_prompts):
        rows = range(step.group_offsets[q], step.group_offsets[q + 1])
        scored = [float(step.reward[i]) for i in rows if not math.isnan(step.reward[i])]
        for i in rows:
            if math.isnan(step.reward[i]) or len(set(scored)) < 2:
                continue
            a, b = step.token_offsets[i], step.token_offsets[i + 1]
            advantage = (float(step.reward[i]) - sum(scored) / len(scored)) * len(scored) / (len(scored) - 1)
            row = torch.from_numpy(np.concatenate([step.prompts[q].tokens, step.tokens[a:b]]))
            logp = torch.log_softmax(model(row[None]).logits[0] / temperature, -1)[range(len(row) - 1), row[1:]][-(b - a) :]
            mask = torch.from_numpy(step.loss_mask[a:b])
            v = (logp.detach() - torch.from_numpy(step.sampler_logp[a:b])).exp().clamp(max=2)
            total = total - advantage / (B * len(rows) * M) * (v * (logp - logp.detach()).exp())[mask].sum()
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()}, float(total.detach())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradient_equals_dense_autograd(tied, temperature):
    model = exact(tiny(tied=tied))
    step = sampled(model, temperature=temperature)
    step.reward[2] = np.nan
    step.loss_mask[5:9] = False
    expected, loss = naive_gradients(model, step, temperature)
    found, metrics = gradients(Learner(model, configured(temperature=temperature, max_grad_norm=1e9), 0), step)
    assert metrics["train/loss"] == pytest.approx(loss, abs=1e-12)
    assert all(torch.allclose(found[k], expected[k], rtol=0, atol=1e-12) for k in expected)
    norm = torch.cat([g.ravel() for g in expected.values()]).norm().item()
    assert metrics["train/grad_norm"] == pytest.approx(norm) and norm > 1e-3


@pytest.mark.parametrize("tokens", [1, 40, 100])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_micro_batches_change_nothing(tokens, beta):
    reference = tiny(1)
    whole, small = (
        gradients(Learner(tiny(), configured(micro_batch_tokens=n, beta=beta), 0, copy.deepcopy(reference)), sampled(tiny()))
        for n in (8192, tokens)
    )
    assert all(torch.allclose(whole[0][k], small[0][k], rtol=0, atol=1e-10) for k in whole[0])
    for name in NAMES - {"time/logprob_s", "time/update_s", "train/padding_share"}:
        assert whole[1][name] == pytest.approx(small[1][name], abs=1e-9), name


def test_padding_and_unused_slots_reach_nothing():
    step = sampled(tiny())
    step.loss_mask[3:6] = False
    clean, _ = gradients(Learner(tiny(), configured(), 0), step)
    dirty = step.sampler_logp.copy()
    dirty[3:6] = np.nan
    found, metrics = gradients(Learner(tiny(), configured(), 36), dataclasses.replace(step, sampler_logp=dirty))
    assert all(torch.equal(found[k], clean[k]) for k in clean) and math.isfinite(metrics["policy/sync_gap"])


def reorder(step, prompts, rows_of):
    """The same step with prompts and the rollouts inside each in another order."""
    rows = np.concatenate([[step.group_offsets[q] + i for i in rows_of[q]] for q in prompts]).astype(int)
    spread = lambda x: np.concatenate([x[step.token_offsets[i] : step.token_offsets[i + 1]] for i in rows])  # noqa: E731
    chosen = [step.prompts[q] for q in prompts]
    counts = step.counts_B[prompts]
    offsets = lambda x: np.concatenate([[0], np.cumsum(x)]).astype(np.int64)  # noqa: E731
    return dataclasses.replace(
        step, prompts=chosen, prompt_tokens=np.concatenate([p.tokens for p in chosen]),
        prompt_offsets=offsets([len(p.tokens) for p in chosen]), group_offsets=offsets(counts),
        token_offsets=offsets(step.lengths_R[rows]), tokens=spread(step.tokens), loss_mask=spread(step.loss_mask),
        sampler_logp=spread(step.sampler_logp), reward=step.reward[rows], plan=StepPlan.plain([counts]),
    )  # fmt: skip


@pytest.mark.parametrize("updates", [1, 2])
def test_order_of_prompts_and_rollouts_changes_nothing(updates):
    step = sampled(tiny())
    shuffled = reorder(step, [3, 4, 1, 0, 2], [[2, 0, 3, 1], [], [1, 2, 0], [0], [5, 4, 3, 0, 1, 2]])
    after = []
    for rollouts in (step, shuffled):
        model = tiny()
        Learner(model, configured(updates_per_step=updates), 0).update(rollouts, 0)
        after.append(params(model))
    assert all(torch.allclose(after[0][k], after[1][k], rtol=0, atol=1e-9) for k in after[0])


def test_metrics():
    model = tiny()
    metrics = Learner(model, configured(), 0).update(sampled(model), 0)
    assert set(metrics) == NAMES
    assert metrics["policy/kl"] is None and metrics["train/lr"] == 1e-2 and metrics["train/skipped"] == 0
    assert 0 < metrics["policy/entropy"] <= math.log(37) and metrics["policy/sync_gap"] < 1e-6
    assert metrics["policy/ratio_raw_mean"] == pytest.approx(1, abs=1e-6) and metrics["policy/clip_frac_low"] == 0


def test_dead_groups_are_skipped_and_nothing_moves_without_signal():
    model = tiny()
    before = params(model)
    learner = Learner(model, configured(), 0)
    step = sampled(model, reward=np.ones(sum(COUNTS), np.float32))
    for k in range(7):
        metrics = learner.update(step, k)
    assert same(params(model), before) and not learner.optimizer.state
    assert metrics["train/trained_rollouts"] == 0 and metrics["train/skipped"] == 0 and metrics["train/loss"] == 0.0
    undefined = ("entropy", "sync_gap", "ratio_raw_mean", "ratio_raw_max", "clip_frac_low", "clip_frac_high")
    assert all(metrics[f"policy/{name}"] is None for name in undefined)


@pytest.mark.parametrize("columns", [
    dict(reward=np.full(14, np.nan, np.float32)),
    dict(finish=np.full(14, Finish.LENGTH, np.uint8)),
    dict(lengths=[0, 1] * 7),
    dict(lengths=[0] * 14, reward=np.full(14, np.nan, np.float32), finish=np.full(14, Finish.ERROR, np.uint8)),
], ids=["unscored", "truncated", "short", "lost"])  # fmt: skip
@pytest.mark.parametrize("truncated", ["grade", "mask"])
@pytest.mark.parametrize("length_term", ["constant", "sequence", "token"])
def test_degenerate_steps_are_finite(columns, truncated, length_term):
    model = tiny()
    metrics = Learner(model, configured(truncated=truncated, length_term=length_term), 0).update(sampled(model, **columns), 0)
    assert all(value is None or math.isfinite(value) for value in metrics.values())
    assert all(torch.isfinite(p).all() for p in model.parameters()) and metrics["train/skipped"] == 0


def test_masked_truncated_rollouts_leave_baseline_and_update():
    """As if they were unscored: the same gradient."""
    finish = np.zeros(14, np.uint8)
    finish[[1, 9]] = Finish.LENGTH
    step = sampled(tiny(), finish=finish)
    unscored = step.reward.copy()
    unscored[[1, 9]] = np.nan
    masked, _ = gradients(Learner(tiny(), configured(truncated="mask"), 0), step)
    expected, _ = gradients(Learner(tiny(), configured(), 0), dataclasses.replace(step, reward=unscored))
    graded, _ = gradients(Learner(tiny(), configured(), 0), step)
    assert all(torch.equal(masked[k], expected[k]) for k in masked)
    assert any(not torch.equal(masked[k], graded[k]) for k in masked)


def test_a_rollout_without_trained_tokens_moves_no_baseline():
    step = sampled(tiny(), counts=[3], lengths=[5, 5, 5], reward=np.array([100, 1, 1], np.float32))
    step.loss_mask[:5] = False
    assert Learner(tiny(), configured(), 0).update(step, 0)["train/trained_rollouts"] == 0


def test_kl_trains_dead_groups_too():
    model, reference = tiny(), tiny(1)
    step = sampled(model, reward=np.ones(14, np.float32))
    metrics = Learner(model, configured(beta=0.1), 0, reference).update(step, 0)
    assert metrics["train/trained_rollouts"] == 14 and metrics["policy/kl"] > 0 and metrics["train/grad_norm"] > 0
    with pytest.raises(UsageError, match="--beta 0.1"):
        Learner(model, configured(beta=0.1), 0)


def test_several_updates_use_one_old_policy():
    model = tiny()
    learner = Learner(model, configured(updates_per_step=2, epochs=3, learning_rate=0.05), 0)
    moved = []
    learner.optimizer.register_step_pre_hook(lambda *_: moved.append(params(model)))
    metrics = learner.update(sampled(model), 0)
    assert len(moved) == 6 and not same(moved[0], moved[1])
    assert metrics["policy/sync_gap"] < 1e-6 and metrics["policy/ratio_raw_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/clip_frac_low"] + metrics["policy/clip_frac_high"] > 0


def test_gradient_is_clipped_once_after_accumulation():
    step = sampled(tiny())
    free, _ = gradients(Learner(tiny(), configured(max_grad_norm=1e9, micro_batch_tokens=1), 0), step)
    clipped, metrics = gradients(Learner(tiny(), configured(max_grad_norm=1e-3, micro_batch_tokens=1), 0), step)
    norm = torch.cat([g.ravel() for g in free.values()]).norm()
    assert metrics["train/grad_norm"] == pytest.approx(norm.item()) and norm > 1e-2
    assert all(torch.allclose(clipped[k], free[k] * 1e-3 / norm, rtol=1e-4, atol=1e-12) for k in free)


@pytest.mark.parametrize("updates", [1, 2])
def test_a_stale_sampler_stops_the_run_before_the_weights_move(updates):
    model, other = tiny(), tiny(1)
    before = params(model)
    learner = Learner(model, configured(updates_per_step=updates), 0)
    with pytest.raises(SyncError, match="sync_gap"):
        learner.update(sampled(other), 0)
    assert same(params(model), before)
    gap = learner.sync_gap(sampled(other))
    assert gap > 0.1 and learner.sync_gap(sampled(model)) < 1e-6 and same(params(model), before)
    with pytest.raises(SyncError):
        learner.check_sync(gap)
    learner.check_sync(None)


def test_few_tokens_judge_no_sync():
    model = tiny()
    step = sampled(model, counts=[2], lengths=[3, 4], reward=np.array([0, 1], np.float32))
    assert Learner(model, configured(), 0).sync_gap(step) is None
    assert Learner(model, configured(), 0).update(step, 0)["policy/sync_gap"] is None


@pytest.mark.parametrize("poison", ["reward", "sampler_logp"])
def test_non_finite_steps_are_skipped_counted_and_end_the_run(poison):
    model = tiny()
    learner = Learner(model, configured(max_nonfinite=3), 0)
    learner.update(sampled(model), 0)
    weights, state = params(model), copy.deepcopy(learner.state_dict()["optimizer"])
    bad = sampled(model)
    getattr(bad, poison)[0] = np.inf if poison == "reward" else np.nan
    for k in (1, 2):
        metrics = learner.update(bad, k)
        assert metrics["train/skipped"] == k and metrics["train/loss"] is None and metrics["train/grad_norm"] is None
        assert same(params(model), weights)
        for index, moments in learner.state_dict()["optimizer"]["state"].items():
            assert all(torch.equal(moments[k], state["state"][index][k]) for k in moments)
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        learner.update(bad, 3)
    assert same(params(model), weights)
    learner.update(sampled(model), 4)
    assert learner.nonfinite_in_a_row == 0 and learner.num_skipped == 3 and not same(params(model), weights)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_resume_equals_a_straight_run_bit_for_bit(dtype):
    config = configured(dtype=dtype, warmup_steps=2, lr_schedule="cosine", weight_decay=0.1, updates_per_step=2)
    straight = Learner(tiny(), config, 0)
    for k in range(4):
        straight.update(sampled(straight.policy.model, seed=k), k)
    first = Learner(tiny(), config, 0)
    for k in range(2):
        first.update(sampled(first.policy.model, seed=k), k)
    file = io.BytesIO()
    torch.save((first.state_dict(), first.policy.model.state_dict()), file)
    file.seek(0)
    state, weights = torch.load(file, weights_only=True)
    second = Learner(tiny(5), config, 0)
    second.policy.model.load_state_dict(weights)
    second.load_state_dict(state)
    for k in range(2, 4):
        second.update(sampled(second.policy.model, seed=k), k)
    assert same(dict(second.weights()), dict(straight.weights()))


def test_bfloat16_keeps_float32_masters():
    model = tiny()
    step = sampled(model)
    learner = Learner(model, configured(dtype="bfloat16", learning_rate=1e-6), 0)
    before = params(model)
    metrics = learner.update(step, 0)
    assert 0 < metrics["policy/sync_gap"] < 0.05
    assert all(p.dtype == torch.float32 for p in model.parameters()) and not same(params(model), before)


def test_lora_trains_adapters_alone():
    import peft

    model = peft.get_peft_model(tiny(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.5))
    step = sampled(model.double())
    before = params(model)
    metrics = Learner(model, configured(), 0).update(step, 0)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all("lora_" in name for name in moved) and metrics["policy/sync_gap"] < 1e-6


OPTIMIZERS = {"plain": {}, "8bit": {"optimizer": "adamw8bit"}, "offloaded": {"offload_optimizer": True}}


@pytest.mark.parametrize("kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_learner_goes_on_from_what_a_checkpoint_keeps_of_it(kind, tmp_path):
    if "optimizer" in kind:
        pytest.importorskip("bitsandbytes")
    model = tiny()
    steps, config = [sampled(model, seed=seed) for seed in (0, 1)], configured(dtype="float32", **kind)
    straight = Learner(model, config, 36)
    straight.update(steps[0], 0)
    save_state(tmp_path, straight.state_dict())
    resumed = Learner(copy.deepcopy(model), config, 36)
    resumed.load_state_dict(load_state(tmp_path))
    for learner in (straight, resumed):
        learner.check_sync = lambda gap: None  # the second step was sampled before the first moved the weights
        learner.update(steps[1], 1)
    assert all(torch.equal(p, dict(resumed.weights())[name]) for name, p in straight.weights())
