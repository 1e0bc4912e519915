"""``--dry-run``: what a run would draw, generate and hold in memory, told without loading a model or importing torch.

Sizes come from config.json, prompts from files on this disk; every assumption is printed beside the number it carries.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from vipfast import cpu_fit, gpu_fit, memory
from vipfast.config import Config
from vipfast.cores import counted
from vipfast.errors import DataError, UsageError
from vipfast.expected import Draw, Pool, draws_per_round, expected_passes, mean, rows_at_once
from vipfast.model_facts import ModelFacts, has_chat_template, model_folder, read_facts
from vipfast.options.values import REASONING_GYM
from vipfast.resolve import DATA_SUFFIXES

TRIAL = 32
"""Problems of a procedural task that a dry run generates."""

SAMPLE = 4096
"""Prompts that a dry run counts the tokens of."""

CHAT_TOKENS = 30
"""What a chat template puts around a prompt, a short system message among it."""


@dataclass(frozen=True)
class Table:
    """One section of the output: rows of text under column names, the assumptions behind them, and why it cannot be."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]
    refusal: str | None = None


def show(config: Config, gpu_bytes: float | None = None) -> None:
    """Print the plan of a resolved config: as rich tables on a terminal, as plain lines elsewhere.

    Raises:
        UsageError: after the plan, where a run on this CPU would be refused.
    """
    tables = plan(config, gpu_bytes)
    if sys.stdout.isatty():
        _show_rich(tables)
    else:
        for table in tables:
            _show_plain(table)
    for refusal in filter(None, (table.refusal for table in tables)):
        raise UsageError(refusal)


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
    lengths, note = _lengths(config, texts)
    return Pool(num_train, heldout, mean(lengths), "; ".join([note, *notes]), lengths)


def _lengths(config: Config, texts: list[str]) -> tuple[list[int], str]:
    """Tokens of prompts, at most ``SAMPLE`` of them from all over the pool, and how they were counted."""
    if config.model == "starter":
        return [len(text.encode("utf-8", "replace")) for text in texts], "one token per byte"
    folder, texts = model_folder(config.model), texts[:: -(-len(texts) // SAMPLE)]
    if folder is None or not (folder / "tokenizer.json").is_file():
        return [-(-len(text) // 4) for text in texts], "4 characters per token assumed, no chat template"
    # Loads in a blink, as transformers' own classes over it do not.
    from tokenizers import Tokenizer

    encoded = Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(texts, add_special_tokens=False)
    around = CHAT_TOKENS if config.prompt_template not in ("plain", "qa") and has_chat_template(folder) else 0
    note = f"{len(texts):,} prompts counted by the model's tokenizer"
    note += f", {around} tokens of a chat template around each assumed" if around else ""
    return [len(one.ids) + around for one in encoded], note


def _plain_text(prompt: str | list[dict]) -> str:
    return prompt if isinstance(prompt, str) else "".join(str(part["content"]) for part in prompt)


def num_evaluations(config: Config) -> int:
    """At the start, every eval_every steps, and at the end."""
    every = config.eval_every or max(config.steps, 1)
    return 1 + -(-config.steps // every)


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
    in_all = f"{config.budget * config.steps:,} in {counted(config.steps, 'step')}"
    notes = [f"budget: {config.budget:,} rollouts per step, {in_all}"]
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
    shards = gpu_fit.num_shards(config) if config.device == "cuda" else 1
    at_once, unit = rows_at_once(config, pool, draws), "round" if config.round_mode == "barrier" else "step"
    passes = expected_passes(config, pool, draws)
    phases = memory.estimate(config, facts, pool.prompt_tokens, at_once, shards, gpu_bytes, passes)
    rows = []
    for (phase, parts), total in zip(phases.items(), memory.totals(phases).values()):
        rows += [(phase, part, memory.size(num_bytes)) for part, num_bytes in parts.items()]
        label = "= in all" if phase in ("always", "load") else "= in all, with what is always there"
        rows.append((phase, label, memory.size(total)))
    recomputed = "layers' inputs and one layer computed again" if config.gradient_checkpointing else "without checkpointing"
    trained = f"{facts.lora_parameters(config.lora_rank):,} in adapters trained" if config.lora_rank else "all trained"
    vllm = config.engine == "vllm"
    notes = [
        f"{facts.num_parameters:,} parameters, {trained} ({facts.source})",
        f"{config.dtype} on {config.device}; "
        + ("vLLM keeps a copy of the weights while it is awake" if vllm else "sampler and learner share the weights"),
        f"all rollouts at full length: {at_once['generate']:,} of a {unit} at once, {at_once.get('evaluate', 0):,} of an "
        "evaluation",
        f"activations of {passes.tokens:,} tokens at once, {recomputed}; attention scores not kept",
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
    elif config.device == "cpu":
        notes += filter(None, (cpu_fit.verdict(config, phases), cpu_fit.warning(config, phases)))
    refusal = cpu_fit.refusal(config, phases) if config.device == "cpu" else None
    return Table("memory", ("phase", "part", "estimate"), rows, notes, refusal)


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
