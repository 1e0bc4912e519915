"""How much memory a run should take, from its options and the model's sizes alone; ``--dry-run`` prints it."""

from vipfast.config import Config
from vipfast.learn.pack import choose_packing
from vipfast.model_facts import ModelFacts

HEAD_CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 1_250_000_000}
"""Logits the loss head holds at once (kernels/logit_rows.py, which needs torch, has the same numbers)."""


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
    phases["update"] = {
        "gradients": master * trained,
        "activations": config.micro_batch_tokens * _activations(config, facts, master, compute),
        **_head(config, facts, master, compute),
    }
    packing = choose_packing(config.packing, config.device, config.dtype)
    if packing.kind == "varlen" and packing.attention is None:
        # as booleans, and once more in the dtype that attention adds to its scores
        phases["update"]["mask of a packed row"] = config.micro_batch_tokens**2 * (1 + compute)
    return phases


def _activations(config: Config, facts: ModelFacts, master: int, compute: int) -> int:
    """Bytes kept of a token for the backward pass. The residual stream and the rotary embedding stay in the master dtype."""
    q, kv = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    # Inputs and insides of two norms, what they feed; q k v and attention's output; the MLP's inner vectors.
    layer = 4 * facts.hidden * master + (2 * facts.hidden + 2 * q + 2 * kv + 4 * facts.intermediate) * compute
    layer += (q + kv) * master if compute < master else 0
    # One layer at a time is computed again, from its input.
    return facts.num_layers * facts.hidden * master + layer if config.gradient_checkpointing else facts.num_layers * layer


def _head(config: Config, facts: ModelFacts, master: int, compute: int) -> dict[str, float]:
    triton = config.device == "cuda" and config.kernels != "off"
    logits = config.micro_batch_tokens * facts.vocab * (compute if triton else max(4, compute))
    chunk = min(HEAD_CHUNK_BYTES[config.device], logits)
    name = "a chunk of logits" if triton else "a chunk of logits, and as much twice over to work on it"
    at_work = {name: chunk if triton else 3 * chunk}
    if config.lora_rank:
        return at_work
    # Summed over the chunks beside the logits; they are gone when the backward pass multiplies it by the upstream gradient.
    gradient = master * facts.hidden * facts.vocab
    if gradient > at_work[name]:
        at_work = {"the head's gradient once more, multiplied": gradient}
    return {"the head's gradient as it is formed": gradient, **at_work}
