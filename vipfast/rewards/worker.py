"""The child process of a ``Pool``: builds its function once, then answers one task at a time until its parent is gone.

Run by path as ``python -P worker.py PARENT_PID FD``, never by forking: the parent may hold threads, locks and a GPU. It imports
the standard library and what its function needs; ``__main__`` of the parent is never run again. FD is a socket on which both
sides speak in messages, an 8-byte length and so many bytes. Tasks come pickled, answers go back as JSON, so that nothing a
graded text did to this process can act in the parent.
"""

import ctypes
import importlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

_LENGTH = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1


def send(sock: socket.socket, message: bytes, deadline: float | None = None) -> None:
    """Send a message; TimeoutError when it has not gone out by ``deadline`` (time.monotonic)."""
    sock.settimeout(_left(deadline))
    sock.sendall(_LENGTH.pack(len(message)))
    sock.settimeout(_left(deadline))
    sock.sendall(message)


def receive(sock: socket.socket, deadline: float | None = None) -> bytes:
    """The next message; EOFError when the other side is gone, TimeoutError when ``deadline`` passes."""
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size, deadline))
    return _exactly(sock, length, deadline)


def _exactly(sock: socket.socket, length: int, deadline: float | None) -> bytes:
    parts = []
    while length:
        sock.settimeout(_left(deadline))
        part = sock.recv(min(length, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def load(target: str) -> Callable:
    """The function behind "module:function"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends; other systems than Linux close the socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()


def _resident_bytes() -> int:
    """Memory in use now; 0 where the system does not say."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _answered(sock: socket.socket, call: Callable, *args) -> Callable | None:
    """Call, and send what came of it. Returns what it gave; None (after which this process is not to be used) if it raised
    MemoryError."""
    value, reply = None, {}
    try:
        value = call(*args)
        reply["value"] = getattr(value, "facts", None) if callable(value) else value
    except MemoryError:
        reply["gave_up"] = "memory"
    except Exception as error:  # noqa: BLE001 - it is the user's code, and may raise anything
        reply["error"] = f"{type(error).__name__}: {error}"[:2000]
    reply["resident_bytes"] = _resident_bytes()
    try:
        message = json.dumps(reply)
    except (TypeError, ValueError) as error:
        message = json.dumps({"error": f"what it returned is no plain value ({error})"[:2000]})
    send(sock, message.encode())
    if "gave_up" in reply:
        sys.exit()
    return value


def main(parent: int, fd: int) -> None:
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    sys.path[:], target, args, memory_bytes = pickle.loads(receive(sock))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    function = _answered(sock, lambda: load(target)(*args))
    if function is None:
        return
    while True:
        try:
            task = receive(sock)
        except EOFError:
            return
        _answered(sock, function, *pickle.loads(task))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
