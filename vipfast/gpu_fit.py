"""Whether a run fits its GPU, told before anything is loaded, and the share of the GPU that vLLM gets."""

import dataclasses
import math
from collections.abc import Callable

from vipfast import main_memory, memory
from vipfast.config import Config
from vipfast.config_rules import flag
from vipfast.cores import counted
from vipfast.distributed import join
from vipfast.errors import UsageError
from vipfast.memory import VLLM_WORKSPACE_BYTES, awake_state, training_state
from vipfast.model_facts import ModelFacts

RESERVE_BYTES = 4_000_000_000
"""Left free when vLLM's share is chosen: CUDA's context, NCCL, CuPy, and a forward pass that checks the sampler's log-probs."""

LARGEST_SHARE = 0.5
"""Of a GPU, for a whole training state; a larger one is split where there are GPUs to share it."""

LORA_RANK = 32
"""The rank of adapters that errors propose."""

_OF_ROLLOUTS = ("prompts_per_step", "rollouts_per_prompt", "max_new_tokens")

UNKNOWN_SHARE = 0.5
"""vLLM's share where the GPU's size or the model's is not known."""


def max_shards(config: Config) -> int:
    """GPUs that can share the training state: torchrun's processes, unless its moments are kept in a way of their own."""
    return join().size if can_split(config) else 1


def can_split(config: Config) -> bool:
    return config.parallel != "ddp" and not config.offload_optimizer and config.optimizer == "adamw"


def num_shards(config: Config) -> int:
    """GPUs that share the training state of a resolved config."""
    return max_shards(config) if config.parallel == "fsdp" else 1


def vllm_share(config: Config, facts: ModelFacts, gpu_bytes: float, shards: int = 1) -> tuple[float, str]:
    """A value for ``--vllm-memory`` and the reason: what a step's rollouts can use, or what training leaves.

    Raises:
        UsageError: training leaves less than vLLM's weights and one rollout need.
    """
    longest, most = _needs(config, facts, config.prompts_per_step, config.budget)
    free = gpu_bytes - sum(awake_state(config, facts, shards).values()) - RESERVE_BYTES
    if free < longest:
        helps = _helps(config, facts, shards, awake_state, gpu_bytes - RESERVE_BYTES - longest)
        raise UsageError(
            f"--engine {config.engine}: vLLM's weights, its work space and one rollout take {_gb(longest)}, and of the GPU's "
            f"{_gb(gpu_bytes)} training keeps {_sum(awake_state(config, facts, shards))} while it is awake; {helps}, or "
            "--engine transformers"
        )
    if most < free:
        share = math.ceil(100 * most / gpu_bytes) / 100
        return share, f"of {_gb(gpu_bytes)}: {_gb(most)} hold a step's rollouts at full length"
    kept = f"training keeps {_gb(gpu_bytes - free - RESERVE_BYTES)} while vLLM is awake, {_gb(RESERVE_BYTES)} stay free"
    return math.floor(100 * free / gpu_bytes) / 100, f"of {_gb(gpu_bytes)}: {kept}"


def evaluation_share(config: Config, facts: ModelFacts, gpu_bytes: float, prompts: int, rollouts: int) -> tuple[float, str]:
    """A value for ``--vllm-memory`` of an evaluation, which keeps the policy's weights and trains nothing, and the reason.

    Args:
        config: device, dtype and engine are resolved.
        prompts, rollouts: in flight at once.

    Raises:
        UsageError: weights and vLLM do not fit the GPU, or a given share does not fit beside the weights.
    """
    longest, most = _needs(config, facts, prompts, rollouts)
    weights = memory.model_bytes(config, facts)
    free = gpu_bytes - weights - RESERVE_BYTES
    kept = f"the policy's own weights keep {_gb(weights)} of the GPU's {_gb(gpu_bytes)}"
    if free < longest:
        raise UsageError(
            f"--engine {config.engine}: vLLM's weights, its work space and one rollout take {_gb(longest)}, and {kept}; use "
            "--engine transformers, a smaller model, or a larger GPU"
        )
    if config.vllm_memory is not None:
        given = config.vllm_memory * gpu_bytes
        if not longest <= given <= gpu_bytes - weights:
            raise UsageError(
                f"--vllm-memory {config.vllm_memory:g}: is {_gb(given)}; vLLM needs {_gb(longest)} at least, and {kept}; leave "
                "it out"
            )
        return config.vllm_memory, "given"
    if most < free:
        why = f"of {_gb(gpu_bytes)}: {_gb(most)} hold {counted(rollouts, 'sample')} at full length"
        return math.ceil(100 * most / gpu_bytes) / 100, why
    return math.floor(100 * free / gpu_bytes) / 100, f"of {_gb(gpu_bytes)}: {kept}, {_gb(RESERVE_BYTES)} stay free"


def check_training(config: Config, facts: ModelFacts, gpu_bytes: float, shards: int = 1) -> None:
    """Refuse a model whose training state alone is more than the GPU. Activations, which are estimated, refuse nothing.

    Args:
        config: device and dtype are resolved.
        gpu_bytes: memory of the whole GPU.
        shards: GPUs over which the training state can be split.

    Raises:
        UsageError: with the numbers and what helps.
    """
    state = training_state(config, facts, shards)
    if sum(state.values()) > gpu_bytes:
        each = sum(training_state(config, facts).values()) / facts.num_parameters
        over = f" over {shards} GPUs" if shards > 1 else ""
        raise UsageError(
            f"--model {config.model}: training its {facts.num_parameters / 1e9:.3g} billion parameters takes {_sum(state)} "
            f"before any activation ({each:.3g} bytes a parameter{over}), and the GPU has {_gb(gpu_bytes)}; "
            f"{_helps(config, facts, shards, training_state, gpu_bytes)}"
        )


def check_share(config: Config, facts: ModelFacts, gpu_bytes: float, shards: int = 1) -> None:
    """Refuse a ``--vllm-memory`` that cannot be.

    Args:
        config: resolved, vllm_memory is given.
        gpu_bytes, shards: as above.

    Raises:
        UsageError: the share and what training keeps while vLLM is awake are more than the GPU, or the share is too small for
            vLLM's weights and one rollout; with the numbers and what helps.
    """
    share, kept = config.vllm_memory * gpu_bytes, awake_state(config, facts, shards)
    asked = f"--vllm-memory {config.vllm_memory:g}: that fraction of the whole GPU is {_gb(share)} of {_gb(gpu_bytes)}"
    if share + sum(kept.values()) > gpu_bytes:
        best, _ = vllm_share(config, facts, gpu_bytes, shards)
        helps = _helps(config, facts, shards, awake_state, gpu_bytes - share)
        raise UsageError(f"{asked}, and training keeps {_sum(kept)} while vLLM is awake; use --vllm-memory {best:g}; {helps}")
    longest, _ = _needs(config, facts, config.prompts_per_step, config.budget)
    if share < longest:
        raise UsageError(
            f"{asked}, and vLLM's weights, its work space and one rollout take {_gb(longest)}; use more, or leave it out"
        )


def check_main_memory(config: Config, facts: ModelFacts) -> None:
    """Refuse offloaded moments that this machine's main memory cannot hold.

    Raises:
        UsageError: AdamW's moments of all of the machine's processes are more than its memory.
    """
    ranks, total = join().size, main_memory.total_bytes()
    needed = ranks * memory.offloaded_bytes(config, facts)
    if needed > total:
        raise UsageError(
            f"--offload-optimizer: AdamW's moments take {_gb(needed)}{f' in {ranks} processes' if ranks > 1 else ''}, and this "
            f"machine has {_gb(total)} of main memory; use --optimizer adamw8bit or --lora-rank {LORA_RANK} instead"
        )


def verdict(config: Config, phases: dict[str, dict[str, float]], gpu_bytes: float) -> str:
    """A line on an ``estimate``: which phase takes most of the GPU, and what lowers it where it is too much."""
    sizes = {phase: size for phase, size in memory.totals(phases).items() if phase != "always"}
    phase = max(sizes, key=sizes.get)
    line = f"{_gb(gpu_bytes)} of GPU memory: most is taken in {phase}, {_gb(sizes[phase])}"
    if sizes[phase] <= gpu_bytes:
        return line
    return f"{line}, too much; what helps: {', '.join(remedies(config, phase))}"


def remedies(config: Config, phase: str) -> list[str]:
    """Options that lower what a phase takes, with the values they have now."""
    cuda = config.device == "cuda"
    if phase in ("generate", "evaluate"):
        waits = ["--engine vllm, which lets rollouts wait for room"] if cuda and config.engine != "vllm" else []
        given = {name: value for name in _OF_ROLLOUTS if (value := getattr(config, name)) is not None}
        return [*waits, *(f"a lower {flag(name)} ({value:g})" for name, value in given.items())]
    off = {
        "--gradient-checkpointing": not config.gradient_checkpointing,
        f"--lora-rank {LORA_RANK}": not config.lora_rank,
        f"a lower --lora-rank ({config.lora_rank})": config.lora_rank > LORA_RANK,
        "--offload-optimizer": cuda and not config.offload_optimizer,
    }
    return [f"a lower --micro-batch-tokens ({config.micro_batch_tokens})", *filter(off.get, off)]


def _needs(config: Config, facts: ModelFacts, prompts: int, rollouts: int) -> tuple[float, float]:
    """Bytes vLLM needs for one rollout, and those it can use for all at once, prompts shared among their rollouts."""
    fixed = memory.vllm_weights(config, facts) + VLLM_WORKSPACE_BYTES
    token, longest = (
        memory.kv_bytes(config, facts) / config.tensor_parallel_size,
        config.max_prompt_tokens + config.max_new_tokens,
    )
    at_once = prompts * config.max_prompt_tokens + rollouts * config.max_new_tokens
    return fixed + token * longest, fixed + token * at_once


def _helps(config: Config, facts: ModelFacts, shards: int, state: Callable[..., dict[str, float]], room_bytes: float) -> str:
    """What would bring ``state`` down to the room there is, each with the bytes it leads to."""
    changes = {} if config.sleep_level else {"--sleep-level 2": dict(sleep_level=2)}
    if not config.lora_rank:
        base = "bfloat16" if config.dtype == "bfloat16" else "float32"
        changes[f"--lora-rank {LORA_RANK}"] = dict(lora_rank=LORA_RANK, base_dtype=base)
    elif not config.base_in_bfloat16:
        changes["--base-dtype bfloat16"] = dict(base_dtype="bfloat16")
    if shards == 1 and not config.offload_optimizer:
        changes["--offload-optimizer"] = dict(offload_optimizer=True, optimizer="adamw")
        if config.optimizer == "adamw" and config.dtype != "float64":
            changes["--optimizer adamw8bit"] = dict(optimizer="adamw8bit")
    sizes = {name: sum(state(dataclasses.replace(config, **change), facts).values()) for name, change in changes.items()}
    plain = dataclasses.replace(config, offload_optimizer=False, optimizer="adamw")
    for gpus in range(shards + 1, 1025):
        shared = sum(state(plain, facts, gpus).values())
        if shared <= room_bytes:
            sizes[f"{gpus} GPUs (torchrun) that share it"] = shared
            break
    told = [f"{name} ({_gb(size)})" for name, size in sizes.items() if size <= room_bytes]
    return f"what helps: {', '.join(told)}" if told else "a smaller model, or a larger GPU"


def _sum(parts: dict[str, float]) -> str:
    return f"{_gb(sum(parts.values()))} ({', '.join(f'{name} {_gb(size)}' for name, size in parts.items())})"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
