"""Kernels compile ahead of time for GPUs that are not there. Needs Triton, and neither a GPU nor the interpreter."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
SOURCES = {path.stem: path.read_text() for path in KERNELS.glob("*.py") if path.stem != "launch"}
CHILD = """
import json, sys
sys.path.insert(0, "benchmarks")
import kernel_compile
binaries = kernel_compile.compile_all({targets}, full={full})
print(json.dumps([binary._asdict() for binary in binaries]))
"""


@pytest.fixture(scope="module")
def compiled():
    """Every variant for sm_90, one or two of each kernel for sm_80 and sm_100, from two processes side by side."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    codes = [CHILD.format(targets=targets, full=full) for targets, full in (((90,), True), ((80, 100), False))]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    children = [subprocess.Popen([sys.executable, "-P", "-c", code], **pipes) for code in codes]
    binaries = []
    for child in children:
        out, err = child.communicate()
        assert child.returncode == 0, err
        binaries += json.loads(out.splitlines()[-1])
    return binaries


def launched(source: str) -> set[str]:
    """First arguments of launch(...), by name."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {call.args[0].id for call in calls if isinstance(call.func, ast.Name) and call.func.id == "launch"}


def jitted(source: str) -> set[str]:
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return {f.name for f in functions if any(ast.unparse(d).startswith("triton.jit") for d in f.decorator_list)}


def uncompiled(sources: dict[str, str], compiled: set[str]) -> set[str]:
    """Kernels that are launched, or are jit functions that nothing mentions, and that no case compiles."""
    names = {
        module: {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
        | {alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) for alias in node.names}
        for module, source in sources.items()
    }
    mentioned = set().union(*names.values())
    wanted = {f"{module}.{name}" for module, source in sources.items() for name in launched(source) & jitted(source)}
    wanted |= {f"{module}.{name}" for module, source in sources.items() for name in jitted(source) - mentioned}
    return wanted - compiled


def test_every_kernel_compiles_for_ampere_hopper_and_blackwell(compiled):
    by_target = {target: {b["kernel"] for b in compiled if b["target"] == target} for target in (80, 90, 100)}
    assert by_target[90] and by_target[80] == by_target[90] == by_target[100]


def test_nothing_spills_on_hopper(compiled):
    assert [b for b in compiled if b["target"] == 90 and b["spill_bytes"]] == []


def test_every_kernel_has_a_compile_case(compiled):
    assert uncompiled(SOURCES, {b["kernel"] for b in compiled}) == set()


def test_a_kernel_without_a_compile_case_is_noticed():
    source = (
        "@triton.jit\ndef a(x):\n    b(x)\n@triton.jit\ndef b(x):\n    pass\n@triton.jit(debug=True)\ndef c(x):\n    pass\n"
    )
    assert uncompiled({"m": source + "launch(a, 1)\n"}, {"m.a"}) == {"m.c"}
    assert uncompiled({"m": source + "launch(a, 1)\nlaunch(c, 1)\n"}, set()) == {"m.a", "m.c"}


def test_integers_of_one_compile(compiled):
    takers = {b["kernel"] for b in compiled if b["target"] == 90 and b["integers"]}
    assert takers == {b["kernel"] for b in compiled if b["target"] == 90 and b["ones"]} != set()


OPERATIONS = sorted(module for module, source in SOURCES.items() if launched(source))


def test_there_are_operations():
    assert OPERATIONS


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_stem_for_kernel_reference_test_and_readme(operation):
    functions = {node.name for node in ast.walk(ast.parse(SOURCES[operation])) if isinstance(node, ast.FunctionDef)}
    assert any(name.endswith("_ref") for name in functions)
    assert (ROOT / "tests" / "kernels" / f"test_{operation}.py").exists()
    assert f"| `{operation}` |" in (KERNELS / "README.md").read_text()


def test_every_operation_has_a_benchmark_row():
    code = "import sys; sys.path.insert(0, 'benchmarks'); import json, kernel_speed as k\n"
    code += "print(json.dumps([[op for op, *_ in sizes] for sizes in (k.tiny_sizes(), k.sizes(k.TOKENS))]))"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert [sorted(set(ops)) for ops in json.loads(done.stdout.splitlines()[-1])] == [OPERATIONS] * 2
