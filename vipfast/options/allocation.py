"""How many rollouts each prompt of a step gets."""

from dataclasses import dataclass
from typing import Literal

from vipfast.options import idle
from vipfast.options.facts import option


@dataclass(frozen=True)
class AllocationOptions:
    """How many rollouts each prompt of a step gets."""

    allocator: Literal["uniform", "vip", "vigor"] = "vigor"
    """How a step's rollout budget is spent over its prompts."""
    prompts_per_step: int = option(64, low=1, high=10**6)
    """Prompts drawn for each step (B)."""
    rollouts_per_prompt: float = option(8.0, low=1e-6, high=4096)
    """Mean rollouts per prompt; the step's budget is this times prompts_per_step and must be a whole number."""
    min_rollouts: int | None = option(None, low=0, high=4096, idle=idle.without_vip)
    """VIP's lower bound L on a prompt's rollouts; 2 for rloo and 3 for dr_grpo unless given."""
    max_rollouts: int = option(32, low=1, high=4096, idle=idle.without_vip)
    """VIP's upper bound U on a prompt's rollouts."""
    budget_unit: Literal["rollouts", "tokens"] = "rollouts"
    """What a step's budget counts: rollouts, or (vip only) tokens, as many as that many rollouts of the pool's mean length are
    expected to take, so that prompts with short answers can get more."""
    objective: str | None = option(None, idle=idle.without_vip)
    """Whose gradient variance VIP minimises: rloo, dr_grpo, or a convex function of a prompt's rollouts of your own, named as
    module:function; follows the estimator unless given (grpo uses dr_grpo)."""
    predictor: Literal["gp", "kernel_beta", "beta", "vip"] = option("gp", idle=idle.without_vip)
    """VIP's success predictor: gp (logit GP with exact binomial counts), kernel_beta (pseudo-counts lent by like texts), beta
    (a prompt's own history) or vip (the paper's noise-free GP)."""
    vigor_m0: int | None = option(None, low=1, high=4096, idle=idle.without_vigor)
    """Rollouts each prompt gets in VIGOR's first round; follows from the mean unless given."""
    vigor_num_rounds: int = option(4, low=1, high=64, idle=idle.without_vigor)
    """VIGOR's rounds T."""
    vigor_alpha: float = option(0.5, low=1e-6, high=1, idle=(idle.without_vigor, idle.in_one_round))
    """Share of the active prompts VIGOR keeps after each round."""
    vigor_gamma: float = option(2.0, low=1, high=4096, idle=(idle.without_vigor, idle.in_one_round))
    """Factor on the rollouts per active prompt from one VIGOR round to the next."""
    score: Literal["variance", "posterior"] = option("variance", idle=(idle.without_vigor, idle.in_one_round))
    """What VIGOR ranks by: variance of the rewards so far, or E[p(1-p)] under their Beta posterior; with 0/1 rewards, all
    scored, both rank alike."""
    round_mode: Literal["barrier", "early", "streaming"] = option("barrier", idle=idle.in_one_round)
    """Whether VIGOR's rounds wait for their slowest rollout: barrier (as published), early (the same allocation, but a prompt
    goes on as soon as nothing pending can change that) or streaming (a variant of the rule: the cut is a running quantile)."""
    update_on: Literal["all", "final"] = option("all", idle=(idle.without_vigor, idle.in_one_round, idle.of_the_last_round))
    """Whether VIGOR's update uses every drawn rollout or only prompts that survived to the last round."""
    correction: Literal["none", "lagged", "fresh"] = option("none", idle=idle.without_vigor)
    """How VIGOR's update makes up for rounds that looked at its own rewards: none (as published), lagged (baselines predicted
    before the step; needs --weighting rollout), or fresh (only the last round's rollouts enter the update)."""

    @property
    def budget(self) -> int:
        """Rollouts per step (C)."""
        return round(self.prompts_per_step * self.rollouts_per_prompt)
