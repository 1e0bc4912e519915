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
    together = {
        name: None if any(values[name] is None for values in columns) else [v[name] for v in columns] for name in columns[0]
    }
    average = {name: None if values is None else _score(asked.config.seed, *values) for name, values in together.items()}
    own = {"k": list(asked.k), "by": list(asked.by)}
    return {"config": asked.decisive | own, "versions": _versions(asked), "tasks": tasks, "average": average}


def _of_task(asked: Evaluation, pool: Pool, rows: Sequence[Sample]) -> tuple[dict, dict[str, np.ndarray | None]]:
    shape = (len(pool.prompts), asked.samples)
    rewards = np.array([np.nan if row.reward is None else row.reward for row in rows]).reshape(shape)
    right_BN = rewards >= asked.config.success_threshold
    finish = np.array([row.finish for row in rows]).reshape(shape)
    tokens = np.array([row.tokens for row in rows]).reshape(shape)
    answers = [[row.answer for row in rows[i : i + shape[1]]] for i in range(0, len(rows), shape[1])]
    values = {f"mean@{shape[1]}": right_BN.mean(1)}
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
        "scores": {name: _of_values(asked, column) for name, column in values.items()},
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
        chosen = {name: values.get(name) for name in (f"{kind}@{asked.samples}" for kind in ("mean", "pass", "maj"))}
        scores = {name: _of_values(asked, None if column is None else column[mask]) for name, column in chosen.items()}
        table[str(level)] = {"num_prompts": int(mask.sum()), **{name: scores[name] for name in scores if name in values}}
    return table


def _of_values(asked: Evaluation, values_B: np.ndarray | None) -> Score:
    return None if values_B is None else _score(asked.config.seed, values_B)


def _score(seed: int, *values_B: np.ndarray) -> Score:
    low, high = interval(seed, *values_B) or (None, None)
    return {"value": float(np.mean([values.mean() for values in values_B])), "low": low, "high": high}


def _versions(asked: Evaluation) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *(("vllm",) if asked.config.engine == "vllm" else ())):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
