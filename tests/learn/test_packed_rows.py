"""Rollouts packed into one row train as they do in rectangles, and none sees its neighbour."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from ragged_steps import configured, exact, gradients, params, same, sampled, tiny
from transformers import AttentionInterface, BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

from vipfast.errors import UsageError
from vipfast.learn import policy as policy_module
from vipfast.learn.batch import upload
from vipfast.learn.learner import Learner
from vipfast.learn.pack import pack
from vipfast.learn.policy import Policy

CPU = torch.device("cpu")


def everything(**options):
    return configured(packing="masked", **options)


@pytest.mark.parametrize("tokens", [1, 60, 8192])
@pytest.mark.parametrize("options", [{}, {"beta": 0.1}, {"updates_per_step": 2}, {"gradient_checkpointing": True}], ids=str)
def test_gradients_equal_those_of_rectangles(tokens, options):
    model, reference = exact(tiny()), exact(tiny(1))
    step = sampled(model)
    found, expected = (
        gradients(Learner(copy.deepcopy(model), config, 0, copy.deepcopy(reference)), step)
        for config in (everything(micro_batch_tokens=tokens, **options), configured(**options))
    )
    assert all(torch.allclose(found[0][k], expected[0][k], rtol=0, atol=1e-10) for k in expected[0])
    assert found[1]["train/padding_share"] == 0 < expected[1]["train/padding_share"]
    for name in ("train/loss", "train/grad_norm", "policy/entropy", "policy/sync_gap"):
        assert found[1][name] == pytest.approx(expected[1][name], abs=1e-10)


def test_passes_stay_within_micro_batch_tokens(monkeypatch):
    seen = []
    forward = Policy.forward
    model = tiny()
    learner = Learner(model, everything(micro_batch_tokens=64), 0)
    monkeypatch.setattr(Policy, "forward", lambda self, batch, loss=None: seen.append(batch) or forward(self, batch, loss))
    learner.update(sampled(model), 0)
    assert len(seen) > 2 and all(batch.input_ids.shape[0] == 1 and batch.input_ids.numel() <= 64 for batch in seen)


def test_no_token_sees_another_rollout():
    """Bit for bit, whatever stands before or behind it."""
    torch.manual_seed(0)
    model = tiny()
    policy = Policy(model, "float64", "cpu", 1.0, train=True, packing="masked")
    step = sampled(model, counts=[3], lengths=[7, 5, 9])
    other = dataclasses.replace(step, tokens=step.tokens.copy())
    other.tokens[:7], other.tokens[12:] = (step.tokens[:7] + 5) % 37, (step.tokens[12:] + 11) % 37
    logp = [policy(upload(pack(rollouts, np.arange(3), 999, 0, "varlen"), CPU)[0]) for rollouts in (step, other)]
    assert torch.equal(logp[0][7:12], logp[1][7:12]) and not torch.isclose(logp[0], logp[1])[:7].any()


def varlen_attention(calls):
    """Attention that reads cumulative lengths alone, as flash-attn's does, and keeps no mask."""

    def attention(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **_):
        assert attention_mask is None and query.shape[0] == 1 and cu_seq_lens_q.dtype == torch.int32
        lengths = cu_seq_lens_q.diff().tolist()
        assert sum(lengths) == query.shape[2] and max_length_q == max(lengths)
        calls.append(len(lengths))
        groups = query.shape[1] // key.shape[1]
        parts = [x.split(lengths, 2) for x in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))]
        attend = torch.nn.functional.scaled_dot_product_attention
        return torch.cat([attend(*qkv, is_causal=True, scale=scaling) for qkv in zip(*parts)], 2).transpose(1, 2), None

    return attention


@pytest.mark.parametrize("recompute", [False, True])
def test_an_attention_of_its_own_serves_packed_rows_alone(monkeypatch, recompute):
    calls = []
    AttentionInterface.register("varlen_test", varlen_attention(calls))
    model = exact(tiny())
    step = sampled(model)
    expected, _ = gradients(Learner(copy.deepcopy(model), configured(), 0), step)
    monkeypatch.setattr(policy_module, "VARLEN_ATTENTION", "varlen_test")
    learner = Learner(model, configured(packing="varlen", micro_batch_tokens=100, gradient_checkpointing=recompute), 0)
    assert calls == [2, 2] and model.config._attn_implementation == "sdpa"  # the check of two layers
    calls.clear()
    found, _ = gradients(learner, step)
    assert all(torch.allclose(found[k], expected[k], rtol=0, atol=1e-10) for k in expected)
    num_passes = len(calls) // (4 if recompute else 2)
    assert num_passes > 1 and len(calls) == (4 if recompute else 2) * num_passes  # of two layers, each once or twice
    assert model.config._attn_implementation == "sdpa"


SIZES = dict(vocab_size=37, hidden_size=16, num_attention_heads=2, initializer_range=0.3)


def test_a_model_without_position_ids_is_refused():
    model = BloomForCausalLM(BloomConfig(n_layer=2, n_head=2, **SIZES))
    Policy(model, "float32", "cpu", 1.0, train=True)
    with pytest.raises(UsageError, match="--packing masked: BloomForCausalLM takes no position_ids.*--packing rectangles"):
        Policy(model, "float32", "cpu", 1.0, train=True, packing="masked")


def test_a_model_whose_rows_see_each_other_is_refused(monkeypatch):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, intermediate_size=24, num_key_value_heads=1, **SIZES))
    # an architecture that makes a causal mask without looking at positions
    from transformers.models.llama import modeling_llama

    original = modeling_llama.create_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **kwargs: original(**(kwargs | {"position_ids": None})))
    with pytest.raises(UsageError, match="--packing masked: LlamaForCausalLM gives packed rows other states.*rectangles"):
        Policy(model, "float32", "cpu", 1.0, train=True, packing="masked")


def test_an_attention_that_cannot_be_used_is_refused():
    with pytest.raises(UsageError, match="--packing varlen: Qwen2ForCausalLM cannot use flash_attention_2 .*rectangles"):
        Policy(tiny(), "float32", "cpu", 1.0, train=True, packing="varlen")


def test_bfloat16_moves_float32_masters_at_a_tiny_rate():
    model = tiny()
    step = sampled(model)
    before = params(model)
    # rows below the 64 tokens from which attention asks the processor, not ATEN_CPU_CAPABILITY, how to lay out bfloat16
    config = everything(dtype="bfloat16", learning_rate=1e-6, gradient_checkpointing=True, micro_batch_tokens=60)
    metrics = Learner(model, config, 0).update(step, 0)
    after = params(model)
    assert 0 < metrics["policy/sync_gap"] < 0.05 and all(p.dtype == torch.float32 for p in after.values())
    moved = torch.cat([(after[k] - before[k]).abs().ravel() for k in before])
    # AdamW's first step is the learning rate wherever there is a gradient; bfloat16 weights of this size would not move at all
    assert not same(before, after) and moved.max() < 1.1e-6 and (moved > 0.5e-6).float().mean() > 0.5
