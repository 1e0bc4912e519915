"""Starts vLLM in this process, quietly, and leaves the process otherwise as it was."""

import os
import random
import warnings
from functools import partial
from typing import Any

import torch

from vipfast.distributed import join
from vipfast.engine.base import Sampling
from vipfast.engine.vllm import random_states, set_random_states

CPU_CACHE_BYTES = 2**30
"""Keys and values on a CPU, where vLLM's fraction of the machine's memory would be taken at once and for good."""

CPU_BATCH_TOKENS = 4096
"""Most tokens of a pass on a CPU, a whole prompt at least."""

ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
"""vLLM's own settings, where the user has not set them."""


def launch(
    folder: str, sampling: Sampling, *, dtype: str, device: str, positions: int, memory: float, parallel: int, sleeps: bool
) -> tuple[Any, Any]:
    """Start an engine with dummy weights; the first sync brings real ones.

    Args:
        folder: the model's config.json; nothing else is read of it.
        dtype: "float32" or "bfloat16".
        positions: most tokens of a prompt with its completion.
        memory: fraction of the device's whole memory for weights, activations, keys and values (CUDA).
        parallel: ranks that share the model and ask alike. Under torchrun every rank starts an engine, once the process group
            is there, and vLLM groups them in order of rank.
        sleeps: whether memory can be given back.

    Returns:
        vLLM's LLMEngine, and a constructor of sampling parameters.
    """
    ranks = join().size
    # vLLM would make a group of one rank, and its ranks could not find each other
    assert ranks == 1 or torch.distributed.is_initialized(), "the process group comes before the engine"
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # In this process: weights are handed over as they are, never copied to another.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    before, python_random = random_states(device), random.getstate()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with warnings.catch_warnings(action="ignore"):
            from vllm import EngineArgs, SamplingParams
            from vllm.sampling_params import RequestOutputKind
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.llm_engine import LLMEngine

            arguments = EngineArgs(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                generation_config="vllm",  # its own defaults; the model's would be taken for the user's wish
                dtype=dtype,
                max_model_len=positions,
                enforce_eager=device == "cpu",
                enable_prefix_caching=True,
                # A prompt cut over two passes rewinds its rollout's generator, which only a GPU's can.
                enable_chunked_prefill=device != "cpu",
                max_num_batched_tokens=max(CPU_BATCH_TOKENS, positions) if device == "cpu" else None,
                # Processed: at the sampling temperature, but of what a nucleus left over; raw: of the whole distribution.
                logprobs_mode="processed_logprobs" if sampling.top_p == 1 else "raw_logprobs",
                seed=sampling.seed % 2**31,
                tensor_parallel_size=parallel,
                distributed_executor_backend="external_launcher" if ranks > 1 else None,
                gpu_memory_utilization=memory,
                kv_cache_memory_bytes=CPU_CACHE_BYTES if device == "cpu" else None,
                enable_sleep_mode=sleeps,
                disable_log_stats=True,
                use_tqdm_on_load=False,
            )
            llm = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
    finally:
        # On a CPU vLLM replaces torch's function by one that only warns.
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        set_random_states(before)
        random.setstate(python_random)
    return llm, partial(SamplingParams, output_kind=RequestOutputKind.FINAL_ONLY)
