"""Log-prob of each token and entropy of its distribution, streamed in chunks of tokens; no gradients.

Letters: T tokens, V vocabulary, D hidden, c tokens of a chunk.

Formula: logp and entropy of logit_rows.

Gradient: none (reference policy, old log-probs, sync check). The gradient of the same logits is in policy_head.

Bytes moved in bf16, chunk by chunk: the matmul reads 2 c D + 2 V D and writes 2 c V; the pass reads 2 c V and writes 8 c. The
logits, c V at a time, never exist whole. With Triton the matmul is the library's and the pass is one program per token.
"""

import torch
from torch import Tensor

from vipfast.kernels.launch import backend_of, launch, tl, triton
from vipfast.kernels.logit_rows import (
    Head,
    check_inputs,
    chunk_budget,
    chunks,
    compute_dtype,
    distribution_ref,
    operands,
    row_arguments,
    row_entropy,
    row_statistics,
    target_logp,
)


@torch.no_grad()
def token_logprob_ref(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, head: Head, bias_V: Tensor | None, chunk_bytes: int | None
) -> tuple[Tensor, Tensor]:
    """Plain torch twin of ``token_logprob``, any dtype."""
    dtype = compute_dtype(hidden_TD)
    weight_VD = weight_VD[: head.vocab_size].to(dtype)
    bias_V = None if bias_V is None else bias_V[: head.vocab_size].to(dtype)
    logp_T = torch.empty(len(hidden_TD), dtype=dtype, device=hidden_TD.device)
    entropy_T = torch.empty_like(logp_T)
    cuts = list(chunks(len(hidden_TD), len(weight_VD), dtype.itemsize, chunk_budget(chunk_bytes, hidden_TD.device)))
    logits_cV = torch.empty(cuts[0].stop, len(weight_VD), dtype=dtype, device=hidden_TD.device)
    for part in cuts:
        hidden_cD = hidden_TD[part].to(dtype)
        found = distribution_ref(hidden_cD, weight_VD, bias_V, targets_T[part], head, logits_cV[: len(hidden_cD)])
        logp_T[part], entropy_T[part] = found.logp_c, found.entropy_c
    return logp_T, entropy_T


@triton.jit(do_not_specialize_on_alignment=["p_target", "p_logp", "p_entropy"])
def token_logprob_kernel(
    p_logits, p_bias, p_target, p_logp, p_entropy, stride, num_vocab,
    inner: tl.float64, outer: tl.float64,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program per token: log-prob of its target and entropy from its row of logits."""
    DTYPE: tl.constexpr = p_logp.dtype.element_ty
    inner, outer = tl.full((), inner, DTYPE), tl.full((), outer, DTYPE)
    i_T = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_T * stride
    top, total, moment = row_statistics(p_row, p_bias, stride, num_vocab, inner, outer, HAS_BIAS, HAS_SOFTCAP, BV)
    i_y = tl.load(p_target + i_T)
    logp = target_logp(p_row, p_bias, i_y, num_vocab, top, total, inner, outer, HAS_BIAS, HAS_SOFTCAP)
    tl.store(p_logp + i_T, logp)
    tl.store(p_entropy + i_T, row_entropy(num_vocab, total, moment))


@torch.no_grad()
def token_logprob_triton(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, head: Head, bias_V: Tensor | None, chunk_bytes: int | None
) -> tuple[Tensor, Tensor]:
    """Launcher: chunk by chunk, one matmul of the library into the buffer, one pass over it."""
    ready = operands(hidden_TD, weight_VD, bias_V, head, chunk_bytes)
    numbers, switches = row_arguments(ready, head)
    logp_T = torch.empty(len(hidden_TD), dtype=compute_dtype(hidden_TD), device=hidden_TD.device)
    entropy_T, targets_T = torch.empty_like(logp_T), targets_T.contiguous()
    for cut in ready.cuts:
        size = cut.stop - cut.start
        logits_cV = torch.mm(ready.hidden_TD[cut], ready.weight_VD.T, out=ready.logits_cV[:size])
        columns_c = (targets_T[cut], logp_T[cut], entropy_T[cut])
        launch(token_logprob_kernel, size, logits_cV, ready.bias_V, *columns_c, *numbers, **switches)
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
    chunk_bytes: int | None = None,
    backend: str | None = None,
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
        chunk_bytes: size of the logits held at a time; None is CHUNK_BYTES, on CUDA CUDA_CHUNK_BYTES.
        backend: "triton", "torch", or None for the device's own.

    Returns:
        logp_T, entropy_T: [T] in fp32 (fp64 for fp64 states), nats.

    Raises:
        ValueError: states and weight do not fit, the weight is a shard, or the backend cannot run here.
    """
    check_inputs(hidden_TD, weight_VD, bias_V, targets_T)
    run = token_logprob_triton if backend_of(backend, hidden_TD.device) == "triton" else token_logprob_ref
    return run(hidden_TD, weight_VD, targets_T, Head(temperature, logit_scale, softcap, vocab_size), bias_V, chunk_bytes)
