"""Log-prob of each token and entropy of its distribution, streamed in chunks of tokens; no gradients.

Letters: T tokens, V vocabulary, D hidden, c tokens of a chunk.

Formula, token t with hidden state h and target y:
    raw = h W^T + b        z = softcap(scale raw) / temperature,   softcap(x) = cap tanh(x / cap)
    logp = z_y - log sum e^z        entropy = log sum e^z - sum softmax(z) z

Gradient: none (reference policy, old log-probs, sync check). The gradient of the same logits is in policy_head.

Bytes moved in fp32: reads 4 T D + 4 V D per chunk, writes 8 T; the logits, 4 c V at a time, never exist whole.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Default size of one chunk's logits: large enough for full matmul speed, small beside any model."""


class Head(NamedTuple):
    """How a model turns hidden states into the logits that are sampled from, its weight and bias apart."""

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None  # rows of the weight beyond it are padding and take no probability


class Distribution(NamedTuple):
    """probs_cV: softmax of the logits. logp_c, entropy_c: [c], of the targets.
    slope_cV: d z / d raw beyond the constant factor scale / temperature, None without a soft-cap.
    """

    probs_cV: Tensor
    logp_c: Tensor
    entropy_c: Tensor
    slope_cV: Tensor | None


def compute_dtype(hidden_TD: Tensor) -> torch.dtype:
    """fp64 stays fp64; everything else is computed in fp32."""
    return torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32


def check_shapes(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> None:
    """Refuse logits passed as hidden states and targets of another length.

    Raises:
        ValueError: naming the shapes.
    """
    if hidden_TD.ndim != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden states of shape {tuple(hidden_TD.shape)} do not fit an output weight of shape {tuple(weight_VD.shape)}: "
            "pass [tokens, hidden] states from before the head, not logits"
        )
    if len(targets_T) != len(hidden_TD):
        raise ValueError(f"{len(targets_T)} targets for {len(hidden_TD)} hidden states: each state needs the id it predicts")


def chunks(num_tokens: int, vocab_size: int, itemsize: int, chunk_bytes: int) -> Iterator[slice]:
    """Slices of the tokens whose logits stay within ``chunk_bytes`` (one token at least); no tokens are one empty slice."""
    size = max(1, chunk_bytes // (vocab_size * itemsize))
    return (slice(start, min(start + size, num_tokens)) for start in range(0, max(num_tokens, 1), size))


def distribution_ref(
    hidden_cD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_c: Tensor, head: Head
) -> Distribution:
    """Logits of one chunk and what follows from them; hidden and weight are already in the dtype to compute in."""
    z_cV = hidden_cD @ weight_VD.T
    if bias_V is not None:
        z_cV += bias_V
    if head.logit_scale != 1.0:
        z_cV *= head.logit_scale
    slope_cV = None
    if head.softcap is not None:
        z_cV.div_(head.softcap).tanh_()
        slope_cV = 1 - z_cV.square()
        z_cV *= head.softcap
    if head.temperature != 1.0:
        z_cV /= head.temperature
    z_cV -= z_cV.amax(-1, keepdim=True)
    target_c = z_cV.gather(-1, targets_c[:, None])[:, 0]
    # exp is 0 there in every dtype, while 0 * -inf in the entropy would be NaN.
    z_cV.clamp_(min=-1e4)
    probs_cV = z_cV.exp()
    total_c = probs_cV.sum(-1)
    log_total_c = total_c.log()
    entropy_c = (log_total_c - torch.linalg.vecdot(probs_cV, z_cV) / total_c).clamp_(0, math.log(z_cV.shape[1]))
    probs_cV /= total_c[:, None]
    return Distribution(probs_cV, target_c - log_total_c, entropy_c, slope_cV)


@torch.no_grad()
def token_logprob_ref(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, head: Head, bias_V: Tensor | None, chunk_bytes: int
) -> tuple[Tensor, Tensor]:
    """Plain torch twin of ``token_logprob``, any dtype."""
    check_shapes(hidden_TD, weight_VD, targets_T)
    dtype = compute_dtype(hidden_TD)
    weight_VD = weight_VD[: head.vocab_size].to(dtype)
    bias_V = None if bias_V is None else bias_V[: head.vocab_size].to(dtype)
    logp_T = torch.empty(len(hidden_TD), dtype=dtype, device=hidden_TD.device)
    entropy_T = torch.empty_like(logp_T)
    for part in chunks(len(hidden_TD), len(weight_VD), dtype.itemsize, chunk_bytes):
        found = distribution_ref(hidden_TD[part].to(dtype), weight_VD, bias_V, targets_T[part], head)
        logp_T[part], entropy_T[part] = found.logp_c, found.entropy_c
    return logp_T, entropy_T


def token_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    temperature: float = 1.0,
    *,
    bias_V: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, without gradients.

    Args:
        hidden_TD: [T, D], states that predict the targets.
        weight_VD: [V, D], the output embedding.
        targets_T: int64 [T].
        temperature: divides the logits, as in the sampler.
        bias_V: [V] or None.
        logit_scale, softcap: the model's own transform of its logits, scale first.
        vocab_size: rows of the weight from here on are padding.
        chunk_bytes: size of the logits held at a time.

    Returns:
        logp_T, entropy_T: [T] in fp32 (fp64 for fp64 states), nats.

    Raises:
        ValueError: states and weight do not fit.
    """
    head = Head(temperature, logit_scale, softcap, vocab_size)
    return token_logprob_ref(hidden_TD, weight_VD, targets_T, head, bias_V, chunk_bytes)
