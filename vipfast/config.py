"""Every option of a run, frozen. The command line, ``config.yaml`` and the notebook all speak these names.

This module imports neither torch nor a command-line library. ``None`` means "decided by the model or the task"; ``resolve``
(vipfast/resolve.py) fills such fields in and prints what it chose and why.
"""

from dataclasses import dataclass
from typing import Literal

from vipfast import config_rules


@dataclass(frozen=True)
class Config(config_rules.NamedOptions):
    """Options of one training run; a sentence under each."""

    task: str = "arithmetic"
    """Where prompts come from: arithmetic (embedded), a .parquet/.jsonl/.json/.csv file or a folder of such, a hub dataset id
    (owner/name, or owner/name:CONFIG), or reasoning_gym:NAME, where NAME*2+OTHER mixes several two to one."""
    task_split: str = "train"
    """Split of a hub dataset to train on; of a folder, the files named after it, themselves or by folder."""
    task_size: int = 2048
    """Problems that a reasoning_gym task generates, from --seed; a tenth of them, at most --heldout-prompts, is held out."""
    task_options: str | None = None
    """Difficulty of a reasoning_gym task as JSON or YAML text: a dataset's own settings, also under its name in a mixture,
    e.g. '{max_terms: 3, leg_counting: {max_animals: 5}}'."""
    prompt_field: str | None = None
    """Column that holds the prompt (dots reach into nested columns); recognised for common layouts when not given."""
    answer_field: str | None = None
    """Column that holds the right answer (dots reach into nested columns); recognised for common layouts when not given."""
    prompt_template: Literal["auto", "chat", "plain", "qa", "boxed", "tags"] = "auto"
    """How a prompt is worded: chat (the tokenizer's chat template), plain (the text alone), auto (chat where there is such a
    template, else plain), qa (plain, "Question: … Answer:"), boxed or tags (auto, and asked to put the final answer in
    \\boxed{} or between <answer> tags)."""
    system_prompt: str | None = None
    """A system message (chat), or a text put before the prompt (plain); goes over a row's own system message."""
    metadata_fields: tuple[str, ...] = ()
    """Further columns of a dataset (dots reach into nested ones) that a reward of your own finds in a prompt's metadata, under
    their last names; gold_ids and supporting, the passages a question wants, are there anyway."""
    heldout_prompts: int = 512
    """Held-out prompts for evaluation, split off by text hash where the task has none of its own."""
    model: str = "starter"
    """The policy: starter (embedded, under 1 M parameters), a from_pretrained folder, or a hub model id."""
    lora_rank: int = 0
    """Rank of LoRA adapters on the linear layers of the body; 0 trains all weights."""
    base_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """With --lora-rank: how the frozen linear layers under the adapters are kept, and the reference's; auto is bfloat16 where
    --dtype is, which changes no number there, and float32 elsewhere, as in runs saved without this option."""
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
    tools: tuple[Literal["calculator", "python", "search"], ...] = ()
    """Tools that a rollout may call between turns: calculator, python (in the code sandbox), search (in --search-corpus)."""
    max_turns: int = 4
    """With --tools: turns of the policy in a rollout; one whose last turn ends with a call counts as cut by its length."""
    max_tool_tokens: int | None = None
    """With --tools: tokens of one output, of longer ones beginning and end; a quarter of max_new_tokens, which counts outputs
    too, but at most 512 unless given."""
    tool_timeout: float = 10.0
    """With --tools: seconds a call may take before it is answered with an error."""
    search_corpus: str | None = None
    """With --tools search: a .jsonl/.parquet/.txt file of passages (text, optionally id and title), or a folder of them."""
    search_k: int = 3
    """With --tools search: passages that a search returns."""
    truncated: Literal["grade", "mask", "zero"] = "grade"
    """Rollouts that hit the length limit: graded as they stand, kept out of the update, or given reward 0."""
    success_threshold: float = 1.0
    """A rollout counts as a success for metrics and predictors when its reward reaches this."""
    reward: tuple[str, ...] = ()
    """What grades completions: maths, code, exact, task (what the task asks for), or module:function for a reward of your own,
    (completions, answers, metadata) -> list of numbers or None, or as TRL or verl take it; what the task asks for unless given.
    The first of several is the verifier, by which success, evaluation and allocation go; the loss sees the weighted sum."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each --reward, the verifier's first; 1 each unless given."""
    reward_timeout: float | None = None
    """Seconds that grading one completion may take: past it a maths answer is wrong, a program fails what is left of its tests,
    and a completion that a reward of your own was asked about is unscored, an error of --max-reward-errors; 10 unless given,
    but for the tests of a program together 20 times --code-timeout."""
    reward_workers: int | None = None
    """Worker processes that grade at a time; as many as there are cores (at most 16), shared by the processes of a run, unless
    given."""
    reward_shape: Literal["raw", "binary"] = "raw"
    """What loss and allocator see of a verifier's reward: the number itself, partial credit and all (raw), or 1 where it
    reaches --success-threshold and 0 elsewhere (binary)."""
    code_reward: Literal["all", "rate"] = "all"
    """What a program of a code task earns: 1 when it passes all tests, or the share of the tests it passes."""
    sandbox: Literal["strict", "weak"] = "strict"
    """Where programs run: without network, other processes and files but their own, or not at all (strict), or with as much
    of that as this machine can do (weak)."""
    code_timeout: float = 6.0
    """Seconds (by the clock) a program may take for one test."""
    code_memory_mb: int = 1024
    """Megabytes of address space a program may take, Python's own 40 among them."""
    max_reward_errors: int = 16
    """Stop after this many rollouts in a row whose reward failed or raised an exception (each is left unscored)."""

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
    stop_when_dead: bool = False
    """End the run, saved and with exit code 1, where it would otherwise only say that it learns nothing (rewards missing or all
    alike for many steps)."""
    sample_rollouts: int | Literal["all"] = 16
    """Rollouts whose texts, rewards and advantages are kept per step in rollouts/STEP.parquet: so many, all of them, or none
    (0)."""

    def __post_init__(self):
        config_rules.take_lists(self)
        config_rules.check(self)

    @property
    def success_at(self) -> float:
        """The least reward, as loss and allocator see it, that is a success."""
        return 1.0 if self.reward_shape == "binary" else self.success_threshold

    @property
    def base_in_bfloat16(self) -> bool:
        """Whether LoRA's frozen layers are kept in bfloat16, of a resolved config."""
        return self.lora_rank > 0 and self.base_dtype == "bfloat16"

    @property
    def budget(self) -> int:
        """Rollouts per step (C)."""
        return round(self.prompts_per_step * self.rollouts_per_prompt)


CHANGEABLE_ON_RESUME = frozenset(
    {"steps", "eval_every", "checkpoint_every", "keep", "threads", "trackers", "output_dir", "sample_rollouts"}
    | {"parallel", "dist_timeout", "offload_optimizer", "vllm_memory", "reward_timeout", "reward_workers"}
    | {"stop_when_dead"}
)
"""Options a resumed run may change; any other difference is refused by name."""

PYTHON = "python"
"""The reward of a run to which a function was handed as Trainer(reward=…) in Python."""

CUSTOM = "custom"
"""The task of a run whose prompts were handed to Trainer in Python."""

REASONING_GYM = "reasoning_gym:"
"""How the name of a procedural task begins."""
