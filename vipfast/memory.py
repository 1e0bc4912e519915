"""How much memory a run should take, from its options and the model's sizes alone; ``--dry-run`` prints it."""

from vipfast.config import Config
from vipfast.model_facts import ModelFacts

HEAD_CHUNK_BYTES = 64 * 2**20
"""Logits the loss head holds at once (kernels/token_logprob.py, which needs torch, has the same number)."""


def estimate(config: Config, facts: ModelFacts, prompt_tokens: float, rows: dict[str, int]) -> dict[str, dict[str, float]]:
    """Bytes by phase and part.

    Args:
        prompt_tokens: mean tokens of a prompt.
        rows: rollouts decoded at once, by phase name ("generate", "evaluate").

    Returns:
        phase -> part -> bytes. "always" is there in every phase.
    """
    master = 8 if config.dtype == "float64" else 4
    compute = 2 if config.dtype == "bfloat16" else master
    lora = facts.lora_parameters(config.lora_rank)
    trained = lora if config.lora_rank else facts.num_parameters
    always = {f"weights ({'float64' if master == 8 else 'float32'})": master * (facts.num_parameters + lora)}
    if config.dtype == "bfloat16":
        always["bfloat16 copies of the weights"] = 2 * facts.num_parameters
    if config.beta:
        always["reference model"] = master * facts.num_parameters
    always["Adam state"] = 2 * master * trained
    phases = {"always": always}
    kv_token = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * compute
    for phase, count in rows.items():
        cache = count * (prompt_tokens + config.max_new_tokens) * kv_token
        phases[phase] = {"KV cache": cache, "logits of one position": count * facts.vocab * compute}
    # Kept for the backward pass, per token and layer: inputs of norms and projections, q k v, attention's output, the MLP's
    # inner vectors.
    q, kv = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    per_token = facts.num_layers * (4 * facts.hidden + 2 * q + 2 * kv + 4 * facts.intermediate) * compute
    logits = config.micro_batch_tokens * facts.vocab * max(4, compute)
    phases["update"] = {
        "gradients": master * trained,
        "activations": config.micro_batch_tokens * per_token,
        "a chunk of logits, and as much twice over to work on it": 3 * min(HEAD_CHUNK_BYTES, logits),
    }
    return phases
