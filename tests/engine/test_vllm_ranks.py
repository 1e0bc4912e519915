"""vLLM in every rank of torchrun: ranks with prompts of their own, and ranks that share a model."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; .ci/run has an environment"),
]

SCRIPT = Path(__file__).with_name("vllm_ranks.py")


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_two_ranks_sample_from_the_policy(tmp_path, tensor_parallel_size):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(SCRIPT.parent), str(SCRIPT.parents[2])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [*launcher, SCRIPT, tmp_path, str(tensor_parallel_size)]
    done = subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert all(rank["gap"] < 1e-4 for rank in ranks)
    first, second = (rank["texts"] for rank in ranks)
    assert (len(first), len(second)) == (6, 3 * tensor_parallel_size)
    if tensor_parallel_size > 1:
        assert first == second
