"""What the transformers engine does and does not do twice, frees, and leaves as it found it; new weights."""

import copy

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from vipfast import streams
from vipfast.engine.base import Request, Sampling
from vipfast.engine.transformers import TransformersEngine
from vipfast.errors import SyncError

V, PAD = 23, 22
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [4], [7, 7, 1], [3, 9, 20, 5, 5, 2]]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def qwen2(tied=True, **kwargs):
    """Large random weights, so that texts depend on their context."""
    torch.manual_seed(1)
    shape = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = Qwen2ForCausalLM(Qwen2Config(**{**shape, "tie_word_embeddings": tied, **kwargs})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.3)
    return model


def request(slot, tokens, count=2, first=0, step=0, stream=streams.TRAIN):
    return Request(slot, np.array(tokens), f"uid{slot}", step, first, count, stream)


def drain(engine):
    finished = []
    while engine.pending:
        finished += engine.step()
    return finished


def run(engine, requests):
    engine.submit(requests)
    return {(f.slot, f.index): f for f in drain(engine)}


def texts(results):
    return {key: f.tokens.tolist() for key, f in results.items()}


def log_probs(model, prompt, tokens, temperature=1.0):
    """log_softmax of one plain forward pass over prompt + tokens, at the positions that predict the tokens."""
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
    model.train(training)
    logp = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)
    return logp.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def assert_aligned(model, results, prompts=PROMPTS, temperature=1.0, atol=1e-5):
    assert results
    for (slot, _), f in results.items():
        assert len(f.tokens) == len(f.logp) > 0
        np.testing.assert_allclose(f.logp, log_probs(model, prompts[slot], f.tokens.tolist(), temperature), atol=atol, rtol=0)


def count_forwards(model):
    """A list that gets (rows, tokens per row) of every forward pass from now on."""
    seen = []
    body = model.get_input_embeddings()
    body.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    return seen


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
