"""The vLLM engine over vLLM itself, on a CPU: two engines, one tied (the starter), one untied, shared by all tests."""

import dataclasses
import importlib.util
import json
import random
from functools import partial

import numpy as np
import pytest
import torch
from decoding import assert_aligned, request, run, sharpened, texts
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from vipfast import Config, Trainer, streams
from vipfast.engine import make_engine
from vipfast.engine.base import Sampling
from vipfast.engine.merge import PlainWeights
from vipfast.engine.transformers import TransformersEngine
from vipfast.engine.vllm import VllmEngine
from vipfast.engine.vllm_launch import launch
from vipfast.errors import NonFiniteError, SyncError
from vipfast.policy import load_policy
from vipfast.resolve import resolve
from vipfast.types import Finish

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; .ci/run has an environment"),
]

BLOCK = 128  # tokens of a KV block on a CPU
POSITIONS = 400
V = 61  # not a multiple of vLLM's padding
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [4], [7, 7, 1], [3, 9, 20, 5, 5, 2]]


def untied_model():
    torch.manual_seed(1)
    shape = dict(vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
    shape |= dict(num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=False)
    return sharpened(Qwen2ForCausalLM(Qwen2Config(**shape, pad_token_id=None, bos_token_id=None, eos_token_id=None)))


def starter_model():
    config = resolve(Config(device="cpu", threads=1)).config
    return load_policy(config)


@pytest.fixture(scope="module")
def starter():
    """The engine a trainer makes, and what its making did to random states and threads."""
    config = resolve(Config(engine="vllm", device="cpu", threads=1, output_dir="unused")).config
    states = lambda: (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())  # noqa: E731
    before = states(), torch.get_num_threads(), torch.set_num_threads
    engine = make_engine(config, starter_model(), Sampling(16, stop_ids=(256,)), 257)
    assert (states(), torch.get_num_threads(), torch.set_num_threads) == before
    return engine


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """vLLM started under a nucleus, and a generation_config that would make every sample the same."""
    folder = tmp_path_factory.mktemp("untied")
    model = untied_model()
    model.save_pretrained(folder)
    GenerationConfig(do_sample=True, top_k=1, top_p=0.001, repetition_penalty=1.3, max_length=20).save_pretrained(folder)
    options = dict(dtype="float32", device="cpu", positions=POSITIONS, memory=0.5, parallel=1, sleeps=False)
    return launch(str(folder), Sampling(8, top_p=0.9), **options)


def tied_engine(starter, policy, sampling=None, **options):
    """Another view of the starter's vLLM, holding ``policy``."""
    sampling = sampling or Sampling(6, stop_ids=(256,))
    engine = VllmEngine(starter.llm, _params(), sampling, 4096, PlainWeights(policy), **options)
    engine.sync(policy.named_parameters())
    return engine


def _params():
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return partial(SamplingParams, output_kind=RequestOutputKind.FINAL_ONLY)


def untied_engine(untied, policy, sampling=None, **options):
    engine = VllmEngine(*untied, sampling or Sampling(8), POSITIONS, PlainWeights(policy), **options)
    engine.sync(policy.named_parameters())
    return engine


def scaled(policy, factor):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(factor)


# weights


def test_log_probs_are_the_policys_after_every_sync_tied(starter):
    policy = starter_model()
    for _ in range(3):
        engine = tied_engine(starter, policy)
        assert_aligned(policy, run(engine, [request(i, p, count=3) for i, p in enumerate(PROMPTS)]), PROMPTS, atol=1e-4)
        scaled(policy, 1.2)


def test_log_probs_are_the_policys_after_every_sync_untied(untied):
    policy = untied_model()
    for _ in range(3):
        engine = untied_engine(untied, policy)
        assert_aligned(policy, run(engine, [request(i, p, count=3) for i, p in enumerate(PROMPTS)]), PROMPTS, atol=1e-4)
        scaled(policy, 1.2)


def test_lora_is_merged_on_the_way(untied):
    from peft import LoraConfig, get_peft_model

    policy = get_peft_model(untied_model(), LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    results = run(untied_engine(untied, policy), [request(i, p) for i, p in enumerate(PROMPTS)])
    assert_aligned(policy, results, PROMPTS, atol=1e-4)


def test_names_that_do_not_fit_are_refused_and_a_right_sync_repairs(untied):
    policy = untied_model()
    engine = untied_engine(untied, policy)
    weights = dict(policy.named_parameters())
    name = "model.layers.1.self_attn.q_proj.weight"  # a third of what vLLM holds as one
    removed = weights.pop(name)
    with pytest.raises(SyncError, match=f"1 missing .*{name}"):
        engine.sync(weights.items())
    with pytest.raises(SyncError, match="sync comes first"):
        engine.submit([request(0, PROMPTS[0])])
    with pytest.raises(SyncError, match="1 unknown .*model.layers.9"):
        engine.sync([*weights.items(), ("model.layers.9.weight", removed)])
    engine.sync(policy.named_parameters())
    assert_aligned(policy, run(engine, [request(i, p) for i, p in enumerate(PROMPTS)]), PROMPTS, atol=1e-4)


# sampling


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_log_probs_are_at_the_sampling_temperature(starter, temperature):
    policy = starter_model()
    engine = tied_engine(starter, policy, Sampling(6, temperature, stop_ids=(256,)))
    results = run(engine, [request(i, p, count=4) for i, p in enumerate(PROMPTS)])
    assert_aligned(policy, results, PROMPTS, temperature, atol=1e-4)


def test_log_probs_under_a_nucleus_are_the_whole_distributions(untied):
    policy = untied_model()
    results = run(
        untied_engine(untied, policy, Sampling(8, top_p=0.9)), [request(i, p, count=4) for i, p in enumerate(PROMPTS)]
    )
    assert_aligned(policy, results, PROMPTS, atol=1e-4)


def test_greedy_output_is_the_transformers_engines(starter, untied):
    # a nucleus that holds the likeliest id alone
    sampling = Sampling(12, top_p=1e-6, stop_ids=(5,))
    for policy, engine in (
        (starter_model(), tied_engine(starter, starter_model(), sampling)),
        (untied_model(), untied_engine(untied, untied_model(), sampling)),
    ):
        requests = [request(i, p, count=1) for i, p in enumerate(PROMPTS)]
        ours, theirs = run(engine, requests), run(TransformersEngine(policy, sampling, 0), requests)
        assert texts(ours) == texts(theirs)
        assert {key: row.finish for key, row in ours.items()} == {key: row.finish for key, row in theirs.items()}


def test_stop_ids_are_kept_as_the_last_id_and_nothing_follows(untied):
    stops = tuple(range(6))
    results = run(untied_engine(untied, untied_model(), Sampling(8, stop_ids=stops)), [request(0, PROMPTS[0], count=64)])
    assert {row.finish for row in results.values()} == {Finish.STOP, Finish.LENGTH}
    for row in results.values():
        *inside, last = row.tokens.tolist()
        assert not set(inside) & set(stops)
        assert (row.finish == Finish.STOP) == (last in stops) and (row.finish == Finish.STOP or len(row.tokens) == 8)
    assert min(len(row.tokens) for row in results.values()) == 1


def test_the_models_generation_config_does_not_leak_in(untied):
    policy, sampling = untied_model(), Sampling(1)
    ours = run(untied_engine(untied, policy, sampling), [request(0, PROMPTS[0], count=512)])
    theirs = run(TransformersEngine(policy, sampling, 0), [request(0, PROMPTS[0], count=512)])
    entropies = [-np.mean([row.logp[0] for row in rows.values()]) for rows in (ours, theirs)]
    assert entropies[0] == pytest.approx(entropies[1], abs=0.25) and entropies[0] > 0.5


def test_a_rollout_is_the_same_however_rounds_are_split(untied):
    engine = untied_engine(untied, untied_model())
    asked = [request(0, PROMPTS[0], count=6), request(1, PROMPTS[1], count=1), request(3, PROMPTS[3], count=3)]
    whole = texts(run(engine, asked))
    assert len({tuple(ids) for ids in whole.values()}) == len(whole) == 10
    first = run(engine, [request(0, PROMPTS[0], count=2), request(3, PROMPTS[3], count=2)])
    rest = run(engine, [request(3, PROMPTS[3], 1, first=2), request(1, PROMPTS[1], 1), request(0, PROMPTS[0], 4, first=2)])
    assert texts(first) | texts(rest) == whole
    assert texts(run(engine, [dataclasses.replace(r, one_by_one=True) for r in asked])) == whole
    later, evaluated = (texts(run(engine, [request(0, PROMPTS[0], 6, **o)])) for o in ({"step": 1}, {"stream": streams.EVAL}))
    assert all(later[key] != whole[key] != evaluated[key] for key in later)


def test_engine_seeds_repeat_a_run_and_differ_between_prompts_and_steps(untied):
    engine = untied_engine(untied, untied_model(), seeds="engine")
    first = texts(run(engine, [request(0, PROMPTS[0], count=6)]))
    run(engine, [request(1, PROMPTS[1], count=6)])
    assert texts(run(engine, [request(0, PROMPTS[0], count=6)])) == first
    assert len({tuple(ids) for ids in first.values()}) == 6
    other = texts(run(engine, [request(0, PROMPTS[0], count=6, step=1)]))
    assert not {tuple(ids) for ids in other.values()} & {tuple(ids) for ids in first.values()}


# prompts


def test_a_prompt_of_two_blocks_is_computed_once_until_the_weights_change(untied):
    policy = untied_model()
    engine = untied_engine(untied, policy, Sampling(4))
    prompt = np.random.default_rng(0).integers(0, V, 2 * BLOCK + 9).tolist()
    cached, step = [], engine.llm.step
    engine.llm.step = lambda: [cached.append(output.num_cached_tokens) or output for output in step()]
    try:
        alone = dataclasses.replace(request(0, prompt, count=3), one_by_one=True)
        results = run(engine, [alone])
        run(engine, [request(0, prompt, count=1, first=3)])
        assert cached[-1] == 2 * BLOCK
        engine.reset()
        run(engine, [request(0, prompt, count=1)])
        assert cached[-1] == 0
        scaled(policy, 1.1)
        engine.sync(policy.named_parameters())
        changed = run(engine, [request(0, prompt, count=1)])
        assert cached[-1] == 0
    finally:
        engine.llm.step = step
    assert_aligned(policy, changed, [prompt], atol=1e-4)
    scaled(policy, 1 / 1.1)
    assert_aligned(policy, results, [prompt], atol=1e-4)


def test_two_prompts_longer_than_the_limit_are_error_rows_among_the_others(untied):
    policy = untied_model()
    engine = untied_engine(untied, policy)
    prompts = [PROMPTS[0], [1] * (POSITIONS + 1), [2] * POSITIONS, [3] * (POSITIONS - 1), PROMPTS[3]]
    results = run(engine, [request(i, p) for i, p in enumerate(prompts)])
    assert {key for key, row in results.items() if row.finish == Finish.ERROR} == {(1, 0), (1, 1), (2, 0), (2, 1)}
    assert [len(results[3, i].tokens) for i in range(2)] == [1, 1]
    assert_aligned(policy, {key: row for key, row in results.items() if row.finish != Finish.ERROR}, prompts, atol=1e-4)


def test_a_round_of_more_prompt_tokens_than_a_pass_takes(untied):
    policy = untied_model()
    engine = untied_engine(untied, policy, Sampling(3))
    prompts = np.random.default_rng(0).integers(0, V, (16, POSITIONS - 10)).tolist()
    asked = [request(i, p, count=2) for i, p in enumerate(prompts)]
    whole = run(engine, asked)
    assert_aligned(policy, whole, prompts, atol=1e-4)
    assert texts(run(engine, asked[5:])) == {key: ids for key, ids in texts(whole).items() if key[0] >= 5}


def test_nan_weights_are_found_before_anything_is_learned(untied):
    policy = untied_model()
    with torch.no_grad():
        policy.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    engine = untied_engine(untied, policy)
    engine.submit([request(0, PROMPTS[0])])
    with pytest.raises(NonFiniteError, match="log-prob of nan"):
        while engine.pending:
            engine.step()
    engine.reset()
    engine.sync(untied_model().named_parameters())


@pytest.fixture
def trained(starter, monkeypatch, tmp_path):
    """Runs of the default model whose engines share one vLLM."""

    def again(config, model, sampling, pad_id):
        return VllmEngine(starter.llm, _params(), sampling, 4096, PlainWeights(model), seeds=config.engine_seeds)

    monkeypatch.setattr("vipfast.trainer.make_engine", again)

    def make(name, resume=False, **options):
        defaults = dict(steps=3, prompts_per_step=8, rollouts_per_prompt=6.0, vigor_num_rounds=3, heldout_prompts=4)
        defaults |= dict(eval_every=0, eval_samples=2, checkpoint_every=0, threads=1, device="cpu", learning_rate=1e-3)
        return Trainer(Config(engine="vllm", output_dir=str(tmp_path / name), **{**defaults, **options}), resume=resume)

    return make


def lines(trainer):
    return [json.loads(line) for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines()]


LORA = {"engine_seeds": "engine", "temperature": 0.8, "lora_rank": 4}
RUNS = [{"allocator": "uniform"}, {"allocator": "vip"}, {"allocator": "vigor"}, {"round_mode": "streaming"}, LORA]


@pytest.mark.parametrize("options", RUNS, ids=["uniform", "vip", "vigor", "streaming", "lora"])
def test_three_steps_train_on_what_the_policy_would_have_said(trained, options):
    trainer = trained("r", **options)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.run()
    done = lines(trainer)
    assert [line["step"] for line in done] == [0, 1, 2, 3] and {line["backend"] for line in done} == {"vllm+torch on cpu"}
    assert all(line["budget/rollouts"] == 48 and (line["policy/sync_gap"] or 0) < 1e-4 for line in done[1:])
    assert any(line["train/grad_norm"] for line in done[1:])
    assert any(not torch.equal(before[name], p) for name, p in trainer.model.named_parameters() if name in before)


def test_sampler_and_trainer_do_not_drift_apart_over_ten_steps_that_move_no_weight(trained):
    trainer = trained("r", allocator="uniform", steps=10, learning_rate=0.0, prompts_per_step=32)
    trainer.run()
    assert all(line["policy/sync_gap"] < 2e-6 for line in lines(trainer)[1:])


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(trained):
    straight = trained("straight")
    straight.run()
    trained("stopped", steps=2).run()
    resumed = trained("stopped", resume=True)
    resumed.run()
    last, expected = lines(resumed)[-1], lines(straight)[-1]
    assert all(last[k] == expected[k] for k in expected if not k.startswith(("time/", "speed/", "memory/")))


@pytest.mark.parametrize("when", ["start", "step"])
def test_one_wrong_weight_in_the_engine_stops_the_run(trained, when):
    trainer = trained("r", allocator="uniform", prompts_per_step=24)
    sync, syncs = trainer.engine.sync, []

    def corrupting(weights):
        sync(weights)
        syncs.append(1)
        if len(syncs) == (1 if when == "start" else 2):
            trainer.engine.llm.collective_rpc(lambda worker: worker.get_model().model.norm.weight.data[3].mul_(3))

    trainer.engine.sync = corrupting
    moved, steps = trainer.learner.optimizer.step, []
    trainer.learner.optimizer.step = lambda *args, **kwargs: steps.append(1) or moved(*args, **kwargs)
    with pytest.raises(SyncError, match="sync_gap .* is above"):
        trainer.run()
    assert (len(steps), len(syncs)) == ((0, 1) if when == "start" else (1, 2))
