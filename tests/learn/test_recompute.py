"""Gradient checkpointing: the same gradients from less memory, and nothing of it left when the model generates."""

import copy

import numpy as np
import pytest
import torch
from ragged_steps import configured, gradients, sampled, tiny
from transformers import OPTConfig, OPTForCausalLM

from vipfast.engine.base import Request, Sampling
from vipfast.engine.transformers import TransformersEngine
from vipfast.errors import UsageError
from vipfast.learn.learner import Learner
from vipfast.learn.policy import Policy
from vipfast.streams import TRAIN


def pair(model, step, **options):
    """(gradients, metrics) without and with checkpointing."""
    configs = (configured(gradient_checkpointing=on, **options) for on in (False, True))
    return [gradients(Learner(copy.deepcopy(model), config, 0), step) for config in configs]


def equal(pair):
    (plain, _), (again, _) = pair
    return bool(plain) and plain.keys() == again.keys() and all(torch.equal(plain[k], again[k]) for k in plain)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_gradients_are_the_same_bit_for_bit(dtype):
    model = tiny()
    assert equal(pair(model, sampled(model), dtype=dtype, micro_batch_tokens=100))


def test_adapters_above_frozen_embeddings_get_their_gradients():
    import peft

    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(tiny(), lora).double()
    found = pair(model, sampled(model))
    assert equal(found) and all("lora_" in name and g.abs().max() > 0 for name, g in found[1][0].items())


def saved_bytes(model, step, recompute):
    """Bytes the autograd graph keeps of one pass, parameters apart, when the backward pass begins."""
    learner = Learner(copy.deepcopy(model), configured(gradient_checkpointing=recompute), 0)
    own = {p.untyped_storage().data_ptr() for p in learner.policy.parameters()}
    kept, most = {}, 0

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    backward = torch.Tensor.backward

    def measured(loss, *args, **kwargs):
        nonlocal most
        most = sum(kept.values())
        return backward(loss, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        patch.setattr(torch.Tensor, "backward", measured)
        learner.update(step, 0)
    return most


def test_less_is_kept_for_the_backward_pass():
    model = tiny()
    step = sampled(model)
    plain, again = (saved_bytes(model, step, recompute) for recompute in (False, True))
    assert 0 < again < plain / 3


def test_a_layers_own_dropout_stays_off():
    """OPT's layers call dropout themselves when they are in training mode, which transformers' own switch asks for."""
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(
        vocab_size=37, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, dropout=0.5,
        word_embed_proj_dim=16, init_std=0.3, max_position_embeddings=128,
    ))  # fmt: skip
    assert equal(pair(model.train(), sampled(model.eval())))


def texts(engine, seed):
    engine.submit([Request(0, np.arange(1, 6), f"uid{seed}", 0, 0, 8, TRAIN)])
    finished = []
    while engine.pending:
        finished += engine.step()
    return {one.index: (one.tokens.tolist(), one.logp.tolist()) for one in finished}


def test_generation_and_log_probs_are_untouched(monkeypatch):
    torch.manual_seed(0)
    model = tiny()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    engine = TransformersEngine(model.train(), Sampling(max_new_tokens=12), 0)
    before = texts(engine, 0)
    learner = Learner(model, configured(dtype="float32", gradient_checkpointing=True, learning_rate=0.0), 0)
    calls = []
    from vipfast.learn import recompute

    checkpoint = recompute.checkpoint
    monkeypatch.setattr(recompute, "checkpoint", lambda *args, **kwargs: calls.append(1) or checkpoint(*args, **kwargs))
    step = sampled(model)
    learner.sync_gap(step)
    assert not calls
    learner.update(step, 0)
    assert len(calls) == 2  # layers, of the one training pass
    engine.sync(learner.weights())
    assert texts(engine, 0) == before and len(calls) == 2
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_cannot_is_refused(monkeypatch):
    model = tiny()
    monkeypatch.setattr(type(model.model), "supports_gradient_checkpointing", False)
    with pytest.raises(UsageError, match="--gradient-checkpointing: Qwen2Model does not support it; .*--micro-batch-tokens"):
        Policy(model, "float32", "cpu", 1.0, train=True, recompute=True)
    Policy(model, "float32", "cpu", 1.0, train=False, recompute=True)  # a reference records no gradient
