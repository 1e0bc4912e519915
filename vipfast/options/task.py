"""Where prompts come from and how they are worded."""

from dataclasses import dataclass
from typing import Literal

from vipfast.options import idle
from vipfast.options.facts import option


@dataclass(frozen=True)
class TaskOptions:
    """Where prompts come from and how they are worded."""

    task: str = option("arithmetic", travels="with_its_task")
    """Where prompts come from: arithmetic (embedded), a .parquet/.jsonl/.json/.csv file or a folder of such, a hub dataset id
    (owner/name, or owner/name:CONFIG), or reasoning_gym:NAME, where NAME*2+OTHER mixes several two to one."""
    task_split: str = option("train", travels="with_its_task", idle=(idle.without_dataset, idle.of_a_file))
    """Split of a hub dataset to train on; of a folder, the files named after it, themselves or by folder."""
    task_size: int = option(2048, low=1, high=10**7, idle=idle.unless_procedural)
    """Problems that a reasoning_gym task generates, from --seed; a tenth of them, at most --heldout-prompts, is held out."""
    task_options: str | None = option(None, idle=idle.unless_procedural)
    """Difficulty of a reasoning_gym task as JSON or YAML text: a dataset's own settings, also under its name in a mixture,
    e.g. '{max_terms: 3, leg_counting: {max_animals: 5}}'."""
    prompt_field: str | None = option(None, travels="with_its_task", idle=idle.without_dataset)
    """Column that holds the prompt (dots reach into nested columns); recognised for common layouts when not given."""
    answer_field: str | None = option(None, travels="with_its_task", idle=idle.without_dataset)
    """Column that holds the right answer (dots reach into nested columns); recognised for common layouts when not given."""
    prompt_template: Literal["auto", "chat", "plain", "qa", "boxed", "tags"] = option("auto", travels="to_training")
    """How a prompt is worded: chat (the tokenizer's chat template), plain (the text alone), auto (chat where there is such a
    template, else plain), qa (plain, "Question: … Answer:"), boxed or tags (auto, and asked to put the final answer in
    \\boxed{} or between <answer> tags)."""
    system_prompt: str | None = option(None, travels="to_training")
    """A system message (chat), or a text put before the prompt (plain); goes over a row's own system message."""
    metadata_fields: tuple[str, ...] = option((), travels="with_its_task", idle=idle.without_dataset)
    """Further columns of a dataset (dots reach into nested ones) that a reward of your own finds in a prompt's metadata, under
    their last names; gold_ids and supporting, the passages a question wants, are there anyway."""
    heldout_prompts: int = option(512, low=0, high=10**7)
    """Held-out prompts for evaluation, split off by text hash where the task has none of its own."""
