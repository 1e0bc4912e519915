"""Worker processes that can be killed: what runs past its time limit costs that limit, never the run.

A thread per worker hands it one task at a time and waits. Past the limit the worker's process group is killed, reaped and
replaced, and the task is given up; a worker that dies by itself has its task tried once more in a fresh one. Workers are
children of threads that live as long as they do (Linux kills a child with the thread that made it), ignore Ctrl-C, and end with
their parent.
"""

import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vipfast.rewards.worker import receive, send

TIMEOUT_S = 10.0
"""Seconds grading a completion may take unless --reward-timeout says otherwise."""
START_S = 120.0
"""Seconds a worker may take to import what it needs."""
MAX_TASKS = 5000
"""Tasks after which a worker is replaced, since libraries such as sympy keep what they have seen."""
MAX_RESIDENT_BYTES = 1 << 30
"""Memory in use after a task above which the worker is replaced, where no limit of its own is set."""
_FACTS = object()


@dataclass(frozen=True)
class Outcome:
    """What became of a task: its ``value``; or ``gave_up`` "time" or "memory", the limit it ran into; or ``error``, what it
    raised or how its worker ended."""

    value: Any = None
    gave_up: str | None = None
    error: str | None = None


class Pool:
    """Runs ``function(*task)`` in worker processes, where ``function = load(target)(*args)`` is built once in each.

    Args:
        target: "module:factory", importable in a fresh Python with this one's ``sys.path``; ``factory(*args)`` returns the
            function. Its time is not the tasks'. An attribute ``facts`` of the function, a plain value, is told by ``facts``.
        args: plain values for the factory.
        workers: processes; they start at ``start`` or with the first task.
        timeout_s: seconds a task may take.
        memory_bytes: address space of a worker (RLIMIT_AS), None: unlimited.
        max_tasks: tasks after which a worker is replaced.
    """

    def __init__(
        self, target: str, args: tuple = (), *, workers: int, timeout_s: float, memory_bytes: int | None = None,
        max_tasks: int = MAX_TASKS,
    ):  # fmt: skip
        self.workers, self.timeout_s = workers, timeout_s
        self._how = (target, args, memory_bytes, max_tasks)
        self._lock, self._crew, self._finalizer = threading.Lock(), None, None

    def start(self) -> None:
        """Have the workers start, and return at once."""
        self._running()

    def _running(self) -> "_Crew":
        with self._lock:
            if self._crew is None:
                self._crew = _Crew(self._how, self.workers)
                self._finalizer = weakref.finalize(self, self._crew.close)  # also at the interpreter's end
            return self._crew

    def facts(self) -> Any:
        """The ``facts`` of the function, once a worker has built it.

        Raises:
            RuntimeError: it cannot be built; the message is the factory's.
        """
        outcome = self._running().submit(_FACTS, START_S).result()
        if outcome.error is not None or outcome.gave_up is not None:
            raise RuntimeError(outcome.error or f"ran out of {outcome.gave_up}")
        return outcome.value

    def map(self, tasks: Iterable[Sequence], timeout_s: float | None = None) -> list[Outcome]:
        """The outcomes of tasks (arguments of the function, picklable), in order. It may be called from several threads."""
        crew = self._running()
        futures = [crew.submit(pickle.dumps(tuple(task)), timeout_s or self.timeout_s) for task in tasks]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:  # those left over after Ctrl-C
                future.cancel()

    def close(self) -> None:
        """Kill and reap the workers; tasks still out end with an error. A later task starts new ones."""
        with self._lock:
            if self._crew is not None:
                self._finalizer()
                self._crew = None


class _Crew:
    """The threads and workers of a pool between start and close."""

    def __init__(self, how: tuple, workers: int):
        self.how, self.closed = how, False
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.lock, self.alive = threading.Lock(), set()
        self.threads = [threading.Thread(target=self.serve, name="reward worker", daemon=True) for _ in range(workers)]
        for thread in self.threads:
            thread.start()

    def submit(self, task: Any, timeout_s: float) -> Future:
        future: Future = Future()
        with self.lock:
            if self.closed:
                future.set_result(Outcome(error="the pool was closed"))
            else:
                self.jobs.put((task, timeout_s, future))
        return future

    def serve(self) -> None:
        worker = self.hire()
        while (job := self.jobs.get()) is not None:
            task, timeout_s, future = job
            if not future.set_running_or_notify_cancel():
                continue
            outcome = None
            for _ in range(2):
                worker = worker or self.hire()
                outcome = Outcome(error="the pool was closed") if worker is None else worker.run(task, timeout_s)
                if worker is not None and worker.spent:
                    self.dismiss(worker)
                    worker = None
                if outcome is not None:
                    break
            future.set_result(outcome or Outcome(error="the worker process died of the task, twice"))
            worker = worker or self.hire()  # so that the next task finds it warm
        if worker is not None:
            self.dismiss(worker)

    def hire(self) -> "_Worker | None":
        with self.lock:
            if self.closed:
                return None
            worker = _Worker(*self.how)
            self.alive.add(worker)
            return worker

    def dismiss(self, worker: "_Worker") -> None:
        worker.kill()
        worker.sock.close()
        worker.process.wait()
        with self.lock:
            self.alive.discard(worker)

    def close(self) -> None:
        with self.lock:
            self.closed = True
            for worker in self.alive:
                worker.kill()
        for _ in self.threads:
            self.jobs.put(None)
        for thread in self.threads:
            if thread is not threading.current_thread():  # where the garbage collector happened to run
                thread.join()


class _Worker:
    """One process. ``spent``: not to be used again."""

    def __init__(self, target: str, args: tuple, memory_bytes: int | None, max_tasks: int):
        self.max_tasks, self.ready, self.spent, self.num_tasks = max_tasks, False, False, 0
        self.max_resident_bytes = MAX_RESIDENT_BYTES if memory_bytes is None else memory_bytes // 2
        self.sock, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints must not mix with the run's own output
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        self.hello = pickle.dumps((sys.path, target, args, memory_bytes))

    def run(self, task: Any, timeout_s: float) -> Outcome | None:
        """The outcome of a task; None if the process died of it."""
        try:
            if not self.ready:
                outcome = self.started()
                if outcome.error is not None:
                    return outcome
            if task is _FACTS:
                return Outcome(self.facts)
            deadline = time.monotonic() + timeout_s
            send(self.sock, task, deadline)
            return self.reply(deadline)
        except TimeoutError:
            self.spent = True
            return Outcome(gave_up="time")
        except (EOFError, ConnectionError):
            self.spent = True
            return None

    def started(self) -> Outcome:
        deadline = time.monotonic() + START_S
        try:
            send(self.sock, self.hello, deadline)
            outcome = self.reply(deadline)
        except TimeoutError:
            self.spent = True
            return Outcome(error=f"a worker did not start within {START_S:g} s")
        self.facts, self.ready = outcome.value, outcome.error is None
        self.spent |= not self.ready
        return outcome

    def reply(self, deadline: float) -> Outcome:
        reply = json.loads(receive(self.sock, deadline))
        self.num_tasks += 1
        grown = reply.pop("resident_bytes", 0) > self.max_resident_bytes
        self.spent = grown or self.num_tasks > self.max_tasks or "gave_up" in reply
        return Outcome(**reply)

    def kill(self) -> None:
        """With all it started; it is reaped by the thread it belongs to."""
        try:
            if self.process.returncode is None:  # once reaped, its number may be another's
                os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # gone; macOS says the latter of a zombie
            pass
