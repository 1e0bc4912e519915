"""One process at a time trains in a run's folder: a lock that the kernel takes back when a process ends, in whatever way."""

import fcntl
import os
import socket
import time
import warnings
from pathlib import Path

from vipfast.errors import UsageError

NAME = ".lock"

_held: dict[Path, int] = {}  # folder -> descriptor


def take(folder: str | Path) -> None:
    """Lock a run's folder until ``release`` or this process ends; taken twice by one process it is taken once.

    Raises:
        UsageError: another process holds it; the message names that process.
    """
    path = Path(folder).resolve()
    if path in _held:
        return
    descriptor = os.open(path / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    for patience_s in (0.1, 0.0):  # another process may just be looking (``check``)
        if _locked(descriptor, path, fcntl.LOCK_EX):
            break
        time.sleep(patience_s)
    else:
        _refuse(descriptor, folder)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    _held[path] = descriptor


def check(folder: str | Path) -> None:
    """Refuse a folder in which another process trains, and leave it as it is.

    Raises:
        UsageError: as ``take``.
    """
    path = Path(folder).resolve()
    if path in _held or not (path / NAME).exists():
        return
    descriptor = os.open(path / NAME, os.O_RDONLY)
    if not _locked(descriptor, path, fcntl.LOCK_SH):
        _refuse(descriptor, folder)
    os.close(descriptor)


def release(folder: str | Path) -> None:
    """Give a lock back; nothing to do where none was taken."""
    descriptor = _held.pop(Path(folder).resolve(), None)
    if descriptor is not None:
        os.close(descriptor)


def _locked(descriptor: int, path: Path, kind: int) -> bool:
    """False if another process has it; True with a warning where the file system knows no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        warnings.warn(f"{path}: its file system has no locks ({error}); start no second run in it", stacklevel=1)
    return True


def _refuse(descriptor: int, folder: str | Path) -> None:
    who = os.read(descriptor, 300).decode(errors="replace") or "another process"
    os.close(descriptor)
    raise UsageError(
        f"--output-dir {folder}: {who} trains in it; wait for it or stop it before --resume, or give another --output-dir"
    )


def _close_in_child() -> None:
    """A forked child would keep the lock of a parent that is gone; closing its descriptor takes nothing from the parent."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
