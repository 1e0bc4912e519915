"""The transformers engine against plain full forward passes of the same model: texts, log-probs, limits, bad input."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from decoding import PAD, PROMPTS, SHAPE, V, assert_aligned, count_forwards, drain, qwen2, request, run, sharpened, texts
from transformers import (
    GenerationConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from vipfast import streams
from vipfast.engine.base import Sampling
from vipfast.engine.transformers import TransformersEngine
from vipfast.errors import NonFiniteError, UsageError
from vipfast.types import Finish


def llama():
    torch.manual_seed(2)
    config = LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}, tie_word_embeddings=False, attn_implementation="eager")
    return sharpened(LlamaForCausalLM(config))


def gpt_neox():
    torch.manual_seed(3)
    return sharpened(GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)))


def lora():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(qwen2(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    return model


MODELS = {"qwen2": qwen2, "llama-eager": llama, "gpt-neox": gpt_neox, "qwen2-lora": lora}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_a_plain_forward_of_each_sequence_alone(name, temperature):
    model = MODELS[name]()
    engine = TransformersEngine(model, Sampling(9, temperature, stop_ids=(0, 3, 5, 9, 14)), PAD)
    results = run(engine, [request(i, p, count=5) for i, p in enumerate(PROMPTS)])
    assert len(results) == 20
    assert len({len(f.tokens) for f in results.values()}) > 1  # rows ended at different times
    assert_aligned(model, results, temperature=temperature)


def test_tokens_follow_the_inverse_cdf_of_the_streams_uniforms():
    model, sampling = qwen2(), Sampling(6, 0.8, stop_ids=(0,), seed=11)
    results = run(TransformersEngine(model, sampling, PAD), [request(0, PROMPTS[0], count=3, first=4, step=7)])
    assert sorted(results) == [(0, 4), (0, 5), (0, 6)]
    for (_, index), f in results.items():
        key = streams.keys(streams.TRAIN, 11, 7, streams.uid_hash("uid0"), index)
        context = list(PROMPTS[0])
        for position, token in enumerate(f.tokens.tolist()):
            with torch.no_grad():
                p = torch.softmax(model(torch.tensor([context])).logits[0, -1].double() / 0.8, -1)
            c = p.cumsum(0).numpy()
            u = float(streams.uniforms(key, position))
            assert token == np.searchsorted(c, u * c[-1], side="right")
            context.append(token)


def test_model_that_counts_up_is_certain_at_first_and_last_position():
    class CountsUp(torch.nn.Module):
        """Logits 50 for the next integer, 0 else, whatever stands before."""

        def __init__(self):
            super().__init__()
            self.inner = qwen2()

        def forward(self, input_ids, position_ids, attention_mask, past_key_values, use_cache, logits_to_keep):
            keys = torch.zeros(len(input_ids), 1, input_ids.shape[1], 2)
            past_key_values.update(keys, keys, 0)
            return SimpleNamespace(logits=50.0 * torch.nn.functional.one_hot((input_ids[:, -1:] + 1) % V, V).float())

        config = property(lambda self: self.inner.config)
        dtype = property(lambda self: self.inner.dtype)

        def get_input_embeddings(self):
            return self.inner.get_input_embeddings()

    results = run(TransformersEngine(CountsUp(), Sampling(5, stop_ids=(12,)), PAD), [request(0, [3, 9]), request(1, [2])])
    assert texts(results) == {(0, 0): [10, 11, 12], (0, 1): [10, 11, 12], (1, 0): [3, 4, 5, 6, 7], (1, 1): [3, 4, 5, 6, 7]}
    assert all(np.abs(f.logp).max() < 1e-6 for f in results.values())
    assert [results[0, 0].finish, results[1, 0].finish] == [Finish.STOP, Finish.LENGTH]


def test_rollouts_do_not_depend_on_rounds_order_neighbours_or_row_limit():
    model, sampling = qwen2(), Sampling(9, stop_ids=(0, 5), seed=3)
    fresh = lambda **kwargs: TransformersEngine(model, sampling, PAD, **kwargs)  # noqa: E731
    whole = texts(run(fresh(), [request(i, p, count=8) for i, p in enumerate(PROMPTS)]))
    assert len(whole) == 32 and len({tuple(t) for t in whole.values()}) > 20

    engine = fresh()
    rounds = run(engine, [request(i, p, count=3) for i, p in enumerate(PROMPTS)])
    rounds |= run(engine, [request(i, p, count=5, first=3) for i, p in enumerate(PROMPTS)])
    assert texts(rounds) == whole

    singles = [request(i, p, count=1, first=k) for i, p in enumerate(PROMPTS) for k in range(8)]
    np.random.default_rng(0).shuffle(singles)
    assert texts(run(fresh(), singles)) == whole
    assert texts(run(fresh(max_rows=5), singles)) == whole

    alone = run(fresh(), [request(2, PROMPTS[2], count=8)])
    assert texts(alone) == {key: text for key, text in whole.items() if key[0] == 2}


def test_rows_may_join_while_others_are_being_decoded():
    model, sampling = qwen2(), Sampling(12, stop_ids=(0,), seed=3)
    whole = run(TransformersEngine(model, sampling, PAD), [request(i, p, count=3) for i, p in enumerate(PROMPTS)])
    engine, finished = TransformersEngine(model, sampling, PAD), []
    for i in (1, 2, 3, 0):  # the longest prompt last, so the store must grow under running rows
        engine.submit([request(i, PROMPTS[i], count=3)])
        finished += engine.step() + engine.step()
    finished += drain(engine)
    assert texts({(f.slot, f.index): f for f in finished}) == texts(whole)
    assert_aligned(model, {(f.slot, f.index): f for f in finished})


def test_long_completions_outgrow_the_store_and_stay_exact():
    model = qwen2(max_position_embeddings=160)
    results = run(TransformersEngine(model, Sampling(150), PAD), [request(0, PROMPTS[0], count=3), request(1, PROMPTS[1], 1)])
    assert {len(f.tokens) for f in results.values()} == {150}
    assert_aligned(model, results)


def test_steps_seeds_and_evaluation_draw_other_texts():
    model = qwen2()
    engine = TransformersEngine(model, Sampling(10), PAD)
    base = texts(run(engine, [request(0, PROMPTS[0], count=6)]))
    assert texts(run(engine, [request(0, PROMPTS[0], count=6)])) == base
    assert texts(run(engine, [request(0, PROMPTS[0], count=6, step=1)])) != base
    assert texts(run(engine, [request(0, PROMPTS[0], count=6, stream=streams.EVAL)])) != base
    other = TransformersEngine(model, Sampling(10, seed=1), PAD)
    assert texts(run(other, [request(0, PROMPTS[0], count=6)])) != base
    assert len({tuple(t) for t in base.values()}) == 6


def test_the_models_own_generation_config_changes_nothing():
    plain, biased = qwen2(), qwen2()
    biased.generation_config = GenerationConfig(do_sample=True, top_k=1, top_p=0.001, repetition_penalty=1.3, temperature=0.1)
    first, second = (
        run(TransformersEngine(model, Sampling(1), PAD), [request(0, PROMPTS[0], count=400)]) for model in (plain, biased)
    )
    assert texts(first) == texts(second)
    with torch.no_grad():
        p = torch.softmax(plain(torch.tensor([PROMPTS[0]])).logits[0, -1], -1).numpy()
    surprise = -np.array([f.logp[0] for f in second.values()])
    entropy = -(p * np.log(p)).sum()
    spread = np.sqrt((p * np.log(p) ** 2).sum() - entropy**2)
    assert abs(surprise.mean() - entropy) < 4 * spread / np.sqrt(400)


def test_log_probs_under_top_p_are_the_full_distributions():
    model = qwen2()
    results = run(TransformersEngine(model, Sampling(8, top_p=0.5), PAD), [request(i, p) for i, p in enumerate(PROMPTS)])
    assert_aligned(model, results)


def test_float64_model_keeps_float64_log_probs():
    model = qwen2().double()
    results = run(TransformersEngine(model, Sampling(4), PAD), [request(0, PROMPTS[0])])
    assert results[0, 0].logp.dtype == np.float64
    single = run(TransformersEngine(qwen2(), Sampling(4), PAD), [request(0, PROMPTS[0])])
    assert single[0, 0].logp.dtype == np.float32
    assert_aligned(model, results, atol=1e-6)


# ends, limits and bad input


def test_stop_id_is_included_and_the_length_limit_is_not_a_stop():
    model = qwen2()
    free = run(TransformersEngine(model, Sampling(8), PAD), [request(0, PROMPTS[0], count=4)])
    assert {f.finish for f in free.values()} == {Finish.LENGTH} and {len(f.tokens) for f in free.values()} == {8}
    stop = int(free[0, 0].tokens[3])
    cut = run(TransformersEngine(model, Sampling(8, stop_ids=(stop,)), PAD), [request(0, PROMPTS[0], count=4)])
    for key, f in cut.items():
        text = free[key].tokens.tolist()
        end = text.index(stop) + 1 if stop in text else 8
        assert f.tokens.tolist() == text[:end]
        assert f.finish == (Finish.STOP if stop in text else Finish.LENGTH)


def test_one_token_completions_take_one_prefill_and_no_decoding():
    model = qwen2()
    seen = count_forwards(model)
    results = run(TransformersEngine(model, Sampling(1), PAD), [request(i, p, count=3) for i, p in enumerate(PROMPTS)])
    assert {len(f.tokens) for f in results.values()} == {1} and len(results) == 12
    assert seen == [(4, 9)]


def test_pad_equal_to_a_real_token_of_the_prompt():
    model = qwen2()
    prompts = [[PAD, 3, PAD], [1, 2, 3, 4, 5, PAD, PAD]]
    results = run(TransformersEngine(model, Sampling(5), PAD), [request(i, p) for i, p in enumerate(prompts)])
    assert_aligned(model, results, prompts)


def test_prompts_near_the_position_limit():
    model = qwen2(max_position_embeddings=12)
    prompts = [[1] * 11, [2] * 12, [3] * 30, [4] * 8, [5]]
    engine = TransformersEngine(model, Sampling(6), PAD)
    engine.submit([request(i, p) for i, p in enumerate(prompts)])
    assert engine.pending == 10
    results = {(f.slot, f.index): f for f in drain(engine)}
    assert {key: (len(f.tokens), len(f.logp), f.finish) for key, f in results.items() if key[1] == 0} == {
        (0, 0): (1, 1, Finish.LENGTH),
        (1, 0): (0, 0, Finish.ERROR),
        (2, 0): (0, 0, Finish.ERROR),
        (3, 0): (4, 4, Finish.LENGTH),
        (4, 0): (6, 6, Finish.LENGTH),
    }
    assert_aligned(model, {key: f for key, f in results.items() if f.finish != Finish.ERROR}, prompts)


def test_nothing_to_do_costs_nothing():
    model = qwen2()
    seen = count_forwards(model)
    engine = TransformersEngine(model, Sampling(4), PAD)
    engine.submit([])
    assert engine.pending == 0 and engine.step() == []
    engine.submit([request(0, PROMPTS[0], count=0)])
    assert engine.pending == 0 and engine.step() == []
    assert seen == []


def test_empty_prompt_is_refused():
    with pytest.raises(UsageError, match="uid3 has no tokens"):
        TransformersEngine(qwen2(), Sampling(4), PAD).submit([request(3, [])])


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(4, temperature=0.0), "--temperature 0.0"),
        (Sampling(4, top_p=0.0), "--top-p 0.0"),
        (Sampling(0), "--max-new-tokens 0"),
    ],
)
def test_sampling_out_of_range_is_refused(sampling, words):
    with pytest.raises(UsageError, match=words):
        TransformersEngine(qwen2(), sampling, PAD)


def test_sliding_window_is_refused_only_where_it_would_matter():
    model = qwen2(use_sliding_window=True, sliding_window=10, max_window_layers=1)
    engine = TransformersEngine(model, Sampling(4), PAD)
    assert_aligned(model, run(engine, [request(3, PROMPTS[3])]))
    with pytest.raises(UsageError, match="window of 10"):
        engine.submit([request(0, PROMPTS[0])])


def test_nan_weights_raise_before_anything_is_sampled():
    model = qwen2()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    engine = TransformersEngine(model, Sampling(4), PAD)
    engine.submit([request(0, PROMPTS[0])])
    with pytest.raises(NonFiniteError, match="2 of 2 rows"):
        engine.step()
