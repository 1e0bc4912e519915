"""What is decided by model, task and machine, and what is refused before anything is loaded."""

import dataclasses
import importlib.util
import json
import os
import types

import pytest

from vipfast import cores, model_facts, resolve
from vipfast.config import Config
from vipfast.cores import free_threads
from vipfast.distributed import Ranks
from vipfast.errors import BudgetError, UsageError
from vipfast.resolve import resolve as resolved

CPU = {"device": "cpu", "threads": 1}


def make_model(folder, tokenizer=True, **config):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 128}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**sizes, "max_position_embeddings": 8192, **config}))
    if tokenizer:
        (folder / "tokenizer_config.json").write_text("{}")
    return str(folder)


def test_starter_defaults_and_their_lines():
    run = resolved(Config(**CPU, output_dir="mine"))
    config, lines = run.config, run.lines
    assert lines == [
        "learning_rate = 1e-4 (starter)",
        "max_new_tokens = 16 (starter)",
        "max_prompt_tokens = 4080 (4096 positions less 16 new tokens)",
        "vigor_m0 = 2 (4 rounds that spend 8 rollouts per prompt)",
        "dtype = float32 (on cpu)",
    ]
    assert config.learning_rate == 1e-4 and config.vigor_m0 == 2


def test_resolving_twice_changes_and_tells_nothing():
    once = resolved(Config(**CPU, allocator="vip", estimator="grpo", score="posterior")).config
    assert (once.objective, once.min_rollouts) == ("dr_grpo", 3)
    again = resolved(once)
    assert again.config == once


@pytest.mark.parametrize(("lora_rank", "rate"), [(0, 1e-6), (8, 1e-5)])
def test_other_models_get_lower_rates_and_longer_texts(tmp_path, lora_rank, rate):
    run = resolved(Config(**CPU, model=make_model(tmp_path / "m"), lora_rank=lora_rank))
    config, lines = run.config, run.lines
    assert (config.learning_rate, config.max_new_tokens, config.max_prompt_tokens) == (rate, 1024, 1024)
    assert "max_prompt_tokens = 1024 (at most 1024 unless given; 7168 positions are left)" in lines


def test_short_model_leaves_what_it_has(tmp_path):
    model = make_model(tmp_path / "m", max_position_embeddings=1500)
    assert resolved(Config(**CPU, model=model)).config.max_prompt_tokens == 476


def test_given_options_stay():
    given = dict(learning_rate=0.5, max_new_tokens=7, max_prompt_tokens=9, dtype="float64", output_dir="mine", vigor_m0=2)
    run = resolved(Config(**CPU, **given))
    config, lines = run.config, run.lines
    assert lines == [] and {name: getattr(config, name) for name in given} == given


def test_hub_id_that_is_not_on_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    run = resolved(Config(**CPU, model="Qwen/Qwen2.5-0.5B-Instruct"))
    config, lines = run.config, run.lines
    assert config.max_prompt_tokens == 1024
    assert any("not known before it is loaded" in line for line in lines)


def test_hub_id_in_the_cache_is_read_there(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--Qwen--Tiny"
    make_model(repo / "snapshots" / "abc", max_position_embeddings=1224)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    assert resolved(Config(**CPU, model="Qwen/Tiny")).config.max_prompt_tokens == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 4096}, "--max-new-tokens 4096: leaves no room .* at most 4095"),
        ({"max_prompt_tokens": 4081}, "--max-prompt-tokens 4081: with --max-new-tokens 16 .* at most 4080"),
        ({"task": "arithmetics"}, "did you mean arithmetic"),
        ({"task": "absent.jsonl"}, "--task absent.jsonl: no such file"),
        ({"model": "./absent"}, "--model ./absent: no such folder"),
        ({"model": "gpt2"}, "owner/name"),
        ({"allocator": "vip", "min_rollouts": 1}, "--min-rollouts 1: --objective rloo needs at least 2"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused_early(options, message):
    with pytest.raises(UsageError, match=message):
        resolved(Config(**CPU, **options))


def test_infeasible_budgets_are_refused_before_loading():
    with pytest.raises(BudgetError, match=r"\[128, 384\]"):
        resolved(Config(**CPU, allocator="vip", max_rollouts=6))
    with pytest.raises(BudgetError, match="--vigor-m0 2"):
        resolved(Config(**CPU, vigor_m0=3))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{}"}, "has no config.json"),
        ({"config.json": "{}"}, "has no tokenizer"),
        ({"adapter_config.json": '{"base_model_name_or_path": "starter"}'}, "LoRA adapters on starter"),
        ({"config.json": "{", "tokenizer.json": "{}"}, "not valid JSON"),
    ],
    ids=["no-config", "no-tokenizer", "adapters", "broken"],
)
def test_incomplete_model_folder_is_named(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=f"--model {tmp_path}.*{message}"):
        resolved(Config(**CPU, model=str(tmp_path)))


def test_options_of_another_allocator_are_told():
    lines = resolved(Config(**CPU, allocator="uniform", score="posterior", max_rollouts=9)).lines
    notes = [line for line in lines if line.startswith("note")]
    assert notes == [
        "note: --max-rollouts 9 has no effect with --allocator uniform",
        "note: --score posterior has no effect with --allocator uniform",
    ]


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="--device cuda: .* sees no GPU"):
        resolved(Config(threads=1, device="cuda"))
    run = resolved(Config(threads=1))
    config, lines = run.config, run.lines
    assert (config.device, config.dtype) == ("cpu", "float32") and "device = cpu (torch sees no GPU)" in lines


def on_a_gpu(monkeypatch, capability=(9, 0), total_memory=80e9):
    import torch

    from vipfast.kernels import launch

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    size = types.SimpleNamespace(total_memory=total_memory)
    for name, answer in (
        ("is_available", True), ("get_device_name", "a GPU"), ("get_device_capability", capability), ("current_device", 0),
        ("get_device_properties", size),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)


@pytest.mark.parametrize(
    ("options", "capability", "told"),
    [
        ({}, (9, 0), ["loss: Triton kernels (Triton ", "packing: rectangles (SDPA, because flash-attn is not installed)"]),
        ({"kernels": "off"}, (9, 0), ["loss: plain torch, because asked for by --kernels off", "packing: rectangles"]),
        ({"kernels": "required"}, (8, 0), ["loss: Triton kernels (asked for by --kernels required)", "packing: rectangles"]),
        ({}, (7, 5), ["loss: plain torch, because sm_75 is older than sm_80", "packing: rectangles"]),
        (
            {"packing": "varlen"},
            (9, 0),
            ["loss: ", "packing: masked (SDPA with a block-diagonal mask, because flash-attn is not"],
        ),
    ],
    ids=str,
)
def test_what_runs_on_a_gpu_is_told_with_the_reason(monkeypatch, options, capability, told):
    on_a_gpu(monkeypatch, capability)
    run = resolved(Config(threads=1, **options))
    config, lines = run.config, run.lines
    assert config.device == "cuda" and all(line.startswith(start) for line, start in zip(lines[-2:], told, strict=True))
    again = resolved(config)
    assert again.config == config


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_required_kernels_are_refused_where_they_cannot_run(monkeypatch, capability):
    on_a_gpu(monkeypatch, capability)
    config = Config(threads=1, kernels="required")
    if capability < (8, 0):
        with pytest.raises(UsageError, match="--kernels required: sm_75 is older than sm_80; use --kernels auto"):
            resolved(config)
    with pytest.raises(UsageError, match="--kernels required: Triton runs on CUDA devices, not on cpu; use --kernels auto"):
        resolved(dataclasses.replace(config, device="cpu"))
    # a resolved config may come to another machine
    config = resolved(dataclasses.replace(config, kernels="auto", device="cpu")).config
    with pytest.raises(UsageError, match="--kernels required"):
        resolved(dataclasses.replace(config, kernels="required"))


def test_a_cpus_ordinary_way_is_not_told_and_another_is(monkeypatch):
    from vipfast.kernels import launch

    monkeypatch.setattr(launch, "INTERPRETED", True)
    told = [line for line in resolved(Config(**CPU)).lines if line.startswith(("loss", "packing", "note"))]
    assert told == []
    assert "loss: Triton kernels (asked for by --kernels required)" in resolved(Config(**CPU, kernels="required")).lines
    lines = resolved(Config(**CPU, kernels="off", packing="varlen")).lines
    assert "note: --kernels off has no effect with --device cpu, where plain torch is the default" in lines
    assert any(
        line.startswith("packing: masked (SDPA with a block-diagonal mask, because flash-attn runs on") for line in lines
    )


@pytest.mark.parametrize(
    ("num_cores", "allowed", "load", "starter", "threads"),
    [
        (2, 2, 0.0, True, 2),
        (2, 2, 0.2, True, 2),
        (2, 2, 0.9, True, 1),
        (2, 2, 5.0, True, 1),
        (64, 8, 30.0, False, 8),
        (64, 64, 60.0, False, 4),
        (64, 64, 0.0, True, 4),
        (64, 64, 0.0, False, 64),
    ],
)
def test_threads_follow_the_free_cores(monkeypatch, num_cores, allowed, load, starter, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(cores, "_cpu_quota", lambda: float("inf"))
    assert free_threads(starter)[0] == threads


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.5),
        ("Qwen/Qwen2.5-Math-1.5B", 1.5),
        ("HuggingFaceTB/SmolLM2-135M", 0.135),
        ("Qwen/Qwen3-30B-A3B", 30),
        ("meta-llama/Llama-3.2-1b", 1),
        ("some/model-v2", None),
        ("some/model-8bit", None),
    ],
)
def test_size_in_a_name(name, billions):
    assert model_facts.size_in_name(name) == billions


def test_parameters_of_qwen_half_a_billion(tmp_path):
    sizes = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2)
    model = make_model(tmp_path / "m", **sizes, vocab_size=151936, tie_word_embeddings=True, model_type="qwen2")
    facts = model_facts.read_facts(model)
    # As published for Qwen2.5-0.5B.
    assert facts.num_parameters == 494_032_768
    # 8 · (q, o: 2·1792; k, v: 2·(896 + 128); gate, up, down: 3·(896 + 4864)) · 24 layers
    assert facts.lora_parameters(8) == 8 * (3584 + 2048 + 17280) * 24


def test_starter_is_counted_exactly():
    folder = model_facts.STARTER
    with open(folder / "model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    counted = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes)
    assert model_facts.read_facts("starter").num_parameters == counted <= 1_000_000


@pytest.mark.parametrize(
    "options, names",
    [
        ({"clip_low": 0.1}, ["--clip-low"]),
        ({"clip_low": 0.1, "updates_per_step": 2}, []),
        ({"clip_high": 0.5, "epochs": 2}, []),
        ({"prompt_field": "q", "task_split": "test"}, ["--task-split", "--prompt-field"]),
        ({"warmup_steps": 60}, ["--warmup-steps"]),
        ({"warmup_steps": 59}, []),
    ],
    ids=str,
)
def test_options_this_run_does_not_read_are_told(options, names):
    notes = [line for line in resolved(Config(**CPU, **options)).lines if line.startswith("note:")]
    assert len(notes) == len(names) and all(name in note for name, note in zip(names, notes, strict=True))


def test_what_runs_on_a_gpu_is_told_once(monkeypatch, tmp_path, capsys):
    from vipfast import cli, trainer
    from vipfast.config_file import save_yaml

    on_a_gpu(monkeypatch)
    told = []
    monkeypatch.setattr(trainer, "load_tokenizer", lambda config: pytest.fail("no further"))

    class Started(trainer.Trainer):
        def __init__(self, run):
            with pytest.raises(pytest.fail.Exception, match="no further"):
                super().__init__(run)
            told.append(self.notes)

        def run(self):
            return 0

    monkeypatch.setattr(trainer, "Trainer", Started)
    config = resolved(Config(threads=1, output_dir=str(tmp_path / "a"))).saved
    save_yaml(config, tmp_path / "config.yaml")
    for options in (["--threads", "1"], ["--config", str(tmp_path / "config.yaml")]):
        assert cli.main([*options, "--output-dir", str(tmp_path / "b")]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len([line for line in lines if line.startswith("packing: rectangles (SDPA, because flash-attn")]) == 1
        assert len([line for line in lines if line.startswith("loss: ")]) == 1 and told.pop() == []


def test_processes_share_the_free_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(cores, "_cpu_quota", lambda: float("inf"))
    eight = Ranks({"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"})
    monkeypatch.setattr(cores, "join", lambda: eight)
    threads, why = free_threads(starter=False)
    assert threads == 2 and why.endswith("8 processes")


def test_options_of_torchrun_do_nothing_for_one_process():
    told = [line for line in resolved(Config(**CPU, parallel="fsdp", dist_timeout=60)).lines if "single process" in line]
    assert [line.split()[1] for line in told] == ["--parallel", "--dist-timeout"]


def test_what_ranks_cannot_do_is_refused_before_anything_is_loaded(monkeypatch):
    two = Ranks({"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    monkeypatch.setattr(resolve, "join", lambda: two)
    for options, words in (
        (dict(tensor_parallel_size=3), "--tensor-parallel-size 3: must divide the number of processes, 2"),
        (dict(correction="lagged", weighting="rollout", round_mode="early"), "--correction lagged: .*--round-mode early"),
        (dict(parallel="fsdp", optimizer="adamw8bit"), "--optimizer adamw8bit: its moments cannot be split"),
    ):
        with pytest.raises(UsageError, match=words):
            resolved(Config(**CPU, **options))
