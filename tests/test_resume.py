"""Invariant 8: stop with SIGKILL at any moment, resume, and everything equals an uninterrupted run's, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

MOVING = ("time/", "speed/", "memory/")
# before the first checkpoint's successor, between steps, inside an update, inside saves (every kind of call), around a log line
MOMENTS = {
    "vigor": ["log:1", "update:4", "fsync:40", "replace:9"],
    "vip": ["step:4"],
    "uniform": ["fsync:61"],
}


@pytest.fixture(scope="module", params=MOMENTS)
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    script = Path(__file__).with_name("killed_runs.py")
    command = [sys.executable, str(script), str(folder), request.param, *MOMENTS[request.param]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, MOMENTS[request.param]


def metrics(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MOVING)} for line in lines]


def test_metrics_equal_an_uninterrupted_runs(runs):
    folder, moments = runs
    straight = metrics(folder / "straight")
    assert [line["step"] for line in straight] == list(range(6))
    for moment in moments:
        assert metrics(folder / moment) == straight, moment


def test_weights_equal_an_uninterrupted_runs(runs):
    folder, moments = runs
    for kind in ("final", "best"):
        straight = load_file(folder / "straight" / kind / "model.safetensors")
        for moment in moments:
            resumed = load_file(folder / moment / kind / "model.safetensors")
            assert straight.keys() == resumed.keys()
            assert all(straight[name].numpy().tobytes() == resumed[name].numpy().tobytes() for name in straight), (kind, moment)


def test_sampled_texts_equal_and_nothing_is_left_over(runs):
    folder, moments = runs
    files = {p.relative_to(folder / "straight"): p for p in (folder / "straight").rglob("*") if p.is_file()}
    for moment in moments:
        others = {p.relative_to(folder / moment): p for p in (folder / moment).rglob("*") if p.is_file()}
        assert others.keys() == files.keys(), moment
        for name in files:
            if name.suffix == ".parquet":
                assert others[name].read_bytes() == files[name].read_bytes(), (moment, name)


def test_training_moved_the_weights(runs):
    folder, _ = runs
    straight = load_file(folder / "straight" / "final" / "model.safetensors")
    from vipfast.policy import model_path

    start = load_file(Path(model_path("starter")) / "model.safetensors")
    assert any((straight[name] != start[name]).any() for name in straight)
