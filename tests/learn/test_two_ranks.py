"""Two processes with unequal shares of a step take the steps that one process takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("two_ranks.py")
CASES = (
    "fsdp-tied-dealt fsdp-untied-one fsdp-untied-recompute-none fsdp-frozen-recompute-one fsdp-updates-kl-one fsdp-giant "
    "fsdp-lonely ddp-tied-dealt ddp-untied-none ddp-frozen-one ddp-updates-kl-dealt ddp-giant ddp-lonely"
).split()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run([sys.executable, SCRIPT, folder], timeout=600, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(found, case):
    for rank in found:
        assert rank[case]["size"] > 1e-3
        assert max(rank[case][part] for part in ("gradient", "parameter", "metrics")) < 1e-9
    updates = 4 if "updates" in case else 3 if "tied-dealt" in case else 1
    assert found[0][case]["updates"] == found[1][case]["updates"] == updates


def test_shards_are_gathered_a_bucket_at_a_time(found):
    """However large the buckets, the weights come out bit for bit; uneven rows, no rows and another type among them."""
    for rank in found:
        num, largest, by_bytes = rank["buckets"]
        assert [apart for _, _, apart in by_bytes.values()] == [0.0] * 3
        (each, _, _), (some, sent, _), (all_at_once, _, _) = by_bytes.values()
        assert each == num and 2 < some < num and sent <= max(20_000, largest)
        assert all_at_once == 2  # the float32 one apart


def test_shards_are_saved_with_everything_a_checkpoint_of_the_model_has(found):
    assert [rank["names"] for rank in found] == [[], []]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_nan_on_one_rank_is_skipped_by_all(found, parallel):
    for rank in found:
        assert rank[f"poisoned-{parallel}"] == [1, 0.0]
