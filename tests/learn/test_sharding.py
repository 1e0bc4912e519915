"""Who shards, and what a rank keeps."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from vipfast.learn.sharding import own_part, present_everywhere, whole


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of so many bytes."""

    def has(num_bytes):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=num_bytes))

    return has


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
