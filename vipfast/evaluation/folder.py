"""An evaluation's folder: what it is called, and whether it holds this very evaluation or another."""

import hashlib
import json
from pathlib import Path

from vipfast import atomic
from vipfast.config_rules import flag
from vipfast.errors import UsageError
from vipfast.evaluation.options import Evaluation, short_name
from vipfast.evaluation.pool import Pool

EVALS = Path("evals")


def open_folder(asked: Evaluation, pools: list[Pool]) -> Path:
    """Make the folder, or go on in one that holds the same evaluation; ``evaluation.json`` says which it is.

    Raises:
        UsageError: the folder holds something else; what differs is named.
    """
    prompts = {pool.name: pool.fingerprint() for pool in pools}
    record = {"options": asked.decisive, "weights": asked.source.fingerprint(), "prompts": prompts}
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
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--output-dir {path}: its evaluation.json cannot be read ({error}); give another folder") from error
    here = record["options"]
    wrong = [
        f"{flag(name)} is {here.get(name)}, there {options.get(name)}"
        for name in dict.fromkeys((*here, *options))
        if here.get(name) != options.get(name)
    ]
    if not wrong:
        wrong += ["the weights of --model are no longer those it began with"] if weights != record["weights"] else []
        changed = [name for name, mark in record["prompts"].items() if prompts.get(name) != mark]
        wrong += [f"the prompts of --task {name} are no longer those it began with" for name in changed]
    if wrong:
        raise UsageError(f"--output-dir {path}: holds another evaluation: {'; '.join(wrong)}. Give another folder")
