"""Runs one program in a process that has given up its rights: as a script, or one call of a function it defines.

Read by the sandbox's own interpreter: standard library only. Here is nothing that a program under test could gain by
knowing: no expected output, and the result it might forge has to be the right one.
"""

import atexit
import importlib
import json
import linecache
import os
import site
import sys
import threading
import traceback
import types

PRELOADED = (
    "__future__ abc argparse array ast asyncio base64 bisect bz2 calendar cmath collections.abc contextlib copy csv ctypes "
    "dataclasses datetime decimal difflib enum fractions functools gc getpass glob hashlib heapq io itertools lzma math "
    "numbers operator pathlib pickle platform pprint queue random re resource select selectors shutil signal socket sqlite3 "
    "statistics string struct subprocess tempfile textwrap threading time timeit typing unicodedata uuid warnings zlib"
).split()
"""Modules that are there before the first program comes, so that importing them costs a program nothing."""

_NAMES = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io json typing"
NAME = "program.py"


def preload() -> dict:
    """Import what programs import most. Returns the names a program finds defined: those modules' own, the modules, and the
    builtins above all, as coding sites and LiveCodeBench's checker have it."""
    for define in (site.setquit, site.setcopyright, site.sethelper):  # exit and quit, which Python without site lacks
        define()
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ImportError:  # a Python built without it
            continue
    names: dict = {}
    for name in _NAMES.split():
        exec(f"from {name} import *", names)
    exec(f"from builtins import *\nimport sys, {', '.join(_NAMES.split())}", names)
    names.pop("__builtins__")
    return names


def run(job: dict, names: dict, results: int) -> None:
    """Run ``job["source"]``; with ``job["function"]`` call that with ``job["arguments"]`` and write its value to ``results`` as
    JSON. Ends the process.
    """
    source, function = job["source"], job["function"]
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    module = types.ModuleType("__main__" if function is None else "program")
    sys.modules[module.__name__] = module
    sys.argv[:] = [NAME]
    code = 0
    sys.setrecursionlimit(50_000)
    module.__dict__.update(names)
    module.__dict__.pop(function, None)  # operator.add is no answer to a task that asks for add
    try:
        exec(compile(source, NAME, "exec", dont_inherit=True), module.__dict__)
        if function is not None:
            owner = module.Solution() if hasattr(getattr(module, "Solution", None), function) else module
            value = json.dumps(getattr(owner, function)(*job["arguments"]), allow_nan=False).encode()
            while value:
                value = value[os.write(results, value) :]
            os._exit(0)
    except SystemExit as exit:
        code = exit.code
    except BaseException as error:  # noqa: BLE001 - whatever the program raises is told as Python tells it
        traceback.print_exception(type(error), error, error.__traceback__.tb_next, limit=-50)
        code = 1
    _leave(code)


def _leave(code) -> None:
    """End as Python does, without taking apart everything preloaded, which takes longer than most programs."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.__stdout__):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001 - whatever the program put there; its output is lost, as at any exit
            continue
    os._exit((code or 0) & 0xFF)
