"""Every option of a run, frozen. The command line, ``config.yaml`` and the notebook all speak these names.

This module imports neither torch nor a command-line library. ``None`` means "decided by the model or the task"; ``resolve``
(vipfast/resolve.py) fills such fields in and prints what it chose and why.
"""

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from typing import Literal

from vipfast.errors import UsageError


@dataclass(frozen=True)
class Config:
    """Options of one training run; a sentence under each."""

    task: str = "arithmetic"
    """Where prompts come from: arithmetic (embedded), a .jsonl/.parquet/.csv file, or a hub dataset id."""
    task_split: str = "train"
    """Split of a hub dataset to train on; ignored for files."""
    prompt_field: str | None = None
    """Column that holds the prompt (dots reach into nested columns); recognised for common layouts when not given."""
    answer_field: str | None = None
    """Column that holds the right answer (dots reach into nested columns); recognised for common layouts when not given."""
    heldout_prompts: int = 512
    """Held-out prompts for evaluation, split off by text hash where the task has none of its own."""
    model: str = "starter"
    """The policy: starter (embedded, under 1 M parameters), a from_pretrained folder, or a hub model id."""
    lora_rank: int = 0
    """Rank of LoRA adapters on the linear layers of the body; 0 trains all weights."""
    dtype: Literal["float32", "bfloat16", "float64"] | None = None
    """Compute precision: float32 on CPU, bfloat16 (over float32 master weights) on GPU unless given; float64 is for tests."""
    device: Literal["cpu", "cuda"] | None = None
    """Where the policy trains and samples; cuda if there is one, unless given."""
    threads: int | None = None
    """CPU threads of torch; chosen from the free cores unless given, and stored, since it moves float sums."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """With torchrun: every process keeps the whole model (ddp) or a shard of it (fsdp); auto shards what would fill more than
    half of a GPU with weights, gradients and optimizer state."""
    dist_timeout: int = 1800
    """With torchrun: seconds without an answer from another process after which the run gives up."""
    seed: int = 0
    """Names every random stream of the run."""

    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """What samples rollouts: vllm (in this process), transformers, or auto: vllm on CUDA where it is installed."""
    vllm_memory: float | None = None
    """Fraction of the whole GPU's memory that vLLM takes while awake: weights, activations, keys and values; what training
    leaves and the rollouts can use unless given."""
    tensor_parallel_size: int = 1
    """GPUs over which vLLM splits the model; their ranks sample the same rollouts together."""
    sleep_level: Literal[0, 1, 2] = 2
    """What vLLM gives back during the update: nothing (0), keys and values with the weights moved to host memory (1) or with
    the weights dropped (2), which the next sync brings anew either way."""
    engine_seeds: Literal["rollout", "engine"] = "rollout"
    """How vLLM draws: rollout seeds each one by its own, so its text is the same in whatever rounds it was asked for; engine
    seeds a whole round at once, for what that saves."""
    sync_bucket_mb: int = 1024
    """Megabytes of weights that are gathered from shards (--parallel fsdp), and that adapters are merged into for vLLM
    (--lora-rank), at a time; a larger weight is taken whole."""

    allocator: Literal["uniform", "vip", "vigor"] = "vigor"
    """How a step's rollout budget is spent over its prompts."""
    prompts_per_step: int = 64
    """Prompts drawn for each step (B)."""
    rollouts_per_prompt: float = 8.0
    """Mean rollouts per prompt; the step's budget is this times prompts_per_step and must be a whole number."""
    min_rollouts: int | None = None
    """VIP's lower bound L on a prompt's rollouts; 2 for rloo and 3 for dr_grpo unless given."""
    max_rollouts: int = 32
    """VIP's upper bound U on a prompt's rollouts."""
    budget_unit: Literal["rollouts", "tokens"] = "rollouts"
    """What a step's budget counts: rollouts, or (vip only) tokens, as many as that many rollouts of the pool's mean length are
    expected to take, so that prompts with short answers can get more."""
    objective: str | None = None
    """Whose gradient variance VIP minimises: rloo, dr_grpo, or a convex function of a prompt's rollouts of your own, named as
    module:function; follows the estimator unless given (grpo uses dr_grpo)."""
    predictor: Literal["gp", "kernel_beta", "beta", "vip"] = "gp"
    """VIP's success predictor: gp (logit GP with exact binomial counts), kernel_beta (pseudo-counts lent by like texts), beta
    (a prompt's own history) or vip (the paper's noise-free GP)."""
    vigor_m0: int | None = None
    """Rollouts each prompt gets in VIGOR's first round; follows from the mean unless given."""
    vigor_num_rounds: int = 4
    """VIGOR's rounds T."""
    vigor_alpha: float = 0.5
    """Share of the active prompts VIGOR keeps after each round."""
    vigor_gamma: float = 2.0
    """Factor on the rollouts per active prompt from one VIGOR round to the next."""
    score: Literal["variance", "posterior"] = "variance"
    """What VIGOR ranks by: variance of the rewards so far, or E[p(1-p)] under their Beta posterior; with 0/1 rewards, all
    scored, both rank alike."""
    round_mode: Literal["barrier", "early", "streaming"] = "barrier"
    """Whether VIGOR's rounds wait for their slowest rollout: barrier (as published), early (the same allocation, but a prompt
    goes on as soon as nothing pending can change that) or streaming (a variant of the rule: the cut is a running quantile)."""
    update_on: Literal["all", "final"] = "all"
    """Whether VIGOR's update uses every drawn rollout or only prompts that survived to the last round."""
    correction: Literal["none", "lagged", "fresh"] = "none"
    """How VIGOR's update makes up for rounds that looked at its own rewards: none (as published), lagged (baselines predicted
    before the step; needs --weighting rollout), or fresh (only the last round's rollouts enter the update)."""

    max_new_tokens: int | None = None
    """Length limit of a completion; the model's default unless given (16 for the starter, 1024 otherwise)."""
    max_prompt_tokens: int | None = None
    """Longer prompts are dropped with a count; what the model's positions leave unless given."""
    temperature: float = 1.0
    """Divides the logits in sampler, trainer and reference alike."""
    top_p: float = 1.0
    """Nucleus of the sampler; below 1 the log-probs stay those of the full distribution."""
    stop: tuple[str, ...] = ()
    """Further stop strings; each must be a single token of the tokenizer."""
    truncated: Literal["grade", "mask", "zero"] = "grade"
    """Rollouts that hit the length limit: graded as they stand, kept out of the update, or given reward 0."""
    success_threshold: float = 1.0
    """A rollout counts as a success for metrics and predictors when its reward reaches this."""
    max_reward_errors: int = 16
    """Stop after this many rollouts in a row whose reward raised an exception (each is left unscored)."""

    estimator: Literal["rloo", "dr_grpo", "grpo"] = "rloo"
    """Advantage of a rollout within its group: leave-one-out, centred, or centred and divided by the std."""
    weighting: Literal["prompt", "rollout", "token"] = "prompt"
    """Whether each prompt, each rollout or each token weighs the same in the loss."""
    length_term: Literal["constant", "sequence", "token"] = "constant"
    """Tokens of a rollout are divided by max_new_tokens, by its own length, or (prompt weighting) by its group's tokens."""
    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low for negative advantages."""
    clip_high: float = 0.28
    """The ratio is clipped at 1 + clip_high for positive advantages."""
    beta: float = 0.0
    """Weight of the KL term towards the starting policy; at 0 no reference model is loaded."""
    updates_per_step: int = 1
    """Mini-batches (optimizer steps) a step's prompts are dealt into."""
    epochs: int = 1
    """Passes over a step's rollouts."""
    learning_rate: float | None = None
    """Peak AdamW learning rate; 1e-4 for the starter, 1e-6 full, 1e-5 with LoRA unless given."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up; linear and cosine would reach 0 one step after the last."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """AdamW with its two moments as the master weights are (8 bytes a parameter), or in 8 bits (2 bytes; bitsandbytes)."""
    offload_optimizer: bool = False
    """Keep AdamW's moments in main memory: the same numbers for 8 bytes a parameter less on the GPU, and slower steps."""
    max_grad_norm: float = 1.0
    """The gradient is clipped to this norm once, after accumulation."""
    micro_batch_tokens: int = 8192
    """Padded tokens of one forward pass of the body; smaller saves memory and changes nothing else."""
    packing: Literal["auto", "varlen", "rectangles"] = "auto"
    """How rollouts pass through the body: one packed row with flash-attn's varlen attention, or small rectangles of like
    length; auto takes varlen where flash-attn is installed, on a CUDA device in bfloat16."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations: less memory, about a third more time."""
    kernels: Literal["auto", "required", "off"] = "auto"
    """The loss on CUDA: Triton kernels where they can run (auto), Triton or an error (required), or plain torch (off)."""
    max_nonfinite: int = 5
    """Stop after this many steps in a row with a non-finite loss or gradient (each is skipped)."""

    steps: int = 60
    """Training steps."""
    eval_every: int = 20
    """Evaluate every so many steps, besides start and end; 0 only at start and end."""
    eval_samples: int = 8
    """Samples per held-out prompt at an evaluation (k of mean@k, pass@k, maj@k)."""
    checkpoint_every: int = 20
    """Save every so many steps, besides the end; 0 only at the end."""
    keep: int = 2
    """Newest complete checkpoints to keep."""
    output_dir: str | None = None
    """The run's folder; runs/<task>-<allocator>-s<seed>-<time> unless given."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Boards to log to besides metrics.jsonl."""
    sample_rollouts: int = 16
    """Rollouts whose texts and rewards are kept per step in rollouts/STEP.parquet; 0 keeps none."""

    def __post_init__(self):
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            check_type(field.name, value, hints[field.name])
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{flag(field.name)} {value}: must be a finite number")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UsageError(f"{flag(name)} {value}: must lie in [{low:g}, {high:g}]")
        if self.temperature <= 0:
            raise UsageError(
                f"--temperature {self.temperature}: must be above 0, since greedy decoding gives every rollout of a prompt "
                "the same text and no gradient; use e.g. 1.0"
            )
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p}: must lie in (0, 1]; 1 samples from the whole distribution")
        if self.weighting == "token" and self.length_term != "constant":
            raise UsageError(f"--length-term {self.length_term}: --weighting token takes no length term; leave it out")
        if self.weighting == "rollout" and self.length_term == "token":
            raise UsageError("--length-term token: needs --weighting prompt (it divides by the tokens of a prompt's group)")
        if self.budget_unit == "tokens" and self.allocator != "vip":
            raise UsageError(
                f"--budget-unit tokens: --allocator {self.allocator} plans in rollouts; use --allocator vip, or leave it out"
            )
        if self.optimizer == "adamw8bit" and self.dtype == "float64":
            raise UsageError("--optimizer adamw8bit: its weights are float32, not --dtype float64; use --optimizer adamw")
        if self.optimizer == "adamw8bit" and self.offload_optimizer:
            raise UsageError(
                "--offload-optimizer: moves --optimizer adamw's moments, and adamw8bit's stay on the GPU; leave one out"
            )
        if self.round_mode != "barrier" and self.allocator != "vigor":
            raise UsageError(
                f"--round-mode {self.round_mode}: --allocator {self.allocator} has a single round; use --allocator vigor, or "
                "leave it out"
            )
        if self.allocator == "vigor" and self.correction == "lagged":
            self._check_lagged()
        if abs(self.budget - self.prompts_per_step * self.rollouts_per_prompt) > 1e-6:
            raise UsageError(
                f"--rollouts-per-prompt {self.rollouts_per_prompt:g}: times --prompts-per-step {self.prompts_per_step} is not "
                f"a whole number of rollouts; the nearest that is: {self.budget / self.prompts_per_step:.12g}"
            )

    def _check_lagged(self) -> None:
        """Refuse what would bring this step's rewards back into the weights or baselines that ``lagged`` keeps free of them."""
        for name, wanted, why in (
            ("weighting", ("rollout",), "divides by counts that this step's rewards decided"),
            ("update_on", ("all",), "leaves out prompts by this step's rewards"),
            ("estimator", ("rloo", "dr_grpo"), "divides by the spread of this step's rewards"),
        ):
            value = getattr(self, name)
            if value not in wanted:
                remedy = f"{flag(name)} {' or '.join(wanted)}, or --correction fresh"
                raise UsageError(f"--correction lagged: {flag(name)} {value} {why}; use {remedy}")

    @property
    def budget(self) -> int:
        """Rollouts per step (C)."""
        return round(self.prompts_per_step * self.rollouts_per_prompt)


CHANGEABLE_ON_RESUME = frozenset(
    {"steps", "eval_every", "checkpoint_every", "keep", "threads", "trackers", "output_dir", "sample_rollouts"}
    | {"parallel", "dist_timeout", "offload_optimizer", "vllm_memory"}
)
"""Options a resumed run may change; any other difference is refused by name."""

CUSTOM = "custom"
"""The task of a run whose prompts were handed to Trainer in Python."""

_RANGES = (
    ("heldout_prompts", 0, 10**7),
    ("lora_rank", 0, 4096),
    ("threads", 1, 4096),
    ("dist_timeout", 1, 10**7),
    ("seed", 0, 2**63 - 1),
    ("vllm_memory", 0.01, 1),
    ("tensor_parallel_size", 1, 1024),
    ("sync_bucket_mb", 1, 10**7),
    ("prompts_per_step", 1, 10**6),
    ("rollouts_per_prompt", 1e-6, 4096),
    ("min_rollouts", 0, 4096),
    ("max_rollouts", 1, 4096),
    ("vigor_m0", 1, 4096),
    ("vigor_num_rounds", 1, 64),
    ("vigor_alpha", 1e-6, 1),
    ("vigor_gamma", 1, 4096),
    ("max_new_tokens", 1, 10**6),
    ("max_prompt_tokens", 1, 10**7),
    ("max_reward_errors", 1, 10**9),
    ("clip_low", 0, 1),
    ("clip_high", 0, 1e6),
    ("beta", 0, 1e6),
    ("updates_per_step", 1, 10**4),
    ("epochs", 1, 10**4),
    ("learning_rate", 0, 10),
    ("warmup_steps", 0, 10**9),
    ("weight_decay", 0, 10),
    ("max_grad_norm", 1e-12, 1e12),
    ("micro_batch_tokens", 1, 10**9),
    ("max_nonfinite", 1, 10**9),
    ("steps", 0, 10**9),
    ("eval_every", 0, 10**9),
    ("eval_samples", 1, 4096),
    ("checkpoint_every", 0, 10**9),
    ("keep", 1, 10**6),
    ("sample_rollouts", 0, 10**6),
)


def flag(name: str) -> str:
    """The command-line spelling of a field: max_new_tokens -> --max-new-tokens."""
    return "--" + name.replace("_", "-")


def check_type(name: str, value, hint) -> None:
    """Refuse a value of the wrong type or outside a Literal (UsageError), naming what is allowed."""
    if not _fits(value, hint):
        allowed = [str(choice) for arm in _arms(hint) for choice in typing.get_args(arm) if typing.get_origin(arm) is Literal]
        wanted = "one of " + ", ".join(allowed) if allowed else f"of type {hint if typing.get_args(hint) else hint.__name__}"
        if typing.get_origin(hint) is tuple:
            items = [str(choice) for choice in typing.get_args(typing.get_args(hint)[0])] or ["texts"]
            wanted = f"a list of {', '.join(items)}; in YAML [{value}]"
        raise UsageError(f"{flag(name)} {value!r}: must be {wanted}")


def _arms(hint) -> tuple:
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _fits(value, hint) -> bool:
    origin = typing.get_origin(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(_fits(value, arm) for arm in _arms(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    if isinstance(value, bool) and hint is not bool:
        return False
    return isinstance(value, (int, float) if hint is float else hint)
