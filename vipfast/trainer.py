"""The loop: select prompts, let the allocator spend the budget, update, sync, log, save.

``Trainer(Config(...), prompts=..., reward=callable).run()`` is what scripts/train.py calls and what a notebook uses.
"""

import dataclasses
import time
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits

from vipfast import checkpoint, run_folder, streams
from vipfast.allocate import make_allocator
from vipfast.allocate.uniform import Uniform
from vipfast.config import CUSTOM, Config
from vipfast.config_file import continued, load_yaml, save_yaml
from vipfast.engine.base import Sampling
from vipfast.engine.sampling import stop_ids
from vipfast.engine.transformers import TransformersEngine
from vipfast.errors import CheckpointError, RewardError, SyncError, UsageError
from vipfast.evaluate import evaluate
from vipfast.learn.learner import Learner
from vipfast.policy import load_policy, load_reference, load_tokenizer
from vipfast.resolve import backend_notes, resolve
from vipfast.rewards.grader import Grader, Reward
from vipfast.rollout import collect
from vipfast.select import EpochSelector
from vipfast.state import set_rng_state
from vipfast.stop import StopRequest
from vipfast.tasks.base import load_task
from vipfast.telemetry.samples import sample_rows
from vipfast.telemetry.step import peak_bytes, rollout_metrics
from vipfast.telemetry.telemetry import Telemetry
from vipfast.types import PromptBatch, Rollouts

DONE, STOPPED = 0, 3
"""Exit codes of ``run``: all steps done; stopped by SIGTERM or Ctrl-C after saving the step it was in."""


class Trainer:
    """A run: everything that moves, built from a frozen Config.

    Args:
        config: options; fields left None are decided by the model and the task.
        prompts: instead of ``config.task``: texts, or dicts with "prompt", optionally "answer", and any metadata.
        reward: (completions, answers, metadata) -> one float or None (= cannot be graded) per completion.
        resume: go on from the newest complete checkpoint in ``config.output_dir``.

    Raises:
        UsageError: an option, file or schedule that cannot be used; the message names it and the remedy.
    """

    def __init__(self, config: Config, *, prompts=None, reward: Reward | None = None, resume: bool = False):
        self.notes: list[str] = []
        if prompts is not None:
            config = dataclasses.replace(config, task=CUSTOM)
        self.restored: Path | None = None
        if resume:
            config = dataclasses.replace(config, output_dir=str(run_folder.resumable(config.output_dir)))
            self.restored = checkpoint.find(config.output_dir)
            config, self.notes = continued(load_yaml(Path(config.output_dir) / "config.yaml"), config)
            if config.steps < checkpoint.step_of(self.restored):
                raise UsageError(f"--steps {config.steps}: the run is already at step {checkpoint.step_of(self.restored)}")
        config, chosen = resolve(config)
        # A resumed run's options have been told; the machine it goes on with may be another.
        self.config, self.notes = config, self.notes + (chosen or (backend_notes(config) if resume else []))
        torch.set_num_threads(config.threads)
        threadpool_limits(config.threads, user_api="blas")  # the predictor's NumPy; another count would also move its last bits
        self.run_dir = Path(config.output_dir)
        if not resume:
            run_folder.check_fresh(self.run_dir)
        self.tokenizer = load_tokenizer(config)
        self.task = load_task(config, self.tokenizer, prompts, reward)
        self.notes += self.task.notes
        self.selector = EpochSelector(self.task.train, config.seed)
        self.allocator = make_allocator(config, [(prompt.uid, prompt.text) for prompt in self.task.train])
        self.grader = Grader(self.task.reward, self.tokenizer, truncated=config.truncated, max_errors=config.max_reward_errors)
        self.model = load_policy(config)
        pad_id = self.tokenizer.pad_token_id
        stops = stop_ids(self.tokenizer, self.model.generation_config, config.stop)
        sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p, stops, config.seed)
        autocast = torch.bfloat16 if config.dtype == "bfloat16" else None
        self.engine = TransformersEngine(self.model, sampling, pad_id, autocast=autocast)
        self.learner = Learner(self.model, config, pad_id, load_reference(config))
        self.step, self.totals = 0, {"budget/rollouts_cum": 0, "budget/tokens_cum": 0}
        self.best: float | None = None
        self.stop = StopRequest()
        self.saved: int | None = None  # step of the last save
        self.warned = False  # of a step without any score
        checkpoint.check_disk(self.run_dir, checkpoint.run_bytes(self.model, config.keep))
        self.checkpoint_s = 0.0  # of a save since the last line

    def run(self) -> int:
        """Train until ``config.steps``; returns DONE or STOPPED. What it leaves behind is described in the README."""
        config = self.config
        if self.restored is None:
            run_folder.claim(self.run_dir)
        save_yaml(config, self.run_dir / "config.yaml")
        if self.restored is not None:
            step = checkpoint.step_of(self.restored)
            checkpoint.trim_run(self.run_dir, step)
            if step == 0:  # this checkpoint comes before the first evaluation, whose line is then written anew
                (self.run_dir / "metrics.jsonl").unlink(missing_ok=True)
        with Telemetry(self.run_dir, config, config.steps) as self.telemetry, self.stop:
            for note in self.notes:
                self.telemetry.say(note)
            self._start_or_restore()
            while self.step < config.steps and self.stop.name is None:
                self._guarded_step()
            self._save()
            go_on = f"python scripts/train.py --resume --output-dir {self.run_dir}"
            if config.task == CUSTOM:
                go_on = f"Trainer(Config(output_dir={str(self.run_dir)!r}, …), prompts=…, reward=…, resume=True).run()"
            if self.step < config.steps:
                self.telemetry.close({"stopped": f"{self.stop.name} after step {self.step}; all is saved", "continue": go_on})
                return STOPPED
            checkpoint.export(self.model, self.tokenizer, self.run_dir / "final")
            self.telemetry.close({"continue": go_on + ("" if config.task == CUSTOM else f" --steps {2 * config.steps}")})
        return DONE

    def train_step(self, step: int) -> tuple[dict, Rollouts]:
        """One step: prompts -> rollouts -> update -> learn -> sync. Returns its metrics and rollouts."""
        config, start = self.config, time.perf_counter()
        self.grader.num_errors = 0
        self.engine.wake()
        batch = PromptBatch(self.selector.next(config.prompts_per_step), step, config.seed, self.selector.next)
        rollouts, tally, seconds = collect(
            self.allocator, batch, config.budget, self.engine, self.grader, threshold=config.success_threshold
        )
        if config.device == "cuda":  # the update needs the memory; a CPU keeps the store for the next step
            self.engine.sleep()
        metrics = {**rollout_metrics(rollouts, tally), **rollouts.plan.note, **seconds, "reward/errors": self.grader.num_errors}
        metrics |= self.learner.update(rollouts, step - 1)

        clock = time.perf_counter()
        metrics |= self.allocator.learn(tally)
        self.selector.learn(tally)
        metrics["time/allocate_s"] += time.perf_counter() - clock

        clock = time.perf_counter()
        self.engine.sync(self.learner.weights())
        metrics["time/sync_s"] = time.perf_counter() - clock

        metrics["speed/tokens_per_s"] = metrics["budget/tokens"] / max(metrics["time/generate_s"], 1e-9)
        metrics["time/step_s"] = time.perf_counter() - start
        return metrics, rollouts

    def _guarded_step(self) -> None:
        """A step with its evaluation, log line and checkpoint; a failing reward leaves a checkpoint of the step before."""
        config, step = self.config, self.step + 1
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
        if config.checkpoint_every and step % config.checkpoint_every == 0:
            self._save()

    def _start_or_restore(self) -> None:
        if self.restored is not None:
            self._restore(self.restored)
        self._check_sync()
        if self.step == 0:
            self._save()
            self._log(self._evaluate())

    def _check_sync(self) -> None:
        """Invariant 9 on fresh tokens, before any weight moves: what the engine samples is what the learner scores."""
        batch = PromptBatch(self.task.train[:32], self.step, self.config.seed)
        ungraded = Grader(lambda completions, answers, metadata: [None] * len(completions), self.tokenizer)
        rollouts, _, _ = collect(Uniform(), batch, 2 * len(batch), self.engine, ungraded, stream=streams.EVAL)
        self.learner.check_sync(self.learner.sync_gap(rollouts))
        self.engine.reset()

    def _evaluate(self) -> dict:
        config = self.config
        scores = evaluate(
            self.task.heldout,
            self.engine,
            self.grader,
            config.eval_samples,
            extract=self.task.extract,
            threshold=config.success_threshold,
            rows_at_once=max(config.budget, config.eval_samples),
        )
        mean = scores[f"eval/mean@{config.eval_samples}"]
        if mean is not None and (self.best is None or mean > self.best):
            self.best = mean
            checkpoint.export(self.model, self.tokenizer, self.run_dir / "best")
        return scores

    def _log(self, metrics: dict, rollouts: Rollouts | None = None) -> None:
        common = {
            "allocator": self.allocator.name,
            "backend": f"{self.engine.name}+{self.learner.backend} on {self.config.device}",
            "memory/peak_bytes": peak_bytes(self.config.device),
            "time/checkpoint_s": self.checkpoint_s,
        }
        self.checkpoint_s = 0.0
        counts_B, sample = None, None
        if rollouts is not None:
            counts_B, num = rollouts.counts_B, self.config.sample_rollouts
            sample = sample_rows(rollouts, self.tokenizer.decode, num, self.config.seed, self.step) if num else None
        try:
            self.telemetry.log(self.step, {**common, **metrics, **self.totals}, counts_B, sample)
        except OSError as error:
            if not checkpoint.is_full_disk(error):
                raise
            raise CheckpointError(
                f"--output-dir {self.run_dir}: the disk is full, step {self.step} could not be logged ({error}); checkpoints "
                "are intact. Free some space or move the run's folder to a larger disk, then resume"
            ) from error
        if rollouts is not None and metrics["reward/unscored"] == rollouts.num_rollouts and not self.warned:
            self.warned = True
            self.telemetry.say(
                f"warning: the reward scored none of step {self.step}'s rollouts (None, NaN or an error), so nothing is learned"
            )

    def _save(self) -> None:
        if self.saved == self.step:
            return
        clock = time.perf_counter()
        checkpoint.save(self.run_dir, self.step, self.model, self.tokenizer, self._state(), self.config.keep)
        self.checkpoint_s, self.saved = time.perf_counter() - clock, self.step

    def _state(self) -> dict:
        return {
            "step": self.step,
            "totals": dict(self.totals),
            "best": self.best,
            "config": dataclasses.asdict(self.config),
            "selector": self.selector.state_dict(),
            "allocator": self.allocator.state_dict(),
            "learner": self.learner.state_dict(),
        }

    def _restore(self, path: Path) -> None:
        state = checkpoint.load(path)
        continued(Config(**state["config"]), self.config)  # config.yaml may not be the one this checkpoint was saved with
        checkpoint.load_weights(path, self.model)
        self.step, self.totals, self.best = state["step"], state["totals"], state["best"]
        self.saved = self.step
        self.selector.load_state_dict(state["selector"])
        self.allocator.load_state_dict(state["allocator"])
        self.learner.load_state_dict(state["learner"])
        self.engine.sync(self.learner.weights())
        set_rng_state(state["rng"])  # ours are counter-based; the user's reward may draw from these
        self.telemetry.say(f"resumed from {path} at step {self.step}")
