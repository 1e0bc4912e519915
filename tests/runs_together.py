"""Whole runs by two processes, several in one launch.

    torchrun --nproc-per-node 2 runs_together.py FOLDER

writes runs under FOLDER and FOLDER/rank-0.json, rank-1.json: what each rank sampled, returned and raised. At last rank 1 dies.
"""

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import safetensors.torch

from vipfast import Config, Trainer, cli
from vipfast.distributed import join
from vipfast.errors import CheckpointError, RewardError

RUNS = {"uniform-ddp": {}, "vip-fsdp": {}, "vigor-ddp": {}, "vigor-fsdp": {}}
"""<allocator>-<parallel>."""


def config(folder: Path, name: str, **changes) -> Config:
    """Three steps of 6 prompts in float64, so that another order of additions leaves differences far below 1e-9."""
    defaults = dict(
        allocator=name.split("-")[0], steps=3, prompts_per_step=6, rollouts_per_prompt=4.0, vigor_num_rounds=2,
        max_new_tokens=6, heldout_prompts=3, eval_samples=2, eval_every=0, checkpoint_every=0, learning_rate=1e-3,
        dtype="float64", device="cpu", threads=1, sample_rollouts=8, dist_timeout=120, output_dir=str(folder / name),
        parallel="fsdp" if name.endswith("fsdp") else "ddp",
    )  # fmt: skip
    return Config(**{**defaults, **changes})


def watched(trainer: Trainer, texts: list[str], before=lambda step: None) -> Trainer:
    """The trainer, which notes a hash of every completion whose tokens are here."""
    whole_step = trainer.train_step

    def step(number):
        before(number)
        metrics, rollouts = whole_step(number)
        for row in rollouts.held_R.nonzero()[0]:
            tokens = rollouts.tokens[rollouts.token_offsets[row] : rollouts.token_offsets[row + 1]]
            name = f"{number} {rollouts.prompts[rollouts.group_R[row]].uid} {rollouts.index[row]} {tokens.tolist()}"
            texts.append(hashlib.sha256(name.encode()).hexdigest())
        return metrics, rollouts

    trainer.train_step = step
    return trainer


def asks_to_stop(rank: int):
    """For ``watched``: SIGTERM to one rank in the second step."""

    def ask(step):
        if step == 2 and join().rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


def reward_that_breaks_on_rank_1(completions, answers, metadata):
    return [1.0] * (len(completions) + (join().rank == 1))


def full_disk_on_rank_1(folder: Path) -> str:
    """What a run says whose second checkpoint finds no room for rank 1's shard."""
    write = safetensors.torch.save_file

    def full(tensors, path):
        if join().rank == 1 and tensors:  # before the first step there are no moments
            raise OSError(errno.ENOSPC, "No space left on device")
        write(tensors, path)

    safetensors.torch.save_file = full
    try:
        Trainer(config(folder, "full-fsdp", allocator="uniform")).run()
    except CheckpointError as error:
        return str(error)
    finally:
        safetensors.torch.save_file = write


def main() -> None:
    folder, ranks = Path(sys.argv[1]), join()
    found = {"texts": {}, "codes": {}}
    for name in RUNS:
        texts = found["texts"][name] = []
        found["codes"][name] = watched(Trainer(config(folder, name)), texts).run()

    found["codes"]["float32"] = Trainer(config(folder, "uniform-float32-fsdp", dtype="float32")).run()
    for mode in ("early", "streaming"):  # each rank decides over its own prompts
        found["codes"][mode] = Trainer(config(folder, f"vigor-{mode}", round_mode=mode)).run()

    # Saved by two from shards, gone on with by two in copies, and by one elsewhere.
    found["codes"]["stopped"] = watched(Trainer(config(folder, "vigor-stopped-fsdp")), [], asks_to_stop(1)).run()
    for copy in ("vigor-alone", "vigor-resharded-fsdp"):
        ranks.decided(lambda copy=copy: shutil.copytree(folder / "vigor-stopped-fsdp", folder / copy))
    again = config(folder, "vigor-stopped-fsdp", parallel="ddp")
    found["codes"]["resumed"] = Trainer(again, resume=True).run()
    found["codes"]["resharded"] = Trainer(config(folder, "vigor-resharded-fsdp"), resume=True).run()
    # Saved by one, gone on with by two as shards.
    found["codes"]["joined"] = Trainer(config(folder, "vip-joined-fsdp"), resume=True).run()
    found["full"] = full_disk_on_rank_1(folder)
    try:
        prompts = [f"p{i}" for i in range(40)]
        Trainer(config(folder, "broken-ddp", allocator="uniform"), prompts=prompts, reward=reward_that_breaks_on_rank_1).run()
    except RewardError as error:
        found["raised"] = str(error)
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(found))
    sys.exit(killed(folder))


def killed(folder: Path) -> int:
    """Rank 1 dies in the second step; rank 0 writes down when its command line ends, and with which exit code."""
    whole_step = Trainer.train_step

    def dies(self, step):
        if step == 2 and join().rank == 1:
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return whole_step(self, step)

    Trainer.train_step = dies
    options = "--allocator uniform --prompts-per-step 4 --rollouts-per-prompt 2 --heldout-prompts 1 --eval-samples 1 --steps 9"
    places = ["--output-dir", str(folder / "killed-run"), "--dist-timeout", "60", "--device", "cpu", "--threads", "1"]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, once the command line has ended, would come before the note
    code = cli.main([*options.split(), *places])
    (folder / "told").write_text(f"{time.time()} {code}")
    return code


if __name__ == "__main__":
    main()
