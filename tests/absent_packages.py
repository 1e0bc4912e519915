"""pytest plugin for a machine that lacks packages of the test extra: what needs one is left out by name, never in silence.

    python -m pytest -p absent_packages tests/learn

A test file that imports an absent package at its top, or starts a script beside it that imports one, is skipped whole; so is a
test that comes to such an import while it runs. Each names the package it needs (``-rs``). Other import errors stay errors.
"""

import ast
import importlib.util
from pathlib import Path

import pytest

OPTIONAL = "datasets flash_attn hypothesis math_verify peft psutil pyarrow reasoning_gym rich tensorboard tyro vllm".split()
ABSENT = frozenset(name for name in OPTIONAL if importlib.util.find_spec(name) is None)


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


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector):
    if isinstance(collector, pytest.Module) and (absent := needs(collector.path)):
        why = f"Skipped: {collector.nodeid} needs {', '.join(sorted(absent))}, not installed"
        return pytest.CollectReport(collector.nodeid, "skipped", (str(collector.path), 1, why), [])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    return (yield from _skipping(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from _skipping(item))


def _skipping(item):
    try:
        return (yield)
    except (ModuleNotFoundError, ValueError) as error:  # vipfast's own errors about a missing package are ValueErrors
        cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        name = (getattr(cause, "name", None) or "").partition(".")[0]
        if name not in ABSENT:
            raise
        pytest.skip(f"{item.nodeid} needs {name}, not installed")
