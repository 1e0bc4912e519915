"""Takes rights away from a process, for good: another uid, limits, Landlock for files, a seccomp filter for system calls.

Read by the sandbox's own interpreter (server.py): standard library only, and nothing of vipfast. All of it works without
privileges and without namespaces; only leaving root's uid needs root.
"""

import ctypes
import os
import platform
import resource
import struct
import sys

from syscalls import ARCHITECTURES, allowed

LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)

# prctl
_PDEATHSIG, _SET_SECCOMP, _SUBREAPER, _NO_NEW_PRIVS = 1, 22, 36, 38

# Landlock (the numbers are the same on every architecture)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REG = (1 << bit for bit in (0, 1, 2, 3, 5, 8))
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
READ, LIST = _READ_FILE | _READ_DIR, _READ_DIR
OWN = READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE
"""What a program may do below its own folder: flat files, so that counting them is one look."""


class Refused(Exception):
    """The machine lacks what the sandbox needs; the message names it."""


def _prctl(option: int, value: int, what: str) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise Refused(f"{what} ({os.strerror(ctypes.get_errno())})")


def leave_root(uid: int) -> None:
    """Become ``uid``, which nobody else uses, without groups or capabilities.

    Raises:
        Refused: the kernel does not let it, as in a container without CAP_SETUID.
    """
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        raise Refused(f"root's right to become another user (CAP_SETUID, CAP_SETGID: {error.strerror})") from error
    assert os.getresuid() == (uid, uid, uid)


def adopt_orphans() -> None:
    """Processes below this one whose parent dies become its children, so that it can end and reap them."""
    if LINUX:
        _prctl(_SUBREAPER, 1, "a subreaper")


def limit(memory: int, cpu_s: int, file_size: int, files: int, processes: int | None) -> None:
    """Set limits that the process cannot raise. ``processes`` counts threads, over all that its uid runs; None leaves it."""
    wanted = {"RLIMIT_AS": memory, "RLIMIT_CPU": cpu_s, "RLIMIT_FSIZE": file_size, "RLIMIT_NOFILE": files, "RLIMIT_CORE": 0}
    if processes is not None:
        wanted["RLIMIT_NPROC"] = processes
    if not LINUX:
        del wanted["RLIMIT_AS"]  # macOS refuses it
    for name, value in wanted.items():
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def die_with_parent(parent: int) -> None:
    if LINUX:
        _prctl(_PDEATHSIG, 9, "a death signal")
        if os.getppid() != parent:  # it died before the signal was asked for
            os._exit(1)


class Landlock:
    """A set of rules, made once and entered by one process after another.

    Args:
        rules: path -> rights below it; paths that do not exist are left out.

    Raises:
        Refused: the kernel has no Landlock, or it is switched off.
    """

    name = "Landlock"

    def __init__(self, rules: dict[str, int]):
        self.abi = _libc.syscall(_CREATE_RULESET, None, 0, 1) if LINUX else -1
        if self.abi < 1:
            raise Refused(
                "Landlock (Linux 5.13 or later with landlock among its security modules, and a container that lets it)"
            )
        handled = (1 << 13) - 1
        for abi, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL)):
            handled |= right if self.abi >= abi else 0
        # file rights; TCP bind and connect; abstract Unix sockets and signals to the outside
        fields = struct.pack("=QQQ", handled, 3 if self.abi >= 4 else 0, 3 if self.abi >= 6 else 0)
        self.fd = _checked(_libc.syscall(_CREATE_RULESET, fields, len(fields), 0), "a Landlock ruleset")
        for path, rights in rules.items():
            if os.path.exists(path):
                self._add(path, rights & handled)

    def _add(self, path: str, rights: int) -> None:
        fd = os.open(path, os.O_PATH)
        try:
            rights &= ~0 if os.path.isdir(path) else _FILE_RIGHTS
            _checked(_libc.syscall(_ADD_RULE, self.fd, 1, struct.pack("=Qi", rights, fd), 0), f"a Landlock rule for {path}")
        finally:
            os.close(fd)

    def enter(self) -> None:
        _prctl(_NO_NEW_PRIVS, 1, "no_new_privs")
        _checked(_libc.syscall(_RESTRICT_SELF, self.fd, 0), "Landlock's restriction")


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


class Seccomp:
    """A filter of system calls, made once and entered by one process after another. What is not allowed fails with ENOSYS,
    which libraries take as an old kernel and go on.

    Raises:
        Refused: no table for this architecture, or no Linux.
    """

    name = "a system call filter (seccomp)"

    def __init__(self):
        machine = platform.machine()
        if not LINUX or machine not in ARCHITECTURES or sys.maxsize < 2**32:
            raise Refused(
                f"system call filters on {sys.platform} {machine} (there are tables for {', '.join(ARCHITECTURES)} Linux)"
            )
        load, same, mask, end = 0x20, 0x15, 0x54, 0x06
        allow, refuse, kill = 0x7FFF0000, 0x00050000 | 38, 0x80000000
        code = [(load, 0, 0, 4), (same, 1, 0, ARCHITECTURES[machine]), (end, 0, 0, kill), (load, 0, 0, 0)]
        for number, rules in allowed(machine):
            tests = []
            for rule in rules:
                jumps = [(same, len(rule.values) - i, 0, value) for i, value in enumerate(rule.values)]
                tests += [(load, 0, 0, 16 + 8 * rule.argument), (mask, 0, 0, rule.mask), *jumps, (end, 0, 0, refuse)]
            code += [(same, 0, len(tests) + 1, number), *tests, (end, 0, 0, allow)]
        code.append((end, 0, 0, refuse))
        self._code = b"".join(struct.pack("=HBBI", *line) for line in code)
        self._filter = _Filter(len(code), self._code)

    def enter(self) -> None:
        _prctl(_NO_NEW_PRIVS, 1, "no_new_privs")
        if _libc.prctl(_SET_SECCOMP, 2, ctypes.byref(self._filter), 0, 0):
            raise Refused(f"system call filters (seccomp: {os.strerror(ctypes.get_errno())})")


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise Refused(f"{what} ({os.strerror(ctypes.get_errno())})")
    return result
