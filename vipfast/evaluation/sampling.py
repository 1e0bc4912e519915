"""Samples what is missing of an evaluation, chunk by chunk, and writes it down; every rank its share of a chunk."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from vipfast import streams
from vipfast.config import Config
from vipfast.distributed import Ranks
from vipfast.engine import make_engine
from vipfast.engine.base import Engine, Sampling
from vipfast.engine.sampling import stop_ids
from vipfast.evaluation import model
from vipfast.evaluation.options import ROWS_AT_ONCE, Evaluation
from vipfast.evaluation.pool import Pool
from vipfast.evaluation.progress import Progress, Watched
from vipfast.evaluation.samples import USE, Samples
from vipfast.placement import Placement
from vipfast.rewards.grader import Grader
from vipfast.rollout import sample_uniformly
from vipfast.stop import StopRequest
from vipfast.telemetry.activity import NOW
from vipfast.telemetry.status import StatusLine
from vipfast.tools import with_tools
from vipfast.types import Prompt

Chunk = tuple[Pool, Sequence[Prompt]]


def make_chunks(asked: Evaluation, pools: Sequence[Pool], num_homes: int) -> list[Chunk]:
    """The prompts in the order they are sampled, as many together as have at most ``rows_at_once`` samples on each rank."""
    rows = asked.rows_at_once or ROWS_AT_ONCE[asked.config.engine]
    size = max(1, rows // asked.samples) * num_homes
    return [(pool, pool.prompts[i : i + size]) for pool in pools for i in range(0, len(pool.prompts), size)]


def open_engine(asked: Evaluation, config: Config, tokenizer, placement: Placement) -> Engine:
    """The engine with the model's weights in it, and the tools of ``config`` around it."""
    policy = model.load(asked.source, config, tokenizer)
    stops = stop_ids(tokenizer, policy.generation_config, config.stop)
    sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p, stops, config.seed)
    engine = make_engine(config, policy, sampling, tokenizer.pad_token_id)
    engine.sync((name, parameter.detach()) for name, parameter in policy.named_parameters())
    return with_tools(config, engine, tokenizer, placement)


def sample_missing(
    asked: Evaluation, chunks: Sequence[Chunk], num_done: int, samples: Samples | None, tokenizer, placement: Placement
) -> tuple[str | None, Progress]:
    """Sample chunk after chunk from ``num_done`` on.

    Args:
        samples: where they are written down; None on ranks other than 0.

    Returns:
        the signal that asked for a stop (None: everything is there), and how it went.

    Raises:
        RewardError, NonFiniteError: as in training.
    """
    ranks, config = placement.ranks, asked.config
    counts = [len(prompts) * asked.samples for _, prompts in chunks]
    progress = Progress(sum(counts), sum(counts[:num_done]), ranks.rank == 0, placement.num_homes, config.max_new_tokens)
    if num_done == len(chunks):  # no model is needed
        return None, progress
    with ExitStack() as stack:
        with StatusLine(shown=ranks.rank == 0):
            NOW.begin("starting", "loading the model")
            engine = open_engine(asked, config, tokenizer, placement)
        NOW.begin("the samples under way")
        if ranks.size == 1:
            stack.callback(engine.close)
        else:  # no rank closes while another samples
            ranks.at_leave.append(engine.close)
        stop = stack.enter_context(StopRequest(progress.say))
        stack.enter_context(progress)
        graders: dict[str, Grader] = {}
        for number in range(num_done, len(chunks)):
            pool, prompts = chunks[number]
            if pool.name not in graders:
                options = dict(truncated=config.truncated, max_errors=config.max_reward_errors, go_on="start again")
                graders[pool.name] = Grader(pool.task.reward, tokenizer, **options)
            progress.task = pool.name
            rows = _sampled(pool, prompts, asked.samples, engine, Watched(graders[pool.name], progress), tokenizer, placement)
            ranks.decided(lambda rows=rows: samples.append(rows))
            progress.at(sum(counts[: number + 1]))
            asked_to = next(filter(None, ranks.gather(stop.name)), None)
            if asked_to and number + 1 < len(chunks):
                return asked_to, progress
        for name, grader in graders.items():
            failed, late = (sum(ranks.gather(num)) for num in (grader.num_errors, grader.num_timeouts))
            if ranks.rank == 0 and failed + late:
                print(f"warning: {name}: grading failed for {failed} samples and was given up after its time limit for {late}")
    return None, progress


def _sampled(
    pool: Pool, prompts: Sequence[Prompt], num: int, engine: Engine, grader: Watched, tokenizer, placement: Placement
) -> list[dict]:
    """A chunk's lines in order; every home samples and grades each so-many-th prompt."""
    homes = placement.num_homes
    own = prompts[placement.home :: homes]
    parts = placement.ranks.together(partial(_lines, pool.name, own, num, engine, grader, tokenizer))
    by_prompt: list[list[dict]] = [[] for _ in prompts]
    for home, lines in enumerate(parts[:: placement.tensor_parallel]):
        by_prompt[home::homes] = [lines[i : i + num] for i in range(0, len(lines), num)]
    return [line for lines in by_prompt for line in lines]


def _lines(task: str, prompts: Sequence[Prompt], num: int, engine: Engine, grader: Watched, tokenizer) -> list[dict]:
    if not prompts:
        return []
    # The streams are those of training's own evaluations, so its numbers come out again.
    rows = sample_uniformly(prompts, num, engine, grader, stream=streams.EVAL, flow=grader.progress)
    engine.reset()
    names = sorted(rows)
    texts = tokenizer.batch_decode([rows[name][0].tokens for name in names], skip_special_tokens=True)
    lines = []
    for (slot, index), text in zip(names, texts):
        row, reward, answer = rows[slot, index]
        lines.append(
            {
                "task": task,
                "uid": prompts[slot].uid,
                "index": index,
                "reward": reward if reward == reward else None,
                "answer": answer,
                "finish": row.finish.name.lower(),
                "tokens": len(row.tokens),
                "text": text,
                **({"tools": {key: getattr(row.use, key) for key in USE}} if row.use else {}),
            }
        )
    return lines


def open_ranks(config: Config, ranks: Ranks) -> Placement:
    """Connect the ranks, take this one's threads, and deal out homes."""
    ranks.connect(config.device, config.dist_timeout)
    torch.set_num_threads(config.threads)
    split = ranks.size > 1 and config.engine == "vllm"
    return Placement(ranks, config.tensor_parallel_size if split else 1)
