"""Memory that runs out in the middle of a run is an error with a remedy, whoever tells of it and however."""

import sys

import numpy as np
import pytest
import torch

from vipfast import Config, cli
from vipfast.errors import RewardError
from vipfast.shortage import ShortageError, is_shortage, shortage_told

RUN = ["--device", "cpu", "--threads", "1", "--steps", "1", "--heldout-prompts", "16", "--allocator", "uniform"]
RUN += ["--prompts-per-step", "8", "--rollouts-per-prompt", "6", "--eval-every", "0"]

PLACES = ["policy.AutoModelForCausalLM.from_pretrained", "trainer.collect", "learn.learner.Learner.update"]


def torch_on_a_cpu():
    torch.empty(2**60, dtype=torch.int8)


def numpy():
    np.empty(2**60, np.int8)


def python():
    bytearray(sys.maxsize - 100)


@pytest.mark.parametrize("ask", [torch_on_a_cpu, numpy, python], ids=lambda ask: ask.__name__)
def test_real_refusals_of_memory_are_known_as_such(ask):
    with pytest.raises(
        ShortageError, match="--device cpu: out of memory .*what helps: a lower --micro-batch-tokens \\(8192\\)"
    ):
        with shortage_told(Config(device="cpu")):
            ask()


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("shape mismatch"), False),
        (RewardError("the reward raised MemoryError: can't allocate memory"), False),  # somebody else's, and told already
        (ValueError("can't allocate memory"), False),
    ],
    ids=str,
)
def test_other_errors_stay_what_they_are(error, known):
    assert is_shortage(error) == known
    with pytest.raises(ShortageError if known else type(error)) as told:
        with shortage_told(Config(device="cuda", gradient_checkpointing=True, lora_rank=64)):
            raise error
    if known:
        wanted = "a lower --micro-batch-tokens (8192), a lower --lora-rank (64), --offload-optimizer, "
        assert wanted in str(told.value) and "a lower --prompts-per-step (64)" in str(told.value)
        assert "--gradient-checkpointing" not in str(told.value)


@pytest.mark.parametrize(
    "place", ["learn.learner.Learner.update", "trainer.collect", "policy.AutoModelForCausalLM.from_pretrained"]
)
def test_a_run_ends_with_one_line_and_code_1_wherever_memory_runs_out(place, tmp_path, monkeypatch, capsys):
    def fails(*args, **kwargs):
        torch.empty(2**60, dtype=torch.int8)

    monkeypatch.setattr(f"vipfast.{place}", fails)
    assert cli.main([*RUN, "--output-dir", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert "error: --device cpu: out of memory (" in error and "--gradient-checkpointing" in error and "Traceback" not in error
