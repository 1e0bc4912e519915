"""What a program gets and what comes back of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds on one run of a program, besides those that are the sandbox's own: one process, 64 threads, 32 open files of at
    most 16 MB, a folder of 64 MB.

    Attributes: ``wall_s`` seconds until it is ended; ``memory_mb`` megabytes of address space, Python's own 40 among them;
    ``output_bytes`` most it may print, on stdout and stderr each, before it is ended.
    """

    wall_s: float = 6.0
    memory_mb: int = 1024
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Output:
    """What a program left.

    Attributes: ``stdout``, ``stderr`` texts, cut at the limit; ``ended``: "exit" (by itself, with code 0), "error" (an
    exception or another code), "signal" (crashed), or what it had too much of: "time", "memory", "output", "disk", "threads";
    ``result`` JSON of a called function's value, as the program's process wrote it, or None; ``cpu_s`` seconds it computed.
    """

    stdout: str
    stderr: str
    ended: str
    result: bytes | None = None
    cpu_s: float = 0.0


class SandboxError(RuntimeError):
    """A program could not be run, through no fault of its own; it says nothing about the program."""
