"""Workers are killed at their limit, reaped and replaced; nothing of them is left behind, however their parent ends."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from vipfast.rewards.pool import Pool

FUNCTIONS = """
import os, signal, subprocess, sys, time

def echo():
    def call(x):
        return x
    call.facts = {"modules": sorted(sys.modules), "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN}
    return call

def naughty(folder):
    def call(what):
        if what == "hang":
            while True:
                pass
        if what == "power":
            return len(str(9 ** 9 ** 9))
        if what == "sleep":
            subprocess.Popen(["sleep", "1000"])
            time.sleep(1000)
        if what == "die":
            os._exit(1)
        if what == "die once":
            path = os.path.join(folder, "died")
            if not os.path.exists(path):
                open(path, "w").close()
                os.kill(os.getpid(), signal.SIGSEGV)
        if what == "raise":
            raise KeyError("no such key")
        if what == "eat":
            return len(bytearray(10**11))
        if what == "set":
            return {1}
        if what == "print":
            print("printed by a reward")
        return os.getpid()
    return call

def broken():
    raise OSError("no such corpus")

def crashing():
    os._exit(7)
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "pool_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def make(functions):
    pools = []

    def made(name, *args, **options):
        pools.append(Pool(f"pool_functions:{name}", args, **{"workers": 2, "timeout_s": 30, **options}))
        return pools[-1]

    yield made
    for pool in pools:
        pool.close()


def naughty(make, tmp_path, **options):
    return make("naughty", str(tmp_path), **options)


def children():
    return [child for child in psutil.Process().children(recursive=True) if "worker.py" in " ".join(child.cmdline())]


def test_outcomes_keep_the_order_of_their_tasks_from_many_threads_at_once(make):
    pool, results = make("echo"), {}

    def ask(name):
        results[name] = [outcome.value for outcome in pool.map([([name, i],) for i in range(20)])]

    threads = [threading.Thread(target=ask, args=(name,)) for name in range(1, 33)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: [[name, i] for i in range(20)] for name in range(1, 33)}
    assert len(children()) == 2


def test_a_worker_holds_little_and_leaves_ctrl_c_to_its_parent(make):
    facts = make("echo", workers=1).facts()
    assert not {"torch", "numpy", "vipfast.config"} & set(facts["modules"]) and facts["sigint"]


def test_ten_megabytes_both_ways_do_not_block_a_pipe(make):
    text = "9" * 10_000_000
    assert [outcome.value for outcome in make("echo").map([(text,)] * 3)] == [text] * 3


def test_what_passes_its_limit_is_killed_and_the_rest_goes_on(make, tmp_path):
    pool = naughty(make, tmp_path, timeout_s=0.4)
    pool.facts()
    start = time.perf_counter()
    outcomes = pool.map([("hang",), ("power",), ("sleep",), ("fine",), ("raise",), ("set",), ("print",)])
    assert [outcome.gave_up for outcome in outcomes] == ["time"] * 3 + [None] * 4
    assert isinstance(outcomes[3].value, int) and outcomes[4].error == "KeyError: 'no such key'"
    assert "no plain value" in outcomes[5].error and isinstance(outcomes[6].value, int)
    assert time.perf_counter() - start < 10
    assert not [child for child in psutil.Process().children(recursive=True) if child.name() == "sleep"], "its children go too"


def test_memory_has_a_limit(make, tmp_path):
    outcomes = naughty(make, tmp_path, workers=1, memory_bytes=1 << 30).map([("eat",), ("fine",)])
    assert outcomes[0].gave_up == "memory" and isinstance(outcomes[1].value, int)


def test_a_worker_that_dies_by_itself_has_its_task_tried_once_more(make, tmp_path):
    once, twice, fine = naughty(make, tmp_path).map([("die once",), ("die",), ("fine",)])
    assert isinstance(once.value, int) and isinstance(fine.value, int)
    assert twice.error == "the worker process died of the task, twice"


def test_what_cannot_be_built_says_why_and_does_not_spin(make):
    for name, message in (("broken", "OSError: no such corpus"), ("crashing", "died of the task"), ("nothing", "no attribute")):
        pool = make(name, workers=1)
        with pytest.raises(RuntimeError, match=message):
            pool.facts()
        assert [bool(outcome.error) for outcome in pool.map([(1,)] * 3)] == [True] * 3
    with pytest.raises(RuntimeError, match="ModuleNotFoundError: No module named 'absent_module'"):
        Pool("absent_module:f", workers=1, timeout_s=1).facts()


def test_workers_are_replaced_after_so_many_tasks(make, tmp_path):
    pids = [outcome.value for outcome in naughty(make, tmp_path, workers=1, max_tasks=3).map([("fine",)] * 7)]
    assert len(set(pids)) == 3 and pids[0] == pids[2] != pids[3]


def test_children_handles_and_memory_are_flat(make, tmp_path):
    pool, own = naughty(make, tmp_path, timeout_s=0.05), psutil.Process()
    pool.map([("fine",)] * 200, timeout_s=30)
    before = (own.num_fds(), threading.active_count(), len(children()))
    resident = own.memory_info().rss
    assert [outcome.gave_up for outcome in pool.map([("hang",)] * 20)] == ["time"] * 20
    pool.map([("fine",)] * 1000, timeout_s=30)
    assert (own.num_fds(), threading.active_count(), len(children())) == before
    assert own.memory_info().rss - resident < 10e6
    assert not [child for child in own.children() if child.status() == psutil.STATUS_ZOMBIE]
    pool.close()
    assert not children() and own.num_fds() < before[0]


def test_closing_ends_what_is_still_out_and_a_later_task_starts_anew(make, tmp_path):
    pool, outcomes = naughty(make, tmp_path), []
    asking = threading.Thread(target=lambda: outcomes.extend(pool.map([("hang",)] * 5)))
    pool.facts()
    asking.start()
    time.sleep(0.2)
    pool.close()
    asking.join(timeout=10)
    assert [outcome.error for outcome in outcomes] == ["the pool was closed"] * 5 and not children()
    assert isinstance(pool.map([("fine",)])[0].value, int)


PARENT = """
import signal, sys, threading, time
from vipfast.rewards.pool import Pool
pool = Pool("pool_functions:naughty", (".",), workers=2, timeout_s=100)
pool.facts()
threading.Thread(target=lambda: pool.map([("hang",)] * 2), daemon=True).start()
time.sleep(0.3)
print("ready", flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("end", ["return", signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=str)
def test_no_worker_outlives_its_parent(functions, end):
    command = [sys.executable, "-c", textwrap.dedent(PARENT), "2" if end == "return" else "100"]
    path = os.pathsep.join([str(functions), *filter(None, sys.path)])
    parent = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert parent.stdout.readline() == "ready\n"
    workers = psutil.Process(parent.pid).children(recursive=True)
    assert len(workers) == 2
    if end != "return":
        parent.send_signal(end)
    parent.wait(timeout=20)
    gone, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive
    parent.stdout.close()
