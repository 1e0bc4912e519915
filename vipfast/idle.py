"""Options that were changed but that a run does not read, told rather than passed over."""

from vipfast.config import CUSTOM, PYTHON, REASONING_GYM, Config
from vipfast.config_rules import flag
from vipfast.distributed import join
from vipfast.engine import choose_engine

_OF_A_DATASET = ("task_split", "prompt_field", "answer_field", "metadata_fields")

_ONLY_FOR = {
    "vip": ("min_rollouts", "max_rollouts", "objective", "predictor"),
    "vigor": ("vigor_m0", "vigor_num_rounds", "vigor_alpha", "vigor_gamma", "score", "update_on", "correction"),
}


def idle_options(config: Config, device: str) -> list[str]:
    """A line for each option that was changed but that this run does not read."""
    idle = {
        name: f"--allocator {config.allocator}" for a, names in _ONLY_FOR.items() if a != config.allocator for name in names
    }
    if config.allocator == "vigor" and config.correction == "fresh":
        idle["update_on"] = "--correction fresh, which uses the last round alone"
    if not config.tools:
        names = ("max_turns", "max_tool_tokens", "tool_timeout", "search_corpus", "search_k")
        idle |= dict.fromkeys(names, "no --tools")
    elif "search" not in config.tools:
        idle |= dict.fromkeys(("search_corpus", "search_k"), f"--tools {' '.join(config.tools)}, without search")
    if config.updates_per_step * config.epochs == 1:
        why = "a single update per step, whose ratio is always 1 (see --updates-per-step, --epochs)"
        idle |= {"clip_low": why, "clip_high": why}
    if config.task in ("arithmetic", CUSTOM):
        idle |= dict.fromkeys(_OF_A_DATASET, f"--task {config.task}")
        if set(config.reward) <= {"task", "exact", PYTHON}:
            idle |= dict.fromkeys(("reward_timeout", "reward_workers"), "rewards that need no worker process")
        if "code" not in config.reward:
            idle |= dict.fromkeys(("code_reward", "code_timeout", "code_memory_mb"), "rewards that run no programs")
            idle |= {} if "python" in config.tools else {"sandbox": "neither programs to grade nor --tools python"}
    procedural = config.task.startswith(REASONING_GYM)
    own = _OF_A_DATASET if procedural else ("task_size", "task_options")
    idle |= dict.fromkeys(own, f"--task {config.task}")
    if config.engine != "vllm" and choose_engine(config, device)[0] == "transformers":
        idle |= dict.fromkeys(("vllm_memory", "tensor_parallel_size", "sleep_level", "engine_seeds"), "--engine transformers")
    merges = "engine_seeds" not in idle and config.lora_rank > 0
    if not merges and (join().size == 1 or config.parallel == "ddp"):
        idle["sync_bucket_mb"] = "weights that are neither shards nor merged with adapters for vLLM"
    if device == "cpu" and "sleep_level" not in idle:
        idle |= dict.fromkeys(("vllm_memory", "sleep_level"), "--device cpu, where vLLM neither sleeps nor shares a GPU")
    if device == "cpu" and config.kernels == "off":
        idle["kernels"] = "--device cpu, where plain torch is the default"
    if join().size == 1:
        idle |= dict.fromkeys(("parallel", "dist_timeout"), "a single process (see torchrun)")
    defaults = Config()
    lines = [
        f"note: {flag(name)} {getattr(config, name)} has no effect with {why}"
        for name, why in idle.items()
        if getattr(config, name) != getattr(defaults, name)
    ]
    if 0 < config.steps <= config.warmup_steps:
        lines.append(
            f"note: with --warmup-steps {config.warmup_steps} the learning rate peaks only at the end of --steps {config.steps}"
        )
    return lines
