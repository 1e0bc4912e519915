"""Evaluations killed with SIGKILL at a given moment and then started again, each in a process forked from one that has torch.

    python killed_evaluations.py FOLDER TASK_FILE TASK_FILE MOMENT ...

evaluates both into FOLDER/straight without interruption, then for each MOMENT into FOLDER/MOMENT, dies there, and starts
again. "append:2" dies after the second chunk is written, "torn:2" when half of it is, "json:1" after evaluation.json.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from killed_runs import forked

from vipfast import atomic
from vipfast.evaluation import command
from vipfast.evaluation.samples import Samples


def evaluate(folder: Path, files: list[str]) -> int:
    options = "--samples 3 --max-prompts 9 --rows-at-once 9 --device cpu --threads 1"
    return command.main([*options.split(), "--task", *files, "--output-dir", str(folder)])


def die_at(moment: str) -> None:
    place, count = moment.split(":")
    owner, name = {"append": (Samples, "append"), "torn": (os, "write"), "json": (atomic, "write_file")}[place]
    original, calls = getattr(owner, name), 0

    def counted(*args):
        nonlocal calls
        if place == "torn" and not args[1].startswith(b'{"task"'):
            return original(*args)  # not the samples
        calls += 1
        dies = calls == int(count)
        if dies and place == "torn":
            args = (args[0], args[1][: len(args[1]) // 2])
        result = original(*args)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)


def main() -> None:
    torch.set_num_threads(1)
    folder, files, moments = Path(sys.argv[1]), sys.argv[2:4], sys.argv[4:]
    # imported once here instead of in every child; nothing of torch runs before the forks
    from transformers.models.auto import modeling_auto, tokenization_auto  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401

    import vipfast.evaluation.run  # noqa: F401

    assert forked(lambda: evaluate(folder / "straight", files)) == 0
    for moment in moments:

        def killed(moment=moment) -> int:
            die_at(moment)
            return evaluate(folder / moment, files)

        assert forked(killed) == signal.SIGKILL, f"{moment} was not reached"
        assert forked(lambda m=moment: evaluate(folder / m, files)) == 0, moment


if __name__ == "__main__":
    main()
