"""What every launcher shares: whether Triton can run here, which backend an operation takes, and the one door to a launch.

Import ``triton`` and ``tl`` from here: where Triton is not installed the kernels are still defined, only never run.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

try:
    import triton
    import triton.language as tl

    INSTALLED = True
except ImportError:
    INSTALLED = False

    class _Absent:
        """Answers to what a module says of Triton while it is being imported: decorators keep their function."""

        def __getattr__(self, name: str) -> "_Absent":
            return self

        def __call__(self, function=None, **_):
            return self if function is None else function

    triton = tl = _Absent()

LEAST_CAPABILITY = (8, 0)
"""bfloat16 arithmetic starts with Ampere."""


@triton.jit
def _probe():
    pass


INTERPRETED = type(_probe).__name__ == "InterpretedFunction"
"""TRITON_INTERPRET=1 was set when the kernels were defined: they run on CPU tensors, slowly, for tests."""


class Launch(NamedTuple):
    """One call of a kernel, as ``recorded`` keeps it."""

    kernel: Any
    grid: int
    args: tuple
    meta: dict[str, Any]


_record: list[Launch] | None = None


def unavailable(device: torch.device | str) -> str | None:
    """Why Triton cannot run on tensors of this device; None where it can."""
    device = torch.device(device)
    if not INSTALLED:
        return "triton is not installed"
    if device.type == "meta":
        return None if _record is not None else "meta tensors hold no data"
    if INTERPRETED:
        return None if device.type == "cpu" else "TRITON_INTERPRET=1 is set, which emulates kernels on CPU tensors alone"
    if device.type != "cuda":
        return f"Triton runs on CUDA devices, not on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"sm_{capability[0]}{capability[1]} is older than sm_80"
    return None


def choose(device: torch.device | str, kernels: str = "auto") -> tuple[str, str]:
    """Backend of the loss on a device, and why.

    Args:
        device: where the tensors are.
        kernels: "auto" takes Triton on CUDA where it can run, "required" refuses anything else, "off" takes plain torch.

    Returns:
        ("triton" or "torch", the reason in a few words).

    Raises:
        ValueError: "required", and Triton cannot run.
    """
    device, reason = torch.device(device), unavailable(device)
    if kernels == "off":
        return "torch", "asked for by --kernels off"
    if kernels == "required":
        if reason:
            raise ValueError(f"--kernels required: {reason}; use --kernels auto to fall back to plain torch, or mend that")
        return "triton", "asked for by --kernels required"
    if reason or device.type == "cpu":  # the interpreter is far too slow for a run
        return "torch", reason or "the interpreter is for tests"
    return "triton", f"Triton {triton.__version__}"


def backend_of(backend: str | None, device: torch.device) -> str:
    """The backend an operation was asked for, or the device's own when it was not.

    Raises:
        ValueError: an unknown backend, or "triton" where it cannot run.
    """
    if backend is None:
        return choose(device)[0]
    if backend not in ("triton", "torch"):
        raise ValueError(f"backend {backend!r}: must be 'triton', 'torch' or None")
    if backend == "triton" and (reason := unavailable(device)):
        raise ValueError(f"backend 'triton' on {device}: {reason}; pass backend='torch' or None")
    return backend


def launch(kernel: Any, grid: int, *args, **meta) -> None:
    """Run ``grid`` programs of a kernel on the device of its first tensor. 1-D: no limit of 65 535; an empty grid runs none."""
    if _record is not None:
        _record.append(Launch(kernel, grid, args, meta))
        return
    if grid == 0:
        return
    device = next(x.device for x in args if isinstance(x, torch.Tensor))
    # Triton launches on the current device, whatever its arguments live on.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[(grid,)](*args, **meta)


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collect launches instead of running them, so that operations called on meta tensors tell what they would compile."""
    global _record
    _record = []
    try:
        yield _record
    finally:
        _record = None
