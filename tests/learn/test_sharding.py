"""Who shards, and what a rank keeps."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from ragged_steps import tiny

from vipfast.config import Config
from vipfast.learn.sharding import choose_parallel, own_part, present_everywhere, whole


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of so many bytes."""

    def has(num_bytes):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=num_bytes))

    return has


def test_auto_shards_what_fills_more_than_half_of_a_gpu(gpu):
    model = tiny()
    state = 16 * sum(p.numel() for p in model.parameters())
    for num_bytes, expected in ((2 * state, "ddp"), (2 * state - 1, "fsdp")):
        gpu(num_bytes)
        assert choose_parallel(Config(device="cuda"), 8, model)[0] == expected
        assert choose_parallel(Config(device="cuda", offload_optimizer=True), 8, model)[0] == "ddp"
        assert choose_parallel(Config(device="cuda", beta=0.1), 8, model)[0] == "fsdp"  # the reference counts
    # adapters have next to no gradients and optimizer state
    model.requires_grad_(False)
    assert choose_parallel(Config(device="cuda"), 8, model)[0] == "ddp"


def test_one_process_never_shards_and_what_is_asked_for_is_done():
    assert choose_parallel(Config(device="cpu", parallel="fsdp"), 1, tiny())[0] == "ddp"
    assert choose_parallel(Config(device="cpu", parallel="fsdp"), 2, tiny())[0] == "fsdp"
    assert choose_parallel(Config(device="cpu"), 2, tiny())[0] == "ddp"


def test_a_tensor_that_is_not_sharded_stays_as_it_is():
    x = torch.arange(3.0)
    assert whole(x) is x and own_part(x, torch.zeros(3)) is x


def test_only_parameters_that_no_rank_has_used_stay_without_a_gradient():
    used, unused_here, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    used.grad = torch.full((2,), 3.0)
    found = present_everywhere([used, unused_here, unused], [True, True, False])
    assert [gradient.tolist() for gradient in found] == [[3, 3], [0, 0]]
    assert unused.grad is None and unused_here.grad is found[1]


def test_a_run_that_does_not_shard_imports_nothing_of_it():
    """Those modules take seconds to import, and the default run is to start soon."""
    code = "import sys, vipfast.trainer; print([name for name in sys.modules if name.startswith('torch.distributed.tensor')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
