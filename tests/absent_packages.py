"""pytest plugin for a machine that lacks packages of the test extra: what needs one is left out by name, never in silence.

    python -m pytest -p absent_packages tests/learn

A test file that imports an absent package at its top, or starts a script beside it that imports one, is left out whole; a test
that comes to such an import while it runs is skipped. Both are told with the package they need; other import errors stay.
"""

import ast
import importlib.util
from pathlib import Path

import pytest

OPTIONAL = "datasets flash_attn hypothesis math_verify peft psutil pyarrow rich tensorboard tyro vllm".split()
ABSENT = frozenset(name for name in OPTIONAL if importlib.util.find_spec(name) is None)

_left_out: dict[Path, set[str]] = {}


def needs(path: Path, everywhere: bool = False) -> set[str]:
    """Absent packages that a file imports at its top level or, if asked, anywhere; those of scripts it names count whole."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    scripts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and str(node.value).endswith(".py")}
    for script in (path.parent / name for name in scripts - {path.name}):
        if script.parent == path.parent and script.is_file():
            found |= needs(script, everywhere=True)
    return found & ABSENT


def pytest_ignore_collect(collection_path):
    if collection_path.name.startswith("test_") and collection_path.suffix == ".py" and (absent := needs(collection_path)):
        _left_out[collection_path] = absent
        return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    return (yield from _skipping())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from _skipping())


def _skipping():
    try:
        return (yield)
    except (ModuleNotFoundError, ValueError) as error:  # vipfast's own errors about a missing package are ValueErrors
        cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        name = (getattr(cause, "name", None) or "").partition(".")[0]
        if name not in ABSENT:
            raise
        pytest.skip(f"needs {name}, which is not installed")


def pytest_terminal_summary(terminalreporter):
    for path, absent in sorted(_left_out.items()):
        terminalreporter.write_line(f"left out: {path} needs {', '.join(sorted(absent))}, not installed")
