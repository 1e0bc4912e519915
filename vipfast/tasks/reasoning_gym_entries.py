"""``python -m vipfast.tasks.reasoning_gym_entries``: generates problems of reasoning-gym; a request as JSON on standard input.

A process of its own, because what the library generates depends, for some datasets, on the process's hash seed and on global
random state, and because it prints.
"""

import contextlib
import dataclasses
import difflib
import json
import os
import random
import sys
import time
from typing import Any

import numpy as np

from vipfast.errors import DataError
from vipfast.options.values import REASONING_GYM

TELL_EVERY_S = 20.0


def main() -> None:
    asked = json.load(sys.stdin)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            answer = generate(**asked)
        except DataError as error:
            answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


def generate(task: str, sizes: dict[str, int], seeds: dict[str, int], options: dict) -> dict[str, Any]:
    """Problems of every dataset, one dataset after the other.

    Args:
        task: as given, for messages.
        sizes, seeds: of each dataset.
        options: settings for all datasets that know them, and mappings of them under a dataset's name.

    Returns:
        {"rows": [{"question", "answer", "dataset", "subject", "settings", "entry"}, …], "repeated": how many came twice}.

    Raises:
        DataError: an unknown dataset or setting, or a value the library refuses.
    """
    settings = settings_of(task, list(sizes), options)
    rows: dict[tuple, dict] = {}
    for name, size in sizes.items():
        for row in _rows(task, name, size, {**settings[name], "seed": seeds[name], "size": size}):
            rows.setdefault((row["question"], row["answer"]), row)
    return {"rows": list(rows.values()), "repeated": sum(sizes.values()) - len(rows)}


def settings_of(task: str, names: list[str], options: dict) -> dict[str, dict]:
    """The settings of each dataset, out of those for all and those under a dataset's name."""
    from reasoning_gym.factory import DATASETS

    known = sorted(set(DATASETS) - {"composite"})
    for name in names:
        if name == "composite":
            raise DataError(
                f"--task {task}: mixtures are written as {REASONING_GYM}NAME*2+OTHER, with any of {', '.join(known)}"
            )
        if name not in known:
            raise DataError(f"--task {task}: reasoning-gym has no {name!r}; {_meant(name, known)}")
    fields = {name: {f.name for f in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"} for name in names}
    settings: dict[str, dict] = {name: {} for name in names}
    every = sorted(set().union(*fields.values()))
    for key, value in options.items():
        if key in names:
            if not isinstance(value, dict):
                raise DataError(f"--task-options: {key}: {value!r} is no mapping of settings; write e.g. {{{key}: {{…}}}}")
            for inner in value:
                if inner not in fields[key]:
                    raise DataError(f"--task-options: {key} has no setting {inner!r}; {_meant(inner, sorted(fields[key]))}")
            continue
        if key in ("seed", "size"):
            raise DataError(f"--task-options: {key!r} is not set there; use {'--seed' if key == 'seed' else '--task-size'}")
        if key not in every:
            raise DataError(f"--task-options: --task {task} has no setting {key!r}; {_meant(key, every + names)}")
        for name in names:
            if key in fields[name]:
                settings[name][key] = value
    return {name: settings[name] | options.get(name, {}) for name in names}


def _meant(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(str(name), known, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"


def _rows(task: str, name: str, size: int, settings: dict):
    from reasoning_gym.factory import create_dataset

    try:
        dataset = create_dataset(name, **settings)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        shown = {key: value for key, value in settings.items() if key not in ("seed", "size")}
        raise DataError(f"--task-options {json.dumps(shown)}: {name} refuses them: {error or type(error).__name__}") from error
    written, last = json.dumps(settings, sort_keys=True), time.monotonic()
    for index in range(size):
        random.seed(settings["seed"] + index)
        np.random.seed(settings["seed"] + index)
        try:
            entry = plainly(dataset[index])
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise DataError(
                f"--task {task}: {name} cannot generate its problem {index} ({type(error).__name__}: {error}); change "
                "--task-options"
            ) from error
        if time.monotonic() - last > TELL_EVERY_S:
            last = time.monotonic()
            print(f"generating {name}: {index + 1} of {size} (--task-size)", file=sys.stderr, flush=True)
        common = {"dataset": name, "subject": name, "settings": written, "entry": repr(entry)}
        yield {"question": entry["question"], "answer": entry["answer"], **common}


def plainly(value: Any) -> Any:
    """The same of Python's own types alone, so that its ``repr`` can be read back."""
    if isinstance(value, np.generic | np.ndarray):
        return plainly(value.tolist())
    if isinstance(value, dict):
        return {plainly(key): plainly(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        return kind(plainly(inner) for inner in value)
    return value


if __name__ == "__main__":
    main()
