"""Rollouts that go on from tokens of their own: the stream and the length limit where they were, and nothing kept of them."""

import numpy as np
import pytest
import torch
from decoding import FLOAT32, PAD, PROMPTS, V, assert_aligned, drain, qwen2, request, run, texts
from fake_vllm import FakeLLM, sampling_params

from vipfast import streams
from vipfast.engine.base import Request, Sampling
from vipfast.engine.merge import PlainWeights
from vipfast.engine.transformers import TransformersEngine
from vipfast.engine.vllm import VllmEngine
from vipfast.types import Finish

NEW = 12


def transformers_engine(model, **options):
    return TransformersEngine(model, Sampling(NEW), PAD, **options)


def vllm_engine(model):
    engine = VllmEngine(FakeLLM(model, []), sampling_params, Sampling(NEW), 64, PlainWeights(model))
    engine.sync(model.named_parameters())
    return engine


def going_on(slot, prompt, tokens, index=0, step=0):
    tokens = np.array(tokens, np.int64)
    return Request(slot, np.array([*prompt, *tokens]), f"uid{slot}", step, index, 1, streams.TRAIN, made=len(tokens))


def test_going_on_draws_what_the_rollout_would_have_drawn():
    """Cut anywhere, by any number of cuts, a rollout is the same."""
    engine = transformers_engine(qwen2())
    whole = run(engine, [request(i, p, count=3) for i, p in enumerate(PROMPTS)])
    for cut in (1, 5, NEW - 1):
        rest = run(engine, [going_on(s, PROMPTS[s], f.tokens[:cut], i) for (s, i), f in whole.items()])
        for name, row in whole.items():
            np.testing.assert_array_equal(rest[name].tokens, row.tokens[cut:])
            np.testing.assert_allclose(rest[name].logp, row.logp[cut:], atol=FLOAT32)


def test_others_tokens_in_between_move_the_stream_on():
    model = qwen2()
    engine = transformers_engine(model)
    prompt, first, put_in = PROMPTS[0], [3, 1, 4], [15, 9, 2, 6]
    [row] = run(engine, [going_on(0, prompt, first + put_in)]).values()
    assert len(row.tokens) == NEW - 7 and row.finish == Finish.LENGTH
    uniform = streams.uniforms(streams.keys(streams.TRAIN, 0, 0, streams.uid_hash("uid0"), 0), np.arange(7, NEW))
    logits = model(torch.tensor([[*prompt, *first, *put_in, *row.tokens]])).logits[0, len(prompt) + 6 : -1]
    cumulative = torch.softmax(logits.double(), -1).cumsum(-1).detach().numpy()
    assert [int(np.searchsorted(c, u, "right")) for c, u in zip(cumulative, uniform)] == row.tokens.tolist()


def test_log_probs_are_the_policys():
    model = qwen2()
    prefix = [1, 2, 3]
    results = run(
        transformers_engine(model), [going_on(i, p, prefix, index=k) for i, p in enumerate(PROMPTS) for k in range(2)]
    )
    assert_aligned(model, results, [[*p, *prefix] for p in PROMPTS])


@pytest.mark.parametrize("make", [transformers_engine, vllm_engine])
def test_the_length_limit_counts_what_is_there(make):
    engine = make(qwen2())
    assert len(run(engine, [going_on(0, PROMPTS[0], [1] * (NEW - 2))])[0, 0].tokens) == 2
    [row] = run(engine, [going_on(0, PROMPTS[0], [1] * NEW)]).values()
    assert row.finish == Finish.ERROR and not len(row.tokens)


def test_nothing_is_kept_of_a_rollout_that_went_on():
    engine = transformers_engine(qwen2())
    rows = run(engine, [request(i, p) for i, p in enumerate(PROMPTS)])
    blocks, prompts = len(engine._blocks), len(engine._prompts)
    for turn in range(1, 9):
        requests = [going_on(s, PROMPTS[s], row.tokens[:turn], i) for (s, i), row in rows.items()]
        engine.submit(requests + requests[:1])  # one twice
        engine.step()
        drain(engine)
        assert (len(engine._blocks), len(engine._prompts), len(engine._prompt_of)) == (blocks, prompts, prompts)
        assert len(engine._place) == prompts and not engine._passing
    again = run(engine, [request(i, p) for i, p in enumerate(PROMPTS)])
    assert texts(again) == texts(rows)


def test_those_that_wait_for_a_row_keep_their_tokens_until_then():
    model = qwen2()
    wide, narrow = transformers_engine(model), transformers_engine(model, max_rows=2)
    requests = [going_on(0, PROMPTS[0], [1, 2], index=i) for i in range(5)]  # equal tokens, streams of their own
    assert texts(run(narrow, requests)) == texts(run(wide, requests))
    assert not narrow._prompts and not narrow._blocks


def test_going_on_leaves_other_rollouts_as_they_are():
    engine = transformers_engine(qwen2())
    alone = run(engine, [request(0, PROMPTS[0], count=4)])
    engine.reset()
    engine.submit([request(0, PROMPTS[0], count=4)])
    mixed = engine.step() + engine.step()
    engine.submit([going_on(1, PROMPTS[1] * 30, [5, 6, 7])])
    mixed += drain(engine)
    assert {(f.slot, f.index): f.tokens.tolist() for f in mixed if f.slot == 0} == texts(alone)


def test_vllm_draws_every_turn_with_a_seed_of_its_own():
    engine = vllm_engine(qwen2())
    for made in (0, 3, 6):
        for index in (0, 1):
            tokens = np.arange(made) % V
            engine.submit([Request(0, np.array([1, 2, *tokens]), "u", 4, index, 1, streams.TRAIN, True, made)])
    seeds = [params.seed for params in engine.llm.given]
    assert len(set(seeds)) == 6 and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[1] == seeds[0] + 1  # first turns as ever
    assert [params.max_tokens for params in engine.llm.given] == [12, 12, 9, 9, 6, 6]
