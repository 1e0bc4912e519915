"""One place in the sandbox: a server process with a folder of its own, that runs one program at a time."""

import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vipfast.sandbox.base import Limits, Output, SandboxError

SERVER = Path(__file__).with_name("server.py")
LARGEST_RESULT = 16 << 20
GRACE_S = 10.0
"""How long after a program's own time its server may take to answer, and how long to start."""


class Refused(SandboxError):
    """The machine lacks what the sandbox needs; the message names it."""


class Worker:
    """Starts a server; started again by its owner once ``run`` has raised.

    Args:
        strict: whether every part of the confinement must hold.
        uid: the user that programs run as, where this process is root; None: as this one.

    Raises:
        Refused: with ``strict``, a part is missing.
        SandboxError: the server does not start.
    """

    def __init__(self, strict: bool, uid: int | None):
        self.folder = tempfile.mkdtemp(prefix="vipfast-sandbox-")
        self._control, theirs = socket.socketpair()
        self._last_words, self._process = tempfile.TemporaryFile(), None
        settings = {"strict": strict, "uid": uid, "folder": self.folder}
        try:
            if uid is not None:
                os.chown(self.folder, uid, uid)
            # The same program gives the same output each time; threads share an arena, or each would reserve 64 MB.
            # No hook between fork and exec, since this process has threads and may hold a GPU; the server confines itself.
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8", SERVER, str(theirs.fileno()), json.dumps(settings)],
                env={"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}, cwd="/", pass_fds=[theirs.fileno()],
                start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._last_words,
            )  # fmt: skip
            theirs.close()  # so that its end is seen
            told = self._answer([], {}, time.monotonic() + GRACE_S)
            if "refused" in told:
                raise Refused(told["refused"])
        except OSError as error:
            self.close()
            raise SandboxError(f"the sandbox's server does not start: {error}") from error
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()

    def run(self, job: dict, stdin: str, limits: Limits) -> Output:
        """Run a program to its end.

        Args:
            job: source, function and arguments, as program.py reads them.
            stdin: what the program reads there.

        Raises:
            SandboxError: the server died or did not answer; close this worker.
        """
        files = [_file(json.dumps(job)), _file(stdin)]
        pipes = [os.pipe() for _ in range(3)]
        ends = [read for read, _ in pipes]
        try:
            theirs = [*files, *(write for _, write in pipes)]
            message = {"memory": limits.memory_mb << 20, "cpu_s": int(limits.wall_s) + 2, "wall_s": limits.wall_s}
            try:
                self._send(json.dumps(message).encode(), theirs)
            finally:
                for file in theirs:
                    os.close(file)
            stdout, stderr, results = kept = [_Kept(limits.output_bytes), _Kept(limits.output_bytes), _Kept(LARGEST_RESULT)]
            end = self._answer(ends, dict(zip(ends, kept)), time.monotonic() + limits.wall_s + GRACE_S)
        finally:
            for read in ends:
                os.close(read)
        if not results.data.startswith(b"+"):
            raise SandboxError(f"a program's process could not be confined: {stderr.text()[-400:] or end}")
        ended = "output" if any(stream.full for stream in kept) else _ended(end, stderr.text())
        return Output(stdout.text(), stderr.text(), ended, bytes(results.data[1:]) or None, end["cpu_s"])

    def _answer(self, ends: list[int], kept: dict, deadline: float) -> dict:
        """The server's next message; until then and after it, what comes out of the pipes is drained."""
        poll = select.poll()
        for file in (self._control, *ends):
            poll.register(file, select.POLLIN)
        open_ends, asked, end = set(ends), False, None
        while end is None or open_ends:
            left = deadline - time.monotonic()
            if left <= 0:
                raise SandboxError("the sandbox's server does not answer")
            # Once the program is gone whatever it wrote is there already, and a pipe that stays open is nobody's to wait for.
            ready = poll.poll(left * 1000 if end is None else 0)
            if end is not None and not ready:
                break
            for file, _ in ready:
                if file in kept:
                    data = os.read(file, 1 << 16)
                    if not data:
                        poll.unregister(file)
                        open_ends.discard(file)
                    elif not kept[file].add(data) and not asked:
                        asked = True
                        self._send(b"k", [])
                else:
                    end = self._message()
                    poll.unregister(file)
        return end

    def _send(self, message: bytes, files: list[int]) -> None:
        try:
            socket.send_fds(self._control, [message], files)
        except OSError as error:
            raise SandboxError(f"the sandbox's server is gone ({error})") from error

    def _message(self) -> dict:
        try:
            data = self._control.recv(1 << 16)
        except ConnectionResetError:  # it died with a message unread
            data = b""
        if not data:
            self._last_words.seek(0)
            raise SandboxError(f"the sandbox's server died {self._last_words.read().decode(errors='replace')[-400:]}".strip())
        return json.loads(data)

    def close(self) -> None:
        """End the server and what it runs, and remove the folder."""
        self._control.close()
        if self._process is not None:
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._last_words.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Kept:
    """The first ``limit`` bytes of a stream."""

    def __init__(self, limit: int):
        self.data, self._limit = bytearray(), limit

    def add(self, data: bytes) -> bool:
        """Keep what fits; whether there is room for more."""
        self.data += data[: self._limit - len(self.data)]
        return not self.full

    @property
    def full(self) -> bool:
        return len(self.data) >= self._limit

    def text(self) -> str:
        return self.data.decode(errors="replace")


def _file(text: str) -> int:
    """A file without a name that holds a text and can only be read."""
    data = text.encode(errors="surrogatepass")
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("job", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    written = 0
    while written < len(data):
        written += os.write(fd, data[written : written + (1 << 30)])
    os.lseek(fd, 0, os.SEEK_SET)
    if hasattr(os, "memfd_create"):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def _ended(end: dict, stderr: str) -> str:
    if end["stopped"]:
        return end["stopped"]
    if end["status"] == -signal.SIGXCPU:
        return "time"
    if end["status"] < 0:
        return "signal"
    if end["status"] and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return "memory"
    return "error" if end["status"] else "exit"
