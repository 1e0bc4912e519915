"""Every program of the hostile corpus ends as it must, in time, earns what it must, harms nothing and leaves nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hostile_programs import CORPUS, Prey, attack

from vipfast.rewards.code import passes
from vipfast.sandbox import Limits, Sandbox

ROOT = Path(__file__).resolve().parents[2]
STRANGER = 1_234_567
"""A user without rights."""


@pytest.fixture(scope="module")
def prey():
    prey = Prey()
    yield prey
    prey.close()


@pytest.fixture(scope="module")
def sandbox(prey):
    sandbox = Sandbox("strict", workers=1)
    yield sandbox
    sandbox.close()


@pytest.mark.parametrize("row", CORPUS, ids=lambda row: row["name"])
def test_program_gains_nothing(sandbox, prey, row):
    output, seconds = attack(sandbox, prey, row)
    assert (output.ended, passes(output, row["output"], row["kind"])) == (row["ended"], bool(row["reward"])), output.stderr[
        -400:
    ]
    assert seconds < row["seconds"] and prey.unharmed()


def test_after_each_kind_of_end_nothing_is_left(prey):
    worst = {
        row["ended"]: row
        for row in reversed(CORPUS)
        if row["ended"] in ("threads", "disk", "output", "memory", "error", "time")
    }
    children, files = len(psutil.Process().children(recursive=True)), psutil.Process().num_fds()
    sandbox = Sandbox("strict", workers=1)
    folder = Path(sandbox.run("import os\nprint(os.getcwd())").stdout.strip())
    opened = psutil.Process().num_fds()
    for row in worst.values():
        attack(sandbox, prey, row)
        assert list(folder.iterdir()) == []
    assert len(psutil.Process().children(recursive=True)) == children + 1 and psutil.Process().num_fds() == opened
    sandbox.close()
    assert not folder.exists()
    assert len(psutil.Process().children(recursive=True)) == children and psutil.Process().num_fds() == files


def test_fifty_timeouts_leave_no_process_and_no_zombie():
    sandbox = Sandbox("strict", workers=1)
    before = [child.pid for child in psutil.Process().children(recursive=True)]
    for _ in range(50):
        assert sandbox.run("while True:\n    pass", limits=Limits(wall_s=0.02)).ended == "time"
    after = psutil.Process().children(recursive=True)
    assert [child.pid for child in after] == before and all(child.status() != psutil.STATUS_ZOMBIE for child in after)
    sandbox.close()


def python_for(uid: int) -> str | None:
    """A Python, new enough, that this user may start."""
    become = f"os.setgroups([])\nos.setgid({uid})\nos.setuid({uid})"
    ask = "import sys; sys.exit(sys.version_info < (3, 11))"
    code = f"import os, sys\n{become}\nos.execv(sys.argv[1], [sys.argv[1], '-c', {ask!r}])"
    for python in (sys.executable, *filter(None, map(shutil.which, ("python3", "/usr/local/bin/python3", "/usr/bin/python3")))):
        if subprocess.run([sys.executable, "-c", code, os.path.realpath(python)], capture_output=True).returncode == 0:
            return os.path.realpath(python)
    return None


@pytest.mark.skipif(os.geteuid() != 0, reason="the tests above ran as an unprivileged user already")
def test_all_of_it_holds_for_a_trainer_that_is_not_root():
    python = python_for(STRANGER)
    if python is None:
        pytest.skip("every Python here is root's alone")
    done = subprocess.run(
        [python, str(ROOT / "tests" / "hostile_programs.py"), str(STRANGER)],
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}, cwd="/", capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["wrong"] == []
