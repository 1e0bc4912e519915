"""Which reward a run uses: what ``--reward`` names, or what the task asks for."""

import math
import os
import re
from typing import Any

from vipfast.config import Config
from vipfast.errors import DataError, UsageError
from vipfast.options.values import PYTHON
from vipfast.rewards.base import Reward
from vipfast.rewards.combined import Combined
from vipfast.rewards.given import Given
from vipfast.run_folder import go_on

NAMED = ("task", "maths", "code", "exact")
_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def check_reward(config: Config) -> None:
    """Refuse, before anything is loaded, names and weights that cannot be meant.

    Raises:
        UsageError: an unknown name, one that comes twice, or weights that do not fit.
    """
    for name in config.reward:
        if name not in (*NAMED, PYTHON) and not _OWN.fullmatch(name):
            raise UsageError(f"--reward {name}: unknown; give {', '.join(NAMED)}, or a function of your own as module:function")
    if PYTHON in config.reward and (len(config.reward) > 1 or config.reward_weights):
        raise UsageError(
            f"--reward {' '.join(config.reward)}: a reward given in Python is the only one and has no --reward-weights; to "
            "combine several, name them as module:function"
        )
    if len(set(config.reward)) < len(config.reward):
        raise UsageError(f"--reward {' '.join(config.reward)}: names one twice; give it once, with the sum of its weights")
    weights = config.reward_weights
    if weights and len(weights) != len(config.reward):
        raise UsageError(
            f"--reward-weights {' '.join(map(str, weights))}: {len(weights)} weights for {len(config.reward)} rewards; give "
            "one for each name after --reward, the verifier's first"
        )
    if weights and not (weights[0] > 0 and all(map(math.isfinite, weights))):
        raise UsageError(
            f"--reward-weights {' '.join(map(str, weights))}: must be finite, and above 0 for the first, which is the verifier"
        )


def choose_reward(config: Config, wanted: str | Reward) -> Reward:
    """The run's reward.

    Args:
        config: ``reward``, ``reward_weights``, ``reward_timeout`` and ``reward_workers``.
        wanted: what the task asks for, "maths", "code" or "exact", or its own verifier.

    Raises:
        UsageError: a reward that cannot be used; the message names the option.
    """
    check_reward(config)
    names = config.reward or ("task",)
    weights = config.reward_weights or (1.0,) * len(names)
    parts: list[tuple[str, Reward, float]] = []
    try:
        for name, weight in zip(names, weights):
            parts.append((name, _named(wanted if name == "task" else name, config), weight))
    except UsageError:
        if parts:
            Combined(parts).close()
        raise
    return parts[0][1] if len(parts) == 1 and weights == (1.0,) else Combined(parts)


def _named(name: str | Reward, config: Config) -> Reward:
    if not isinstance(name, str):
        return name
    if name == "exact":
        from vipfast.rewards import exact

        return exact.reward
    if name == "code":
        from vipfast.rewards.code import Code

        limits = dict(
            timeout_s=config.code_timeout, completion_s=config.reward_timeout,
            memory_mb=config.code_memory_mb, workers=config.reward_workers or default_workers(),
        )  # fmt: skip
        return Code(config.code_reward, config.sandbox, **limits)
    from vipfast.rewards.pool import TIMEOUT_S

    limits = dict(workers=config.reward_workers or default_workers(), timeout_s=config.reward_timeout or TIMEOUT_S)
    if name == "maths":
        from vipfast.rewards.maths import Maths

        return Maths(**limits)
    from vipfast.rewards.own import Own

    return Own(name, **limits, gold_names=gold_names(config), task=config.task)


def gold_names(config: Config) -> tuple[str, ...]:
    """What the gold answer is called in the dataset, as far as --answer-field says it; rewards for TRL ask by that name."""
    return (config.answer_field.rpartition(".")[2],) if config.answer_field else ()


def given_reward(config: Config, reward: Any) -> Given | None:
    """The reward that was given in Python, if one was.

    Raises:
        UsageError: it cannot be called; there is one in the options too; or the options tell of one and it is not here.
    """
    if reward is None:
        if PYTHON in config.reward:
            raise UsageError(
                f"--reward {PYTHON}: the run's reward was a function given in Python, which no file holds; give it again: "
                f"{go_on(config)}. A new run takes {', '.join(NAMED)}, or module:function"
            )
        return None
    if config.reward not in ((), (PYTHON,)):
        raise DataError(f"--reward {' '.join(config.reward)}: reward= was given in Python too; leave one of them out")
    return Given(reward, gold_names=gold_names(config), task=config.task)


def default_workers() -> int:
    """Cores this process may use, shared by the ranks of the run, at least one and at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(16, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
