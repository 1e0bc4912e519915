"""Which prompts of a task are evaluated."""

import hashlib
from dataclasses import dataclass

import numpy as np

from vipfast import streams
from vipfast.errors import UsageError
from vipfast.evaluation.options import Evaluation
from vipfast.evaluation.split import has_splits
from vipfast.tasks.base import Task, for_evaluation
from vipfast.tasks.load import load_task
from vipfast.types import Prompt

KNOWN_KEYS = ("level", "difficulty", "family", "size", "subject", "source", "year")
"""Metadata told apart unless --by says otherwise."""

MOST_VALUES = 50

_OF_THE_SPLIT = (
    *("task", "task_split", "task_size", "task_options", "prompt_field", "answer_field", "metadata_fields"),
    *("heldout_prompts", "max_prompt_tokens", "seed"),
)
"""Options on which it depends what a run has held out."""


@dataclass(frozen=True)
class Pool:
    """A task's prompts to evaluate; ``name`` as --task has it, ``split`` the one chosen, ``keys`` metadata to tell apart."""

    name: str
    task: Task
    prompts: list[Prompt]
    split: str
    keys: tuple[str, ...]
    notes: tuple[str, ...]

    def fingerprint(self) -> str:
        return hashlib.sha256(" ".join(prompt.uid for prompt in self.prompts).encode()).hexdigest()


def choose(asked: Evaluation, config, tokenizer) -> Pool:
    """Load a task (``config.task``) and pick its prompts.

    Raises:
        UsageError: the split has no prompts, or the task no such metadata.
    """
    task = load_task(config, tokenizer, least=1)
    run = asked.trained_on
    trained = run is not None and all(getattr(run, name) == getattr(config, name) for name in _OF_THE_SPLIT)
    split = asked.split
    if split == "auto":
        split = "heldout" if task.heldout and (task.own_heldout or trained) else "all"
    prompts = {"heldout": task.heldout, "train": task.train, "all": task.train + task.heldout}[split]
    if not prompts:
        raise UsageError(
            f"--split {split}: --task {config.task} has no such prompts (--heldout-prompts {config.heldout_prompts}); use "
            "--split all"
        )
    found = len(prompts)
    if asked.max_prompts is not None and asked.max_prompts < found:
        hashes = np.array([streams.uid_hash(prompt.uid) for prompt in prompts], np.uint64)
        order = np.argsort(streams.keys(streams.ORDER, config.seed, 0, hashes), kind="stable")
        prompts = [prompts[i] for i in np.sort(order[: asked.max_prompts])]
    chosen = f"{len(prompts)} of {found}" if len(prompts) < found else str(found)
    why = " (--split auto)" if asked.split == "auto" else ""
    of = f" of --task-split {config.task_split}" if has_splits(config.task) else ""
    notes = [f"{config.task}: {chosen} prompts{of}, {SPLITS[split]}{why}"]
    # A task that training would have nothing to evaluate on is no matter here.
    notes += [f"{config.task}: {note}" for note in task.notes if not note.startswith("nothing is held out")]
    return Pool(config.task, task, for_evaluation(prompts), split, _keys(asked, prompts), tuple(notes))


SPLITS = {"heldout": "held out from training", "train": "those training uses", "all": "all there are"}


def level_of(prompt: Prompt, key: str):
    """A prompt's value of a metadata key: a text, number or truth value; None where it has none."""
    value = prompt.metadata.get(key)
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, str | int | float) and value == value else None


def check_keys(asked: Evaluation, pools: list[Pool]) -> None:
    """Refuse a --by that no task knows.

    Raises:
        UsageError: naming the keys there are.
    """
    there = sorted({str(key) for pool in pools for prompt in pool.prompts for key in prompt.metadata})
    for key in asked.by:
        if not any(key in pool.keys for pool in pools):
            has = f"its prompts have {', '.join(there)}" if there else "its prompts have no metadata at all"
            raise UsageError(f"--by {key}: --task {' '.join(asked.tasks)}: no prompt has such a value; {has}")


def _keys(asked: Evaluation, prompts: list[Prompt]) -> tuple[str, ...]:
    candidates = dict.fromkeys(key for prompt in prompts for key in prompt.metadata)
    num_values = {key: len({level_of(prompt, key) for prompt in prompts} - {None}) for key in candidates}
    if asked.by:
        return tuple(key for key in asked.by if num_values.get(key))
    return tuple(key for key in KNOWN_KEYS if 2 <= num_values.get(key, 0) <= MOST_VALUES)
