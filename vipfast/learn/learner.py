"""The policy update: rollouts of a step to optimizer steps, with the guards that keep bad numbers out of the weights."""

import math
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from vipfast.config import Config
from vipfast.errors import NonFiniteError, SyncError, UsageError
from vipfast.kernels.launch import choose
from vipfast.kernels.policy_loss import add_sums
from vipfast.learn.batch import StepTensors, upload
from vipfast.learn.pack import MicroBatch, choose_packing, pack, padding_share
from vipfast.learn.policy import Policy
from vipfast.learn.schedule import learning_rate
from vipfast.learn.trainable import Trainable
from vipfast.types import Rollouts

BETAS = (0.9, 0.999)
"""AdamW's moment decays: torch's own defaults, which suit the few and noisy steps of RL as well as .95 would."""

SYNC_TOKENS = 64
"""Fewest trained tokens over which the gap between sampler and trainer is judged."""

SYNC_TOLERANCE = {"float32": 1e-4, "float64": 1e-4, "bfloat16": 0.05}
"""Largest mean abs(logp_train - sampler_logp), nats, by compute dtype."""


class Learner:
    """Owns the optimizer; changes the model in place.

    Args:
        model: a causal language model whose parameters with ``requires_grad`` are trained.
        config: resolved, i.e. learning_rate, max_new_tokens, dtype and device are given.
        pad_id: fills rectangles; any valid id.
        ref_model: the policy KL is measured to; needed when config.beta > 0.

    Raises:
        UsageError: no reference model for a KL term, a model whose head is not a plain linear layer, or one that cannot be
            packed or recomputed as asked.
        ValueError: config.kernels is "required" and Triton cannot run on the device.

    Attributes: ``backend`` of the loss, "triton" or "torch".
    """

    def __init__(self, model: nn.Module, config: Config, pad_id: int, ref_model: nn.Module | None = None):
        if config.beta > 0 and ref_model is None:
            raise UsageError(f"--beta {config.beta}: a KL term needs a reference model; pass ref_model, or set --beta 0")
        self.config, self.pad_id = config, pad_id
        self.backend, _ = choose(config.device, config.kernels)
        self.packing = choose_packing(config.packing, config.device, config.dtype)
        shared = dict(
            dtype=config.dtype, device=config.device, temperature=config.temperature, backend=self.backend,
            packing=self.packing, recompute=config.gradient_checkpointing,
        )  # fmt: skip
        self.policy = Policy(model, train=True, **shared)
        self.reference = Policy(ref_model, train=False, **shared) if config.beta > 0 else None
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        # Norm gains and biases have no scale to shrink towards.
        groups = [
            {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate, betas=BETAS, fused=True)
        self.num_skipped = 0
        self.nonfinite_in_a_row = 0

    def update(self, rollouts: Rollouts, step: int) -> dict[str, float | int | None]:
        """Train on one step's rollouts.

        Args:
            rollouts: the whole step.
            step: its number from 0; names the learning rate and the order of mini-batches.

        Returns:
            Metrics under their names in metrics.jsonl; None where undefined, e.g. entropy when nothing was trained.

        Raises:
            SyncError: the sampler's log-probs are not this policy's; the weights have not moved.
            NonFiniteError: config.max_nonfinite steps in a row had a non-finite loss or gradient norm (each was skipped).
        """
        started = time.perf_counter()
        config, data = self.config, Trainable.of(rollouts, self.config)
        tensors = StepTensors.of(data, self.policy.device)
        old_T, ref_T = self._logprobs(data, need_old=config.updates_per_step * config.epochs > 1)
        logprob_s = time.perf_counter() - started
        lr = learning_rate(config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr

        losses, norms, packed = [], [], []
        first_sums, all_sums = {}, {}
        for epoch, rows_r, weight_R in data.minibatches(step):
            micro_batches = self._pack(rollouts, rows_r)
            if not micro_batches:
                continue
            self.optimizer.zero_grad()
            loss, sums = self._accumulate(tensors, micro_batches, weight_R, old_T, ref_T)
            if not losses and old_T is None:
                self.check_sync(_mean(sums, "gap") if sums["tokens"] >= SYNC_TOKENS else None)
            norm = nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm)
            losses.append(loss)
            norms.append(float(norm))
            packed += micro_batches
            all_sums = add_sums(all_sums, sums)
            first_sums = add_sums(first_sums, sums) if epoch == 0 else first_sums
            if not (math.isfinite(losses[-1]) and math.isfinite(norms[-1])):
                break
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._count(losses, norms)
        enough = bool(first_sums) and first_sums["tokens"] >= SYNC_TOKENS
        return {
            "policy/entropy": _mean(all_sums, "entropy"),
            "policy/kl": _mean(all_sums, "kl") if config.beta > 0 else None,
            "policy/clip_frac_low": _mean(all_sums, "clip_low"),
            "policy/clip_frac_high": _mean(all_sums, "clip_high"),
            "policy/ratio_raw_mean": _mean(first_sums, "ratio_raw"),
            "policy/ratio_raw_max": _finite(float(first_sums["ratio_raw_max"])) if first_sums else None,
            "policy/sync_gap": _mean(first_sums, "gap") if enough else None,
            "train/loss": _finite(float(np.mean(losses))) if losses else 0.0,
            "train/grad_norm": _finite(float(np.mean(norms))) if norms else 0.0,
            "train/lr": lr,
            "train/skipped": self.num_skipped,
            "train/padding_share": padding_share(packed),
            "train/trained_rollouts": len(data.rows_r),
            "train/advantage_abs_mean": data.advantage_abs_mean,
            "time/logprob_s": logprob_s,
            "time/update_s": time.perf_counter() - started - logprob_s,
        }

    def sync_gap(self, rollouts: Rollouts) -> float | None:
        """Mean abs(logp_train - sampler_logp) over all sampled tokens, nats; None below 64 of them. Nothing is updated."""
        rows_r = np.flatnonzero(rollouts.lengths_R > 0)
        if rollouts.loss_mask.sum() < SYNC_TOKENS:
            return None
        logp_T = self._logprob_of(self.policy, rollouts, rows_r).cpu().numpy()
        return float(np.abs(logp_T - rollouts.sampler_logp)[rollouts.loss_mask].mean(dtype=np.float64))

    def check_sync(self, gap: float | None) -> None:
        """Stop the run when the sampler's log-probs are not this policy's; None (too few tokens) passes.

        Raises:
            SyncError: the gap exceeds what rounding in the compute dtype explains.
        """
        tolerance = SYNC_TOLERANCE[self.config.dtype]
        if gap is not None and gap > tolerance:
            raise SyncError(
                f"sync_gap {gap:.3g} is above {tolerance:g} nats (--dtype {self.config.dtype}): the sampler's log-probs are "
                "not those of the policy that trains, so no weight was moved. The engine holds other weights, or its "
                "temperature, vocabulary or logit transform differs from the trainer's; check the engine's sync, or try "
                "--dtype float32"
            )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and parameters of the model, as an engine takes them."""
        return self.policy.model.named_parameters()

    def state_dict(self) -> dict:
        """Optimizer and counters; the model's weights are saved with the model."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "num_skipped": self.num_skipped,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
        }

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_skipped = state["num_skipped"]
        self.nonfinite_in_a_row = state["nonfinite_in_a_row"]

    def _pack(self, rollouts: Rollouts, rows_r: np.ndarray) -> list[MicroBatch]:
        return pack(rollouts, rows_r, self.config.micro_batch_tokens, self.pad_id, self.packing.kind)

    def _logprob_of(self, policy: Policy, rollouts: Rollouts, rows_r: np.ndarray) -> Tensor:
        """[T] log-probs of the rows' tokens over the whole step, NaN elsewhere."""
        logp_T = torch.full((len(rollouts.tokens),), math.nan, dtype=policy.dtype, device=policy.device)
        with torch.no_grad():
            for batch in upload(self._pack(rollouts, rows_r), policy.device):
                logp_T[batch.tokens_T] = policy(batch)
        return logp_T

    def _logprobs(self, data: Trainable, need_old: bool) -> tuple[Tensor | None, Tensor | None]:
        """Log-probs of all trained rows before the first optimizer step and under the reference; None where not needed."""
        rollouts, rows_r = data.rollouts, data.rows_r
        ref_T = self._logprob_of(self.reference, rollouts, rows_r) if self.reference else None
        if not need_old:
            return None, ref_T
        old_T = self._logprob_of(self.policy, rollouts, rows_r)
        trained_T = data.mask_T & np.repeat(np.isin(np.arange(rollouts.num_rollouts), rows_r), rollouts.lengths_R)
        if trained_T.sum() >= SYNC_TOKENS:
            gap_T = np.abs(old_T.cpu().numpy() - rollouts.sampler_logp)[trained_T]
            self.check_sync(float(gap_T.mean(dtype=np.float64)))
        return old_T, ref_T

    def _accumulate(
        self, tensors: StepTensors, micro_batches: list[MicroBatch], weight_R: np.ndarray, *before: Tensor | None
    ) -> tuple[float, dict[str, Tensor]]:
        """Add the gradient of one optimizer step into ``.grad``; returns the loss and its sums, on the host.

        ``before``: log-probs before the first update and of the reference, [T] over the step or None.
        """
        policy = self.policy
        weight = torch.from_numpy(weight_R).to(policy.device)
        loss, sums = 0.0, {}
        for batch in upload(micro_batches, policy.device):
            result = policy(batch, tensors.loss_arguments(batch, weight, self.config, *before))
            result.loss.backward()
            loss, sums = loss + result.loss.detach(), add_sums(sums, result.sums)
        # The host has run ahead so far; this waits for the device once.
        loss, *totals = torch.stack([loss.double(), *(sums[name].double() for name in sums)]).cpu()
        return float(loss), dict(zip(sums, totals))

    def _count(self, losses: list[float], norms: list[float]) -> None:
        """Keep the counts of skipped steps; a step that trained nothing neither adds to nor ends a row of them."""
        if not losses:
            return
        if math.isfinite(losses[-1]) and math.isfinite(norms[-1]):
            self.nonfinite_in_a_row = 0
            return
        self.num_skipped += 1
        self.nonfinite_in_a_row += 1
        if self.nonfinite_in_a_row >= self.config.max_nonfinite:
            raise NonFiniteError(
                f"{self.nonfinite_in_a_row} steps in a row had a non-finite loss or gradient (last loss {losses[-1]}, gradient "
                f"norm {norms[-1]}); each was skipped and the weights are those of the last good step. Look at rewards and "
                "log-probs in the saved rollouts, lower --learning-rate, or allow more with --max-nonfinite"
            )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(sums: dict[str, Tensor], name: str) -> float | None:
    """Mean over trained tokens; None when there are none or the sum is not finite."""
    return _finite(float(sums[name] / sums["tokens"])) if sums and sums["tokens"] > 0 else None
