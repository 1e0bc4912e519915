"""How many rollouts each prompt of a step gets: ``uniform``, ``vip`` or ``vigor``, behind one protocol (base.py)."""

import warnings
from collections.abc import Sequence

from vipfast.allocate.base import Allocator
from vipfast.allocate.solver import LEAST_ROLLOUTS, check_budget, least_rollouts
from vipfast.allocate.uniform import Uniform
from vipfast.allocate.vigor import Schedule, Vigor
from vipfast.allocate.vip import Vip
from vipfast.config import Config
from vipfast.errors import UsageError
from vipfast.predict import make_predictor


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
        vigor = Vigor(schedule, config.score, config.update_on)
        vigor.warn(num_prompts, config.estimator)
        return vigor
    if config.allocator == "vip":
        objective = config.objective or ("rloo" if config.estimator == "rloo" else "dr_grpo")
        low = least_rollouts(objective, config.min_rollouts)
        check_budget(num_prompts, budget, low, config.max_rollouts, LEAST_ROLLOUTS[objective])
        return Vip(make_predictor(config.predictor, [text for _, text in pool_texts]), objective, low, config.max_rollouts)
    raise UsageError(f"--allocator {config.allocator}: must be one of uniform, vip, vigor")
