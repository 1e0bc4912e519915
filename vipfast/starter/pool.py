"""Measures the starter on problems with the project's own engine, and composes the pool from what it can and cannot do."""

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from vipfast import streams
from vipfast.engine.base import Request, Sampling
from vipfast.engine.transformers import TransformersEngine
from vipfast.starter import recipe
from vipfast.tasks import arithmetic
from vipfast.tasks.arithmetic import Problem
from vipfast.types import Finish

MAX_NEW_TOKENS = 16
NEVER_BELOW, ALWAYS_ABOVE = 0.02, 0.98
SHARES = {"never": 0.46, "middle": 0.41, "always": 0.13}
"""What the pool is composed to: problems with no right sample, some, and only right ones, in the selecting measurement."""
BANDS = (0.26, 0.24, 0.20, 0.17, 0.13)
"""The middle's weights by fifths of pass rate: tilted to the hard side, where training has more to gain."""


def measure(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    samples: int,
    seed: int,
    at_once: int = 64,
) -> np.ndarray:
    """Pass rates float64 [N] at temperature 1 from ``samples`` rollouts of each problem; a rollout must end to count.

    Args:
        seed: names the random numbers; another seed is a fresh measurement.
        at_once: problems decoded together.
    """
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, stop_ids=(tokenizer.eos_token_id,), seed=seed)
    engine = TransformersEngine(model, sampling, pad_id=tokenizer.pad_token_id)
    right = np.zeros(len(problems))
    # Prompts of one length share a prefill without padding.
    order = sorted(range(len(problems)), key=lambda i: len(problems[i].text))
    for start in range(0, len(order), at_once):
        slots = order[start : start + at_once]
        tokens = tokenizer([problems[i].text for i in slots])["input_ids"]
        engine.submit(
            [
                Request(slot, np.array(ids), problems[slot].text, step=0, first_index=0, count=samples, stream=streams.EVAL)
                for slot, ids in zip(slots, tokens, strict=True)
            ]
        )
        while engine.pending:
            done = [row for row in engine.step() if row.finish == Finish.STOP]
            texts = tokenizer.batch_decode([row.tokens[:-1] for row in done])
            for row, verdict in zip(done, arithmetic.reward(texts, [problems[x.slot].answer for x in done], []), strict=True):
                right[row.slot] += verdict.reward
        engine.reset()
    return right / samples


def candidates(split: str, count: int, seed: int) -> list[Problem]:
    """``count`` distinct problems whose home is ``split``; what the starter never learnt, though taught it, comes seldom."""
    rng = random.Random(f"{split} {seed}")
    cells = [cell for cell in recipe.RATES for _ in range(3 if cell in recipe.NEVER else 1 if cell[0] in recipe.SELDOM else 2)]
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = recipe.draw(rng, split, cells)
        found[problem.text] = problem
    return list(found.values())


def compose(problems: list[Problem], rates: np.ndarray, size: int, seed: int) -> list[Problem]:
    """``size`` of the problems in the proportions of ``SHARES``; middle ones follow ``BANDS`` as far as they last.

    Raises:
        ValueError: too few candidates of a kind.
    """
    rng = np.random.default_rng(seed)
    kinds = {"never": rates == 0, "middle": (rates > 0) & (rates < 1), "always": rates == 1}
    band = np.minimum((rates * 5).astype(int), 4)
    chosen = []
    for kind, members in kinds.items():
        wanted = round(SHARES[kind] * size) if kind != "always" else size - len(chosen)
        weight = members * (np.array(BANDS) / np.bincount(band[members], minlength=5).clip(1))[band]
        if members.sum() < wanted:
            raise ValueError(
                f"{wanted} problems are to be {kind}-solved, but only {members.sum()} of {len(problems)} candidates are"
            )
        chosen += rng.choice(len(problems), wanted, replace=False, p=weight / weight.sum()).tolist()
    rng.shuffle(chosen)
    return [problems[i] for i in chosen]


def rated(problems: list[Problem], rates: np.ndarray) -> list[Problem]:
    """The problems, each with its measured pass rate."""
    return [replace(problem, pass_rate=round(float(rate), 6)) for problem, rate in zip(problems, rates, strict=True)]


def write(problems: list[Problem], path: Path) -> None:
    """One JSON object a line, the fields of ``Problem``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in problems), encoding="utf-8")
