"""Rows of the head that the tokenizer has no id for, with logits far above all others: no engine ever samples them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from decoding import PAD, PROMPTS, V, assert_aligned, qwen2, request, run, texts
from fake_vllm import FakeLLM, sampling_params

from vipfast.engine import make_engine
from vipfast.engine.base import Sampling
from vipfast.engine.merge import PlainWeights
from vipfast.engine.transformers import TransformersEngine
from vipfast.engine.vllm import VllmEngine
from vipfast.vocabulary import limit_to_tokenizer, num_known_ids

TOKENIZER = SimpleNamespace(get_vocab=lambda: {str(i): i for i in range(V)})


def padded(rows=V + 9):
    """A model of V ids, padded to ``rows``, and the same model without its padding."""
    plain, model = qwen2(tied=False), qwen2(tied=False, vocab_size=rows)
    weights = plain.state_dict()
    for name, parameter in model.state_dict().items():
        parameter[: len(weights[name])] = weights[name]
    model.lm_head.bias = torch.nn.Parameter(torch.where(torch.arange(rows) < V, 0.0, 50.0))
    limit_to_tokenizer(model, TOKENIZER, "padded")
    return model, plain


def on_transformers(model, sampling):
    return TransformersEngine(model, sampling, PAD)


def on_vllm(model, sampling):
    options = dict(num_ids=num_known_ids(model))
    engine = VllmEngine(FakeLLM(model, []), sampling_params, sampling, 64, PlainWeights(model), **options)
    engine.sync(model.named_parameters())
    return engine


ENGINES = pytest.mark.parametrize("make", [on_transformers, on_vllm])


@ENGINES
@pytest.mark.parametrize("top_p", [1.0, 0.9, 1e-6], ids=["whole", "nucleus", "greedy"])
def test_padding_is_never_sampled_and_takes_no_probability(make, top_p):
    model, plain = padded()
    results = run(make(model, Sampling(2, top_p=top_p)), [request(0, PROMPTS[0], count=256)])
    ids = np.concatenate([row.tokens for row in results.values()])
    assert len(ids) == 512 and ids.max() < V
    assert_aligned(plain, results)
    del model.num_known_ids  # without the limit these very rows are all that is sampled
    free = run(make(model, Sampling(2, top_p=top_p)), [request(0, PROMPTS[0], count=4)])
    assert min(row.tokens.min() for row in free.values()) >= V


@ENGINES
def test_texts_are_those_of_the_model_without_its_padding(make):
    model, plain = padded()
    asked = [request(i, p, count=3) for i, p in enumerate(PROMPTS)]
    sampling = Sampling(6, temperature=0.8, stop_ids=(0, 5))
    ours, theirs = run(make(model, sampling), asked), run(make(plain, sampling), asked)
    assert texts(ours) == texts(theirs)
    if make is on_transformers:
        assert all((ours[key].logp == theirs[key].logp).all() for key in ours)


def test_lora_adapters_do_not_hide_the_limit():
    import peft

    model, _ = padded()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=["lm_head"]))
    results = run(TransformersEngine(adapted, Sampling(2), PAD), [request(0, PROMPTS[0], count=8)])
    assert max(row.tokens.max() for row in results.values()) < V


def test_vllm_is_told_of_the_padding_where_an_engine_is_made(monkeypatch):
    model, plain = padded()
    monkeypatch.setattr("vipfast.engine.vllm_launch.launch", lambda *args, **kwargs: (FakeLLM(model, []), sampling_params))
    monkeypatch.setitem(__import__("sys").modules, "vllm", object())
    from vipfast.config import Config

    config = Config(engine="vllm", device="cpu", dtype="float32", max_prompt_tokens=32, max_new_tokens=4)
    engine = make_engine(config, model, Sampling(4), PAD)
    engine.sync(model.named_parameters())
    assert_aligned(plain, run(engine, [request(0, PROMPTS[0], count=8)]))
