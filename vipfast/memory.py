"""How much memory a run should take, from its options and the model's sizes alone; ``--dry-run`` and the first step tell it."""

import dataclasses
from typing import NamedTuple

from vipfast.config import Config
from vipfast.model_facts import ModelFacts

HEAD_CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 1_250_000_000}
"""Logits the loss head holds at once (kernels/logit_rows.py, which needs torch, has the same numbers)."""

VLLM_WORKSPACE_BYTES = 4_000_000_000
"""vLLM's activations, logits and CUDA graphs, assumed; it measures them as it starts and gives the rest to keys and values."""

VLLM_CPU_CACHE_BYTES = 2**30
"""vLLM's keys and values on a CPU, a fixed number there."""

LIBRARY_BYTES = 110_000_000
"""Main memory of the libraries that come with a model once it is loaded, as measured; those before are no part of a phase."""

PROCESS_BYTES = 450_000_000
"""Main memory of Python and the libraries that are there before any model is, as measured."""

MALLOC_KEEPS = 0.5
"""Of a pass's activations, what the C library's malloc still holds in pieces when the next pass asks for as much: 0.3 and 0.9
were measured, of models of 135 and 32 million parameters."""

DRAWING_BYTES, DRAWN_AT_ONCE = 21, 2**24
"""Of one probability as the transformers engine draws from it in float64, and how many of them are worked on together."""


class Passes(NamedTuple):
    """The update's passes through the body: padded tokens of the largest, and whether there are several in a step."""

    tokens: int
    several: bool


def model_bytes(config: Config, facts: ModelFacts) -> float:
    """Bytes of the policy's weights, adapters apart, with LoRA's frozen layers as they are kept."""
    frozen = facts.linear_parameters if config.base_in_bfloat16 else 0
    return _widths(config)[0] * (facts.num_parameters - frozen) + 2 * frozen


def training_state(config: Config, facts: ModelFacts, shards: int = 1) -> dict[str, float]:
    """Bytes of one GPU that an optimizer step holds whatever the batch: master weights, gradients, Adam's moments, reference.

    Args:
        shards: GPUs over which each of them is split (FSDP); 1: every GPU has all.

    Returns:
        part -> bytes.
    """
    master, _ = _widths(config)
    lora = facts.lora_parameters(config.lora_rank)
    trained = lora if config.lora_rank else facts.num_parameters
    frozen = facts.linear_parameters if config.base_in_bfloat16 else 0
    model = model_bytes(config, facts)
    parts = {
        f"weights ({'float64' if master == 8 else 'float32'})": master * (facts.num_parameters - frozen + lora),
        **({"frozen layers (bfloat16)": 2 * frozen} if frozen else {}),
        "gradients": master * trained,
        **({"reference model": model} if config.beta else {}),
        **adam_state(config, trained, master),
    }
    parts = {name: num_bytes / shards for name, num_bytes in parts.items()}
    if shards > 1 and config.engine != "vllm":  # ranks that sample from shards would have to decode in step
        parts["whole copy to sample from"] = model
    return parts


def adam_state(config: Config, trained: int, master: int) -> dict[str, float]:
    """Bytes of AdamW's moments where the model trains: none if they rest in main memory; 8 bits have a scale a block of 256."""
    if config.offload_optimizer:
        return {}
    if config.optimizer == "adamw8bit":
        return {"Adam state (8 bits)": 2 * trained * (1 + 4 / 256)}
    return {"Adam state": 2 * master * trained}


def offloaded_bytes(config: Config, facts: ModelFacts) -> float:
    """Main memory for moments that are kept there, of one process that trains the whole model."""
    plain = dataclasses.replace(config, offload_optimizer=False)
    return training_state(plain, facts)["Adam state"] if config.offload_optimizer else 0


def never_sleeps(config: Config) -> bool:
    """Whether vLLM stays awake during the update."""
    return config.sleep_level == 0 or config.device == "cpu"


def awake_state(config: Config, facts: ModelFacts, shards: int = 1) -> dict[str, float]:
    """Bytes that training keeps while vLLM is awake: all but gradients and activations, unless it never sleeps."""
    if config.engine == "vllm" and never_sleeps(config):
        master, compute = _widths(config)
        update = {"activations": config.micro_batch_tokens * _activations(config, facts, master, compute)}
        return {**training_state(config, facts, shards), **update, **_head(config, facts, master, compute)}
    return {name: part for name, part in training_state(config, facts, shards).items() if name != "gradients"}


def estimate(
    config: Config,
    facts: ModelFacts,
    prompt_tokens: float,
    rows: dict[str, int],
    shards: int = 1,
    gpu_bytes: float | None = None,
    passes: Passes | None = None,
) -> dict[str, dict[str, float]]:
    """Bytes by phase and part, of one GPU or of the process on a CPU.

    Args:
        prompt_tokens: mean tokens of a prompt.
        rows: rollouts decoded at once, by phase name ("generate", "evaluate").
        shards: GPUs over which the training state is split (FSDP).
        gpu_bytes: memory of the whole GPU where it is known; vLLM then takes its fraction of it.
        passes: of the update; one of --micro-batch-tokens unless given.

    Returns:
        phase -> part -> bytes. "always" is there in every phase but "load", which comes before the first optimizer step.
        "logprob" is there only if log-probs are computed before the update.
    """
    passes = passes or Passes(config.micro_batch_tokens, several=False)
    config = dataclasses.replace(config, micro_batch_tokens=passes.tokens)
    master, compute = _widths(config)
    vllm = config.engine == "vllm"
    state = training_state(config, facts, shards)
    always = {name: part for name, part in state.items() if name != "gradients"}
    always |= {"libraries loaded with the model": LIBRARY_BYTES} if config.device == "cpu" else {}
    phases = {"always": always, "load": {name: part for name, part in always.items() if not name.startswith("Adam")}}
    # A frozen layer is its own copy; of the other weights, only the head and the adapters are multiplied with.
    own = facts.vocab * facts.hidden + facts.lora_parameters(config.lora_rank)
    copied = own if config.base_in_bfloat16 else facts.num_parameters
    copies = {"bfloat16 copies of the weights": 2 * copied} if config.dtype == "bfloat16" else {}
    if not vllm:  # the sampler computes as the learner does, and keeps them
        always |= copies
        copies = {}
    if shards > 1:
        phases["load"]["a part of the model before it is cut"] = master * facts.gathered_parameters
        copies = {"weights of two layers and the head, gathered": master * facts.gathered_parameters, **copies}

    decoding = {phase: _decoding(config, facts, prompt_tokens, count, vllm, gpu_bytes) for phase, count in rows.items()}
    if vllm:
        phases["load"] |= next(iter(decoding.values()), {})
    phases |= {"generate": decoding["generate"]} if "generate" in rows else {}
    head = _head(config, facts, master, compute)
    if config.beta or config.updates_per_step * config.epochs > 1:
        layer = config.micro_batch_tokens * _layer(config, facts, master, compute)
        phases["logprob"] = {"activations of one layer": layer, **_logits(config, facts, compute), **copies}
    phases["update"] = {
        "gradients": state["gradients"],
        "activations": config.micro_batch_tokens * _activations(config, facts, master, compute),
        **head,
        **copies,
    }
    if config.device == "cpu" and passes.several:
        phases["update"]["kept by malloc of earlier passes"] = MALLOC_KEEPS * phases["update"]["activations"]
    if config.packing == "masked":
        # as booleans, and once more in the dtype that attention adds to its scores
        phases["update"]["mask of a packed row"] = config.micro_batch_tokens**2 * (1 + compute)
    if vllm and never_sleeps(config):
        phases["update"] |= decoding.get("generate", {})
    elif config.device == "cpu" and "generate" in decoding:  # the store stays for the next step
        phases["update"]["KV cache"] = decoding["generate"]["KV cache"]
    phases["sync"] = {}
    if vllm:
        awake = decoding.get("generate", {}) if never_sleeps(config) else {"vLLM's weights": vllm_weights(config, facts)}
        phases["sync"] = {**awake, **_bucket(config, facts)}
    if shards > 1:
        bucket = min(config.sync_bucket_mb * 10**6, master * facts.num_parameters)
        largest = master * facts.vocab * facts.hidden  # is a bucket of its own
        phases["sync"]["a bucket of gathered weights, and what is handed on of it"] = 2 * max(bucket, largest)
    return phases | ({"evaluate": decoding["evaluate"]} if "evaluate" in rows else {})


def totals(phases: dict[str, dict[str, float]]) -> dict[str, float]:
    """Bytes of each phase of an ``estimate``, with what is always there."""
    always = sum(phases["always"].values())
    return {phase: sum(parts.values()) + (0 if phase in ("always", "load") else always) for phase, parts in phases.items()}


def _bucket(config: Config, facts: ModelFacts) -> dict[str, float]:
    """What adapters are merged into on their way to vLLM; other weights go as they are."""
    if not config.lora_rank:
        return {}
    return {"a bucket of merged weights": min(config.sync_bucket_mb * 10**6, vllm_weights(config, facts))}


def vllm_weights(config: Config, facts: ModelFacts) -> float:
    """Bytes of vLLM's own copy of the weights, in the compute dtype."""
    return _widths(config)[1] * facts.num_parameters / config.tensor_parallel_size


def kv_bytes(config: Config, facts: ModelFacts) -> int:
    """Keys and values of one token in the compute dtype."""
    return 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * _widths(config)[1]


def size(num_bytes: float) -> str:
    """In GB from 0.1 on, in MB below."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def _widths(config: Config) -> tuple[int, int]:
    """Bytes of a number in the master and in the compute dtype."""
    master = 8 if config.dtype == "float64" else 4
    return master, 2 if config.dtype == "bfloat16" else master


def _decoding(
    config: Config, facts: ModelFacts, prompt_tokens: float, count: int, vllm: bool, gpu_bytes: float | None
) -> dict[str, float]:
    compute = _widths(config)[1]
    cache = count * (prompt_tokens + config.max_new_tokens) * kv_bytes(config, facts)
    if not vllm:
        drawing = DRAWING_BYTES * min(count * facts.vocab, max(DRAWN_AT_ONCE, facts.vocab))
        return {"KV cache": cache, "logits of one position": count * facts.vocab * compute, "drawing from them": drawing}
    if config.device == "cpu":
        return {"vLLM's weights": vllm_weights(config, facts), "KV cache": VLLM_CPU_CACHE_BYTES}
    if gpu_bytes is not None and config.vllm_memory is not None:
        return {"vLLM": config.vllm_memory * gpu_bytes}
    return {
        "vLLM's weights": vllm_weights(config, facts),
        "vLLM's activations": VLLM_WORKSPACE_BYTES,
        "KV cache": cache / config.tensor_parallel_size,
    }


def _layer(config: Config, facts: ModelFacts, master: int, compute: int) -> int:
    """Bytes of a token inside one layer. The residual stream and the rotary embedding stay in the master dtype."""
    q, kv = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    # Inputs and insides of two norms, what they feed; q k v and attention's output; the MLP's inner vectors.
    layer = 4 * facts.hidden * master + (2 * facts.hidden + 2 * q + 2 * kv + 4 * facts.intermediate) * compute
    return layer + ((q + kv) * master if compute < master else 0)


def _activations(config: Config, facts: ModelFacts, master: int, compute: int) -> int:
    """Bytes kept of a token for the backward pass."""
    layer = _layer(config, facts, master, compute)
    # One layer at a time is computed again, from its input.
    return facts.num_layers * facts.hidden * master + layer if config.gradient_checkpointing else facts.num_layers * layer


def _logits(config: Config, facts: ModelFacts, compute: int) -> dict[str, float]:
    triton = config.device == "cuda" and config.kernels != "off"
    logits = config.micro_batch_tokens * facts.vocab * (compute if triton else max(4, compute))
    chunk = min(HEAD_CHUNK_BYTES[config.device], logits)
    return {"a chunk of logits": chunk} if triton else {"a chunk of logits, and as much twice over to work on it": 3 * chunk}


def _head(config: Config, facts: ModelFacts, master: int, compute: int) -> dict[str, float]:
    at_work = _logits(config, facts, compute)
    if config.lora_rank:
        return at_work
    # Summed over the chunks beside the logits; they are gone when the backward pass multiplies it by the upstream gradient.
    gradient = master * facts.hidden * facts.vocab
    if gradient > sum(at_work.values()):
        at_work = {"the head's gradient once more, multiplied": gradient}
    return {"the head's gradient as it is formed": gradient, **at_work}
