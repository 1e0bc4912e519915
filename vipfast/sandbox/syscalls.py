"""The system calls a program in the sandbox may make; whatever is not here fails.

None makes a process, reaches a socket, signals, traces or limits another process, or changes owner, mode, times or attributes
of a file. That matters most where the trainer is no root: its programs then run under its own uid, and Landlock does not see
chmod. Read by the sandbox's own interpreter: standard library only.
"""

from typing import NamedTuple


class Rule(NamedTuple):
    """Allowed where ``arguments[argument] & mask`` is one of ``values`` (both the low 32 bits)."""

    argument: int
    mask: int
    values: tuple[int, ...]


ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""What Linux calls each in a filter (AUDIT_ARCH_*)."""

_ANY = 0xFFFFFFFF
_ACCESS, _TRUNCATE = 3, 0o1000
# O_TRUNC with read access alone truncates too, which Landlock's first versions do not see.
_OPEN = (_ACCESS | _TRUNCATE, (0, 1, 2, _TRUNCATE | 1, _TRUNCATE | 2))
_RULES = {
    "open": [Rule(1, *_OPEN)],
    "openat": [Rule(2, *_OPEN)],
    # CLONE_THREAD: threads, no processes. glibc falls back to clone from clone3, whose flags no filter can see.
    "clone": [Rule(0, 0x10000, (0x10000,))],
    "prlimit64": [Rule(0, _ANY, (0,))],
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, locks, F_DUPFD_CLOEXEC; not F_SETOWN and F_SETSIG, which signal others
    "fcntl": [Rule(1, _ANY, (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030))],
    # TCGETS (isatty), TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": [Rule(1, _ANY, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451))],
    # AF_UNIX and SOCK_STREAM, whose ends cannot be turned elsewhere; the only sockets (asyncio wakes itself with a pair)
    "socketpair": [Rule(0, _ANY, (1,)), Rule(1, 0xF, (1,))],
    # flags: MSG_DONTWAIT and MSG_NOSIGNAL at most; urgent data has let programs into kernels
    "sendto": [Rule(3, _ANY & ~0x4040, (0,))],
    "recvfrom": [Rule(3, _ANY & ~0x4040, (0,))],
}

# name, number on x86-64, number on arm64 (- where it has none)
_NUMBERS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
preadv2 327 286, pwritev2 328 287, lseek 8 62, sendfile 40 71, close 3 57, close_range 436 436, dup 32 23, dup2 33 -,
dup3 292 24, pipe 22 -, pipe2 293 59, fcntl 72 25, ioctl 16 29, open 2 -, openat 257 56, stat 4 -, fstat 5 80,
lstat 6 -, newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44, access 21 -, faccessat 269 48,
faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50,
umask 95 166, rename 82 -, renameat 264 38, renameat2 316 276, unlink 87 -, unlinkat 263 35, fsync 74 82, fdatasync 75 83,
ftruncate 77 46, fadvise64 221 223, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -,
epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd 284 -, eventfd2 290 19,
mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, brk 12 214, madvise 28 233, msync 26 227,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 133,
rt_sigtimedwait 128 137, sigaltstack 131 132, restart_syscall 219 128, pause 34 -, nanosleep 35 101,
clock_nanosleep 230 115, getitimer 36 102, setitimer 38 103, alarm 37 -, time 201 -, gettimeofday 96 169,
clock_gettime 228 113, clock_getres 229 114, times 100 153, getrusage 98 165, getrlimit 97 163, setrlimit 160 164,
prlimit64 302 261, sysinfo 99 179, uname 63 160, getrandom 318 278, getcpu 309 168, sched_yield 24 124,
sched_getaffinity 204 123, getpid 39 172, getppid 110 173, gettid 186 178, getpgrp 111 -, getpgid 121 155, getsid 124 156,
getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getgroups 115 158, getresuid 118 148, getresgid 120 150,
clone 56 220, wait4 61 260, waitid 247 95, exit 60 93, exit_group 231 94, futex 202 98, set_tid_address 218 96,
set_robust_list 273 99, rseq 334 293, membarrier 324 283, arch_prctl 158 -, socketpair 53 199, sendto 44 206,
recvfrom 45 207, shutdown 48 210, getsockname 51 204, getpeername 52 205, getsockopt 55 209
"""


def allowed(machine: str) -> list[tuple[int, list[Rule]]]:
    """The calls allowed on an architecture: number, and the rules its arguments must keep."""
    column = 1 + list(ARCHITECTURES).index(machine)
    rows = [row.split() for row in _NUMBERS.replace("\n", " ").split(",")]
    return [(int(row[column]), _RULES.get(row[0], [])) for row in rows if row[column] != "-"]
