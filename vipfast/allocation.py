"""The allocator that a run's options ask for: the one place where Config meets the rules of ``vipfast.allocate``."""

import warnings
from collections.abc import Sequence

from vipfast import xp
from vipfast.allocate import Allocator, Lengths, Schedule, Uniform, Vigor, Vip
from vipfast.allocate.objective import LEAST_ROLLOUTS, find_objective, gains, least_rollouts
from vipfast.allocate.solver import check_budget
from vipfast.config import Config
from vipfast.errors import UsageError
from vipfast.predict import make_predictor

BASELINE = "beta"
"""Predictor of vigor's lagged baselines: a prompt's own history, which costs nothing to ask."""


def make_allocator(config: Config, pool_texts: Sequence[tuple[str, str]] = ()) -> Allocator:
    """The allocator a run asks for. Checks its budget, so that an infeasible one fails before anything is loaded.

    Args:
        config: the run's options.
        pool_texts: (uid, text) of every training prompt; vip samples it to measure how far apart prompts lie.

    Raises:
        BudgetError: the budget cannot be met within the bounds, or by the vigor schedule.
        UsageError: the allocator is unknown, or --min-rollouts is too low for the objective.
    """
    num_prompts, budget = config.prompts_per_step, config.budget
    if config.allocator == "uniform":
        if budget < 2 * num_prompts:
            warnings.warn(
                f"--rollouts-per-prompt {config.rollouts_per_prompt:g}: a group of one has no baseline and teaches nothing; "
                "use 2 or more",
                stacklevel=2,
            )
        return Uniform()
    if config.allocator == "vigor":
        schedule = Schedule.fit(
            num_prompts, budget, config.vigor_m0, config.vigor_num_rounds, config.vigor_alpha, config.vigor_gamma
        )
        predictor = make_predictor(BASELINE, pool_texts) if config.correction == "lagged" else None
        vigor = Vigor(schedule, config.score, config.update_on, config.correction, predictor, config.round_mode)
        vigor.warn(num_prompts, config.estimator)
        return vigor
    if config.allocator == "vip":
        objective, low = objective_and_bound(config)
        lengths = Lengths() if config.budget_unit == "tokens" else None
        arrays, why_not = xp.choose(config.device)
        if why_not:
            warnings.warn(f"--device cuda: allocation runs on the CPU, since {why_not}", stacklevel=2)
        predictor = make_predictor(config.predictor, pool_texts, arrays)
        return Vip(predictor, objective, low, config.max_rollouts, lengths, arrays)
    raise UsageError(f"--allocator {config.allocator}: must be one of uniform, vip, vigor")


def objective_and_bound(config: Config) -> tuple[str, int]:
    """vip's objective and its lower bound L, given or following from the estimator, once they are known to work.

    Raises:
        BudgetError: the budget cannot be met within the bounds.
        UsageError: the objective is unknown or not convex between the bounds, or --min-rollouts is too low for it.
    """
    objective = config.objective or ("rloo" if config.estimator == "rloo" else "dr_grpo")
    phi, low = find_objective(objective), least_rollouts(objective, config.min_rollouts)
    check_budget(config.prompts_per_step, config.budget, low, config.max_rollouts, LEAST_ROLLOUTS.get(objective, 0))
    gains(phi, low, config.max_rollouts)
    return objective, low
