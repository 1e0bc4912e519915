"""Compiles every kernel for GPUs that are not there, through Triton's own launcher, and reads what the machine code needs.

Nothing is listed by hand: operations are called on meta tensors and say themselves what they would launch. Import this only
where TRITON_INTERPRET is unset.
"""

import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from common import print_table
from kernel_cases import compile_cases

from vipfast.kernels import launch


class Binary(NamedTuple):
    """One compiled variant of a kernel.

    ``spill_bytes``: stack and local memory of a thread. ``integers``: arguments that would become constants if they were 1;
    ``ones``: those that did.
    """

    op: str
    kernel: str
    target: int
    case: str
    registers: int
    shared_bytes: int
    spill_bytes: int
    time_s: float
    integers: tuple[str, ...]
    ones: tuple[str, ...]


class _Absent:
    """A driver for a GPU that is not there: answers what the launcher asks before it compiles."""

    def __init__(self, target: int):
        self.target = target

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        return self.target  # kernels cache their variants by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(targets: tuple[int, ...], *, full: bool = True) -> list[Binary]:
    """Every distinct variant (argument types, constants, divisibility, options) the cases would launch, once per target."""
    from triton.runtime.driver import driver

    launches = []
    for op, case, call in compile_cases(full=full):
        with launch.recorded() as record:
            call()
        launches += [(op, case, *one) for one in record]
    binaries, seen = [], set()
    for target in targets:
        driver.set_active(_Absent(target))
        for op, case, kernel, _, args, meta in launches:
            start = time.perf_counter()
            compiled = kernel.warmup(*args, grid=(1,), **meta)
            time_s = time.perf_counter() - start
            # Two kernels of one text share machine code, but are compiled and loaded apart.
            name = f"{compiled.src.fn.__module__.rpartition('.')[2]}.{compiled.name}"
            if (name, compiled.hash) not in seen:
                seen.add((name, compiled.hash))
                registers, spill_bytes = resources(compiled.asm["cubin"])
                shared_bytes = compiled.metadata.shared
                found = (registers, shared_bytes, spill_bytes, time_s)
                binaries.append(Binary(op, name, target, case, *found, *_integers(compiled.src)))
    return binaries


def _integers(source) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = [param.name for param in source.fn.params if not (param.is_constexpr or param.do_not_specialize)]
    constants = {source.fn.params[path[0]].name: value for path, value in source.constants.items()}
    integers = tuple(name for name in names if source.signature[name] in ("i32", "i64"))
    return integers, tuple(name for name in names if constants.get(name) == 1)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, per thread, of the greediest function in a cubin."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if not found:
        raise ValueError(f"cuobjdump names no registers: {text!r}")
    return max(int(registers) for registers, _, _ in found), max(int(stack) + int(local) for _, stack, local in found)


def report(targets: tuple[int, ...], *, full: bool) -> dict:
    """Compile, print one line per kernel and target (most over its variants), return the summary."""
    binaries = compile_all(targets, full=full)
    rows = [("kernel", "target", "variants", "registers", "shared bytes", "spilled bytes", "seconds")]
    for kernel, target in dict.fromkeys((b.kernel, b.target) for b in binaries):
        found = [b for b in binaries if (b.kernel, b.target) == (kernel, target)]
        most = (max(b[i] for b in found) for i in (4, 5, 6))
        rows.append((kernel, f"sm_{target}", len(found), *most, f"{sum(b.time_s for b in found):.1f}"))
    print_table(f"compiled by Triton {launch.triton.__version__}, per kernel the most over its variants", rows)
    for b in binaries:
        if b.spill_bytes:
            print(f"  spills {b.spill_bytes} bytes a thread: {b.kernel} for sm_{b.target}, {b.op}, {b.case}")
    by_target = {f"sm_{t}": sum(b.spill_bytes for b in binaries if b.target == t) for t in targets}
    return {
        "kernels": len({b.kernel for b in binaries}),
        "spills": sum(by_target.values()),
        "variants": len(binaries),
        "registers": max((b.registers for b in binaries), default=0),
        "spills_by_target": by_target,
    }
