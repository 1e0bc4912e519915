"""``--dry-run``: what a run would draw, generate and hold in memory, told without loading a model or importing torch.

Sizes come from config.json, prompts from files on this disk; every assumption is printed beside the number it carries.
"""

import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vipfast import gpu_fit, memory
from vipfast.allocate import make_allocator
from vipfast.config import REASONING_GYM, Config
from vipfast.errors import DataError
from vipfast.model_facts import ModelFacts, known_facts, read_facts
from vipfast.resolve import DATA_SUFFIXES, total_gpu_bytes
from vipfast.types import Prompt, PromptBatch, Tally

if TYPE_CHECKING:
    from vipfast.tasks.base import Task


TRIAL = 32
"""Problems of a procedural task that a dry run generates."""


@dataclass(frozen=True)
class Table:
    """One section of the output: rows of text under column names, and the assumptions behind them."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]


@dataclass(frozen=True)
class Pool:
    """Prompts as far as they can be counted; of a dataset not at hand: None, and a bound for the mean ``prompt_tokens``."""

    num_train: int | None
    num_heldout: int
    prompt_tokens: float
    note: str


@dataclass(frozen=True)
class Draw:
    """One allocation round: active prompts, the fewest and most rollouts of one of them, and at most all of the round's."""

    active: int
    fewest: int
    most: int
    drawn: int


def show(config: Config, gpu_bytes: float | None = None) -> None:
    """Print the plan of a resolved config: as rich tables on a terminal, as plain lines elsewhere."""
    tables = plan(config, gpu_bytes)
    if sys.stdout.isatty():
        _show_rich(tables)
    else:
        for table in tables:
            _show_plain(table)


def plan(config: Config, gpu_bytes: float | None = None) -> list[Table]:
    """Prompts, rounds, tokens and memory of a resolved config; ``gpu_bytes``: memory of the GPU to plan for, if known.

    Raises:
        UsageError: a dataset, model or budget that cannot be used.
    """
    facts, pool = read_facts(config.model), read_pool(config)
    draws = draws_per_round(config)
    memory_table = _memory(config, pool, facts, draws, gpu_bytes)
    return [_prompts(config, pool), _rounds(config, draws), _tokens(config, pool, draws), memory_table]


def read_pool(config: Config) -> Pool:
    """Count the task's prompts and their mean length; tokens are bytes for the starter and characters / 4 otherwise."""
    notes: list[str] = []
    if config.task == "arithmetic":
        from vipfast.tasks import arithmetic

        texts = [problem.text for problem in arithmetic.load_pool("train")]
        heldout = min(config.heldout_prompts, arithmetic.SPLITS["heldout"])
        num_train = len(texts)
    elif config.task.startswith(REASONING_GYM):
        from vipfast.tasks.reasoning_gym import load_records as generated

        texts = [_plain_text(record.prompt) for record in generated(config, notes, size=min(config.task_size, TRIAL))]
        notes.append(f"prompts are as long as {len(texts)} generated on trial; repeated ones are not known before all are")
        heldout = min(config.heldout_prompts, config.task_size // 10)
        num_train = config.task_size - heldout
    elif config.task.endswith(DATA_SUFFIXES) or Path(config.task).expanduser().is_dir():
        from vipfast.tasks.dataset import load_records

        # As the task does: at most a tenth is held out.
        texts = [_plain_text(record.prompt) for record in load_records(config, notes)[0]]
        heldout = min(config.heldout_prompts, len(texts) // 10)
        num_train = len(texts) - heldout
    else:
        note = "a hub dataset is not read in a dry run: prompts are not counted, --max-prompt-tokens stands for their length"
        return Pool(None, config.heldout_prompts, config.max_prompt_tokens, note)
    if num_train < config.prompts_per_step:
        raise DataError(
            f"--prompts-per-step {config.prompts_per_step}: --task {config.task} holds {num_train} prompts to train on; "
            f"use at most {num_train}"
        )
    if config.model == "starter":
        return Pool(
            num_train,
            heldout,
            _mean([len(text.encode("utf-8", "replace")) for text in texts]),
            "; ".join(["one token per byte", *notes]),
        )
    notes.insert(0, "4 characters per token assumed, no chat template")
    return Pool(num_train, heldout, _mean([len(text) for text in texts]) / 4, "; ".join(notes))


def _plain_text(prompt: str | list[dict]) -> str:
    return prompt if isinstance(prompt, str) else "".join(str(part["content"]) for part in prompt)


def draws_per_round(config: Config) -> list[Draw]:
    """The rounds of a step, by running the allocator itself on no rewards.

    vip plans one round from what it has learned by then; of it, only the bounds are known before. A budget in tokens buys more
    rollouts where answers are short.
    """
    if config.allocator == "vip":
        in_rollouts, most = config.budget_unit == "rollouts", config.prompts_per_step * config.max_rollouts
        drawn = config.budget if in_rollouts else most
        return [Draw(config.prompts_per_step, config.min_rollouts, config.max_rollouts, drawn)]
    none = np.zeros(0, np.int64)
    batch = PromptBatch([Prompt(str(i), "", none) for i in range(config.prompts_per_step)], step=1, seed=config.seed)
    # Rounds that do not wait draw the same.
    rounds = make_allocator(replace(config, round_mode="barrier")).rounds(batch, config.budget)
    draws = []
    try:
        counts_B = next(rounds)
        while True:
            active = counts_B[counts_B > 0]
            draws.append(Draw(len(active), int(active.min()), int(active.max()), int(active.sum())))
            counts_B = rounds.send(Tally.empty(batch.uids))
    except StopIteration:
        return draws


def num_evaluations(config: Config) -> int:
    """At the start, every eval_every steps, and at the end."""
    every = config.eval_every or max(config.steps, 1)
    return 1 + -(-config.steps // every)


def rows_of_evaluation(config: Config, pool: Pool) -> int:
    """Rollouts an evaluation decodes at once: as many as a training step, in whole prompts."""
    return min(pool.num_heldout, max(1, config.budget // config.eval_samples)) * config.eval_samples


def _prompts(config: Config, pool: Pool) -> Table:
    drawn = config.steps * config.prompts_per_step
    epochs = f" ({drawn / pool.num_train:.2f} epochs)" if pool.num_train else ""
    known = pool.num_train is not None
    rows = [
        ("in the pool", f"{pool.num_train:,}" if known else "unknown"),
        ("held out", f"{'' if known else 'up to '}{pool.num_heldout:,}"),
        ("per step (B)", f"{config.prompts_per_step:,}"),
        ("in the run", f"{drawn:,}{epochs}"),
        ("mean tokens of one", f"{pool.prompt_tokens:.1f}" if known else f"up to {pool.prompt_tokens:,}"),
    ]
    return Table("prompts", ("", config.task), rows, [pool.note])


def _rounds(config: Config, draws: list[Draw]) -> Table:
    rows = []
    for number, draw in enumerate(draws, 1):
        each = f"{draw.fewest}" if draw.fewest == draw.most else f"{draw.fewest} to {draw.most}"
        rows.append((f"{number}", f"{draw.active:,}", each, f"{draw.drawn:,}"))
    notes = [f"budget: {config.budget:,} rollouts per step, {config.budget * config.steps:,} in {config.steps:,} steps"]
    if config.budget_unit == "tokens":
        notes = [f"budget: the tokens of {config.budget:,} rollouts of mean length per step, as expected; drawn: at most"]
    if config.allocator == "vip":
        notes.append("vip decides within these bounds, from what its predictor has learned by then")
    return Table(f"rounds of {config.allocator}", ("round", "active", "each", "drawn"), rows, notes)


def _tokens(config: Config, pool: Pool, draws: list[Draw]) -> Table:
    prompt = config.prompts_per_step * pool.prompt_tokens
    completion = sum(draw.drawn for draw in draws) * config.max_new_tokens
    evaluations = num_evaluations(config)
    eval_rollouts = pool.num_heldout * config.eval_samples
    rows = [
        ("prompts, read once", f"{prompt:,.0f}", f"{prompt * config.steps:,.0f}"),
        ("completions, at most", f"{completion:,}", f"{completion * config.steps:,}"),
        (f"evaluation, at most (×{evaluations})", "", f"{evaluations * eval_rollouts * config.max_new_tokens:,}"),
    ]
    notes = [
        f"at most: every completion as long as --max-new-tokens {config.max_new_tokens}",
        f"an evaluation draws {eval_rollouts:,} rollouts",
    ]
    return Table("tokens", ("", "per step", "per run"), rows, notes)


def _memory(config: Config, pool: Pool, facts: ModelFacts, draws: list[Draw], gpu_bytes: float | None) -> Table:
    shards = gpu_fit.choose_shards(config, facts, gpu_bytes) if config.device == "cuda" else 1
    at_once, unit = rows_at_once(config, pool, draws), "round" if config.round_mode == "barrier" else "step"
    phases = memory.estimate(config, facts, pool.prompt_tokens, at_once, shards, gpu_bytes)
    rows = []
    for (phase, parts), total in zip(phases.items(), memory.totals(phases).values()):
        rows += [(phase, part, memory.size(num_bytes)) for part, num_bytes in parts.items()]
        label = "= in all" if phase in ("always", "load") else "= in all, with what is always there"
        rows.append((phase, label, memory.size(total)))
    recomputed = "layers' inputs and one layer computed again" if config.gradient_checkpointing else "without checkpointing"
    trained = f"{facts.lora_parameters(config.lora_rank):,} in adapters trained" if config.lora_rank else "all trained"
    vllm = memory.samples_with_vllm(config)
    notes = [
        f"{facts.num_parameters:,} parameters, {trained} ({facts.source})",
        f"{config.dtype} on {config.device}; "
        + ("vLLM keeps a copy of the weights while it is awake" if vllm else "sampler and learner share the weights"),
        f"all rollouts at full length: {at_once['generate']:,} of a {unit} at once, {at_once['evaluate']:,} of an evaluation",
        f"activations of {config.micro_batch_tokens:,} tokens, {recomputed}; attention scores not kept",
        "besides: Python, torch and transformers themselves, about 0.4 GB of main memory",
    ]
    if shards > 1:
        notes.append(f"of one of {shards} GPUs that share weights, gradients and Adam state")
    if config.offload_optimizer:
        offloaded = memory.size(memory.offloaded_bytes(config, facts))
        notes.append(f"Adam state of {offloaded} in main memory; every optimizer step moves it to the GPU and back")
    if gpu_bytes is not None:
        notes.append(gpu_fit.verdict(config, phases, gpu_bytes))
    elif config.device == "cuda":
        notes.append(
            "whether that fits: name the GPU's size with --gpu-memory-gb; a run asks its own GPU before it loads anything"
        )
    return Table("memory", ("phase", "part", "estimate"), rows, notes)


def expected_memory(config: Config, task: "Task") -> dict[str, float]:
    """Bytes by phase that a run should take (see ``memory.estimate``); {} for a model whose sizes are not known."""
    facts = known_facts(config.model)
    if facts is None:
        return {}
    gpu_bytes = total_gpu_bytes() if config.device == "cuda" else None
    shards = gpu_fit.choose_shards(config, facts, gpu_bytes)
    pool = Pool(len(task.train), len(task.heldout), _mean([len(prompt.tokens) for prompt in task.train]), "")
    with warnings.catch_warnings():  # on the allocator's options, told when the run's own was made
        warnings.simplefilter("ignore", UserWarning)
        at_once = rows_at_once(config, pool, draws_per_round(config))
    return memory.totals(memory.estimate(config, facts, pool.prompt_tokens, at_once, shards, gpu_bytes))


def rows_at_once(config: Config, pool: Pool, draws: list[Draw]) -> dict[str, int]:
    """Rollouts decoded at once, by phase: where rounds wait for one another, only one round's are."""
    drawn = max(draw.drawn for draw in draws) if config.round_mode == "barrier" else config.budget
    return {"generate": drawn, "evaluate": rows_of_evaluation(config, pool)}


def _mean(lengths: list[int]) -> float:
    return sum(lengths) / max(len(lengths), 1)


def _show_plain(table: Table) -> None:
    lines = [table.columns, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
    print(f"\n{table.title}")
    for line in lines:
        print("  " + "  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip())
    for note in table.notes:
        print(f"  {note}")


def _show_rich(tables: list[Table]) -> None:
    import rich
    import rich.table

    for table in tables:
        drawn = rich.table.Table(title=table.title, title_justify="left")
        drawn.caption, drawn.caption_justify = "\n".join(table.notes), "left"
        for i, column in enumerate(table.columns):
            drawn.add_column(column, justify="left" if i == 0 or column == "part" else "right")
        for row in table.rows:
            drawn.add_row(*row)
        rich.print(drawn)
