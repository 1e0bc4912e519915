"""The policy update: rollouts of a step to optimizer steps, with the guards that keep bad numbers out of the weights."""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from vipfast.config import Config
from vipfast.distributed import ALONE, Ranks
from vipfast.errors import NonFiniteError, SyncError, UsageError
from vipfast.kernels.launch import backend_of
from vipfast.kernels.policy_loss import add_sums
from vipfast.learn.batch import StepTensors, upload
from vipfast.learn.optimizer import make_optimizer
from vipfast.learn.pack import MicroBatch, blank, pack, padding_share
from vipfast.learn.policy import Policy
from vipfast.learn.saved_shards import SavedShards
from vipfast.learn.schedule import learning_rate
from vipfast.learn.sharding import as_shard, gathered, is_sharded, own_part, own_rows, present_everywhere, shard, whole
from vipfast.learn.share import shared_out
from vipfast.learn.trainable import Trainable
from vipfast.telemetry.activity import NOW
from vipfast.types import Rollouts

SYNC_TOKENS = 64
"""Fewest trained tokens over which the gap between sampler and trainer is judged."""

SYNC_TOLERANCE = {"float32": 1e-4, "float64": 1e-4, "bfloat16": 0.05}
"""Largest mean abs(logp_train - sampler_logp), nats, by compute dtype."""


class Learner:
    """Owns the optimizer; changes the model in place.

    With several ranks each trains the rows it is dealt, of the whole step's weights, so gradients are summed: by FSDP2 layer by
    layer, otherwise once per optimizer step, after accumulation, with a plain all-reduce. (torch's DDP would hide that exchange
    behind the last of many passes, and ask in return for equal passes, averages instead of sums, and a wrapper.) All ranks call
    every method alike.

    Args:
        model: a causal language model whose parameters with ``requires_grad`` are trained; to be sharded it may lie in main
            memory, and moves to the device layer by layer.
        config: resolved, i.e. learning_rate, max_new_tokens, dtype and device are given, and how ranks hold the policy.
        pad_id: fills rectangles; any valid id.
        ref_model: the policy KL is measured to; needed when config.beta > 0.
        ranks: who trains.

    Raises:
        UsageError: no reference model for a KL term, a model whose head is not a plain linear layer, or one that cannot be
            packed or recomputed as asked.
        ValueError: config.kernels is "required" and Triton cannot run on the device.

    Attributes: ``backend`` of the loss, "triton" or "torch".
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        pad_id: int,
        ref_model: nn.Module | None = None,
        ranks: Ranks = ALONE,
    ):
        if config.beta > 0 and ref_model is None:
            raise UsageError(f"--beta {config.beta}: a KL term needs a reference model; pass ref_model, or set --beta 0")
        self.config, self.pad_id, self.ranks = config, pad_id, ranks
        self.sharded = config.parallel == "fsdp" and ranks.size > 1
        self.backend = backend_of({"required": "triton", "off": "torch"}.get(config.kernels), torch.device(config.device))
        shared = dict(
            dtype=config.dtype, device=config.device, temperature=config.temperature, backend=self.backend,
            packing=config.packing, recompute=config.gradient_checkpointing,
        )  # fmt: skip
        self.policy = Policy(model, train=True, placed=not self.sharded, **shared)
        self.reference = Policy(ref_model, train=False, placed=not self.sharded, **shared) if config.beta > 0 else None
        if self.sharded:
            for policy in filter(None, (self.policy, self.reference)):
                shard(policy)
                policy.check()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.parameters, config)
        self.num_skipped = 0
        self.nonfinite_in_a_row = 0

    def update(
        self, rollouts: Rollouts, step: int, mark: Callable[[str], None] = lambda phase: None
    ) -> dict[str, float | int | None]:
        """Train on one step's rollouts.

        Args:
            rollouts: the whole step.
            step: its number from 0; names the learning rate and the order of mini-batches.
            mark: told "logprob" and "update" as these phases end, the first only if it was any work.

        Returns:
            Metrics under their names in metrics.jsonl; None where undefined, e.g. entropy when nothing was trained.

        Raises:
            SyncError: the sampler's log-probs are not this policy's; the weights have not moved.
            NonFiniteError: config.max_nonfinite steps in a row had a non-finite loss or gradient norm (each was skipped).
        """
        started = time.perf_counter()
        config, data = self.config, shared_out(Trainable.of(rollouts, self.config), step, self.ranks)
        rollouts = data.rollouts
        tensors = StepTensors.of(data, self.policy.device)
        old_T, ref_T = self._logprobs(data, need_old=config.updates_per_step * config.epochs > 1)
        if old_T is not None or ref_T is not None:
            mark("logprob")
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
            self._add_up_gradients()
            norm = nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm)
            losses.append(loss)
            norms.append(float(whole(norm)))
            packed += micro_batches
            all_sums = add_sums(all_sums, sums)
            first_sums = add_sums(first_sums, sums) if epoch == 0 else first_sums
            if not (math.isfinite(losses[-1]) and math.isfinite(norms[-1])):
                break
            self.optimizer.step()
        self.optimizer.zero_grad()
        mark("update")
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
            "train/padding_share": padding_share(packed, self.ranks),
            "train/trained_rollouts": len(data.rows_r),
            "train/advantage_abs_mean": data.advantage_abs_mean,
            "time/logprob_s": logprob_s,
            "time/update_s": time.perf_counter() - started - logprob_s,
        }

    def sync_gap(self, rollouts: Rollouts) -> float | None:
        """Mean abs(logp_train - sampler_logp) over all sampled tokens, nats; None below 64 of them. Nothing is updated."""
        rows_r = np.flatnonzero(rollouts.lengths_R > 0)
        return self._gap(self._logprob_of(self.policy, rollouts, rows_r), rollouts, rollouts.loss_mask)

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
        """Names and parameters of the model, as an engine takes them; shards are gathered --sync-bucket-mb at a time."""
        yield from gathered(self.policy.model.named_parameters(), self.config.sync_bucket_mb * 10**6)

    def state_dict(self) -> dict:
        """Optimizer and counters, whole; of a sharded optimizer everything but the moments, which ``shard`` has. The model's
        weights are saved with the model.
        """
        optimizer = self.optimizer.state_dict()
        if self.sharded:
            optimizer["state"] = {
                index: {name: value for name, value in moments.items() if not is_sharded(value)}
                for index, moments in optimizer["state"].items()
            }
        return {
            "optimizer": optimizer,
            "num_skipped": self.num_skipped,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
        }

    def shard(self) -> dict[str, Tensor] | None:
        """This rank's rows of the optimizer's moments by "<parameter>.<moment>"; None where every rank has them all."""
        if not self.sharded:
            return None
        state = self.optimizer.state_dict()["state"]
        moments = {f"{i}.{name}": x.to_local() for i, values in state.items() for name, x in values.items() if is_sharded(x)}
        return {name: rows.contiguous() for name, rows in moments.items() if len(rows)}

    def load_state_dict(self, state: dict, shards: Sequence[Path] = ()) -> None:
        """Take back what ``state_dict`` gave and, of a sharded run's checkpoint, the files that hold every rank's ``shard``;
        the ranks may be others, and sharded or not.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        optimizer, saved = state["optimizer"], SavedShards(shards)
        own = {index: dict(moments) for index, moments in optimizer["state"].items()}
        for index, moments in own.items() if self.sharded else ():  # 8-bit moments, which are never sharded, are no rows
            for name, x in moments.items():
                moments[name] = own_part(x, parameters[index]) if x.ndim else x
        for key in saved.names:
            index, name = key.split(".")
            parameter = parameters[int(index)]
            own[int(index)][name] = as_shard(saved.rows(key, *own_rows(parameter)), parameter)
        self.optimizer.load_state_dict({**optimizer, "state": own})
        self.num_skipped = state["num_skipped"]
        self.nonfinite_in_a_row = state["nonfinite_in_a_row"]

    def whole_weights(self) -> dict[str, Tensor] | None:
        """Sharded weights gathered into rank 0's main memory ({} elsewhere), and the buffers that a checkpoint has; None where
        the model holds its own.
        """
        if not self.sharded:
            return None
        first = self.ranks.rank == 0
        kept = {name: full.to("cpu", copy=True) if first else None for name, full in self.weights()}
        buffers = {name: x.to("cpu", copy=True) for name, x in self.policy.model.state_dict().items() if not is_sharded(x)}
        return {**buffers, **kept} if first else {}

    def _pack(self, rollouts: Rollouts, rows_r: np.ndarray) -> list[MicroBatch]:
        """Passes over those of the rows that are here; blank ones behind them, so that all ranks make equally many."""
        own = rows_r[rollouts.held_R[rows_r]]
        parts = pack(rollouts, own, self.config.micro_batch_tokens, self.pad_id, self.config.packing)
        return parts + [blank(self.pad_id)] * (max(self.ranks.gather(len(parts))) - len(parts))

    def _add_up_gradients(self) -> None:
        """The whole step's gradient on every rank; FSDP2 has done so in the backward pass."""
        if self.ranks.size == 1 or self.sharded:
            return
        used = np.any(self.ranks.gather([p.grad is not None for p in self.parameters]), axis=0)
        self.ranks.add_up(present_everywhere(self.parameters, used))

    def _logprob_of(self, policy: Policy, rollouts: Rollouts, rows_r: np.ndarray) -> Tensor:
        """[T] log-probs of the rows' tokens over the whole step, NaN elsewhere."""
        logp_T = torch.full((len(rollouts.tokens),), math.nan, dtype=policy.dtype, device=policy.device)
        with torch.no_grad():
            for batch in NOW.each("logprob", upload(self._pack(rollouts, rows_r), policy.device)):
                logp_T[batch.tokens_T] = policy(batch)
        if self.sharded:
            policy.reshard()  # the root waits for a backward pass that does not come
        return logp_T

    def _gap(self, logp_T: Tensor, rollouts: Rollouts, mask_T: np.ndarray) -> float | None:
        """Mean abs(logp - sampler_logp) over the masked tokens of all ranks; None below SYNC_TOKENS of them."""
        here_T = mask_T & np.repeat(rollouts.held_R, rollouts.lengths_R)
        gap_T = np.abs(logp_T.cpu().numpy() - rollouts.sampler_logp)[here_T]
        total, count = np.sum(self.ranks.gather((gap_T.sum(dtype=np.float64), len(gap_T))), axis=0)
        return float(total / count) if count >= SYNC_TOKENS else None

    def _logprobs(self, data: Trainable, need_old: bool) -> tuple[Tensor | None, Tensor | None]:
        """Log-probs of all trained rows before the first optimizer step and under the reference; None where not needed."""
        rollouts, rows_r = data.rollouts, data.rows_r
        ref_T = self._logprob_of(self.reference, rollouts, rows_r) if self.reference else None
        if not need_old:
            return None, ref_T
        old_T = self._logprob_of(self.policy, rollouts, rows_r)
        trained_T = data.mask_T & np.repeat(np.isin(np.arange(rollouts.num_rollouts), rows_r), rollouts.lengths_R)
        self.check_sync(self._gap(old_T, rollouts, trained_T))
        return old_T, ref_T

    def _accumulate(
        self, tensors: StepTensors, micro_batches: list[MicroBatch], weight_R: np.ndarray, *before: Tensor | None
    ) -> tuple[float, dict[str, Tensor]]:
        """Add the gradient of one optimizer step into ``.grad``; returns the loss and its sums over all ranks, on the host.

        ``before``: log-probs before the first update and of the reference, [T] over the step or None.
        """
        policy = self.policy
        weight = torch.from_numpy(weight_R).to(policy.device)
        loss, sums = 0.0, {}
        for batch in NOW.each("update", upload(micro_batches, policy.device)):
            result = policy(batch, tensors.loss_arguments(batch, weight, self.config, *before))
            result.loss.backward()
            loss, sums = loss + result.loss.detach(), add_sums(sums, result.sums)
        # The host has run ahead so far; this waits for the device once.
        loss, *totals = torch.stack([loss.double(), *(sums[name].double() for name in sums)]).cpu()
        parts = self.ranks.gather((float(loss), dict(zip(sums, totals))))
        return sum(loss for loss, _ in parts), functools.reduce(add_sums, (sums for _, sums in parts))

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
