"""Options that were changed but that a run does not read, or not to the end, told rather than passed over."""

import math
from pathlib import Path

from vipfast.config import CUSTOM, PYTHON, REASONING_GYM, Config
from vipfast.config_rules import flag
from vipfast.cores import cores_allowed, counted
from vipfast.distributed import join
from vipfast.engine import choose_engine

_OF_A_DATASET = ("task_split", "prompt_field", "answer_field", "metadata_fields")
_OF_PROGRAMS = ("code_reward", "code_timeout", "code_memory_mb")
_OF_VLLM = ("vllm_memory", "tensor_parallel_size", "sleep_level", "engine_seeds")

_ONLY_FOR = {
    "vip": ("min_rollouts", "max_rollouts", "objective", "predictor"),
    "vigor": ("vigor_m0", "vigor_num_rounds", "vigor_alpha", "vigor_gamma", "score", "update_on", "correction"),
}

ARITHMETIC_HELDOUT = 512
"""Held-out problems of the embedded task."""


def idle_options(config: Config, device: str) -> list[str]:
    """A line for each option that was changed but that this run does not read, or does not read to the end.

    Args:
        config: options as given, resolved or not.
        device: where the run trains.
    """
    idle = _by_allocator(config) | _by_task(config) | _by_machine(config, device)
    if not config.tools:
        names = ("max_turns", "max_tool_tokens", "tool_timeout", "search_corpus", "search_k")
        idle |= dict.fromkeys(names, "no --tools")
    elif "search" not in config.tools:
        idle |= dict.fromkeys(("search_corpus", "search_k"), f"--tools {' '.join(config.tools)}, without search")
    if config.updates_per_step * config.epochs == 1:
        why = "a single update per step, whose ratio is always 1 (see --updates-per-step, --epochs)"
        idle |= {"clip_low": why, "clip_high": why}
    if config.heldout_prompts == 0:
        idle |= dict.fromkeys(("eval_every", "eval_samples"), "--heldout-prompts 0, which leaves nothing to evaluate")
    defaults = Config()
    changed = {name for name in Config.__dataclass_fields__ if getattr(config, name) != getattr(defaults, name)}
    lines = [
        f"note: {flag(name)} {_shown(getattr(config, name))} has no effect with {why}"
        for name, why in idle.items()
        if name in changed
    ]
    return lines + _beyond_what_is_there(config, changed)


def _by_allocator(config: Config) -> dict[str, str]:
    idle = {
        name: f"--allocator {config.allocator}" for a, names in _ONLY_FOR.items() if a != config.allocator for name in names
    }
    if config.allocator == "vigor" and config.correction == "fresh":
        idle["update_on"] = "--correction fresh, which uses the last round alone"
    if config.allocator == "vigor" and config.vigor_num_rounds == 1:
        names = ("vigor_alpha", "vigor_gamma", "score", "round_mode", "update_on")
        idle |= dict.fromkeys(names, "--vigor-num-rounds 1, after which nobody is left out")
    return idle


def _by_task(config: Config) -> dict[str, str]:
    idle = {}
    embedded, procedural = config.task in ("arithmetic", CUSTOM), config.task.startswith(REASONING_GYM)
    if embedded or procedural:
        idle |= dict.fromkeys(_OF_A_DATASET, f"--task {config.task}")
    elif Path(config.task).expanduser().is_file():
        idle["task_split"] = f"--task {config.task}, a single file"
    if not procedural:
        idle |= dict.fromkeys(("task_size", "task_options"), f"--task {config.task}")
    # What a dataset asks for is known once it is read.
    rewards = set(config.reward or ("task",))
    if rewards <= ({"task"} if embedded else set()) | {"exact", PYTHON}:
        idle |= dict.fromkeys(("reward_timeout", "reward_workers"), "rewards that need no worker process")
    if "code" not in rewards and (embedded or procedural or "task" not in rewards):
        idle |= dict.fromkeys(_OF_PROGRAMS, "rewards that run no programs")
        idle |= {} if "python" in config.tools else {"sandbox": "neither programs to grade nor --tools python"}
    return idle


def _by_machine(config: Config, device: str) -> dict[str, str]:
    idle = {}
    if config.engine != "vllm" and choose_engine(config, device)[0] == "transformers":
        idle |= dict.fromkeys(_OF_VLLM, "--engine transformers")
    merges = "engine_seeds" not in idle and config.lora_rank > 0
    if not merges and (join().size == 1 or config.parallel == "ddp"):
        idle["sync_bucket_mb"] = "weights that are neither shards nor merged with adapters for vLLM"
    if device == "cpu" and "sleep_level" not in idle:
        idle |= dict.fromkeys(("vllm_memory", "sleep_level"), "--device cpu, where vLLM neither sleeps nor shares a GPU")
    if device == "cpu" and config.kernels == "off":
        idle["kernels"] = "--device cpu, where plain torch is the default"
    if join().size == 1:
        idle |= dict.fromkeys(("parallel", "dist_timeout"), "a single process (see torchrun)")
    return idle


def _beyond_what_is_there(config: Config, changed: set[str]) -> list[str]:
    """Numbers that ask for more than there is."""
    lines = []
    if 0 < config.steps <= config.warmup_steps:
        lines.append(
            f"note: with --warmup-steps {config.warmup_steps} the learning rate peaks only at the end of --steps {config.steps}"
        )
    if config.updates_per_step > config.prompts_per_step:
        lines.append(
            f"note: --updates-per-step {config.updates_per_step} makes at most {config.prompts_per_step} mini-batches, one per "
            f"prompt of --prompts-per-step {config.prompts_per_step}"
        )
    procedural = config.task.startswith(REASONING_GYM)
    available = config.task_size // 10 if procedural else ARITHMETIC_HELDOUT if config.task == "arithmetic" else math.inf
    if "heldout_prompts" in changed and config.heldout_prompts > available:
        why = f"a tenth of --task-size {config.task_size}" if procedural else f"all that --task {config.task} has"
        lines.append(f"note: of --heldout-prompts {config.heldout_prompts} there are {available}, {why}")
    if config.threads is not None and config.threads * join().size > cores_allowed():
        processes = f" in {join().size} processes" if join().size > 1 else ""
        lines.append(
            f"note: --threads {config.threads}{processes} on {counted(cores_allowed(), 'core')} makes threads wait for one "
            "another; leave it out to have as many as cores are free"
        )
    return lines


def _shown(value) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
