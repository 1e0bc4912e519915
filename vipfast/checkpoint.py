"""Checkpoints that are complete or absent: ``RUN/checkpoints/step-N/`` with ``model/``, the run's state and ``COMPLETE``.

``model/`` is a ``from_pretrained`` folder (adapters for LoRA). Ranks that shard the model add a file each with their part of
the optimizer, of which any number of ranks reads the rows it needs. The marker ``COMPLETE`` lists size and SHA-256 of every
file; whatever does not match it is passed over. This module imports without torch, so the command line can look around at once.
"""

import errno
import functools
import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vipfast import atomic
from vipfast.errors import CheckpointError, UsageError
from vipfast.state import load_state, rng_state, save_state

MARKER = "COMPLETE"
SHARD = "optimizer-"
"""How the files begin in which ranks that shard the model keep their parts of the optimizer."""
_FULL_DISK = "no space left|os error 28|quota exceeded|os error 122|file write failed|unexpected pos"


def begin(run_dir: str | Path, step: int) -> Path:
    """A hidden folder for checkpoint ``step``: ranks write their shards into it, then ``save`` finishes it."""
    with full_disk_told(run_dir, f"step-{step}"):
        return atomic.begun_folder(_folder(run_dir) / f"step-{step}")


def abandon(run_dir: str | Path) -> None:
    """Delete a folder that ``begin`` made and ``save`` did not come to finish; nothing to do after a save."""
    atomic.settle(_folder(run_dir))


def save_shard(begun: Path, rank: int, num_ranks: int, shard: dict[str, Any]) -> None:
    """Write what a rank keeps of the optimizer, tensors by name, into the folder that ``begin`` made.

    Raises:
        CheckpointError: the disk is full.
    """
    from safetensors.torch import save_file

    with full_disk_told(begun.parent.parent, f"the shard of rank {rank}"):
        save_file(shard, begun / f"{SHARD}{rank:05d}-of-{num_ranks:05d}.safetensors")


def save(
    run_dir: str | Path,
    step: int,
    model: Any,
    tokenizer: Any,
    state: dict,
    keep: int,
    weights: dict[str, Any] | None = None,
    begun: Path | None = None,
) -> Path:
    """Write checkpoint ``step``, then delete complete ones older than the newest ``keep`` (by number) and damaged older ones.

    Args:
        run_dir: the run's folder.
        step: training steps done.
        model: a transformers or PEFT model; its weights come back bit for bit.
        tokenizer: saved beside the weights, or None.
        state: everything else that moves, of the kinds ``vipfast.state`` keeps; ``rng`` is added unless given.
        keep: complete checkpoints to leave, at least 1.
        weights: instead of the model's own, where they are sharded: name -> whole tensor.
        begun: the folder to finish, which holds the ranks' shards.

    Returns:
        the folder RUN/checkpoints/step-N.

    Raises:
        CheckpointError: the disk is full; earlier checkpoints are untouched and the half-written one is gone.
    """
    assert keep >= 1 and step >= 0
    path = _folder(run_dir) / f"step-{step}"
    with full_disk_told(run_dir, path.name), atomic.new_folder(path, begun) as temporary:
        _write_model(model, tokenizer, temporary / "model", own_names=True, weights=weights)
        save_state(temporary, {"rng": rng_state(), **state})
        files = {str(file.relative_to(temporary)): _fingerprint(file) for file in _files(temporary)}
        (temporary / MARKER).write_text(json.dumps({"step": step, "files": files}, indent=1))
        # A checkpoint that survives a power cut must not outlive the metrics lines it continues.
        if (Path(run_dir) / "metrics.jsonl").exists():
            atomic.sync(Path(run_dir) / "metrics.jsonl")
    older = [other for other in _steps(run_dir) if step_of(other) < step]
    good = [other for other in older if _damage(other, hashes=False) is None][: keep - 1]
    for other in older:
        if other not in good:
            atomic.remove_folder(other)
    return path


def export(model: Any, tokenizer: Any, path: str | Path, weights: dict[str, Any] | None = None) -> Path:
    """Write a ``from_pretrained`` folder (RUN/final, RUN/best), replacing an earlier one only when the new one is complete;
    ``weights`` as in ``save``.

    Raises:
        CheckpointError: the disk is full; what was there before still is.
    """
    path = Path(path)
    with full_disk_told(path.parent, path.name), atomic.new_folder(path) as temporary:
        _write_model(model, tokenizer, temporary, own_names=False, weights=weights)
    return path


@contextmanager
def full_disk_told(run_dir: str | Path, what: str) -> Iterator[None]:
    """Inside, an error that says the disk is full becomes a CheckpointError that says what is lost and what is not."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if not is_full_disk(error):
            raise
        intact = [good for good in _steps(run_dir) if _damage(good, hashes=False) is None]
        kept = f"the previous checkpoint {intact[0]} is intact" if intact else "there is no earlier checkpoint"
        raise CheckpointError(
            f"--output-dir {run_dir}: the disk is full, so {what} was not saved ({error}); {kept}. Free some space "
            "or move the run's folder to a larger disk, then resume"
        ) from error


def newest_complete(run_dir: str | Path) -> Path | None:
    """The complete checkpoint with the highest step, or None. Damaged newer ones are passed over, with one warning in all."""
    atomic.settle(_folder(run_dir))
    passed_over = []
    for path in _steps(run_dir):
        damage = _damage(path, hashes=True)
        if damage is None:
            if passed_over:
                warnings.warn(f"{'; '.join(passed_over)}: passed over, using {path.name}", stacklevel=1)
            return path
        passed_over.append(f"checkpoint {path.name} is damaged ({damage})")
    if passed_over:
        warnings.warn(f"{'; '.join(passed_over)}: passed over, and no other is left", stacklevel=1)
    return None


def find(run_dir: str | Path) -> Path:
    """The checkpoint a resume continues from.

    Raises:
        CheckpointError: nothing usable is there; the message says what was looked at, so that no run restarts in silence.
    """
    path = newest_complete(run_dir)
    if path is None:
        seen = [f"{other.name}: {_damage(other, hashes=True)}" for other in _steps(run_dir)]
        where = _folder(run_dir)
        reason = "; ".join(seen) if seen else ("the folder holds none" if where.is_dir() else "there is no such folder")
        raise CheckpointError(f"--resume {run_dir}: no complete checkpoint in {where} ({reason}); start without --resume")
    return path


def step_of(path: str | Path) -> int:
    """Training steps done at a checkpoint folder: .../step-40 -> 40."""
    return int(Path(path).name.removeprefix("step-"))


def load(path: str | Path, checked: bool = False) -> dict:
    """The state a checkpoint holds; tensors are on the CPU, arrays are NumPy again. No pickle is run.

    ``checked``: another process has just compared the files with what was written.

    Raises:
        CheckpointError: a file is missing or differs from what was written.
    """
    damage = _damage(Path(path), hashes=not checked)
    if damage is not None:
        raise CheckpointError(f"checkpoint {path} is damaged ({damage}); resume from another one")
    return load_state(Path(path))


def shards(path: str | Path) -> list[Path]:
    """The files in which the ranks that saved this checkpoint kept their parts of the optimizer, by rank; none if whole."""
    return sorted(Path(path).glob(f"{SHARD}*.safetensors"))


def load_weights(path: str | Path, model: Any) -> None:
    """Put a checkpoint's weights (or adapters) into ``model``, bit for bit; tied weights stay tied.

    Raises:
        CheckpointError: names, shapes or dtypes are not the model's own.
    """
    import torch
    from safetensors.torch import load_file

    folder = Path(path) / "model"
    saved: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        saved.update(load_file(file))
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        _check_fit(path, saved, get_peft_model_state_dict(model, save_embedding_layers=False))
        set_peft_model_state_dict(model, saved)
        return
    _check_fit(path, saved, model.state_dict())
    model.load_state_dict(saved, strict=False)  # strict would ask for the tied copies that are saved once


def check_disk(run_dir: str | Path, num_bytes: int) -> None:
    """Refuse a run whose checkpoints cannot fit.

    Args:
        num_bytes: what the run will leave on disk at its largest (keep + 1 checkpoints and the exported models).

    Raises:
        UsageError: less is free where ``run_dir`` will be.
    """
    place = Path(run_dir).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise UsageError(
            f"--output-dir {run_dir}: {free / 1e9:.2f} GB free, but the run's checkpoints need {num_bytes / 1e9:.2f} GB; "
            "name a folder on a larger disk or lower --keep"
        )


def run_bytes(model: Any, keep: int) -> int:
    """Bytes a run leaves on disk at its largest: ``keep`` + 1 checkpoints of weights and two Adam moments, final/ and best/."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    moments = sum(2 * p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return (keep + 1) * (weights + moments) + 3 * weights


def trim_run(run_dir: str | Path, step: int) -> None:
    """Cut a run's records back to ``step`` before it continues: metrics lines, sampled texts and (damaged) newer checkpoints.

    A torn last line goes too. TensorBoard's files stay: the tracker is told the step from which to start over.
    """
    run_dir = Path(run_dir)
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists():
        lines = metrics.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if (at := _line_step(line)) is not None and at <= step]
        if kept != lines:
            atomic.write_file(metrics, b"".join(kept))
    atomic.settle(run_dir)
    atomic.settle(run_dir / "rollouts")
    for path in (run_dir / "rollouts").glob("*.parquet"):
        if path.stem.isdigit() and int(path.stem) > step:
            path.unlink()
    for path in _steps(run_dir):
        if step_of(path) > step:
            atomic.remove_folder(path)


def _line_step(line: bytes) -> int | None:
    """The step of a metrics line, None if the line is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        return json.loads(line)["step"]
    except ValueError:
        return None


def _folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"


def _steps(run_dir: str | Path) -> list[Path]:
    """Checkpoint folders, complete or not, highest step first (by number: step-10 comes before step-9)."""
    folder = _folder(run_dir)
    paths = [path for path in folder.iterdir() if re.fullmatch(r"step-\d+", path.name)] if folder.is_dir() else []
    return sorted(paths, key=step_of, reverse=True)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _fingerprint(file: Path) -> dict[str, Any]:
    status = file.stat()
    return {"bytes": status.st_size, "sha256": _sha256(file.absolute(), status.st_size, status.st_mtime_ns, status.st_ino)}


@functools.cache
def _sha256(file: Path, *state: int) -> str:
    """Of a file in this state; a resume asks several times, and a large checkpoint takes minutes to read."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _damage(path: Path, hashes: bool) -> str | None:
    """What is wrong with a checkpoint folder, or None. Without ``hashes`` only presence and size of the files count."""
    try:
        files = json.loads((path / MARKER).read_text())["files"]
    except FileNotFoundError:
        return f"no {MARKER} marker"
    except ValueError:
        return f"{MARKER} cannot be read"
    for name, wanted in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != wanted["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {wanted['bytes']}"
        if hashes and _fingerprint(file) != wanted:
            return f"the content of {name} has changed"
    return None


def is_full_disk(error: Exception) -> bool:
    """Whether a write failed for want of space; the safetensors and torch writers report it in words only."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return True
    return re.search(_FULL_DISK, str(error).lower()) is not None


def _write_model(model: Any, tokenizer: Any, folder: Path, own_names: bool, weights: dict[str, Any] | None) -> None:
    """``own_names`` keeps the parameter names of the model in memory where its published files use others (fused experts)."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        if hasattr(model, "peft_config"):
            # "auto" would ask the network about the vocabulary
            model.save_pretrained(folder, save_embedding_layers=False, state_dict=weights)
        else:
            model.save_pretrained(folder, save_original_format=not own_names, state_dict=weights)
    finally:
        if bars:
            logging.enable_progress_bar()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _check_fit(path: str | Path, saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Every saved tensor has its place in the model, and every place of the model is filled (if only through a tied twin)."""
    filled = {own[name].data_ptr() for name in saved if name in own}
    wrong = [f"{name} is not in the model" for name in saved if name not in own]
    wrong += [f"{name} is not in the checkpoint" for name in own if name not in saved and own[name].data_ptr() not in filled]
    for name in saved.keys() & own.keys():
        here, there = own[name], saved[name]
        if (here.shape, here.dtype) != (there.shape, there.dtype):
            wrong.append(f"{name} is {there.dtype} {tuple(there.shape)} there, {here.dtype} {tuple(here.shape)} here")
    if wrong:
        raise CheckpointError(f"checkpoint {path} does not fit the model: {'; '.join(sorted(wrong)[:3])} ({len(wrong)} in all)")
