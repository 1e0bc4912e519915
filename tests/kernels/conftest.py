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


@pytest.fixture(autouse=True)
def sums_of_float32(monkeypatch):
    """The library adds the parts of a product of half precision in float32, which the bounds of rounding.py count on."""
    if torch.cuda.is_available():
        for dtype in ("bf16", "fp16"):
            monkeypatch.setattr(torch.backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction", False)


class WatchedRows:
    """Logits that kernels were given and what they left in their place, float64, chunk by chunk; BV: columns of a tile."""

    def __init__(self):
        self.given, self.left, self.BV = [], [], None


@pytest.fixture
def watch_rows(monkeypatch):
    """watch_rows(module) -> WatchedRows of the launches that a module of rows of logits makes from now on."""

    def watch(module):
        seen, launch = WatchedRows(), module.launch

        def watched(kernel, grid, logits, *args, **meta):
            seen.given.append(logits.double())
            launch(kernel, grid, logits, *args, **meta)
            seen.left.append(logits.double())
            seen.BV = meta["BV"]

        monkeypatch.setattr(module, "launch", watched)
        return seen

    return watch
