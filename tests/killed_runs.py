"""Runs killed with SIGKILL at a given moment and then resumed, each in a process forked from one that has torch loaded.

    python killed_runs.py FOLDER ALLOCATOR MOMENT ...

trains FOLDER/straight without interruption, then for each MOMENT ("step:3", "update:2", "fsync:9", "replace:4", "log:5") trains
FOLDER/MOMENT, dies there, and resumes it to the end. A moment counts calls from the start of the process.
"""

import os
import signal
import sys
import traceback
from pathlib import Path

import torch

from vipfast import Config
from vipfast.learn.learner import Learner
from vipfast.telemetry.telemetry import Telemetry
from vipfast.trainer import Trainer

PLACES = {
    "step": (Trainer, "train_step"),
    "update": (Learner, "update"),
    "log": (Telemetry, "log"),
    "fsync": (os, "fsync"),
    "replace": (os, "replace"),
}


def config(folder: Path, allocator: str) -> Config:
    return Config(
        allocator=allocator,
        steps=5,
        prompts_per_step=12,
        rollouts_per_prompt=6,
        vigor_num_rounds=3,
        heldout_prompts=12,
        eval_samples=4,
        eval_every=2,
        checkpoint_every=2,
        output_dir=str(folder),
        threads=1,
        device="cpu",
        lr_schedule="cosine",
        warmup_steps=2,
        learning_rate=3e-4,
    )


def die_at(moment: str) -> None:
    """Kill this process when the named function has been called so many times and has done its work."""
    place, count = moment.split(":")
    owner, name = PLACES[place]
    original, calls = getattr(owner, name), 0

    def counted(*args, **kwargs):
        nonlocal calls
        result = original(*args, **kwargs)
        calls += 1
        if calls == int(count):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)


def forked(task) -> int:
    """Run a task in a child; returns its wait status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = task()
        except Exception:  # noqa: BLE001 - a child must not return into its parent's code
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def straight(folder: Path, allocator: str) -> int:
    """The uninterrupted run; the embedded pool's embeddings are shipped, so no allocator may load their model."""
    code = Trainer(config(folder / "straight", allocator)).run()
    assert "sentence_transformers" not in sys.modules
    return code


def main() -> None:
    torch.set_num_threads(1)
    folder, allocator, moments = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    # imported once here instead of in every child; nothing of torch runs before the forks
    from pyarrow import parquet  # noqa: F401
    from transformers.models.auto import modeling_auto, tokenization_auto  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401

    assert forked(lambda: straight(folder, allocator)) == 0
    for moment in moments:

        def killed(moment=moment) -> int:
            die_at(moment)
            return Trainer(config(folder / moment, allocator)).run()

        assert forked(killed) == signal.SIGKILL, f"{moment} was not reached"
        assert forked(lambda m=moment: Trainer(config(folder / m, allocator), resume=True).run()) == 0, moment


if __name__ == "__main__":
    main()
