"""When an option has no effect: conditions that options name where they are declared.

Each takes the options, the device and the engine that samples, and returns what leaves the option unread, or None.
"""

from pathlib import Path
from typing import Any

from vipfast.distributed import join
from vipfast.options.values import CUSTOM, PYTHON, REASONING_GYM


def without_vip(config: Any, device: str, engine: str) -> str | None:
    return f"--allocator {config.allocator}" if config.allocator != "vip" else None


def without_vigor(config: Any, device: str, engine: str) -> str | None:
    return f"--allocator {config.allocator}" if config.allocator != "vigor" else None


def in_one_round(config: Any, device: str, engine: str) -> str | None:
    single = config.allocator == "vigor" and config.vigor_num_rounds == 1
    return "--vigor-num-rounds 1, after which nobody is left out" if single else None


def of_the_last_round(config: Any, device: str, engine: str) -> str | None:
    fresh = config.allocator == "vigor" and config.correction == "fresh"
    return "--correction fresh, which uses the last round alone" if fresh else None


def without_dataset(config: Any, device: str, engine: str) -> str | None:
    return f"--task {config.task}" if _is_embedded(config) or _is_procedural(config) else None


def of_a_file(config: Any, device: str, engine: str) -> str | None:
    return f"--task {config.task}, a single file" if Path(config.task).expanduser().is_file() else None


def unless_procedural(config: Any, device: str, engine: str) -> str | None:
    return None if _is_procedural(config) else f"--task {config.task}"


def without_workers(config: Any, device: str, engine: str) -> str | None:
    # What a dataset asks for is known once it is read.
    plain = ({"task"} if _is_embedded(config) else set()) | {"exact", PYTHON}
    return "rewards that need no worker process" if _rewards(config) <= plain else None


def without_programs(config: Any, device: str, engine: str) -> str | None:
    own = _is_embedded(config) or _is_procedural(config) or "task" not in _rewards(config)
    return "rewards that run no programs" if "code" not in _rewards(config) and own else None


def without_sandbox(config: Any, device: str, engine: str) -> str | None:
    unused = without_programs(config, device, engine) and "python" not in config.tools
    return "neither programs to grade nor --tools python" if unused else None


def without_tools(config: Any, device: str, engine: str) -> str | None:
    return None if config.tools else "no --tools"


def without_search(config: Any, device: str, engine: str) -> str | None:
    return None if "search" in config.tools else f"--tools {' '.join(config.tools)}, without search"


def with_one_update(config: Any, device: str, engine: str) -> str | None:
    why = "a single update per step, whose ratio is always 1 (see --updates-per-step, --epochs)"
    return why if config.updates_per_step * config.epochs == 1 else None


def without_heldout(config: Any, device: str, engine: str) -> str | None:
    return "--heldout-prompts 0, which leaves nothing to evaluate" if config.heldout_prompts == 0 else None


def without_adapters(config: Any, device: str, engine: str) -> str | None:
    return None if config.lora_rank else "--lora-rank 0, which freezes nothing"


def without_vllm(config: Any, device: str, engine: str) -> str | None:
    return "--engine transformers" if engine == "transformers" else None


def on_a_cpu(config: Any, device: str, engine: str) -> str | None:
    return "--device cpu, where vLLM neither sleeps nor shares a GPU" if device == "cpu" else None


def as_on_any_cpu(config: Any, device: str, engine: str) -> str | None:
    return "--device cpu, where plain torch is the default" if device == "cpu" and config.kernels == "off" else None


def with_nothing_to_gather(config: Any, device: str, engine: str) -> str | None:
    merged, sharded = engine == "vllm" and config.lora_rank > 0, join().size > 1 and config.parallel != "ddp"
    return None if merged or sharded else "weights that are neither shards nor merged with adapters for vLLM"


def in_one_process(config: Any, device: str, engine: str) -> str | None:
    return "a single process (see torchrun)" if join().size == 1 else None


def _is_embedded(config: Any) -> bool:
    return config.task in ("arithmetic", CUSTOM)


def _is_procedural(config: Any) -> bool:
    return config.task.startswith(REASONING_GYM)


def _rewards(config: Any) -> set[str]:
    return set(config.reward or ("task",))
