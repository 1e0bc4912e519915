"""A step's rollouts as the update sees them: what is trained, scored and weighted, worked out once for the whole step."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vipfast.config import Config
from vipfast.kernels.group_advantage import group_advantages_ref
from vipfast.learn.advantage import rollout_weights
from vipfast.learn.pack import deal_prompts, rows_to_train
from vipfast.types import Finish, Rollouts


@dataclass(frozen=True, eq=False)
class Trainable:
    """One rule for rollouts that teach nothing: ``--truncated mask`` clears the loss mask of those cut at the length limit, and
    a rollout without a trained token counts as unscored, out of the baseline and the update while its place in n_q stays in
    the weights.
    """

    rollouts: Rollouts
    config: Config
    mask_T: np.ndarray  # bool [T], tokens that are trained if their row is
    length_R: np.ndarray  # int64 [R], true entries of mask_T
    reward_R: np.ndarray  # float64 [R], NaN = out of the update
    advantage_R: np.ndarray  # float64 [R]
    rows_r: np.ndarray  # int64 [r], rows to train

    @classmethod
    def of(cls, rollouts: Rollouts, config: Config) -> "Trainable":
        plan = rollouts.plan
        masked_R = (rollouts.finish == Finish.LENGTH) & (config.truncated == "mask")
        mask_T = rollouts.loss_mask & ~np.repeat(masked_R, rollouts.lengths_R)
        row_T = np.repeat(np.arange(rollouts.num_rollouts), rollouts.lengths_R)
        length_R = np.bincount(row_T[mask_T], minlength=rollouts.num_rollouts)
        reward_R = np.where(length_R > 0, rollouts.reward, np.nan).astype(np.float64)
        advantage_R = group_advantages_ref(
            reward_R, rollouts.group_offsets, plan.use_R, plan.baseline_B, config.estimator
        ).numpy()
        rows_r = rows_to_train(advantage_R, reward_R, plan.use_R, length_R, config.beta)
        return cls(rollouts, config, mask_T, length_R, reward_R, advantage_R, rows_r)

    @property
    def advantage_abs_mean(self) -> float | None:
        """Mean abs(advantage) over scored rollouts in use, zeros included; None without any."""
        counted_R = self.rollouts.plan.use_R & ~np.isnan(self.reward_R)
        return float(np.abs(self.advantage_R[counted_R]).mean()) if counted_R.any() else None

    def minibatches(self, step: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Per optimizer step: epoch, rows to train int64 [r], weight of a token of each row float64 [R]."""
        rollouts, config, used_B = self.rollouts, self.config, self.rollouts.plan.used_B
        lengths_R = np.where(rollouts.plan.use_R, self.length_R, 0)
        tokens_B = np.bincount(rollouts.group_R, lengths_R, minlength=rollouts.num_prompts).astype(np.int64)
        uids = [prompt.uid for prompt in rollouts.prompts]
        for epoch in range(config.epochs):
            for prompts_B in deal_prompts(tokens_B, used_B, uids, config.updates_per_step, config.seed, step, epoch):
                rows_r = self.rows_r[prompts_B[rollouts.group_R[self.rows_r]]]
                weight_R = rollout_weights(
                    rollouts.group_offsets, self.length_R, rollouts.plan,
                    config.weighting, config.length_term, config.max_new_tokens, prompts_B,
                )  # fmt: skip
                yield epoch, rows_r, weight_R
