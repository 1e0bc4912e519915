"""A step's tensors on the device: constants of the whole step, and the passes of an optimizer step, each copied over once.

A copy from ordinary memory makes the host wait for the device, so none may happen between two micro-batches.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vipfast.config import Config
from vipfast.learn.pack import MicroBatch
from vipfast.learn.trainable import Trainable

ALIGNMENT = 16
"""Columns start at multiples of this many int64: kernels are compiled anew for a pointer that is aligned less."""

_INDICES = ("input_ids", "positions_T", "targets_T", "tokens_T", "rows_r", "token_offsets")


class StepTensors(NamedTuple):
    """The whole step, whichever rows a pass holds. ``use_R`` and ``baseline_B`` are what the loss reads of the plan."""

    reward_R: Tensor
    group_offsets: Tensor
    use_R: Tensor
    baseline_B: Tensor
    sampler_logp_T: Tensor
    mask_T: Tensor

    @classmethod
    def of(cls, data: Trainable, device: torch.device) -> "StepTensors":
        rollouts, plan = data.rollouts, data.rollouts.plan
        columns = (
            data.reward_R, rollouts.group_offsets, plan.use_R, plan.baseline_B, rollouts.sampler_logp, data.mask_T,
        )  # fmt: skip
        return cls(*(torch.from_numpy(column).to(device) for column in columns))

    def loss_arguments(
        self, batch: "Batch", weight_R: Tensor, config: Config, old_T: Tensor | None = None, ref_T: Tensor | None = None
    ) -> dict[str, Any]:
        """What ``Policy.forward`` hands on to the loss of one pass; old_T and ref_T are [T] over the whole step."""
        at_T = batch.tokens_T
        return dict(
            reward_R=self.reward_R, group_offsets=self.group_offsets, plan=self, weight_R=weight_R,
            rows_r=batch.rows_r, token_offsets=batch.token_offsets, sampler_logp_T=self.sampler_logp_T[at_T],
            old_logp_T=None if old_T is None else old_T[at_T], ref_logp_T=None if ref_T is None else ref_T[at_T],
            loss_mask_T=self.mask_T[at_T], estimator=config.estimator,
            clip_low=config.clip_low, clip_high=config.clip_high, beta=config.beta,
        )  # fmt: skip


class Batch(NamedTuple):
    """A MicroBatch on the device. Of a packed row also where its rows lie (int32 [r+1]) and the longest of them."""

    input_ids: Tensor
    positions_T: Tensor
    targets_T: Tensor
    tokens_T: Tensor
    rows_r: Tensor
    token_offsets: Tensor
    position_ids: Tensor | None
    row_offsets: Tensor | None
    longest: int


def upload(micro_batches: Sequence[MicroBatch], device: torch.device) -> list[Batch]:
    """All passes in one copy."""
    columns = [getattr(part, name) for part in micro_batches for name in _INDICES]
    for part in micro_batches:
        if part.row_offsets is not None:
            lengths = np.diff(part.row_offsets)
            columns += [np.arange(part.input_ids.size) - np.repeat(part.row_offsets[:-1], lengths), part.row_offsets]
    sizes = [column.size for column in columns]
    starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)])
    buffer = np.zeros(starts[-1], np.int64)
    for start, size, column in zip(starts, sizes, columns):
        buffer[start : start + size] = column.ravel()
    there = torch.from_numpy(buffer).to(device)
    views = iter([there[start : start + size] for start, size in zip(starts.tolist(), sizes)])
    indices = [[next(views) for _ in _INDICES] for _ in micro_batches]
    batches = []
    for part, (input_ids, *others) in zip(micro_batches, indices):
        position_ids, row_offsets, longest = None, None, 0
        if part.row_offsets is not None:
            position_ids, row_offsets = next(views)[None], next(views).to(torch.int32)
            longest = int(np.diff(part.row_offsets).max())
        batches.append(Batch(input_ids.view(part.input_ids.shape), *others, position_ids, row_offsets, longest))
    return batches
