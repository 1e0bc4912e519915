"""Buffers that a kernel leaves unwritten must show: ``torch.empty`` returns NaN here (the lowest number for integers)."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where kernels are tested: compiled on a GPU, interpreted on a CPU."""


def _poisoned(make):
    def empty(*args, **kwargs):
        made = make(*args, **kwargs)
        if made.device.type == "meta":
            return made
        if made.dtype.is_floating_point:
            return made.fill_(float("nan"))
        return made.fill_(torch.iinfo(made.dtype).min) if made.dtype is not torch.bool else made

    return empty


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch):
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
