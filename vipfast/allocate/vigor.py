"""VIGOR: variance-guided online rollout allocation (arXiv 2607.22002, Algorithm 1).

Rollouts are drawn in T rounds; after each, only the share alpha of the prompts whose rewards vary most stays active, and those
get gamma times as many. Differences from the paper: the budget is met exactly for any batch size (a round never draws more than
is left, and the last one hands what remains to the highest scores), and ties, which after a first round of two rollouts decide
most of the cut, are broken by a seeded key instead of by position.

Rounds that look at the rewards which later form the baseline scale a prompt's gradient by less than p (1-p): where the first
rewards happen to agree, sampling stops. ``correction`` offers two ways out. "lagged": every rollout enters against a baseline
predicted before the step, each with weight 1/C, so that a prompt's expected gradient is E[n_q]/C times the exact one. "fresh":
only the last round enters, whose rewards decided nothing.
"""

import math
import warnings
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from vipfast import xp
from vipfast.allocate.base import Counts
from vipfast.allocate.open_rounds import Early, Round, Streaming
from vipfast.allocate.predicting import Predicting
from vipfast.allocate.score import SCORES
from vipfast.allocate.solver import rounded
from vipfast.errors import BudgetError
from vipfast.predict.base import Predictor
from vipfast.predict.rows import mean_counts
from vipfast.types import PromptBatch, StepPlan, Tally

FEW_SURVIVORS = 8
OPEN_ROUNDS = {"early": Early, "streaming": Streaming}


@dataclass(frozen=True)
class Schedule:
    """T = ``num_rounds`` rounds: ``m0`` rollouts each in the first, then ``alpha`` of the prompts, ``gamma`` times as many."""

    m0: int
    num_rounds: int = 4
    alpha: float = 0.5
    gamma: float = 2.0

    @classmethod
    def fit(cls, num_prompts: int, budget: int, m0: int | None, num_rounds: int, alpha: float, gamma: float) -> "Schedule":
        """The schedule that spends ``budget`` on ``num_prompts`` prompts, m0 following from the mean when it is None.

        Raises:
            BudgetError: m0 * sum_t (alpha gamma)^(t-1) is not the mean (to within one rollout of the whole budget).
        """
        growth = sum((alpha * gamma) ** t for t in range(num_rounds))
        mean = budget / num_prompts
        fitting = max(1, round(mean / growth))
        chosen = fitting if m0 is None else m0
        if abs(chosen * growth * num_prompts - budget) < 1:
            return cls(chosen, num_rounds, alpha, gamma)
        shape = f"--vigor-num-rounds {num_rounds} --vigor-alpha {alpha:g} --vigor-gamma {gamma:g}"
        if m0 is not None:
            means = (round(m0 * growth * num_prompts) / num_prompts,)
            opening = f"--vigor-m0 {m0} with {shape} spends {means[0]:.12g} rollouts per prompt"
        else:
            below = max(1, math.floor(mean / growth))
            means = tuple(round(m * growth * num_prompts) / num_prompts for m in (below, below + 1))
            opening = f"no whole --vigor-m0 with {shape} spends exactly that many"
        remedy = " or ".join(f"--rollouts-per-prompt {value:.12g}" for value in means)
        if abs(fitting * growth * num_prompts - budget) < 1:
            remedy = f"--vigor-m0 {fitting}, or {remedy}"
        raise BudgetError(f"--rollouts-per-prompt {mean:.12g}: {opening}; use {remedy}")

    def active(self, num_prompts: int) -> int:
        """Prompts still active in the last round."""
        for _ in range(self.num_rounds - 1):
            num_prompts = self.cut(num_prompts)
        return num_prompts

    def rounds(self, num_prompts: int, budget: int) -> list[Round]:
        """What each round draws: no more than is left, the last one all of it; fewer rounds where the budget runs out."""
        rounds, active = [], num_prompts
        for round_ in range(self.num_rounds):
            last, share = round_ == self.num_rounds - 1, budget // active
            draws = share if last else min(share, self.draws(round_))
            rounds.append(Round(active, draws, budget - share * active if last else 0))
            budget -= draws * active + rounds[-1].extra
            if not budget:
                break
            active = self.cut(active)
        return rounds

    def cut(self, active: int) -> int:
        """How many of ``active`` prompts stay after a round."""
        # 0.7 * 10 is 7.000000000000001 in float64, and must keep 7.
        return max(1, math.ceil(self.alpha * active - 1e-9))

    def draws(self, round_: int) -> int:
        """Rollouts per active prompt that round ``round_`` (from 0) aims at."""
        return int(self.m0 * self.gamma**round_ + 1e-9)


class Vigor(Predicting):
    """Args: ``schedule``; ``score``, "variance" or "posterior"; ``update_on``, "all" or "final" (survivors of the last cut);
    ``correction``, "none", "lagged" or "fresh"; ``predictor``, of the lagged baselines, and of no use otherwise;
    ``round_mode``, "barrier", "early" or "streaming" (``open_rounds``). Both corrections hold in every mode: whether a rollout
    is started is settled before it is drawn, and neither weights nor divisors depend on what it brings.
    """

    name = "vigor"
    budget_kind = "exact"
    counts = staticmethod(mean_counts)  # a baseline is a mean reward

    def __init__(
        self,
        schedule: Schedule,
        score: str = "variance",
        update_on: str = "all",
        correction: str = "none",
        predictor: Predictor | None = None,
        round_mode: str = "barrier",
    ):
        assert (predictor is not None) == (correction == "lagged"), "lagged baselines, and nothing else, need a predictor"
        super().__init__(predictor)
        self.schedule, self.update_on, self.correction = schedule, update_on, correction
        self.score, self.score_name = SCORES[score], score
        self.round_mode, self.barrier = round_mode, round_mode == "barrier"

    def warn(self, num_prompts: int, estimator: str) -> None:
        """Tell once, through ``warnings``, where this schedule is known to teach little."""
        schedule = self.schedule
        survivors = schedule.active(num_prompts)
        if schedule.num_rounds > 1 and survivors < FEW_SURVIVORS:
            warnings.warn(
                f"--allocator vigor: only {survivors} of --prompts-per-step {num_prompts} prompts survive "
                "the last cut, and too few prompts is noise too; use more prompts per step, or fewer --vigor-num-rounds, "
                f"to keep at least {FEW_SURVIVORS}",
                stacklevel=2,
            )
        if schedule.num_rounds > 1 and schedule.m0 == 1:
            warnings.warn(
                "--allocator vigor: a first round of 1 rollout has no variance to rank by, so the first cut is a draw of lots; "
                "use --vigor-m0 2 or more",
                stacklevel=2,
            )
        if estimator == "dr_grpo" and schedule.m0 == 2 and self.update_on == "all" and self.correction == "none":
            warnings.warn(
                "--allocator vigor with --estimator dr_grpo: the advantages of a group of n shrink by (n - 1)/n, so groups of "
                "2, which the first cut leaves, count half; use --estimator rloo to weigh them fully",
                stacklevel=2,
            )

    def rounds(self, prompts: PromptBatch, budget: int) -> Generator[Counts, Tally, StepPlan]:
        """T rounds, fewer where the budget runs out. See ``vipfast.allocate.base.Allocator``."""
        predicted_B = self._predict(prompts)
        play = self._play if self.barrier else self._play_open
        asked_KB, survivors, tied_share = yield from play(prompts.ties_B, self.schedule.rounds(len(prompts), budget))
        note = {"alloc/ceiling": None, "alloc/var_ratio_expected": None}
        note |= {"alloc/survivors": len(survivors), "alloc/tied_share": tied_share}
        fields = {} if predicted_B is None else {"baseline_B": predicted_B, "predicted_B": predicted_B}
        return StepPlan.plain(asked_KB, use_KB=self._use(asked_KB, survivors), note=note, **fields)

    def _play(self, ties_B: np.ndarray, rounds: list[Round]) -> Generator[Counts, Tally, tuple]:
        """Rounds that wait. Returns what was asked, a list of K int64 [B]; the survivors; the share chosen by tie-break."""
        ranked = np.argsort(ties_B, kind="stable")
        asked_KB, tied_share, tally = [], None, None
        for round_ in rounds:
            if tally is not None:
                score_B = rounded(self.score(tally))
                ranked = ranked[np.lexsort((ties_B[ranked], -score_B[ranked]))]
                kept, dropped = np.split(ranked, [round_.active])
                if len(asked_KB) == 1:
                    tied = score_B[kept] == score_B[dropped[0]] if len(dropped) else np.zeros(1)
                    tied_share = float(np.mean(tied))
                ranked = kept
            counts_B = np.zeros(len(ties_B), np.int64)
            counts_B[ranked] = round_.draws
            counts_B[ranked[: round_.extra]] += 1
            asked_KB.append(counts_B)
            tally = yield counts_B
        return asked_KB, ranked, tied_share

    def _play_open(self, ties_B: np.ndarray, rounds: list[Round]) -> Generator[Counts, Tally, tuple]:
        """The same for rounds that do not wait."""
        steps = OPEN_ROUNDS[self.round_mode](rounds, self.schedule.cut, ties_B, self.score_name)
        tally = yield steps.start()
        while not steps.done(tally):
            tally = yield steps.resume(tally)
        return list(steps.asked_KB), steps.survivors(), steps.tied_share(tally)

    def _predict(self, prompts: PromptBatch) -> np.ndarray | None:
        """float64 [B], success probabilities as expected before the step; None without a predictor."""
        if self.predictor is None:
            return None
        (predicted_B,) = xp.to_host(self.predictor.predict(prompts.uids, [prompt.text for prompt in prompts.prompts])[0])
        self.remember(prompts, predicted_B)
        return predicted_B

    def _use(self, asked_KB: list[np.ndarray], survivors: np.ndarray) -> np.ndarray:
        """bool [K, B], what enters the update."""
        use_KB = np.ones((len(asked_KB), len(asked_KB[0])), bool)
        if self.correction == "fresh":
            use_KB[:-1] = False
            use_KB[-1] = asked_KB[-1] > 0
        elif self.update_on == "final":
            use_KB[:, np.setdiff1d(np.arange(use_KB.shape[1]), survivors)] = False
        return use_KB
