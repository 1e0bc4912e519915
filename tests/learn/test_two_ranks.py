"""Two processes with unequal shares of a step take the step that one process takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("two_ranks.py")
CASES = (
    "fsdp-tied-even fsdp-tied-uneven fsdp-tied-none fsdp-untied-uneven fsdp-untied-recompute-none fsdp-frozen-recompute-uneven "
    "ddp-tied-none ddp-untied-uneven"
).split()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    subprocess.run([sys.executable, SCRIPT, folder], check=True, timeout=300, capture_output=True, text=True)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(found, case):
    for rank in found:
        assert rank[case]["size"] > 1e-3 and rank[case]["passes"] > 1
        assert max(rank[case][part] for part in ("gradient", "parameter", "loss")) < 1e-9
