"""Programs that nobody vouches for, run side by side: at most as many at a time as there are workers."""

import atexit
import functools
import itertools
import json
import os
import queue
from pathlib import Path

from vipfast.errors import UsageError
from vipfast.sandbox.base import Limits, Output, SandboxError
from vipfast.sandbox.worker import Refused, Worker

FIRST_UID = 0x70000000
"""As root, programs run as users from here to 0x7fffffff, 64 for each trainer by its process id: above the ids that people,
services and containers (systemd's end just below) are given."""
UID_BLOCK, MAX_PID = 64, 1 << 22
_numbers = itertools.count()

PROBE = """
import ctypes, json, os, socket
def fails(act):
    try:
        act()
    except OSError:
        return True
    return False
parent, here = os.getppid(), os.getcwd()
def write():
    path = f"{os.path.dirname(here)}/vipfast-probe-{parent}"
    open(path, "x").close()
    os.remove(path)
open("own", "w").write("x")
print(json.dumps({
    "no network": fails(lambda: socket.socket()) and fails(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)),
    "one process": fails(lambda: os.fork() or os._exit(0)),
    "no signals to others": fails(lambda: os.kill(parent, 0)),
    "no reading outside its folder": fails(lambda: open("/etc/passwd").read()) and fails(lambda: os.listdir("/proc")),
    "no writing outside its folder": fails(write) and fails(lambda: os.chmod(here, 0o700)),
    "not root": os.getuid() != 0,
}))
"""


class Sandbox:
    """Runs programs; may be called from several threads.

    Args:
        strength: "strict" refuses where a part of the confinement does not hold; "weak" does without it.
        workers: most programs at a time; the cores this process may use unless given.

    Attributes: ``note`` str, what holds and what does not, found by a program that tries; ``workers`` int.

    Raises:
        UsageError: with "strict", this machine lacks something; the message names it.
    """

    def __init__(self, strength: str = "strict", workers: int | None = None):
        self._strict = strength == "strict"
        self._closed = False
        # The last used is the next used: one that is warm, and as many as are needed.
        self._free: queue.LifoQueue = queue.LifoQueue()
        self.workers = workers or _cores()
        for _ in range(self.workers):
            self._free.put(None)
        try:
            self.note = self._check()
        except BaseException:
            self.close()
            raise

    def run(
        self, source: str, *, stdin: str = "", function: str | None = None, arguments=(), limits: Limits | None = None
    ) -> Output:
        """Run a Python program in a fresh process, as a script, or one call of a function it defines.

        Args:
            source: the program.
            stdin: what it can read there.
            function: name of the function, or of the method of its class Solution, to call.
            arguments: positional, whatever JSON can hold.
            limits: bounds on this run.

        Raises:
            SandboxError: it could not be run; says nothing about the program.
        """
        job = {"source": source, "function": function, "arguments": list(arguments)}
        worker = self._free.get()
        try:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            worker = worker or Worker(self._strict, _uid(next(_numbers)))
            return worker.run(job, stdin, limits or Limits())
        except BaseException:
            if worker is not None:
                worker.close()
            worker = None
            raise
        finally:
            if self._closed and worker is not None:
                worker.close()
                worker = None
            self._free.put(worker)

    def _check(self) -> str:
        try:
            output = self.run(PROBE)
            holds = json.loads(output.stdout) if output.ended == "exit" else {f"a program that runs ({output.stderr})": False}
        except Refused as error:
            raise UsageError(_refusal(str(error))) from error
        except SandboxError as error:
            raise UsageError(f"--sandbox {'strict' if self._strict else 'weak'}: cannot run any program: {error}") from error
        broken = [what for what, true in holds.items() if not true]
        if self._strict and broken:
            raise UsageError(_refusal(", ".join(broken)))
        if not broken:
            return f"sandbox: {', '.join(holds)} (tried)"
        return f"sandbox: weak, without: {', '.join(broken)} (tried)"

    def close(self) -> None:
        """End all workers; one that is busy ends with its program."""
        self._closed = True
        idle = []
        while not self._free.empty():
            idle.append(self._free.get())  # nothing else takes one once closed, but to find that out
        for worker in filter(None, idle):
            worker.close()
        for _ in idle:
            self._free.put(None)


def check(strength: str) -> str:
    """Try what holds here: a sentence for the notes of a run.

    Raises:
        UsageError: with "strict", this machine lacks something; the message names it.
    """
    sandbox = Sandbox(strength, workers=1)
    sandbox.close()
    return sandbox.note


@functools.cache
def shared(strength: str = "strict") -> Sandbox:
    """The process's own sandbox of a strength, opened when first asked for and closed at exit."""
    sandbox = Sandbox(strength)
    atexit.register(sandbox.close)
    return sandbox


def run_python(source: str, limits: Limits | None = None, *, strength: str = "strict") -> Output:
    """Run a script in the shared sandbox, with nothing to read on stdin; nothing of it lasts.

    Raises:
        UsageError: the sandbox cannot be had here.
        SandboxError: the script could not be run; says nothing about it.
    """
    return shared(strength).run(source, limits=limits)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _uid(number: int) -> int | None:
    """A user for one worker where this process is root: of its own where that many users exist, else near the highest."""
    if os.geteuid() != 0:
        return None
    first, count = 0, 1 << 32
    ranges = Path("/proc/self/uid_map")
    if ranges.is_file():
        first, _, count = max(
            (list(map(int, line.split())) for line in ranges.read_text().splitlines()), key=lambda row: row[2]
        )
    if first + count > FIRST_UID + MAX_PID * UID_BLOCK:
        return FIRST_UID + os.getpid() % MAX_PID * UID_BLOCK + number % UID_BLOCK
    return first + count - 2 - number % min(UID_BLOCK, max(count // 2, 1))


def _refusal(what: str) -> str:
    return (
        f"--sandbox strict: this machine lacks {what}. Run on Linux with Landlock and seccomp, or give --sandbox weak, which "
        "goes without and leaves the trainer's files and network open to programs that a model wrote"
    )
