"""The vLLM engine over a stand-in for vLLM: the order of calls, what it refuses, and that the stand-in is like the real one."""

import dataclasses
import importlib.util
import inspect
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from decoding import PAD, PROMPTS, assert_aligned, qwen2, request, run, texts
from fake_vllm import FakeLLM, FakeWorker, sampling_params

from vipfast import Config, Trainer
from vipfast.engine.base import Sampling
from vipfast.engine.merge import PlainWeights
from vipfast.engine.vllm import VllmEngine
from vipfast.errors import NonFiniteError, SyncError, UsageError
from vipfast.types import Finish

STOPS = (0, 5)


def make(policy, calls=None, *, max_new_tokens=6, positions=64, **options):
    calls = [] if calls is None else calls
    fake = FakeLLM(policy, calls, PAD)
    return VllmEngine(
        fake, sampling_params, Sampling(max_new_tokens, stop_ids=STOPS), positions, PlainWeights(policy), **options
    )


@pytest.fixture
def memory_freed(monkeypatch):
    """Records in place of CUDA, which is not here."""
    freed = []
    monkeypatch.setattr("vipfast.engine.vllm.free_cached_memory", lambda: freed.append("free cached memory"))
    return freed


def scaled(policy, factor):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(factor)


# the order of calls


@pytest.mark.parametrize("level", [1, 2])
def test_a_step_of_training_wakes_loads_and_sleeps_in_the_order_that_works(tmp_path, monkeypatch, level):
    calls = []

    def engine(config, model, sampling, pad_id):
        plain = PlainWeights(model)
        return VllmEngine(FakeLLM(model, calls, pad_id), sampling_params, sampling, 64, plain, sleep_level=level)

    monkeypatch.setattr("vipfast.trainer.make_engine", engine)
    monkeypatch.setattr("vipfast.trainer.expected_memory", lambda config, task: {})
    monkeypatch.setattr("vipfast.engine.vllm.free_cached_memory", lambda: calls.append("free cached memory"))
    options = dict(steps=2, allocator="uniform", prompts_per_step=24, heldout_prompts=4, eval_every=1, learning_rate=1e-3)
    trainer = Trainer(Config(**options, threads=1, device="cpu", output_dir=str(tmp_path / "r")))
    # as on a GPU, where the loop lets the engine sleep
    trainer.config = dataclasses.replace(trainer.config, device="cuda")
    update = trainer.learner.update
    trainer.learner.update = lambda *args: calls.append("update") or update(*args)
    assert trainer.run() == 0
    start = ["reload_weights", "reset_prefix_cache", "generate", "reset_prefix_cache"]
    evaluation = ["generate", "reset_prefix_cache"]
    slept = [f"sleep {level}", "update", "free cached memory", "wake weights", "reload_weights", "reset_prefix_cache"]
    awake = ["free cached memory", "wake kv_cache"]
    step = ["generate", *slept, *awake, *evaluation]
    assert calls == start + evaluation + step + step
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["policy/sync_gap"] < 1e-4 and line["train/grad_norm"] > 0 for line in lines[1:])
    assert {line["backend"].split("+")[0] for line in lines} == {"vllm"}


def test_the_first_sync_of_a_resumed_run_comes_before_its_first_token(tmp_path, monkeypatch):
    calls = []

    def engine(config, model, sampling, pad_id):
        return VllmEngine(FakeLLM(model, calls, pad_id), sampling_params, sampling, 64, PlainWeights(model))

    monkeypatch.setattr("vipfast.trainer.make_engine", engine)
    options = dict(allocator="uniform", prompts_per_step=4, heldout_prompts=4, eval_every=0, threads=1, device="cpu")
    Trainer(Config(steps=1, **options, output_dir=str(tmp_path / "r"))).run()
    again = Trainer(Config(steps=2, **options, output_dir=str(tmp_path / "r")), resume=True)
    calls.clear()
    again.run()
    assert calls[:3] == ["reload_weights", "reset_prefix_cache", "generate"]


def test_rollouts_before_a_sync_and_after_a_deep_sleep_are_refused(memory_freed):
    policy = qwen2()
    engine = make(policy, sleep_level=2)
    with pytest.raises(SyncError, match="sync comes first"):
        engine.submit([request(0, PROMPTS[0])])
    engine.sync(policy.named_parameters())
    run(engine, [request(0, PROMPTS[0])])
    engine.sleep()
    engine.wake()
    with pytest.raises(SyncError, match="sync comes first"):
        engine.submit([request(0, PROMPTS[0])])
    shallow = make(policy, sleep_level=1)
    shallow.sync(policy.named_parameters())
    shallow.sleep()
    assert_aligned(policy, run(shallow, [request(0, PROMPTS[0])]))
    assert memory_freed == 4 * ["free cached memory"]


def test_without_a_sleep_level_nothing_is_asked_to_sleep():
    policy, calls = qwen2(), []
    engine = make(policy, calls)
    engine.sync(policy.named_parameters())
    engine.sleep()
    engine.wake()
    assert calls == ["reload_weights", "reset_prefix_cache"]


# weights


@pytest.mark.parametrize("tied", [True, False])
def test_every_sync_brings_the_new_weights_and_forgets_what_the_old_ones_computed(tied):
    policy = qwen2(tied)
    engine = make(policy)
    for _ in range(2):
        engine.sync(policy.named_parameters())
        assert_aligned(policy, run(engine, [request(i, p) for i, p in enumerate(PROMPTS)]))
        scaled(policy, 1.5)


def test_names_are_compared_on_both_sides():
    policy = qwen2()
    engine = make(policy)
    weights = dict(policy.named_parameters())
    removed = weights.pop("model.norm.weight")
    with pytest.raises(SyncError, match=r"policy handed over .* 1 missing \['model.norm.weight'\]"):
        engine.sync(weights.items())
    with pytest.raises(SyncError, match=r"1 missing \['model.norm.weight'\], 1 unknown \['module.norm.weight'\]"):
        engine.sync([*weights.items(), ("module.norm.weight", removed)])
    with pytest.raises(SyncError, match="sync comes first"):
        engine.submit([request(0, PROMPTS[0])])


def test_a_weight_that_vllm_leaves_out_is_an_error():
    policy = qwen2()
    engine = make(policy)
    served = type(engine.llm.model)
    load = served.load_weights
    served.load_weights = lambda model, weights: load(model, weights) - {"model.norm.weight"}
    with pytest.raises(SyncError, match=r"vLLM took in .* 1 missing \['model.norm.weight'\]"):
        engine.sync(policy.named_parameters())


# rollouts


def test_rounds_ask_with_seeds_that_go_on_where_the_last_round_ended():
    policy = qwen2()
    engine = make(policy)
    engine.sync(policy.named_parameters())
    run(engine, [request(0, PROMPTS[0], count=6), request(1, PROMPTS[1], count=3)])
    run(engine, [request(0, PROMPTS[0], count=2), request(0, PROMPTS[0], count=4, first=2)])
    whole, other, first, rest = engine.llm.given
    assert (whole.n, other.n, first.n, rest.n) == (6, 3, 2, 4)
    assert whole.seed == first.seed == rest.seed - 2 and other.seed != whole.seed
    alone = dataclasses.replace(request(0, PROMPTS[0], count=3, first=1), one_by_one=True)
    results = run(engine, [alone])
    assert [(given.n, given.seed - whole.seed) for given in engine.llm.given[4:]] == [(1, 1), (1, 2), (1, 3)]
    assert sorted(results) == [(0, 1), (0, 2), (0, 3)]
    run(engine, [request(0, PROMPTS[0], count=1, step=1)])
    assert abs(engine.llm.given[-1].seed - whole.seed) > 6


def test_engine_seeds_leave_requests_without_one():
    policy = qwen2()
    engine = make(policy, seeds="engine")
    engine.sync(policy.named_parameters())
    run(engine, [request(0, PROMPTS[0])])
    assert [given.seed for given in engine.llm.given] == [None]


def test_sampling_is_given_in_full_and_never_left_to_a_default():
    policy = qwen2()
    engine = make(policy)
    engine.sync(policy.named_parameters())
    run(engine, [request(0, PROMPTS[0])])
    [given] = engine.llm.given
    assert (given.temperature, given.top_p, given.top_k, given.min_p, given.repetition_penalty) == (1.0, 1.0, 0, 0.0, 1.0)
    assert given.stop_token_ids == list(STOPS) and given.ignore_eos and given.logprobs == 0 and not given.detokenize


def test_prompts_without_room_are_error_rows_and_others_stop_at_the_last_position():
    policy = qwen2()
    engine = make(policy, positions=9, max_new_tokens=20)
    engine.sync(policy.named_parameters())
    results = run(engine, [request(0, [*PROMPTS[0], 1]), request(1, PROMPTS[0]), request(2, PROMPTS[0][:8])])
    assert {results[0, 0].finish, results[1, 1].finish} == {Finish.ERROR} and not len(results[1, 1].tokens)
    assert engine.llm.given[0].max_tokens == 1 and len(results[2, 0].tokens) == 1
    with pytest.raises(UsageError, match="uid3 has no tokens"):
        engine.submit([request(3, [])])


def scripted(policy, token_ids, logprobs):
    """An engine whose vLLM answers a request with one completion."""
    engine = make(policy)
    engine.sync(policy.named_parameters())
    flat = None if logprobs is None else SimpleNamespace(logprobs=logprobs)
    completion = SimpleNamespace(index=0, token_ids=token_ids, logprobs=flat)
    engine.llm.step = lambda: [SimpleNamespace(request_id="0", outputs=[completion])]
    engine.submit([request(0, PROMPTS[0], count=1)])
    return engine


def test_nan_log_probs_stop_the_run():
    with pytest.raises(NonFiniteError, match="log-prob of nan"):
        scripted(qwen2(), [3, 5], [-0.5, float("nan")]).step()


@pytest.mark.parametrize(
    ("token_ids", "logprobs"), [([3, 5], None), ([3, 5], [-0.5, None]), ([], [])], ids=["none", "none-inside", "empty"]
)
def test_missing_log_probs_make_an_error_row(token_ids, logprobs):
    [row] = scripted(qwen2(), token_ids, logprobs).step()
    assert row.finish == Finish.ERROR and len(row.tokens) == len(row.logp) == 0


@pytest.mark.parametrize(("token", "finish"), [(5, Finish.STOP), (3, Finish.LENGTH)])
def test_a_completion_of_one_token(token, finish):
    [row] = scripted(qwen2(), [token], [-0.5]).step()
    assert (row.tokens.tolist(), row.logp.tolist(), row.finish) == ([token], [-0.5], finish)


def test_rollouts_that_vllm_lost_come_back_as_error_rows():
    policy = qwen2()
    engine = make(policy)
    engine.sync(policy.named_parameters())
    engine.submit([request(0, PROMPTS[0], count=2)])
    engine.llm.step, engine.llm.has_unfinished_requests = list, lambda: False
    assert [(row.index, row.finish) for row in engine.step()] == [(0, Finish.ERROR), (1, Finish.ERROR)]
    assert engine.pending == 0


def test_reset_forgets_pending_work():
    policy, calls = qwen2(), []
    engine = make(policy, calls)
    engine.sync(policy.named_parameters())
    first = texts(run(engine, [request(0, PROMPTS[0])]))
    engine.submit([request(1, PROMPTS[1], count=7)])
    assert engine.pending == 7
    engine.reset()
    assert engine.pending == 0 and engine.step() == [] and calls[-2:] == ["abort 1", "reset_prefix_cache"]
    assert set(texts(run(engine, [request(0, PROMPTS[0])]))) == set(first)


def test_random_states_of_the_process_are_left_alone():
    policy = qwen2()
    engine = make(policy)
    engine.sync(policy.named_parameters())
    draws = []

    def step():
        draws.append((torch.rand(1).item(), np.random.rand()))
        return []

    engine.submit([request(0, PROMPTS[0])])
    engine.llm.step = step
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    engine.step(), engine.step()
    assert torch.equal(torch.get_rng_state(), torch_state) and (np.random.get_state()[1] == numpy_state).all()
    assert len(set(draws)) == 2


# the stand-in


@pytest.mark.vllm
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (.ci/run has an environment with it)"
)
def test_the_stand_in_has_vllms_own_signatures():
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Runner2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    public = [name for name, value in vars(FakeLLM).items() if callable(value) and not name.startswith("_")]
    assert len(public) == 8
    for name in public:
        assert_callable_like(getattr(FakeLLM, name), getattr(LLMEngine, name))
    assert_callable_like(FakeWorker.get_model, Worker.get_model)
    assert callable(Worker.reload_weights)
    for runner in (GPUModelRunner, Runner2):
        assert_callable_like(FakeWorker.reload_weights, runner.reload_weights)
    policy = qwen2()
    engine = make(policy)
    engine.sync(policy.named_parameters())
    run(engine, [request(0, PROMPTS[0])])
    assert set(vars(engine.llm.given[0])) <= set(inspect.signature(SamplingParams).parameters)


def assert_callable_like(fake, real):
    """Whatever call ``fake`` takes, ``real`` takes too."""
    ours, theirs = inspect.signature(fake).parameters, inspect.signature(real).parameters
    assert list(ours) == [name for name in theirs if name in ours], f"{real.__qualname__} has {list(theirs)}, not {list(ours)}"
    needed = {name for name, p in theirs.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    assert needed <= set(ours), f"{real.__qualname__} needs {needed - set(ours)}"


def test_the_plans_cache_on_a_cpu_is_the_engines_own():
    from vipfast.engine.vllm_launch import CPU_CACHE_BYTES
    from vipfast.memory import VLLM_CPU_CACHE_BYTES

    assert VLLM_CPU_CACHE_BYTES == CPU_CACHE_BYTES
