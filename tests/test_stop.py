"""Ctrl-C is answered at once, wherever the main thread is, and what it says holds: real processes, real signals."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

START = """
import sys
from vipfast.cli import guarded
from vipfast.stop import StopRequest
from vipfast.telemetry.activity import NOW
"""
# A call into C that holds the main thread: no Python handler runs before it is over.
DEAF = "import hashlib; print('deaf', flush=True); hashlib.pbkdf2_hmac('sha512', b'', b'', 2_000_000_000)\n"
PATIENCE_S = 60

WORK = {
    "an import": "print('deaf', flush=True); import time\ntime.sleep(60)",
    "a call that does not return": DEAF,
    "a callback whose errors are lost": """
import gc, time, weakref
class Thing: ...
thing = Thing()
def late(reference):
    print('deaf', flush=True)
    time.sleep(60)
reference = weakref.ref(thing, late)
del thing
time.sleep(60)
""",
}


def started(body: str) -> subprocess.Popen:
    """A command that runs ``body`` under ``guarded``, once it has printed that it is deaf."""
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    code = f"{START}def run(ranks):\n{indented}    return 0\nsys.exit(guarded(run, 'the old way on'))"
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, "-c", code], **options)
    assert process.stdout.readline() == "deaf\n"
    return process


@pytest.mark.parametrize("kind", WORK)
def test_before_anything_was_started_ctrl_c_ends_it_and_says_so(kind):
    process = started(WORK[kind])
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, said) == (130, "stopped; nothing was started yet\n")


STEP = """
with StopRequest(lambda text: print(text, flush=True), "go on with this") as stop:
    NOW.begin("step 12")
"""


def within_a_step(work: str) -> str:
    return STEP + "".join(f"    {line}\n" for line in work.splitlines())


def test_a_first_signal_is_answered_while_torch_is_deaf_and_a_second_ends_the_process_under_it():
    process = started(within_a_step(DEAF))
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "finishing step 12, Ctrl-C again stops now\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and "Traceback" not in said


def test_a_second_signal_stops_at_once_with_the_way_on():
    process = started(within_a_step("print('deaf', flush=True)\nimport time\nwhile True: time.sleep(0.05)"))
    for answer in ("finishing step 12, Ctrl-C again stops now\n", ""):
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == answer
    assert process.wait(PATIENCE_S) == 130 and process.stderr.read() == "stopped at once; go on with this\n"


def test_sigterm_is_answered_too_and_names_itself():
    process = started(
        within_a_step("print('deaf', flush=True)\nimport time\nwhile stop.name is None: time.sleep(0.05)\nprint(stop.name)")
    )
    process.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=PATIENCE_S)
    # Two threads print, and one's line may begin in the other's.
    assert [out.count(text) for text in ("SIGTERM", "finishing step 12, a second signal stops now")] == [1, 1]
    assert said == "" and process.returncode == 0


def test_after_the_step_ctrl_c_no_longer_claims_that_nothing_was_started():
    process = started(within_a_step("pass") + "print('deaf', flush=True)\nimport time\ntime.sleep(60)")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, said) == (130, "stopped at once; the old way on\n")


def test_a_forked_childs_signals_are_its_own():
    """Ctrl-C goes to all of a terminal's processes; a child's must not count as a second one of the parent."""
    body = """
import os, time
ready, there = os.pipe()
child = os.fork()
if child == 0:
    os.write(there, b"1")
    time.sleep(0.5)
    os._exit(0)
os.read(ready, 1)
print("deaf", flush=True)
os.kill(child, 2)
os.waitpid(child, 0)
time.sleep(0.5)
print(stop.name)
"""
    process = started(within_a_step(body))
    assert process.communicate(timeout=PATIENCE_S) == ("None\n", "") and process.returncode == 0


@pytest.mark.parametrize(
    ("place", "left"), [("_check_sync", "no checkpoint was saved yet"), ("_guarded_step", "go on with .* --resume")]
)
@pytest.mark.filterwarnings("ignore")
def test_a_stop_at_once_speaks_of_a_checkpoint_only_where_there_is_one(tmp_path, monkeypatch, place, left):
    from vipfast import Config, Trainer

    def stopped(trainer):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, place, stopped)
    options = dict(prompts_per_step=4, rollouts_per_prompt=4.0, vigor_num_rounds=2, heldout_prompts=4, threads=1, device="cpu")
    with pytest.raises(KeyboardInterrupt, match=left):
        Trainer(Config(steps=2, output_dir=str(tmp_path / "r"), **options)).run()
    assert (tmp_path / "r" / "checkpoints" / "step-0").exists() == ("--resume" in left)


def test_an_evaluation_answers_and_then_leaves_the_way_on_to_its_command():
    work = "print('deaf', flush=True)\nimport time\nwhile True: time.sleep(0.05)"
    process = started(within_a_step(work).replace(', "go on with this"', ""))
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline().startswith("finishing")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_S)[1] == "stopped at once; the old way on\n" and process.returncode == 130


def test_signals_and_descriptors_are_given_back():
    from vipfast.stop import StopRequest

    before, num_open = signal.getsignal(signal.SIGINT), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with StopRequest():
            assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before and len(os.listdir("/proc/self/fd")) == num_open
    assert signal.set_wakeup_fd(-1) == -1


SMALL = """
import sys
from vipfast.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run_of(folder, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-c", SMALL, "--output-dir", str(folder), "--threads", "1", "--device", "cpu", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_a_run_stopped_in_its_first_evaluation_saves_and_its_continue_line_is_one_command(tmp_path):
    process = run_of(tmp_path / "r", "--steps", "500", "--prompts-per-step", "16", "--heldout-prompts", "16")
    told = []
    for line in process.stdout:
        told.append(line)
        if line.startswith("vipfast "):  # the view's title: the folder is there
            process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 3, "".join(told)
    assert any(re.fullmatch(r"finishing .+, Ctrl-C again stops now\n", line) for line in told)
    command = next(line.split(maxsplit=1)[1] for line in told if line.startswith("continue "))
    assert command.startswith(sys.executable) and command.endswith(f"--resume --output-dir {tmp_path / 'r'}\n")
    rest = subprocess.run(f"{command.strip()} --steps 2", shell=True, capture_output=True, text=True)
    assert rest.returncode == 0, rest.stdout + rest.stderr
    steps = [json.loads(line)["step"] for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] >= 2
