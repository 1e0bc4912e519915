"""What samples rollouts; nothing here imports torch or vLLM before an engine is made."""

from typing import Any

from vipfast.config import Config


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
    if config.engine != "vllm":
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
