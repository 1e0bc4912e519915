"""A run from a script of one's own whose output is piped to a program that ends first."""

import subprocess
import sys

from vipfast.telemetry.telemetry import read_metrics


def test_a_run_goes_on_when_whoever_reads_what_it_prints_has_gone(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(OWN)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, script], text=True, **pipes) as running:
        running.stdout.readline()
        running.stdout.close()
        running.stdin.close()
        told = running.stderr.read()
    assert (running.returncode, told) == (0, "")
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]


OWN = """
import sys
from pathlib import Path

from vipfast.config import Config
from vipfast.telemetry.telemetry import Telemetry

print("begun", flush=True)
sys.stdin.read()
before = sys.stdout
with Telemetry(Path(__file__).parent, Config(), total_steps=2) as telemetry:
    for step in range(3):
        print("told by the reward")
        telemetry.log(step, {"reward/mean": 0.5})
    telemetry.close({"continue": "somehow"})
assert sys.stdout is before
print("told by the script")
"""
