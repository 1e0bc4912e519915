"""Two processes never train in one folder, and a process that was killed holds none."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vipfast import lock, run_folder
from vipfast.errors import UsageError

HOLDER = """
import os, subprocess, sys, time
from vipfast import lock
lock.take(sys.argv[1])
if "fork" in sys.argv and os.fork() == 0:
    time.sleep(60)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Start a process that trains in ``tmp_path``, as far as its lock says; returns it with its lock taken."""
    processes = []

    def start(*options: str) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLDER, str(tmp_path), *options]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        assert int(processes[-1].stdout.readline()) == processes[-1].pid
        return processes[-1]

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.fixture(autouse=True)
def given_back(tmp_path):
    yield
    lock.release(tmp_path)


@pytest.mark.parametrize("ask", [lock.take, lock.check, run_folder.check_fresh, run_folder.claim], ids=lambda ask: ask.__name__)
def test_the_second_process_is_refused_by_the_firsts_name(holder, tmp_path, ask):
    first = holder()
    with pytest.raises(UsageError, match=rf"--output-dir .*: process {first.pid} on \S+ trains in it; wait .*--resume"):
        ask(tmp_path)


@pytest.mark.parametrize("named", [True, False], ids=["by its folder", "as the newest of runs"])
def test_a_run_that_runs_is_not_resumed(holder, tmp_path, monkeypatch, named):
    (tmp_path / "config.yaml").touch()
    unfinished = tmp_path / "checkpoints" / ".step-2.tmp-999999"
    unfinished.mkdir(parents=True)
    holder()
    monkeypatch.setattr(run_folder, "RUNS", tmp_path.parent)
    with pytest.raises(UsageError, match="trains in it"):
        run_folder.resumable(tmp_path if named else None)
    assert unfinished.is_dir(), "what the running process writes is left alone"


@pytest.mark.parametrize("options", [(), ("fork",)], ids=["alone", "with a child that lives on"])
def test_a_killed_process_holds_nothing(holder, tmp_path, options):
    first = holder(*options)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    lock.take(tmp_path)
    assert (tmp_path / lock.NAME).read_text().startswith(f"process {os.getpid()} on "), "the name is the new holder's"


def test_one_process_may_take_its_folder_again_and_gives_it_back(tmp_path):
    lock.take(tmp_path)
    lock.take(f"{tmp_path}/../{tmp_path.name}")
    lock.check(tmp_path)
    code = "import sys; from vipfast import lock; lock.take(sys.argv[1])"
    assert "trains in it" in subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True).stderr
    lock.release(tmp_path)
    assert subprocess.run([sys.executable, "-c", code, tmp_path]).returncode == 0


def test_a_look_leaves_nothing_behind(tmp_path):
    lock.check(tmp_path)
    lock.check(tmp_path / "none")
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_is_said_once_and_gone_on_with(tmp_path, monkeypatch):
    def unsupported(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.warns(UserWarning, match="its file system has no locks") as said:
        lock.take(tmp_path)
        lock.take(tmp_path)
    assert len(said) == 1


def test_a_new_run_that_finds_another_ones_folder_leaves_it_unlocked(tmp_path):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UsageError, match="has just taken it"):
        run_folder.claim(tmp_path)
    assert Path(tmp_path).resolve() not in lock._held


@pytest.mark.parametrize("options", [("--resume",), ()], ids=["resumed", "new"])
def test_the_command_refuses_before_it_loads_anything(holder, tmp_path, capsys, options):
    from vipfast.cli import main

    (tmp_path / "config.yaml").touch()
    first = holder()
    assert main([*options, "--output-dir", str(tmp_path), "--device", "cpu"]) == 2
    assert f"process {first.pid} on " in capsys.readouterr().err
