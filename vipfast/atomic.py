"""Files and folders that are complete or absent, whatever moment the process dies (write aside, fsync, rename).

Hidden names carry the writer's process id: ``.NAME.tmp-PID`` is being written (or deleted), ``.NAME.old-PID`` is what
``NAME`` replaces. ``settle`` clears up after writers that died.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-(?P<pid>\d+)")


def write_file(path: Path, data: bytes, durable: bool = True) -> None:
    """Write or replace a file; a reader sees the old content or the new, never a part. ``durable``: even after a power cut."""
    temporary = _hidden(path, "tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        if durable:
            sync(temporary)
        os.replace(temporary, path)
        if durable:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def begun_folder(target: Path) -> Path:
    """Make the empty hidden folder that ``new_folder`` may finish; until then other processes can write into it too."""
    target.parent.mkdir(parents=True, exist_ok=True)
    settle(target.parent)
    temporary = _hidden(target, "tmp")
    temporary.mkdir()
    return temporary


@contextmanager
def new_folder(target: Path, begun: Path | None = None) -> Iterator[Path]:
    """Yield a hidden folder, empty unless ``begun``, that becomes ``target`` (or replaces it) when the block ends without an
    error.
    """
    temporary = begun or begun_folder(target)
    try:
        yield temporary
        for path in sorted(temporary.rglob("*")):
            sync(path)
        sync(temporary)
        if target.exists():
            os.replace(target, _hidden(target, "old"))
        os.replace(temporary, target)
        sync(target.parent)
    finally:
        settle(target.parent)


def remove_folder(target: Path) -> None:
    """Delete a folder; a reader sees all of it or none, since it is hidden before its files go."""
    hidden = _hidden(target, "tmp")
    os.replace(target, hidden)
    shutil.rmtree(hidden)


def settle(parent: Path) -> None:
    """Delete what dead writers (or this process) left half done in ``parent``; put back what was never replaced."""
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        leftover = _LEFTOVER.fullmatch(path.name)
        if leftover is None or _writes_elsewhere(int(leftover["pid"])):
            continue
        target = parent / leftover["name"]
        if leftover["kind"] == "old" and not target.exists():
            os.replace(path, target)
        elif path.is_dir():
            # What cannot be deleted now (a network disk's open-file stubs) is found again by the next call.
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{os.getpid()}")


def _writes_elsewhere(pid: int) -> bool:
    """Whether another live process has this id. Our own id is a leftover: a resumed container often gets the same one."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
