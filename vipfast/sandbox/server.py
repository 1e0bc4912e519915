"""The sandbox's own interpreter: warm, without rights, it forks a child for every program and sees to its end.

Run as ``python -s -S -P -B server.py FD SETTINGS``, with FD its end of a socket pair and SETTINGS JSON. It has one thread, so
that it may fork, and knows neither programs nor tests: a child reads its job from a file of its own and writes into pipes of
its caller. Standard library only.

Each message in carries a child's limits and its files: job, stdin, stdout, stderr, results. Each message out says how it ended.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
import sysconfig
import time

sys.path.insert(0, os.path.dirname(__file__))
import confine
import program

del sys.path[0]

LIBRARY = sysconfig.get_paths()["stdlib"]
TICK_S = 0.05
"""How often a running program's folder and threads are counted."""
START_S, STARTED = 5.0, b"\0"
"""How long a child may take to give up its rights, and what it then tells its server by the pipe that also tells of signals."""
LARGEST_FOLDER, MOST_FILES, MOST_THREADS = 64 << 20, 1000, 64
LARGEST_FILE, MOST_OPEN = 16 << 20, 32
"""Files deleted while open are in no folder: at most MOST_OPEN of them, each LARGEST_FILE."""


class Server:
    """Gives up root, prepares what children enter, and runs them one after another.

    Args:
        control: the caller's socket.
        strict: refuse to start where a part of the confinement is missing, else do without.
        uid: who to become; None stays.
        folder: the programs' own folder, which this user owns.
    """

    def __init__(self, control: socket.socket, strict: bool, uid: int | None, folder: str):
        self.control, self.folder, self.uid, self.parent = control, folder, uid, os.getppid()
        self.names = program.preload()
        self._need(strict, confine.adopt_orphans)
        self.landlock = self._need(strict, lambda: _tried(confine.Landlock(_rules(folder))))
        self.seccomp = self._need(strict, lambda: _tried(confine.Seccomp()))
        self.door = os.open(LIBRARY, os.O_RDONLY)
        if uid is not None:
            self._need(strict, lambda: confine.leave_root(uid))
        if not os.access(LIBRARY, os.R_OK | os.X_OK):
            _enter_by(f"/proc/self/fd/{self.door}")
        try:
            os.chdir(folder)
        except PermissionError as error:
            raise confine.Refused(f"a temporary folder that any user can enter ({folder} is not; set TMPDIR)") from error
        os.environ.update(HOME=folder, TMPDIR=folder, PATH="", LANG="C.UTF-8")
        self.wake, self.waker = os.pipe()
        for end in (self.wake, self.waker):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        gc.freeze()

    def _need(self, strict: bool, part):
        try:
            return part()
        except confine.Refused:
            if strict:
                raise

    def serve(self):
        """Run programs until the caller is gone. Returns what is left to do, in a child its program."""
        while True:
            message, files, _, _ = socket.recv_fds(self.control, 1 << 12, 5)
            if not message:
                return self._leave
            if not files:  # a late request to end a program that had ended
                continue
            limits, parent = json.loads(message.lstrip(b"k")), os.getpid()
            child = os.fork()
            if child == 0:
                return self._become(limits, files, parent)
            for file in files:
                os.close(file)
            end = self._watch(child, limits["wall_s"])
            if end is None:
                return self._leave
            self.control.sendall(json.dumps(end).encode())

    def _become(self, limits: dict, files: list[int], parent: int):
        """In the child: give up everything, then tell so with the first byte of the results."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        confine.die_with_parent(parent)
        job, stdin, stdout, stderr, results = files
        with open(job, "rb") as file:
            text = json.load(file)
        for file, place in ((stdin, 0), (stdout, 1), (stderr, 2)):
            os.dup2(file, place)
        confine.limit(limits["memory"], limits["cpu_s"], LARGEST_FILE, MOST_OPEN, self.uid and 2 * MOST_THREADS)
        for part in (self.landlock, self.seccomp):
            if part is not None:
                part.enter()
        os.write(self.waker, STARTED)
        self.control.detach()
        start = 3
        for kept in sorted((self.door, results)):
            os.closerange(start, kept)
            start = kept + 1
        os.closerange(start, 1024)
        os.write(results, b"+")
        return lambda: program.run(text, self.names, results)

    def _watch(self, child: int, wall_s: float) -> dict | None:
        """See a child to its end. Returns how it ended, None when the caller is gone."""
        deadline, why = time.monotonic() + START_S, None
        while True:
            done, status, usage = os.wait4(child, os.WNOHANG)
            if done:
                break
            left = deadline - time.monotonic()
            why = "time" if left <= 0 else self._excess(child)
            asked = select.select([self.wake, self.control], [], [], 0 if why else min(TICK_S, left))[0]
            if self.control in asked:
                why = "output" if self.control.recv(1) else "gone"
            elif os.getppid() != self.parent:
                why = "gone"
            if why:
                os.kill(child, signal.SIGKILL)
                _, status, usage = os.wait4(child, 0)
                break
            if self.wake in asked and STARTED in os.read(self.wake, 1 << 12):
                deadline = time.monotonic() + wall_s  # what came before is not the program's
        if self.seccomp is None:
            _sweep(child)
        _empty(self.folder)
        if why == "gone":
            return None
        cpu_s = usage.ru_utime + usage.ru_stime
        return {"status": os.waitstatus_to_exitcode(status), "stopped": why, "cpu_s": cpu_s}

    def _excess(self, child: int) -> str | None:
        size = count = 0
        try:
            for entry in _entries(self.folder):
                count += 1
                try:
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                except FileNotFoundError:  # deleted since
                    continue
        except PermissionError:  # where system calls are not filtered it can take these rights away meanwhile
            return None
        if size > LARGEST_FOLDER or count > MOST_FILES:
            return "disk"
        tasks = f"/proc/{child}/task"
        return "threads" if os.path.isdir(tasks) and len(os.listdir(tasks)) > MOST_THREADS else None

    def _leave(self) -> None:
        _empty(self.folder)
        try:
            os.rmdir(self.folder)
        except OSError:  # its parent is not this user's to change; the caller removes it
            pass


def _tried(part):
    """The part itself, once a child has entered it.

    Raises:
        Refused: the child could not.
    """
    child = os.fork()
    if child == 0:
        try:
            part.enter()
        except confine.Refused:
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise confine.Refused(f"leave to enter {part.name}")
    return part


def _rules(folder: str) -> dict[str, int]:
    """What programs may read: the standard library without installed packages, shared libraries, time zones, locales."""
    left_out = ("site-packages", "dist-packages")
    library = [entry.path for entry in os.scandir(LIBRARY) if entry.name not in left_out]
    places = {os.path.realpath(place) for place in ("/lib", "/lib64", "/usr/lib", "/usr/lib64")}
    entries = [entry for place in places if os.path.isdir(place) for entry in os.scandir(place)]
    # Not the whole of these: installed packages may lie there too, such as Debian's in /usr/lib/python3/dist-packages.
    kept = (f"{os.uname().machine}-linux-gnu", "glibc-hwcaps", "locale")
    shared = [entry.path for entry in entries if entry.name in kept or (".so" in entry.name and entry.is_file())]
    others = ["/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime", "/dev/zero", "/dev/urandom"]
    rules = dict.fromkeys(library + shared + others, confine.READ)
    return rules | {LIBRARY: confine.LIST, "/dev/null": confine.OWN, folder: confine.OWN}


def _enter_by(door: str) -> None:
    """Reach the standard library by a file that root opened: it lies where this user may not pass, such as below /root."""

    def moved(path: str) -> str:
        return door + path.removeprefix(LIBRARY) if path.startswith(LIBRARY) else path

    sys.path[:] = map(moved, sys.path)
    for module in list(sys.modules.values()):
        if hasattr(module, "__path__"):
            module.__path__ = [moved(path) for path in module.__path__]
    sys.path_importer_cache.clear()


def _sweep(child: int) -> None:
    """End and reap whatever a child has left behind, where system calls are not filtered and it could."""
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # nobody left; macOS says the latter of zombies
        pass
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        with open("/proc/thread-self/children") as children:
            for orphan in children.read().split():
                os.kill(int(orphan), signal.SIGKILL)
        time.sleep(0.001)


def _entries(folder: str):
    os.chmod(folder, 0o700)  # which a program can take from its folder only where system calls are not filtered
    return os.scandir(folder)


def _empty(folder: str) -> None:
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):  # likewise
            _empty(entry.path)
            os.rmdir(entry.path)
        else:
            os.unlink(entry.path)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        server = Server(control, **json.loads(sys.argv[2]))
    except (confine.Refused, OSError) as error:
        control.sendall(json.dumps({"refused": str(error)}).encode())
        return
    control.sendall(b"{}")
    server.serve()()


if __name__ == "__main__":
    main()
