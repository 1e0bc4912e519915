"""A run's folder: what it is called, whether it holds a run already, and which one ``--resume`` continues."""

import os
import re
import shlex
import sys
from datetime import datetime
from pathlib import Path

from vipfast import lock
from vipfast.config import Config
from vipfast.errors import UsageError
from vipfast.options.values import CUSTOM, PYTHON, REASONING_GYM

RUNS = Path("runs")


def default_name(config: Config, now: datetime) -> str:
    """``runs/<task>-<allocator>-s<seed>-<time>``, with a number after it while such a folder exists."""
    base = f"{_short(config.task)}-{config.allocator}-s{config.seed}-{now:%Y%m%d-%H%M%S}"
    name, count = base, 1
    while (RUNS / name).exists():
        count += 1
        name = f"{base}-{count}"
    return str(RUNS / name)


def _short(task: str) -> str:
    """A task's name as part of a folder's: of a file or folder its own name, of anything else all of it, but not endless."""
    path = Path(task)
    if task.startswith(REASONING_GYM):
        pass
    elif path.is_dir():
        task = path.resolve().name
    elif "." in path.name:
        task = path.stem
    return re.sub(r"[^\w.-]+", "-", task)[:80].strip("-") or "task"


def check_fresh(folder: str | Path) -> None:
    """Refuse to start a new run where another one lives.

    Raises:
        UsageError: the folder holds a run (its config.yaml or metrics.jsonl), perhaps one that is running, or is a file.
    """
    path = Path(folder)
    lock.check(path)
    if path.exists() and not path.is_dir():
        raise UsageError(f"--output-dir {folder}: is a file; give a folder")
    found = [name for name in ("config.yaml", "metrics.jsonl", "checkpoints") if (path / name).exists()]
    if found:
        raise UsageError(
            f"--output-dir {folder}: already holds a run ({', '.join(found)}); continue it with --resume, or give another "
            "folder"
        )


def go_on(config: Config, steps: int | None = None) -> str:
    """How a run is continued, up to ``steps`` if given: a command for this shell, with the interpreter that runs now, or the
    Python that hands the run again what no file holds.
    """
    if config.task != CUSTOM and PYTHON not in config.reward:
        script = [sys.argv[0]] if Path(sys.argv[0]).name == "train.py" else ["-m", "vipfast", "train"]
        num_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
        launched = [] if num_ranks == "1" else ["-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
        more = [] if steps is None else ["--steps", str(steps)]
        return shlex.join([sys.executable, *launched, *script, "--resume", "--output-dir", config.output_dir, *more])
    given = ["prompts=…"] if config.task == CUSTOM else []
    given += ["reward=…"] if PYTHON in config.reward else []
    return f"Trainer(Config(output_dir={config.output_dir!r}, …), {', '.join(given)}, resume=True).run()"


def once_mended(config: Config) -> str:
    """How to go on after a run that learned nothing: as it was with a mended reward, or anew, since its options stay."""
    anew = f"with other options, such as --learning-rate, start anew from --model {config.output_dir}/best"
    return f"with the reward mended go on with {go_on(config)}; {anew}"


def claim(folder: str | Path) -> None:
    """Make a new run's folder and lock it; of two runs that want the same one, the second is refused (UsageError)."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    lock.take(path)
    try:
        (path / "config.yaml").touch(exist_ok=False)
    except FileExistsError as error:
        lock.release(path)
        raise UsageError(f"--output-dir {folder}: another run has just taken it; give another folder") from error


def resumable(folder: str | Path | None) -> Path:
    """The run ``--resume`` continues: ``folder``, or the run under runs/ that saved a complete checkpoint last.

    Raises:
        UsageError: nothing there can be continued; the message says why.
    """
    # NumPy comes with it, which --help should not wait for.
    from vipfast import checkpoint

    if folder is not None:
        path = Path(folder)
        if not path.is_dir():
            raise UsageError(f"--resume --output-dir {folder}: no such folder; leave out --resume to start a new run in it")
        lock.check(path)  # before its checkpoints are looked through: what is half written there belongs to whoever trains
        if not (path / "config.yaml").is_file():
            raise UsageError(f"--resume --output-dir {folder}: it has no config.yaml, so it is no run's folder")
        if checkpoint.newest_complete(path) is None:
            raise UsageError(
                f"--resume --output-dir {folder}: it has no complete checkpoint under checkpoints/, so there is nothing to "
                "continue from; start again in another folder"
            )
        return path
    runs = [config.parent for config in RUNS.glob("*/config.yaml")]
    # A folder's time is that of its last entry: the newest checkpoint's rename.
    runs.sort(key=lambda run: _mtime(run / "checkpoints"), reverse=True)
    for run in runs:
        lock.check(run)
        if checkpoint.newest_complete(run) is not None:
            return run
    why = f"none of the {len(runs)} runs there has a complete checkpoint" if runs else "there is no run"
    raise UsageError(f"--resume: nothing to continue under {RUNS}/ ({why}); name the run's folder with --output-dir")


def _mtime(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0
