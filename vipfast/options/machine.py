"""What the run has to itself, and how it shares it between sampling and the update."""

from dataclasses import dataclass
from typing import Literal

from vipfast.options import idle
from vipfast.options.facts import option


@dataclass(frozen=True)
class MachineOptions:
    """What the run has to itself, and how it shares it between sampling and the update."""

    device: Literal["cpu", "cuda"] | None = option(None, travels="never")
    """Where the policy trains and samples; cuda if there is one, unless given."""
    threads: int | None = option(None, low=1, high=4096, resumable=True, travels="never", moves_samples=False)
    """CPU threads of torch; chosen from the free cores unless given, and stored, since it moves float sums."""
    parallel: Literal["auto", "ddp", "fsdp"] = option(
        "auto", resumable=True, evaluated=False, decided=True, idle=idle.in_one_process
    )
    """With torchrun: every process keeps the whole model (ddp) or a shard of it (fsdp); auto shards what would fill more than
    half of a GPU with weights, gradients and optimizer state."""
    dist_timeout: int = option(
        1800, low=1, high=10**7, resumable=True, travels="never", moves_samples=False, idle=idle.in_one_process
    )
    """With torchrun: seconds without an answer from another process after which the run gives up."""
    engine: Literal["auto", "transformers", "vllm"] = option("auto", travels="never", decided=True)
    """What samples rollouts: vllm (in this process), transformers, or auto: vllm on CUDA where it is installed."""
    vllm_memory: float | None = option(
        None, low=0.01, high=1, resumable=True, travels="never", moves_samples=False, idle=(idle.without_vllm, idle.on_a_cpu)
    )
    """Fraction of the whole GPU's memory that vLLM takes while awake: weights, activations, keys and values; what training
    leaves and the rollouts can use unless given."""
    tensor_parallel_size: int = option(1, low=1, high=1024, travels="never", idle=idle.without_vllm)
    """GPUs over which vLLM splits the model; their ranks sample the same rollouts together."""
    sleep_level: Literal[0, 1, 2] = option(2, evaluated=False, idle=(idle.without_vllm, idle.on_a_cpu))
    """What vLLM gives back during the update: nothing (0), keys and values with the weights moved to host memory (1) or with
    the weights dropped (2), which the next sync brings anew either way."""
    engine_seeds: Literal["rollout", "engine"] = option("rollout", travels="never", idle=idle.without_vllm)
    """How vLLM draws: rollout seeds each one by its own, so its text is the same in whatever rounds it was asked for; engine
    seeds a whole round at once, for what that saves."""
    sync_bucket_mb: int = option(1024, low=1, high=10**7, evaluated=False, idle=idle.with_nothing_to_gather)
    """Megabytes of weights that are gathered from shards (--parallel fsdp), and that adapters are merged into for vLLM
    (--lora-rank), at a time; a larger weight is taken whole."""
