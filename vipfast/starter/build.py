"""The whole build in one function, from a seed, and its report."""

import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2ForCausalLM

from vipfast.policy import read_tokenizer
from vipfast.predict.embed import Embedder, build_shipped
from vipfast.starter import model as body
from vipfast.starter import pool, sft
from vipfast.tasks import arithmetic
from vipfast.tasks.arithmetic import SPLITS, Problem

SELECT_SAMPLES, REPORT_SAMPLES = 16, 64
CANDIDATES_PER_PROBLEM = 1.75


def build(assets: Path, seed: int, steps: int) -> None:
    """Train the starter, choose the pool by one measurement, rate it by a fresh one, and write all of it under ``assets``.

    Selecting and rating on the same samples would make hard problems look harder and easy ones easier than they are.
    """
    start = time.perf_counter()
    tokenizer = body.make_tokenizer()
    model = body.make_model(seed)
    sft.train(model, tokenizer, steps, seed)
    body.sensitise(model)
    body.save(model, tokenizer, assets / "starter")
    for split, size in SPLITS.items():
        found = pool.candidates(split, int(size * CANDIDATES_PER_PROBLEM), seed)
        chosen = pool.compose(found, pool.measure(model, tokenizer, found, SELECT_SAMPLES, seed), size, seed)
        rates = pool.measure(model, tokenizer, chosen, REPORT_SAMPLES, seed + 1)
        pool.write(pool.rated(chosen, rates), assets / "arithmetic" / f"{split}.jsonl")
        print(f"{split}: {size} of {len(found)} candidates written, {time.perf_counter() - start:.0f} s", flush=True)
    texts = [problem.text for split in SPLITS for problem in arithmetic.load_pool(split, assets)]
    build_shipped(texts, assets / "arithmetic" / "embeddings.npz")
    for split in SPLITS:
        report(split, arithmetic.load_pool(split, assets), assets)
    print(f"built in {time.perf_counter() - start:.0f} s")


def remeasure(assets: Path, seed: int) -> None:
    """Sample every pool problem 64 times with fresh randomness and print the report; writes nothing."""
    tokenizer, model = load(assets)
    for split in SPLITS:
        problems = arithmetic.load_pool(split, assets)
        rates = pool.measure(model, tokenizer, problems, REPORT_SAMPLES, seed + 2)
        shift = rates - np.array([problem.pass_rate for problem in problems])
        report(split, pool.rated(problems, rates), assets)
        print(f"  against the shipped pass rates: mean shift {shift.mean():+.4f}, mean absolute {np.abs(shift).mean():.4f}")


def load(assets: Path) -> tuple[PreTrainedTokenizerFast, Qwen2ForCausalLM]:
    """The shipped starter, in float32 and evaluation mode."""
    folder = assets / "starter"
    return read_tokenizer(str(folder)), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def report(split: str, problems: list[Problem], assets: Path) -> None:
    """Print a split's shares, its groups without variance, its predictability from the text, and a line per family and size."""
    rates = np.array([problem.pass_rate for problem in problems])
    never, always = rates < pool.NEVER_BELOW, rates > pool.ALWAYS_ABOVE
    print(f"\n{split}: {len(problems)} problems, mean pass rate {rates.mean():.3f}")
    between = rates[~never & ~always]
    print(f"  p < {pool.NEVER_BELOW}: {never.mean():.3f}   p > {pool.ALWAYS_ABOVE}: {always.mean():.3f}")
    print(f"  between: {len(between) / len(rates):.3f}   mean {between.mean():.3f}")
    print("  between, by tenths of p:", *np.histogram(between, 10, (0, 1))[0])
    print(f"  uniform groups of 8 without variance: {(rates**8 + (1 - rates) ** 8).mean():.3f}")
    print(f"  Pearson r of p with ridge on text embeddings, held out: {predictability(problems, rates, assets):.3f}")
    for name in ("text", "answer"):
        lengths = [len(getattr(problem, name)) for problem in problems]
        print(f"  {name} bytes: mean {np.mean(lengths):.1f}, most {max(lengths)}")
    cells: dict[tuple[str, int], list[float]] = {}
    for problem in problems:
        cells.setdefault((problem.family, problem.size), []).append(problem.pass_rate)
    print("  family      size  number   mean p  sd")
    for (family, size), values in sorted(cells.items()):
        print(f"  {family:<10}  {size:>4}  {len(values):>6}   {np.mean(values):.3f}   {np.std(values):.3f}")


def predictability(problems: list[Problem], rates: np.ndarray, assets: Path, folds: int = 5) -> float:
    """Correlation of pass rates with ridge predictions from the other folds' embeddings."""
    x = Embedder(shipped=[assets / "arithmetic" / "embeddings.npz"])([problem.text for problem in problems]).astype(np.float64)
    fold = np.arange(len(problems)) % folds
    predicted = np.zeros(len(problems))
    for i in range(folds):
        fit, test = fold != i, fold == i
        mean_x, mean_y = x[fit].mean(0), rates[fit].mean()
        centred = x[fit] - mean_x
        weights = np.linalg.solve(centred.T @ centred + 0.1 * np.eye(x.shape[1]), centred.T @ (rates[fit] - mean_y))
        predicted[test] = (x[test] - mean_x) @ weights + mean_y
    return float(np.corrcoef(predicted, rates)[0, 1])
