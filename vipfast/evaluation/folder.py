"""An evaluation's folder: what it is called, and whether it holds this very evaluation or another."""

import hashlib
import json
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from vipfast import atomic
from vipfast.config_rules import flag
from vipfast.errors import UsageError
from vipfast.evaluation.options import FREE, Evaluation, short_name
from vipfast.evaluation.pool import Pool

EVALS = Path("evals")


def open_folder(asked: Evaluation, pools: list[Pool]) -> Path:
    """Make the folder, or go on in one that holds the same evaluation; ``evaluation.json`` says which it is.

    Raises:
        UsageError: the folder holds something else; what differs is named.
    """
    prompts = {pool.name: pool.fingerprint() for pool in pools}
    record = {"options": asked.decisive, "weights": asked.source.fingerprint(), "prompts": prompts}
    own = {name: _source_mark(name.partition(":")[0]) for name in asked.config.reward if ":" in name}
    record |= {"rewards": own} if own else {}
    text = json.dumps(record, indent=1, allow_nan=False)
    given = asked.config.output_dir
    names = "+".join(map(short_name, asked.tasks))[:80]
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    path = Path(given) if given else EVALS / f"{short_name(asked.source.name)}-{names}-{mark}"
    if path.exists() and not path.is_dir():
        raise UsageError(f"--output-dir {path}: is a file; give a folder")
    file = path / "evaluation.json"
    if file.exists():
        _check_same(path, json.loads(text), file)
        return path
    if found := [name for name in ("samples.jsonl", "config.yaml", "metrics.jsonl") if (path / name).exists()]:
        raise UsageError(f"--output-dir {path}: already holds something else ({', '.join(found)}); give another folder")
    path.mkdir(parents=True, exist_ok=True)
    atomic.write_file(file, text.encode() + b"\n")
    return path


def _check_same(path: Path, record: dict, file: Path) -> None:
    try:
        there = json.loads(file.read_text(encoding="utf-8"))
        options, weights, prompts = there["options"], there["weights"], there["prompts"]
        rewards = there.get("rewards", {}).items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--output-dir {path}: its evaluation.json cannot be read ({error}); give another folder") from error
    here = record["options"]
    wrong = [
        f"{flag(name)} is {here.get(name)}, there {options.get(name)}"
        for name in dict.fromkeys((*here, *options))
        if name not in FREE and here.get(name) != options.get(name)
    ]
    if not wrong:
        wrong += ["the weights of --model are no longer those it began with"] if weights != record["weights"] else []
        marks = record.get("rewards", {})
        wrong += [
            f"the file of --reward {name} is no longer the one it began with"
            for name, mark in rewards
            if marks.get(name) != mark
        ]
        changed = [name for name, mark in record["prompts"].items() if prompts.get(name) != mark]
        wrong += [f"the prompts of --task {name} are no longer those it began with" for name in changed]
    if wrong:
        raise UsageError(f"--output-dir {path}: holds another evaluation: {'; '.join(wrong)}. Give another folder")


def _source_mark(module: str) -> str | None:
    """Of a module's file, found as a reward's worker finds it but never imported here; None where it is no file."""
    path, spec = [os.getcwd(), *sys.path], None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest() if spec.has_location else None
