"""The kernels: how fast, how much memory, how far from the roof; without a GPU, whether they compile and what bounds them.

    python benchmarks/kernels.py                  # on a GPU: beside torch, torch.compile and, where installed, Liger-Kernel;
                                                  # without: floors, then the CPU twin beside dense torch, measured
    python benchmarks/kernels.py --compile-only   # every kernel for sm_80, sm_90, sm_100: registers, shared memory, spills
    python benchmarks/kernels.py --smoke          # all of it tiny, the GPU part through Triton's interpreter

A speed is printed only where the operation's tests pass in this environment: they run first, unless ``--tests`` names a
``pytest --junitxml`` report of tests/kernels that is newer than the kernels. Ratios are ours over the others for memory and CPU
time, and others over ours for ``head_vs_*``; both sides take turns in one run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from common import append_results

HERE = Path(__file__).resolve().parent
KERNELS, TESTS = HERE.parent / "kernels", HERE.parent / "tests" / "kernels"
# vipfast.kernels is imported inside functions: Triton reads TRITON_INTERPRET when a kernel is defined.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="everything tiny: shows that it runs, measures nothing")
    parser.add_argument("--compile-only", action="store_true", help="compile ahead of time; needs Triton and no GPU")
    parser.add_argument("--targets", type=int, nargs="+", default=[80, 90, 100], help="for --compile-only")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768], help="T on a GPU")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="on a GPU, start no further size after this time")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU twin")
    parser.add_argument("--repeats", type=int, default=5, help="of the CPU twin")
    parser.add_argument("--tests", type=Path, help="junit report of tests/kernels from this environment")
    args = parser.parse_args()
    if args.compile_only:
        result, rows = compile_only(tuple(args.targets), full=not args.smoke), []
    elif args.smoke:
        result, rows = smoke(), []
    else:
        result, rows = measure(args)
    red = result.get("red")
    for row in rows if red else [*rows, result]:
        append_results("kernels.py", row, smoke=args.smoke)
    print(json.dumps(result))
    if red:
        raise SystemExit(1)


def compile_only(targets: tuple[int, ...], *, full: bool) -> dict:
    if os.environ.pop("TRITON_INTERPRET", None):
        print("TRITON_INTERPRET is set, which compiles nothing: unset for --compile-only")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # else the seconds are those of finding what an earlier run compiled
        import kernel_compile

        if not kernel_compile.launch.INSTALLED:
            raise SystemExit("--compile-only needs Triton, which is not installed: pip install triton")
        return kernel_compile.report(targets, full=full)


def measure(args: argparse.Namespace) -> tuple[dict, list[dict]]:
    """The part for a GPU, or without one the floors and the CPU twin."""
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        import kernel_speed

        tested = tests_passed(list(kernel_speed.CALLS), args.tests)
        result, rows = kernel_speed.report(device, tested, tuple(args.tokens), limit_s=args.limit_s)
        return result | {"red": [op for op, green in tested.items() if not green]}, rows
    import kernel_roofs
    import kernel_twin

    kernel_roofs.print_floors()
    if not tests_passed(["policy_head"], args.tests)["policy_head"]:
        print("policy_head: its tests fail here, so no speed is reported")
        return {"twin_mem_ratio": None, "twin_time_ratio": None, "red": ["policy_head"]}, []
    return kernel_twin.report(4096, 151936, 64, args.threads, args.repeats), []


def smoke() -> dict:
    """Compile for one target, then every other part at sizes that take seconds; on a CPU the kernels are interpreted."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    script = [sys.executable, str(Path(__file__).resolve()), "--compile-only", "--targets", "90", "--smoke"]
    done = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=True)
    *table, compiled = done.stdout.splitlines()
    print("\n".join(table))
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    import kernel_roofs
    import kernel_speed
    import kernel_twin

    kernel_roofs.print_floors()
    green = tests_passed(["token_logprob"], None, quick=True)["token_logprob"]
    twin = kernel_twin.report(64, 1000, 8, threads=1, repeats=2)
    speed, _ = kernel_speed.report(device, dict.fromkeys(kernel_speed.CALLS, green), tiny=True)
    print("the figures of a smoke run measure nothing")
    return json.loads(compiled) | twin | speed | {"red": [] if green else ["token_logprob"]}


def tests_passed(ops: list[str], report: Path | None, *, quick: bool = False) -> dict[str, bool]:
    """Whether each operation's tests pass here: run now, or read from a report that is newer than every kernel.

    Raises:
        SystemExit: a report that is not there or older than a kernel; pytest that does not start.
    """
    if report is not None:
        if not report.exists():
            raise SystemExit(f"--tests {report}: no such file; name a pytest --junitxml report of tests/kernels")
        stale = [path.name for path in KERNELS.glob("*.py") if path.stat().st_mtime > report.stat().st_mtime]
        if stale:
            raise SystemExit(f"--tests {report}: older than {', '.join(stale)}; run the tests again or leave --tests out")
        return {op: _green(report, op) for op in ops}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        shared = ["logit_rows"] if {"policy_head", "token_logprob"} & set(ops) else []
        files = [str(path) for op in [*ops, *shared] for path in sorted(TESTS.glob(f"test_{op}*.py"))]
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", *(["-x"] if quick else [])]
        print(f"running the tests of {', '.join(ops)} first", flush=True)
        command = [sys.executable, "-P", "-m", "pytest", *options, *files]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not report.exists():
            raise SystemExit(f"the tests did not run, so no speed is reported: {(done.stderr or done.stdout)[-2000:]}")
        return {op: _green(report, op) for op in ops}


def _green(report: Path, op: str) -> bool:
    """At least one test of the operation's files passed, and none in the report failed: operations are made of each other."""
    every = list(ElementTree.parse(report).iter("testcase"))
    # A file that cannot be imported is an error without a class name.
    bad = [case for case in every if case.find("failure") is not None or case.find("error") is not None]
    cases = [case for case in every if f"test_{op}" in case.get("classname", "")]
    for case in bad[:3]:
        print(f"  red: {case.get('classname')}::{case.get('name')}")
    return not bad and any(case.find("skipped") is None for case in cases)


if __name__ == "__main__":
    main()
