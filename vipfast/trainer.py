"""The loop: select prompts, let the allocator spend the budget, update, sync, log, save.

``Trainer(Config(...), prompts=..., reward=callable).run()`` is what scripts/train.py calls and what a notebook uses.
"""

import contextlib
import copy
import dataclasses
import functools
import time
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from vipfast import checkpoint, lock, run_folder, streams
from vipfast.allocate.base import Allocator
from vipfast.allocate.uniform import Uniform
from vipfast.allocation import make_allocator
from vipfast.config import Config
from vipfast.config_file import continued, save_yaml
from vipfast.distributed import join
from vipfast.engine import make_engine
from vipfast.engine.base import Sampling
from vipfast.engine.sampling import stop_ids
from vipfast.errors import CheckpointError, DeadRunError, RewardError, SyncError
from vipfast.evaluate import evaluate
from vipfast.expected import check_memory, expected_memory
from vipfast.learn.learner import Learner
from vipfast.options.values import CUSTOM, PYTHON
from vipfast.placement import Placement
from vipfast.policy import load_policy, load_reference, load_tokenizer
from vipfast.ranks.apart import Apart
from vipfast.ranks.led import Led
from vipfast.rewards.base import Reward
from vipfast.rewards.grader import Grader
from vipfast.rollout import collect
from vipfast.run_result import DONE, STOPPED, RunResult
from vipfast.select import EpochSelector
from vipfast.settled import Settled, settled
from vipfast.shortage import shortage_told
from vipfast.state import set_rng_state
from vipfast.stop import StopRequest
from vipfast.tasks.load import load_task
from vipfast.telemetry.activity import NOW
from vipfast.telemetry.peaks import Peaks
from vipfast.telemetry.samples import gathered_rows
from vipfast.telemetry.step import rollout_metrics
from vipfast.telemetry.telemetry import NoTelemetry, Telemetry
from vipfast.tools import with_tools
from vipfast.types import PromptBatch, Rollouts


class Trainer:
    """A run: everything that moves, built from a frozen Config.

    Under torchrun every rank builds one and calls ``run``: rank 0 settles the options, decides the counts, writes and shows;
    each generates, grades and trains its share.

    Args:
        config: options; fields left None are decided by the model and the task. Or options that are settled already.
        prompts: instead of ``config.task``: texts, or dicts with "prompt", optionally "answer", and any metadata.
        reward: (completions, answers, metadata) -> one float or None (= cannot be graded) per completion, or a function as
            TRL or verl take it (rewards/shapes.py); it is tried once before the model is loaded.
        resume: go on from the newest complete checkpoint in ``config.output_dir``.

    Raises:
        UsageError: an option, file or schedule that cannot be used; the message names it and the remedy.
    """

    def __init__(self, config: Config | Settled, *, prompts=None, reward: Reward | None = None, resume: bool = False):
        self.ranks, start = join(), config
        if isinstance(config, Config):
            if prompts is not None:
                config = dataclasses.replace(config, task=CUSTOM)
            if reward is not None and not config.reward:
                config = dataclasses.replace(config, reward=(PYTHON,))
            start = self.ranks.decided(lambda: settled(config, resume))
        self.config = config = start.run.config
        self.saved_config, self.restored, self.notes = start.run.saved, start.restored, list(start.notes)
        self.ranks.connect(config.device, config.dist_timeout)
        torch.set_num_threads(config.threads)
        threadpool_limits(config.threads, user_api="blas")  # the predictor's NumPy; another count would also move its last bits
        self.run_dir = Path(config.output_dir)
        NOW.begin("starting", "reading the task")
        self.tokenizer = load_tokenizer(config)
        self.task = load_task(config, self.tokenizer, prompts, reward)
        self.notes += self.task.notes
        if self.restored is None:
            self.notes += self.ranks.decided(lambda: check_memory(config, self.task))
        self.selector = EpochSelector(self.task.train, config.seed)
        split = self.ranks.size > 1 and config.engine == "vllm"
        self.placement = Placement(self.ranks, config.tensor_parallel_size if split else 1)
        texts = [(prompt.uid, prompt.text) for prompt in self.task.train]
        self.allocator, alone = self._make_allocator(texts), self.ranks.size == 1
        self.grader = Grader(
            self.task.reward, self.tokenizer, truncated=config.truncated, max_errors=config.max_reward_errors,
            binary_at=config.success_threshold if config.reward_shape == "binary" else None,
            go_on=f"go on with {run_folder.go_on(config)}",
        )  # fmt: skip
        self.peaks = Peaks(config.device)
        NOW.enter("loading the model")
        self.model = load_policy(config, self.tokenizer)
        if self.restored is not None:
            checkpoint.load_weights(self.restored, self.model)
        if config.parallel == "ddp":
            self.model.to(config.device)
        pad_id = self.tokenizer.pad_token_id
        stops = stop_ids(self.tokenizer, self.model.generation_config, config.stop)
        sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p, stops, config.seed)
        # Shards cannot sample: ranks would have to decode in step with one another.
        apart = config.parallel == "fsdp" and config.engine == "transformers"
        sampled = copy.deepcopy(self.model).to(config.device) if apart else self.model
        NOW.enter("starting the engine")
        self.engine = make_engine(config, sampled, sampling, pad_id)
        self.engine = with_tools(config, self.engine, self.tokenizer, self.placement)
        if not alone:
            self.ranks.at_leave.append(self.engine.close)
        self.learner = Learner(self.model, config, pad_id, load_reference(config, self.tokenizer), self.ranks)
        self.peaks.mark("load")
        self.step, self.totals = 0, {"budget/rollouts_cum": 0, "budget/tokens_cum": 0}
        self.best: float | None = None
        self.stop = StopRequest(self._say, "no checkpoint was saved yet, so start again, in another folder")
        self.saved: int | None = None  # step of the last save
        num_bytes = checkpoint.run_bytes(self.model, config.keep)
        self.ranks.decided(lambda: checkpoint.check_disk(self.run_dir, num_bytes))
        self.checkpoint_s = 0.0  # of a save since the last line

    def _make_allocator(self, texts: list[tuple[str, str]]) -> Allocator:
        make = functools.partial(make_allocator, self.config, texts)
        if self.ranks.size == 1:
            return make()
        return Led(make, self.ranks) if self.config.round_mode == "barrier" else Apart(make, self.placement)

    def run(self) -> RunResult:
        """Train until ``config.steps``. What it leaves behind is described in the README."""
        config = self.config
        self.telemetry = NoTelemetry()
        with contextlib.ExitStack() as stack:
            for resource in (shortage_told(config), self.stop, contextlib.closing(self.grader), self.ranks.losses_named()):
                stack.enter_context(resource)
            stack.callback(lock.release, self.run_dir)
            self.ranks.decided(self._open_folder)
            stack.enter_context(self.telemetry)
            for note in self.notes:
                self._say(note)
            self._start_or_restore()
            while self.step < config.steps and (stopped := self._stop_asked()) is None:
                self._guarded_step()
            self._save()
            if self.step < config.steps:
                go_on = run_folder.go_on(config)
                self.telemetry.close({"stopped": f"{stopped} after step {self.step}; all is saved", "continue": go_on})
                return RunResult(STOPPED, self.run_dir)
            self._export("final")
            self.telemetry.close({"continue": run_folder.go_on(config, 2 * config.steps)})
        return RunResult(DONE, self.run_dir)

    def _open_folder(self) -> None:
        """Take the run's folder, or cut its records back to the checkpoint; rank 0 alone writes there."""
        if self.restored is None:
            run_folder.claim(self.run_dir)
        save_yaml(self.saved_config, self.run_dir / "config.yaml")
        if self.restored is not None:
            step = checkpoint.step_of(self.restored)
            checkpoint.trim_run(self.run_dir, step)
            if step == 0:  # this checkpoint comes before the first evaluation, whose line is then written anew
                (self.run_dir / "metrics.jsonl").unlink(missing_ok=True)
        self.telemetry = Telemetry(self.run_dir, self.config, self.config.steps)

    def _say(self, message: str) -> None:
        self.telemetry.say(message)

    def _stop_asked(self) -> str | None:
        """The signal that asked any of the ranks to stop."""
        return next(filter(None, self.ranks.gather(self.stop.name)), None)

    def train_step(self, step: int) -> tuple[dict, Rollouts]:
        """One step: prompts -> rollouts -> update -> learn -> sync. Returns its metrics and rollouts."""
        config, start = self.config, time.perf_counter()
        self.grader.start_count()
        self.engine.wake()
        batch = PromptBatch(self.selector.next(config.prompts_per_step), step, config.seed, self.selector.next)
        rollouts, tally, seconds = collect(
            self.allocator, batch, config.budget, self.engine, self.grader,
            threshold=config.success_at, placement=self.placement,
        )  # fmt: skip
        if config.device == "cuda":  # the update needs the memory; a CPU keeps the store for the next step
            self.engine.sleep()
        self.peaks.mark("generate")
        metrics = {**rollout_metrics(rollouts, tally, config.search_k), **rollouts.plan.note, **seconds}
        metrics |= self.grader.metrics(self.ranks.gather)
        metrics |= self.learner.update(rollouts, step - 1, self.peaks.mark)

        clock = time.perf_counter()
        NOW.enter("learn")
        metrics |= self.allocator.learn(tally)
        self.selector.learn(tally)
        self.placement.learn(tally)
        metrics["time/allocate_s"] += time.perf_counter() - clock

        clock = time.perf_counter()
        NOW.enter("sync")
        self.engine.sync(self.learner.weights())
        metrics["time/sync_s"] = time.perf_counter() - clock
        self.peaks.mark("sync")

        metrics["speed/tokens_per_s"] = metrics["budget/tokens"] / max(metrics["time/generate_s"], 1e-9)
        metrics["time/step_s"] = time.perf_counter() - start
        return metrics, rollouts

    def _guarded_step(self) -> None:
        """A step with its evaluation, log line and checkpoint; a failing reward leaves a checkpoint of the step before."""
        config, step = self.config, self.step + 1
        NOW.begin(f"step {step}")
        position = self.selector.state_dict()
        try:
            metrics, rollouts = self.train_step(step)
        except (RewardError, SyncError):  # no weight has moved yet
            self.selector.load_state_dict(position)
            self._save()
            raise
        self.step = step
        for name in self.totals:
            self.totals[name] += metrics[name.removesuffix("_cum")]
        if step == config.steps or (config.eval_every and step % config.eval_every == 0):
            metrics |= self._evaluate()
        # The line comes before the checkpoint: a checkpoint at step N promises that every line up to N is on disk.
        self._log(metrics, rollouts)
        if not self.peaks.told:
            self.telemetry.say(self.peaks.table(step, expected_memory(config, self.task)))
        if config.checkpoint_every and step % config.checkpoint_every == 0:
            self._save()
        if config.stop_when_dead and (dead := self.ranks.decided(lambda: self.telemetry.dead)):
            self._save()
            raise DeadRunError(f"--stop-when-dead: {dead}. All is saved; {run_folder.once_mended(config)}")

    def _start_or_restore(self) -> None:
        NOW.begin("the start", "sync")
        if self.restored is not None:
            self._restore(self.restored)
        self.engine.sync(self.learner.weights())
        self._check_sync()
        if self.step == 0:
            self._save()
            if self._stop_asked() is None:
                self._log(self._evaluate())

    def _check_sync(self) -> None:
        """Invariant 9 on fresh tokens, before any weight moves: what the engine samples is what the learner scores."""
        batch = PromptBatch(self.task.train[:32], self.step, self.config.seed)
        ungraded = Grader(lambda completions, answers, metadata: [None] * len(completions), self.tokenizer)
        rollouts, _, _ = collect(
            Uniform(), batch, 2 * len(batch), self.engine, ungraded, stream=streams.EVAL, placement=self.placement
        )
        self.learner.check_sync(self.learner.sync_gap(rollouts))
        self.engine.reset()

    def _evaluate(self) -> dict:
        config = self.config
        NOW.begin("the evaluation")
        scores = evaluate(
            self.task.heldout, self.engine, self.grader, config.eval_samples, threshold=config.success_at,
            rows_at_once=max(config.budget // self.placement.num_homes, config.eval_samples), placement=self.placement,
        )  # fmt: skip
        self.peaks.mark("evaluate")
        mean = scores[f"eval/mean@{config.eval_samples}"]
        if mean is not None and (self.best is None or mean > self.best):
            self.best = mean
            self._export("best")
        return scores

    def _log(self, metrics: dict, rollouts: Rollouts | None = None) -> None:
        together = "" if self.ranks.size == 1 else f" × {self.ranks.size} {self.config.parallel}"
        common = {
            "allocator": self.allocator.name,
            "backend": f"{self.engine.name}+{self.learner.backend} on {self.config.device}{together}",
            "memory/peak_bytes": max(self.ranks.gather(self.peaks.highest())),
            "time/checkpoint_s": self.checkpoint_s,
        }
        self.checkpoint_s = 0.0
        counts_B, sample = None, None
        if rollouts is not None:
            counts_B = rollouts.counts_B
            if self.config.sample_rollouts:
                sample = gathered_rows(rollouts, self.tokenizer.decode, self.config, self.step, self.ranks)
        self.ranks.decided(lambda: self._write_line({**common, **metrics, **self.totals}, counts_B, sample))

    def _write_line(self, line: dict, counts_B: np.ndarray | None, sample: list[dict] | None) -> None:
        with checkpoint.full_disk_told(self.run_dir, f"the line of step {self.step}"):
            self.telemetry.log(self.step, line, counts_B, sample)

    def _save(self) -> None:
        if self.saved == self.step:
            return
        clock = time.perf_counter()
        NOW.enter("save")
        state, weights = self._state(), self.learner.whole_weights()
        begun, keep = self._saved_shards(), self.config.keep
        place = self.run_dir, self.step
        self.ranks.decided(lambda: checkpoint.save(*place, self.model, self.tokenizer, state, keep, weights, begun))
        self.checkpoint_s, self.saved = time.perf_counter() - clock, self.step
        self.stop.left = f"go on with {run_folder.go_on(self.config)}"
        self.peaks.mark("save")

    def _saved_shards(self) -> Path | None:
        """The begun checkpoint in which every rank has put its shard of the optimizer; None where nothing is sharded."""
        shard = self.learner.shard()
        if shard is None:
            return None
        begun = self.ranks.decided(lambda: checkpoint.begin(self.run_dir, self.step))
        try:
            self.ranks.together(lambda: checkpoint.save_shard(begun, self.ranks.rank, self.ranks.size, shard))
        except CheckpointError:
            self.ranks.decided(lambda: checkpoint.abandon(self.run_dir))
            raise
        return begun

    def _export(self, name: str) -> None:
        NOW.enter("save")
        weights = self.learner.whole_weights()
        self.ranks.decided(lambda: checkpoint.export(self.model, self.tokenizer, self.run_dir / name, weights))

    def _state(self) -> dict:
        return {
            "step": self.step,
            "totals": dict(self.totals),
            "best": self.best,
            "config": dataclasses.asdict(self.saved_config),
            "selector": self.selector.state_dict(),
            "allocator": self.allocator.state_dict(),
            "placement": self.placement.state_dict(),
            "learner": self.learner.state_dict(),
        }

    def _restore(self, path: Path) -> None:
        state = checkpoint.load(path, checked=self.ranks.rank > 0)
        continued(Config(**state["config"]), self.saved_config)  # config.yaml may not be the one this checkpoint was saved with
        self.step, self.totals, self.best = state["step"], state["totals"], state["best"]
        self.saved = self.step
        self.selector.load_state_dict(state["selector"])
        self.allocator.load_state_dict(state["allocator"])
        self.placement.load_state_dict(state.get("placement", {}))
        self.learner.load_state_dict(state["learner"], checkpoint.shards(path))
        if self.ranks.size == 1:
            set_rng_state(state["rng"])  # ours are counter-based; the user's reward may draw from these
        self.telemetry.say(f"resumed from {path} at step {self.step}")
