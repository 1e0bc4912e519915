"""What the transformers engine does and does not do twice, frees, and leaves as it found it; new weights."""

import copy

import numpy as np
import pytest
import torch
from decoding import PAD, PROMPTS, V, assert_aligned, count_forwards, qwen2, request, run, texts

from vipfast.engine.base import Sampling
from vipfast.engine.transformers import TransformersEngine
from vipfast.errors import SyncError

# work that is done, and work that is not


def test_a_prompt_is_prefilled_once_over_rounds_and_again_after_sync():
    model = qwen2()
    seen = count_forwards(model)
    engine = TransformersEngine(model, Sampling(3), PAD)
    prefills = lambda: [rows for rows, tokens in seen if tokens > 1]  # noqa: E731
    run(engine, [request(0, PROMPTS[0]), request(2, PROMPTS[2]), request(5, PROMPTS[0])])
    assert prefills() == [2]  # slot 5 asks with slot 0's tokens
    run(engine, [request(0, PROMPTS[0], first=2), request(2, PROMPTS[2], first=2), request(3, PROMPTS[3])])
    assert prefills() == [2, 1]
    engine.sync(model.named_parameters())
    run(engine, [request(0, PROMPTS[0], step=1)])
    assert prefills() == [2, 1, 1]


def test_finished_rows_leave_the_batch():
    model = qwen2()
    seen = count_forwards(model)
    engine = TransformersEngine(model, Sampling(12, stop_ids=(0, 5)), PAD)
    results = run(engine, [request(i, p, count=4) for i, p in enumerate(PROMPTS)])
    lengths = np.array([len(f.tokens) for f in results.values()])
    assert [rows for rows, tokens in seen[1:]] == [int((lengths > t).sum()) for t in range(1, lengths.max())]
    before = len(seen)
    assert engine.step() == [] and len(seen) == before


def test_max_rows_bounds_every_pass():
    model = qwen2()
    seen = count_forwards(model)
    engine = TransformersEngine(model, Sampling(5, stop_ids=(0, 5)), PAD, max_rows=3)
    results = run(engine, [request(i, p, count=4) for i, p in enumerate(PROMPTS)])
    assert len(results) == 16 and max(rows for rows, _ in seen) <= 3
    assert_aligned(model, results)


def test_prefill_is_split_into_batches(monkeypatch):
    monkeypatch.setattr("vipfast.engine.transformers.PREFILL_TOKENS", 10)
    monkeypatch.setattr("vipfast.engine.transformers.SAMPLE_ELEMENTS", 2 * V)
    model = qwen2()
    seen = count_forwards(model)
    results = run(TransformersEngine(model, Sampling(4), PAD), [request(i, p, count=3) for i, p in enumerate(PROMPTS)])
    assert [shape for shape in seen if shape[0] < 12 and shape != (12, 1)] == [(2, 3), (1, 6), (1, 9)]
    assert_aligned(model, results)


def test_sleep_and_reset_free_the_caches():
    engine = TransformersEngine(qwen2(), Sampling(4), PAD)
    run(engine, [request(0, PROMPTS[0])])
    assert engine._cache.tensors and engine._blocks
    engine.sleep()
    assert not engine._cache.tensors and not engine._blocks
    engine.wake()
    first = texts(run(engine, [request(0, PROMPTS[0])]))
    engine.submit([request(1, PROMPTS[1], count=7)])
    engine.step()
    assert engine.pending == 7
    engine.reset()
    assert engine.pending == 0 and engine.step() == [] and not engine._cache.tensors
    assert texts(run(engine, [request(0, PROMPTS[0])])) == first


# the model is left as it was found


def test_modes_are_restored_and_dropout_is_off_meanwhile():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(qwen2(attention_dropout=0.5), LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5))
    model.base_model.model.gradient_checkpointing_enable()
    model.train()
    model.base_model.model.model.norm.eval()
    modes = [module.training for module in model.modules()]
    results = run(TransformersEngine(model, Sampling(6), PAD), [request(i, p) for i, p in enumerate(PROMPTS)])
    assert [module.training for module in model.modules()] == modes and not all(modes) and any(modes)
    assert model.base_model.model.is_gradient_checkpointing
    assert_aligned(model, results)


def test_training_works_after_rollouts():
    model = qwen2(rope_scaling={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, max_position_embeddings=8).train()
    run(TransformersEngine(model, Sampling(3), PAD), [request(1, PROMPTS[1])])
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    model(torch.tensor([PROMPTS[0]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_global_random_state_is_untouched():
    model = qwen2()
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    run(TransformersEngine(model, Sampling(5), PAD), [request(0, PROMPTS[0])])
    assert torch.equal(torch.get_rng_state(), torch_state) and (np.random.get_state()[1] == numpy_state).all()


# new weights


@pytest.mark.parametrize("tied", [True, False])
def test_sync_takes_new_weights_and_drops_what_the_old_ones_computed(tied):
    policy = qwen2(tied)
    engine = TransformersEngine(copy.deepcopy(policy), Sampling(6), PAD)
    run(engine, [request(i, p) for i, p in enumerate(PROMPTS)])
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    engine.sync(policy.named_parameters())
    assert_aligned(policy, run(engine, [request(i, p) for i, p in enumerate(PROMPTS)]))


def test_sync_from_the_engines_own_model_copies_nothing():
    model = qwen2()
    engine = TransformersEngine(model, Sampling(6), PAD)
    versions = [parameter._version for parameter in model.parameters()]
    engine.sync(model.named_parameters())
    assert [parameter._version for parameter in model.parameters()] == versions


def test_sync_accepts_a_tied_weight_under_both_names_if_they_agree():
    model = qwen2()
    engine = TransformersEngine(copy.deepcopy(model), Sampling(2), PAD)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(state)
    engine.sync(state.items())
    state["lm_head.weight"] += 1
    with pytest.raises(SyncError, match="one tied weight"):
        engine.sync(state.items())


def test_sync_names_what_is_missing_and_unknown():
    model = qwen2()
    engine = TransformersEngine(model, Sampling(2), PAD)
    weights = dict(model.named_parameters())
    removed = weights.pop("model.norm.weight")
    with pytest.raises(SyncError, match=r"1 missing \['model.norm.weight'\], 1 unknown \['module.norm.weight'\]"):
        engine.sync([*weights.items(), ("module.norm.weight", removed)])
    with pytest.raises(SyncError, match="model.norm.weight: the policy's shape is"):
        engine.sync([*weights.items(), ("model.norm.weight", removed[:3])])
