"""An evaluation's scores, from its samples: ``OUT/results.json``, strict JSON, the same bytes for the same samples."""

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from vipfast.evaluation.options import Evaluation
from vipfast.evaluation.pool import Pool, level_of
from vipfast.evaluation.samples import Sample
from vipfast.evaluation.scores import interval, majority_B, pass_B
from vipfast.tools.use import columns_of, metrics_of

Score = dict[str, float | None] | None
"""{"value", "low", "high"}, the last two None where there is no interval; None where the score means nothing."""

PACKAGES = ("vipfast", "torch", "transformers", "numpy", "scipy")


def results(asked: Evaluation, pools: Sequence[Pool], rows: Sequence[Sample]) -> dict[str, Any]:
    """Everything, from the rows of all tasks in order."""
    tasks, columns, first = {}, [], 0
    for pool in pools:
        num = len(pool.prompts) * asked.samples
        tasks[pool.name], values = _of_task(asked, pool, rows[first : first + num])
        columns.append(values)
        first += num
    # The mean of the tasks' scores, each task alike, whatever its number of prompts.
    average = {name: _score(asked.config.seed, *(values[name] for values in columns)) for name in columns[0]}
    own = {"k": list(asked.k), "by": list(asked.by)}
    return {"config": asked.decisive | own, "versions": _versions(asked), "tasks": tasks, "average": average}


def _of_task(asked: Evaluation, pool: Pool, rows: Sequence[Sample]) -> tuple[dict, dict[str, np.ndarray | None]]:
    shape = (len(pool.prompts), asked.samples)
    rewards = np.array([np.nan if row.reward is None else row.reward for row in rows]).reshape(shape)
    right_BN = rewards >= asked.config.success_threshold
    finish = np.array([row.finish for row in rows]).reshape(shape)
    tokens = np.array([row.tokens for row in rows]).reshape(shape)
    answers = [[row.answer for row in rows[i : i + shape[1]]] for i in range(0, len(rows), shape[1])]
    values = {f"mean@{shape[1]}": right_BN.mean(1), "reward": _mean_scored(rewards)}
    values |= {f"pass@{k}": pass_B(right_BN, k) for k in asked.k}
    has_answers = getattr(pool.task.reward, "has_answers", False)
    values |= {f"maj@{k}": majority_B(right_BN, answers, k) if has_answers else None for k in asked.k}
    prompts = [
        {
            "uid": prompt.uid,
            "prompt": prompt.text,
            **{key: level_of(prompt, key) for key in pool.keys},
            "right": int(right_BN[b].sum()),
            "unscored": int(np.isnan(rewards[b]).sum()),
            "truncated": int((finish[b] == "length").sum()),
            "tokens": int(tokens[b].sum()),
        }
        for b, prompt in enumerate(pool.prompts)
    ]
    return {
        "split": pool.split,
        "num_prompts": shape[0],
        "scores": {name: _score(asked.config.seed, column) for name, column in values.items()},
        "by": {key: _by(asked, pool, key, values) for key in pool.keys},
        "samples": rewards.size,
        "unscored": int(np.isnan(rewards).sum()),
        "truncated": int((finish == "length").sum()),
        "lost": int((finish == "error").sum()),
        "tokens": {
            "mean": float(tokens.mean()),
            **{name: float(np.quantile(tokens, q)) for name, q in (("median", 0.5), ("p95", 0.95))},
            "max": int(tokens.max()),
        },
        **({"tools": _of_tools(asked, pool, rows)} if asked.config.tools else {}),
        "notes": list(pool.notes),
        "prompts": prompts,
    }, values


def _by(asked: Evaluation, pool: Pool, key: str, values: dict[str, np.ndarray | None]) -> dict[str, dict]:
    """Per value of a metadata key, in order, the prompts that have it and the scores of all n samples."""
    level_B = [level_of(prompt, key) for prompt in pool.prompts]
    found = sorted(set(level_B) - {None}, key=lambda level: (isinstance(level, str), level))
    table = {}
    for level in found:
        mask = np.array([other == level for other in level_B])
        chosen = {name: values[name] for name in score_names(asked.samples) if name in values}
        scores = {
            name: _score(asked.config.seed, column if column is None else column[mask]) for name, column in chosen.items()
        }
        table[str(level)] = {"num_prompts": int(mask.sum()), **scores}
    return table


def score_names(num_samples: int) -> list[str]:
    """The scores of all samples, in the order of tables."""
    return [f"mean@{num_samples}", "reward", f"pass@{num_samples}", f"maj@{num_samples}"]


def _mean_scored(reward_BN: np.ndarray) -> np.ndarray:
    """float64 [B], mean reward of each prompt's scored samples; NaN where none is scored."""
    scored_BN = ~np.isnan(reward_BN)
    with np.errstate(invalid="ignore"):
        return np.where(scored_BN, reward_BN, 0.0).sum(1) / scored_BN.sum(1)


def _of_tools(asked: Evaluation, pool: Pool, rows: Sequence[Sample]) -> dict[str, float | None] | None:
    """What training logs as tools/*, over all samples; None where all were lost."""
    columns = columns_of(rows, [prompt.metadata for prompt in pool.prompts for _ in range(asked.samples)])
    found = metrics_of(columns if columns["turns"].any() else None, asked.config.search_k)
    return {name.removeprefix("tools/"): value for name, value in found.items() if name.startswith("tools/")} or None


def _score(seed: int, *values_B: np.ndarray | None) -> Score:
    """The mean of the tasks' means over prompts, NaN left out; None where a task has none."""
    known = [values[~np.isnan(values)] for values in values_B if values is not None]
    if len(known) < len(values_B) or not all(map(len, known)):
        return None
    low, high = interval(seed, *known) or (None, None)
    return {"value": float(np.mean([values.mean() for values in known])), "low": low, "high": high}


def _versions(asked: Evaluation) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *(("vllm",) if asked.config.engine == "vllm" else ())):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
