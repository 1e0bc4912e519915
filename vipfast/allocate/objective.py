"""What an allocation minimises: sum_q a_q phi(n_q), with phi discretely convex in the rollouts n of a prompt.

``rloo`` and ``dr_grpo`` are the gradient variances of their estimators. A user's own is any function of that kind, by name:
``--objective mine:phi`` takes ``phi`` from the importable module ``mine``, with the least n that means anything given as
``--min-rollouts``. Whatever it is, a bend the wrong way between the bounds is refused, since the exact solver rests on it.
"""

import importlib
from collections.abc import Callable

import numpy as np

from vipfast.errors import UsageError

Objective = Callable[[np.ndarray], np.ndarray]
"""phi: float64 array of rollout counts -> float64 array of that shape."""


def rloo(n: np.ndarray) -> np.ndarray:
    """phi of the leave-one-out estimator: a prompt's gradient variance is 4 sigma^2 p (1-p) phi(n) (VIP, Theorem 5.2)."""
    return 1.0 / (n - 1.0)


def dr_grpo(n: np.ndarray) -> np.ndarray:
    """phi of the centred estimator (VIP, Theorem 5.1). It rises from n = 1 to 2, so it is discretely convex from n = 3 on."""
    return (n - 1.0) / n**2


OBJECTIVES: dict[str, Objective] = {"rloo": rloo, "dr_grpo": dr_grpo}
LEAST_ROLLOUTS = {"rloo": 2, "dr_grpo": 3}
"""Smallest L from which each objective is finite and discretely convex."""


def find_objective(name: str) -> Objective:
    """The function behind ``--objective``: a key of ``OBJECTIVES``, or ``module:function``.

    Raises:
        UsageError: there is no such module or function.
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    module, _, function = name.partition(":")
    if not (module and function):
        raise UsageError(f"--objective {name}: must be {', '.join(OBJECTIVES)}, or a function of your own as module:function")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise UsageError(
            f"--objective {name}: module {module} cannot be imported ({error}); put its folder on PYTHONPATH"
        ) from error
    if not callable(found):
        raise UsageError(f"--objective {name}: module {module} has no function {function}")
    return found


def least_rollouts(objective: str, given: int | None) -> int:
    """L: the option's value, or the objective's own least when it is None.

    Raises:
        UsageError: ``given`` is below the least for which the objective means anything, or missing for one of the user's own.
    """
    least = LEAST_ROLLOUTS.get(objective)
    if least is None:
        if given is None:
            raise UsageError(
                f"--objective {objective}: give --min-rollouts too, the least rollouts per prompt from which your function "
                "is finite and convex"
            )
        return given
    if given is not None and given < least:
        raise UsageError(
            f"--min-rollouts {given}: --objective {objective} needs at least {least} rollouts per prompt (below that its "
            f"variance is undefined, or is least without any signal); use {least} or leave it out"
        )
    return least if given is None else given


def gains(objective: Objective, low: int, high: int) -> np.ndarray:
    """float64 [high - low], phi(n) - phi(n + 1) for n = low ... high - 1, never increasing.

    Raises:
        UsageError: phi is not finite or not discretely convex on [low, high]; the message names the first n where.
    """
    name = getattr(objective, "__name__", str(objective))
    n = np.arange(low, high + 1, dtype=np.float64)
    values = _called(objective, name, n)
    if values.shape != n.shape:
        raise UsageError(f"objective {name}: gives shape {values.shape} for {len(n)} rollout counts; it must keep the shape")
    if not np.isfinite(values).all():
        i = int(np.argmin(np.isfinite(values)))
        raise UsageError(
            f"objective {name}: is {values[i]} at n = {low + i}; --min-rollouts and --max-rollouts must keep it finite"
        )
    gain = values[:-1] - values[1:]
    rounding = 8 * np.finfo(np.float64).eps * np.abs(values).max()
    rises = np.flatnonzero(np.diff(gain) > rounding)
    if len(rises):
        wrong = int(rises[0]) + 1
        raise UsageError(
            f"objective {name}: not discretely convex at n = {low + wrong}: the rollout before lowers it by "
            f"{gain[wrong - 1]:.6g}, the one after by {gain[wrong]:.6g}, which is more; choose --min-rollouts and "
            "--max-rollouts between which it bends one way"
        )
    return np.minimum.accumulate(gain)


def _called(objective: Objective, name: str, n: np.ndarray) -> np.ndarray:
    """phi(n) as real numbers; the user's function may do anything."""
    try:
        with np.errstate(all="ignore"):  # what is not finite is named by the caller
            values = np.asarray(objective(n.copy()))
    except Exception as error:
        raise UsageError(
            f"objective {name}: fails on an array of {len(n)} rollout counts ({type(error).__name__}: {error}); it must take "
            "float64 counts and give as many variances"
        ) from error
    if values.dtype.kind not in "fiu":
        raise UsageError(f"objective {name}: gives values of type {values.dtype}; they must be real numbers")
    return values.astype(np.float64)


def checked_gains(gain_BK: np.ndarray) -> np.ndarray:
    """A user's table of gains, one row per prompt, made never increasing as ``gains`` makes one.

    Raises:
        ValueError: a row rises beyond rounding, or is not finite; the message names prompt and unit.
    """
    gain_BK = np.asarray(gain_BK, np.float64)
    if not np.isfinite(gain_BK).all():
        q, unit = np.argwhere(~np.isfinite(gain_BK))[0]
        raise ValueError(f"gains must be finite: unit {unit} of prompt {q} is {gain_BK[q, unit]}")
    rounding_B = 8 * np.finfo(np.float64).eps * np.abs(gain_BK).max(1, initial=0.0)
    rises = np.argwhere(np.diff(gain_BK) > rounding_B[:, None])
    if len(rises):
        q, unit = rises[0]
        raise ValueError(
            f"gains must not rise (discrete concavity): unit {unit + 1} of prompt {q} gains {gain_BK[q, unit + 1]:.6g} after "
            f"{gain_BK[q, unit]:.6g}"
        )
    return np.minimum.accumulate(gain_BK, axis=1)
