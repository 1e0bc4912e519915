"""What the sandbox promises its callers: fresh processes, bounded output, as many at a time as said, errors of its own."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from vipfast.errors import UsageError
from vipfast.sandbox import Limits, Sandbox, SandboxError, check, pool, run_python

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sandbox():
    sandbox = Sandbox("strict", workers=2)
    yield sandbox
    sandbox.close()


def server(sandbox) -> psutil.Process:
    """The server that the next program will run on."""
    parent = int(sandbox.run("import os\nprint(os.getppid())").stdout)
    return psutil.Process(parent)


def test_note_says_what_was_tried():
    assert check("strict") == (
        "sandbox: no network, one process, no signals to others, no reading outside its folder, no writing outside its folder, "
        "not root (tried)"
    )


@pytest.mark.parametrize(
    ("source", "ended", "stdout"),
    [
        ("print(input(), end='!')", "exit", "in!"),
        ("import sys\nsys.exit('no')", "error", ""),
        ("import sys\nsys.exit(256)", "exit", ""),  # as a shell sees it
        ("import atexit\natexit.register(print, 'late')\nprint('early')", "exit", "early\nlate\n"),
        (
            "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), print('late'))).start()",
            "exit",
            "late\n",
        ),
        ("import sys\nsys.stdout = None", "exit", ""),
        ("import io, sys\nprint('kept')\nsys.stdout = io.StringIO()\nprint('lost')", "exit", "kept\n"),
        ("print('\\udcff\\u00e9')", "exit", "\ufffd\u00e9\n"),
        ("print(__name__, __file__ if '__file__' in globals() else '')", "exit", "__main__ \n"),
        ("print({'b', 'a', 'c'} == set('abc'), hash('a') == hash('a'))", "exit", "True True\n"),
        ("import asyncio\nprint(asyncio.run(asyncio.sleep(0.01, 'slept')))", "exit", "slept\n"),
        ("import xml.dom.minidom, unittest.mock, email.mime.text\nprint('imported')", "exit", "imported\n"),
    ],
)
def test_script_runs_as_python_runs_it(sandbox, source, ended, stdout):
    output = sandbox.run(source, stdin="in\n")
    assert (output.ended, output.stdout) == (ended, stdout), output.stderr


def test_traceback_names_the_programs_lines_and_nothing_of_the_sandbox(sandbox):
    output = sandbox.run("def f():\n    return 1 / 0\n\nf()")
    assert 'File "program.py", line 2, in f\n    return 1 / 0' in output.stderr and output.stderr.endswith("division by zero\n")
    assert "server.py" not in output.stderr and "/program.py" not in output.stderr


def test_every_run_is_a_process_and_a_folder_of_its_own_and_draws_its_own_numbers(sandbox):
    source = "import os, random\nprint(os.listdir('.'), os.getpid(), random.random())\nopen('left', 'w').write('x')"
    runs = [sandbox.run(source).stdout.split() for _ in range(3)]
    assert {run[0] for run in runs} == {"[]"} and len({run[1] for run in runs}) == len({run[2] for run in runs}) == 3


def test_the_same_program_gives_the_same_output_on_another_server():
    outputs = set()
    for _ in range(2):
        sandbox = Sandbox("strict", workers=1)
        outputs.add(sandbox.run("print(hash('a'), list({'x', 'y', 'z'}))").stdout)
        sandbox.close()
    assert len(outputs) == 1


def test_output_is_kept_up_to_its_limit(sandbox):
    output = sandbox.run("print('x' * 500)", limits=Limits(output_bytes=100))
    assert output.ended == "output" and output.stdout == "x" * 100
    assert sandbox.run("print('x' * 98)", limits=Limits(output_bytes=100)).ended == "exit"


def test_memory_limit_is_the_one_given(sandbox):
    need_300_mb = "x = bytearray(300 << 20)\nprint(len(x) >> 20)"
    assert sandbox.run(need_300_mb, limits=Limits(memory_mb=256)).ended == "memory"
    assert sandbox.run(need_300_mb, limits=Limits(memory_mb=400)).stdout == "300\n"


def test_no_more_run_at_a_time_than_there_are_workers(sandbox):
    most, done = 0, threading.Event()

    def count():
        nonlocal most
        while not done.is_set():
            servers = [child for child in psutil.Process().children() if "server.py" in " ".join(child.cmdline())]
            most = max(most, sum(len(each.children()) for each in servers))

    watching = threading.Thread(target=count)
    watching.start()
    with ThreadPoolExecutor(16) as threads:
        outputs = list(threads.map(lambda i: sandbox.run(f"import time\ntime.sleep(0.05)\nprint({i})").stdout, range(16)))
    done.set()
    watching.join()
    assert outputs == [f"{i}\n" for i in range(16)] and 1 <= most <= 2


def test_a_server_that_dies_is_no_fault_of_the_program_and_is_replaced(sandbox):
    victim = server(sandbox)
    threading.Timer(0.2, victim.kill).start()
    with pytest.raises(SandboxError, match="server died"):
        sandbox.run("import time\ntime.sleep(5)")
    assert sandbox.run("print(1)").stdout == "1\n" and not victim.is_running()


def test_a_server_that_hangs_is_given_up(sandbox, monkeypatch):
    monkeypatch.setattr("vipfast.sandbox.worker.GRACE_S", 0.2)
    victim = server(sandbox)
    victim.suspend()
    with pytest.raises(SandboxError, match="does not answer"):
        sandbox.run("print(1)", limits=Limits(wall_s=0.1))
    monkeypatch.undo()
    assert not victim.is_running() and sandbox.run("print(1)").stdout == "1\n"


def test_a_closed_sandbox_says_so_and_ends_its_servers():
    sandbox = Sandbox("strict", workers=2)
    process = server(sandbox)
    sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run("print(1)")
    assert not process.is_running()


def test_nothing_outlives_a_trainer_that_is_killed():
    code = (
        "import os, sys\nfrom vipfast.sandbox import Sandbox\nsandbox = Sandbox('strict', 1)\n"
        "print(sandbox.run('import os\\nprint(os.getppid(), os.getcwd())').stdout, flush=True)\n"
        "sandbox.run('import time\\ntime.sleep(600)', limits=__import__('vipfast').sandbox.Limits(wall_s=600))"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pid, folder = trainer.stdout.readline().split()
    server = psutil.Process(int(pid))
    while not (running := server.children()):
        time.sleep(0.01)
    trainer.kill()
    trainer.communicate()
    gone, alive = psutil.wait_procs([server, *running], timeout=5)
    assert not alive and not Path(folder).exists()


def test_no_file_of_the_trainer_is_open_in_a_program(sandbox):
    read, write = os.pipe()
    os.set_inheritable(write, True)
    source = (
        "import os\nfound = 0\nfor fd in range(1024):\n    try:\n        os.fstat(fd)\n        found += 1\n"
        "    except OSError:\n        pass\nprint(found)"
    )
    assert int(sandbox.run(source).stdout) <= 5  # stdin, stdout, stderr, results, and the door to a library below /root
    os.close(read)
    os.close(write)


def test_interrupting_a_run_ends_its_program():
    code = (
        "from vipfast.sandbox import Sandbox, Limits\nsandbox = Sandbox('strict', 1)\nprint('ready', flush=True)\n"
        "try:\n    sandbox.run('while True: pass', limits=Limits(wall_s=60))\n"
        "except KeyboardInterrupt:\n    sandbox.close()\n    print(__import__('psutil').Process().children(recursive=True))"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    trainer.stdout.readline()
    time.sleep(0.3)
    trainer.send_signal(signal.SIGINT)
    assert trainer.communicate(timeout=10)[0] == "[]\n"


def test_users_of_two_workers_and_of_two_trainers_differ(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    one = [pool._uid(number) for number in range(4)]
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert len({*one, *(pool._uid(number) for number in range(4))}) == 8 and min(one) > 1000
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert pool._uid(0) is None


def test_folder_that_the_programs_user_cannot_enter_is_named(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("programs run as this user")
    tmp_path.chmod(0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UsageError, match="TMPDIR"):
        Sandbox("strict", workers=1)


def test_python_tool():
    output = run_python("print(sum(range(10)))\nimport sys\nprint('why', file=sys.stderr)")
    assert (output.stdout, output.stderr, output.ended) == ("45\n", "why\n", "exit")
    assert run_python("input()").ended == "error"
    assert run_python("while True: pass", Limits(wall_s=0.1)).ended == "time"


def test_a_python_that_cannot_be_started_is_an_error_and_leaves_nothing(monkeypatch):
    before, folders = psutil.Process().num_fds(), set(Path(tempfile.gettempdir()).glob("vipfast-sandbox-*"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(UsageError, match="cannot run any program: the sandbox's server does not start"):
        Sandbox("strict", workers=1)
    assert psutil.Process().num_fds() == before
    assert set(Path(tempfile.gettempdir()).glob("vipfast-sandbox-*")) <= folders


@pytest.mark.skipif(os.geteuid() != 0, reason="programs run as this user")
def test_programs_of_two_sandboxes_run_as_two_users_and_none_of_them_people(sandbox):
    other = Sandbox("strict", workers=1)
    users = {int(each.run("import os\nprint(os.getuid(), os.getgroups())").stdout.split()[0]) for each in (sandbox, other)}
    other.close()
    assert len(users) == 2 and min(users) >= 0x70000000
