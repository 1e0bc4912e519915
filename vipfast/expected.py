"""What a run should take in memory: rollouts decoded at once and tokens trained at once, from its options and its prompts."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vipfast import cpu_fit, gpu_fit, memory
from vipfast.allocation import make_allocator
from vipfast.config import Config
from vipfast.distributed import join
from vipfast.errors import UsageError
from vipfast.memory import Passes
from vipfast.model_facts import known_facts
from vipfast.resolve import total_gpu_bytes
from vipfast.types import Prompt, PromptBatch, Tally

if TYPE_CHECKING:
    from vipfast.tasks.base import Task

PASSES = 50
"""A step of more passes fills its largest; for fewer a dry run cuts them as the learner would."""


@dataclass(frozen=True)
class Pool:
    """Prompts as far as they can be counted; of a dataset not at hand: None, and a bound for the mean ``prompt_tokens``.

    ``lengths``: tokens of single prompts, all of them or a sample; none of a dataset not at hand.
    """

    num_train: int | None
    num_heldout: int
    prompt_tokens: float
    note: str
    lengths: Sequence[int] = ()


@dataclass(frozen=True)
class Draw:
    """One allocation round: active prompts, the fewest and most rollouts of one of them, and at most all of the round's."""

    active: int
    fewest: int
    most: int
    drawn: int


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


def rows_of_evaluation(config: Config, pool: Pool) -> int:
    """Rollouts an evaluation decodes at once: as many as a training step, in whole prompts."""
    return min(pool.num_heldout, max(1, config.budget // config.eval_samples)) * config.eval_samples


def expected_memory(config: Config, task: "Task") -> dict[str, float]:
    """Bytes by phase that a run should take (see ``memory.estimate``); {} for a model whose sizes are not known."""
    return memory.totals(phases) if (phases := _expected(config, task)) else {}


def check_memory(config: Config, task: "Task") -> list[str]:
    """Before a run loads its model on a CPU: a warning where other programs leave too little main memory.

    Raises:
        UsageError: the run is expected to take more than this machine has; with the numbers and what helps.
    """
    phases = _expected(config, task) if config.device == "cpu" else None
    if phases is None:
        return []
    if (refusal := cpu_fit.refusal(config, phases)) is not None:
        raise UsageError(refusal)
    return [told] if (told := cpu_fit.warning(config, phases)) else []


def _expected(config: Config, task: "Task") -> dict[str, dict[str, float]] | None:
    """``memory.estimate`` of a loaded task's own prompts; None for a model whose sizes are not known."""
    facts = known_facts(config.model)
    if facts is None:
        return None
    gpu_bytes = total_gpu_bytes() if config.device == "cuda" else None
    shards = gpu_fit.num_shards(config)
    lengths = [len(prompt.tokens) for prompt in task.train]
    pool = Pool(len(task.train), len(task.heldout), mean(lengths), "", lengths)
    with warnings.catch_warnings():  # on the allocator's options, told when the run's own was made
        warnings.simplefilter("ignore", UserWarning)
        draws = draws_per_round(config)
    sizes = rows_at_once(config, pool, draws), shards, gpu_bytes, expected_passes(config, pool, draws)
    return memory.estimate(config, facts, pool.prompt_tokens, *sizes)


def rows_at_once(config: Config, pool: Pool, draws: list[Draw]) -> dict[str, int]:
    """Rollouts decoded at once, by phase: where rounds wait for one another, only one round's are."""
    drawn = max(draw.drawn for draw in draws) if config.round_mode == "barrier" else config.budget
    return {"generate": drawn, **({"evaluate": rows_of_evaluation(config, pool)} if pool.num_heldout else {})}


def expected_passes(config: Config, pool: Pool, draws: list[Draw]) -> Passes:
    """The update's passes through the body, if all rollouts of a step are trained at full length.

    Prompts from all over the pool stand for those of a step, and are cut as the learner cuts them: rollouts of unlike length do
    not share a pass, so a small step never fills --micro-batch-tokens.
    """
    from vipfast.learn.pack import PACKED, cut_packed, cut_rectangles

    num = config.prompts_per_step
    count_B = sum(np.where(np.arange(num) < draw.active, draw.drawn / draw.active, 0) for draw in draws)
    known = sorted(pool.lengths) or [int(pool.prompt_tokens)]
    prompt_B = np.array(known)[np.arange(num) * len(known) // num]
    # Which prompts get most rollouts has nothing to do with their length.
    prompt_B = np.random.default_rng(0).permutation(prompt_B)
    length_R = np.repeat(prompt_B + config.max_new_tokens - 1, np.ceil(count_B).astype(np.int64))
    length_r = length_R[:: config.updates_per_step * join().size]
    longest = int(length_r.max())
    if length_r.sum() > PASSES * config.micro_batch_tokens:
        return Passes(max(longest, config.micro_batch_tokens), several=True)
    packed = config.packing in PACKED
    parts = [length_r[part] for part in (cut_packed if packed else cut_rectangles)(length_r, config.micro_batch_tokens)]
    tokens = max(int(part.sum() if packed else len(part) * part.max()) for part in parts)
    return Passes(tokens, several=len(parts) > 1)


def mean(lengths: Sequence[int]) -> float:
    return sum(lengths) / max(len(lengths), 1)
