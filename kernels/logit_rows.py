"""Rows of logits, a chunk of tokens at a time: how they are made, and the sweeps that read a row and turn it into a gradient.

Letters: T tokens, V vocabulary, D hidden, c tokens of a chunk.

Formula, token t with hidden state h and target y:
    raw = h W^T + b        z = softcap(scale raw) / temperature,   softcap(x) = cap tanh(x / cap)
    logp = z_y - log sum e^z        entropy = log sum e^z - sum softmax(z) z

Gradient, for g = d loss / d logp:
    d raw = g (onehot(y) - softmax(z)) slope scale / temperature     slope = 1 - tanh^2 with a soft-cap, else 1

Bytes moved in bf16: the first sweep reads 2 V a row, the second reads and writes 2 V; neither writes anything else of size V.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vipfast.kernels.launch import tl, triton

CHUNK_BYTES = 64 * 2**20
"""Default size of one chunk's logits on a CPU: large enough for full matmul speed, small beside any model."""

CUDA_CHUNK_BYTES = 1_250_000_000
"""The same on CUDA, where a matmul needs thousands of tokens to reach full speed: 4 096 of them at V = 151 936 in bf16."""

CHUNK_MULTIPLE = 128
"""Larger chunks hold a multiple of this many tokens, the tile of a matmul: one token more would cost a row of tiles."""


class Head(NamedTuple):
    """How a model turns hidden states into the logits that are sampled from, its weight and bias apart."""

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None  # rows of the weight beyond it are padding and take no probability


CACHE_BYTES = 2**20
"""Logits that a CPU takes at a time: every pass over them but the first finds them in its cache."""


class Distribution(NamedTuple):
    """mass_cV: e^(z - max z); total_c: its sum, so that softmax is mass / total. target_c1: [c, 1], the targets, 0 for an id
    outside the vocabulary. logp_c, entropy_c: [c]; logp is that of the targets, NaN for such an id.
    slope_cV: d z / d raw beyond the constant factor scale / temperature, None without a soft-cap.
    """

    mass_cV: Tensor
    total_c: Tensor
    target_c1: Tensor
    logp_c: Tensor
    entropy_c: Tensor
    slope_cV: Tensor | None


def compute_dtype(hidden_TD: Tensor) -> torch.dtype:
    """fp64 stays fp64; everything else is computed in fp32."""
    return torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32


def check_inputs(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_T: Tensor) -> None:
    """Refuse logits passed as hidden states, targets or a bias of another length, and a sharded weight.

    Raises:
        ValueError: naming the shapes, or the remedy.
    """
    # Of all tensors only a DTensor has a mesh; asking by type would import torch.distributed.tensor for everybody.
    if hasattr(weight_VD, "device_mesh"):
        raise ValueError(
            "the output weight is a DTensor, a shard of the whole: call this inside the forward of the module that owns the "
            "weight, where FSDP2 has gathered it, or pass weight.full_tensor()"
        )
    if hidden_TD.ndim != 2 or weight_VD.ndim != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden states of shape {tuple(hidden_TD.shape)} do not fit an output weight of shape {tuple(weight_VD.shape)}: "
            "pass [tokens, hidden] states from before the head, not logits"
        )
    if len(targets_T) != len(hidden_TD):
        raise ValueError(f"{len(targets_T)} targets for {len(hidden_TD)} hidden states: each state needs the id it predicts")
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise ValueError(
            f"a bias of shape {tuple(bias_V.shape)} for an output weight of {len(weight_VD)} rows: pass one per row"
        )


def chunk_budget(chunk_bytes: int | None, device: torch.device) -> int:
    """Bytes of logits held at once; None is the device's default."""
    if chunk_bytes is None:
        return CUDA_CHUNK_BYTES if device.type in ("cuda", "meta") else CHUNK_BYTES
    return chunk_bytes


def chunks(num_tokens: int, vocab_size: int, itemsize: int, chunk_bytes: int) -> Iterator[slice]:
    """Slices of the tokens whose logits stay within ``chunk_bytes`` (one token at least); no tokens are one empty slice."""
    size = max(1, chunk_bytes // (vocab_size * itemsize))
    if size > CHUNK_MULTIPLE:
        size -= size % CHUNK_MULTIPLE
    return (slice(start, min(start + size, num_tokens)) for start in range(0, max(num_tokens, 1), size))


def distribution_ref(
    hidden_cD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_c: Tensor, head: Head, logits_cV: Tensor
) -> Distribution:
    """Logits of one chunk, written to a buffer and turned into mass_cV there, and what follows from them; all arguments are
    in the dtype to compute in.
    """
    torch.mm(hidden_cD, weight_VD.T, out=logits_cV)
    c, V = logits_cV.shape
    size = max(1, CACHE_BYTES // (V * logits_cV.itemsize)) if logits_cV.device.type == "cpu" else max(1, c)
    shifted, slope_cV = logits_cV.new_empty(min(size, c), V), None if head.softcap is None else torch.empty_like(logits_cV)
    score_c, total_c, moment_c = logits_cV.new_empty(3, c)
    known_c = (targets_c >= 0) & (targets_c < V)
    target_c1 = torch.where(known_c, targets_c, 0)[:, None]
    for start in range(0, c, size):
        cut = slice(start, min(start + size, c))
        z_nV = logits_cV[cut]
        if bias_V is not None:
            z_nV += bias_V
        if head.logit_scale != 1.0:
            z_nV *= head.logit_scale
        if head.softcap is not None:
            z_nV.div_(head.softcap).tanh_()
            torch.sub(1, z_nV.square(), out=slope_cV[cut])
            z_nV *= head.softcap
        if head.temperature != 1.0:
            z_nV /= head.temperature
        shifted_nV = torch.sub(z_nV, z_nV.amax(-1, keepdim=True), out=shifted[: len(z_nV)])
        score_c[cut] = shifted_nV.gather(-1, target_c1[cut])[:, 0]
        # exp is 0 there in every dtype, while 0 * -inf in the entropy would be NaN.
        shifted_nV.clamp_(min=-1e4)
        mass_nV = torch.exp(shifted_nV, out=z_nV)
        total_c[cut] = mass_nV.sum(-1)
        moment_c[cut] = torch.bmm(mass_nV[:, None], shifted_nV[:, :, None])[:, 0, 0]  # a dot product that stores no product
    log_total_c = total_c.log()
    entropy_c = (log_total_c - moment_c / total_c).clamp_(0, math.log(V))
    logp_c = torch.where(known_c, score_c - log_total_c, math.nan)
    return Distribution(logits_cV, total_c, target_c1, logp_c, entropy_c, slope_cV)


LOWEST = tl.constexpr(-1e30)
"""Stands for scores of minus infinity: far below every score, and differences with it stay finite."""

LN2 = tl.constexpr(0.6931471805599453)
VECTOR = tl.constexpr(8)
"""Neighbouring columns that one thread reads at once: 16 bytes in bf16."""

BLOCK_BYTES, NUM_WARPS = 16384, 16
"""A tile is two loads of 16 bytes for each of 512 threads; with STAGES two tiles are on their way while a third is used."""

STAGES = tl.constexpr(3)


@triton.jit
def squash(b_x):
    """tanh, which the interpreter lacks."""
    b_e = tl.exp2(tl.abs(b_x) * (-2 / LN2))
    b_t = (1 - b_e) / (1 + b_e)
    return tl.where(b_x < 0, -b_t, b_t)


@triton.jit
def scores(b_raw, p_bias, o_V, m_V, inner, outer, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """z / ln 2 of raw logits, so that e^z is a bare exp2, and d z / d raw beyond its constant factor."""
    if HAS_BIAS:
        b_raw += tl.load(p_bias + o_V, mask=m_V, other=0).to(b_raw.dtype)
    if HAS_SOFTCAP:
        b_t = squash(b_raw * inner)
        return b_t * outer, 1 - b_t * b_t
    else:
        return b_raw * outer, tl.full(b_raw.shape, 1, b_raw.dtype)


@triton.jit
def tile_scores(
    p_row, p_bias, start, stride, num_vocab, inner, outer,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Offsets [BV / VECTOR, VECTOR] of a tile of columns, their scores and slopes; anything beyond the vocabulary.

    A row may be read to the end of its stride, which keeps every load whole where num_vocab is odd.
    """
    o_V = start + tl.arange(0, BV // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    b_raw = tl.load(p_row + o_V, mask=o_V < stride, other=0).to(outer.dtype)
    b_z, b_slope = scores(b_raw, p_bias, o_V, o_V < num_vocab, inner, outer, HAS_BIAS, HAS_SOFTCAP)
    return o_V, b_z, b_slope


@triton.jit
def row_statistics(
    p_row, p_bias, stride, num_vocab, inner, outer,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One sweep over a row: the top score, total = sum 2^(score - top), moment = sum 2^(score - top) (score - top).

    Every group of VECTOR columns keeps a top of its own until the end, so no thread waits for another's numbers on the way.
    """
    b_top = tl.full((BV // VECTOR,), LOWEST, outer.dtype)
    b_total = tl.full((BV // VECTOR,), 0, outer.dtype)
    b_moment = tl.full((BV // VECTOR,), 0, outer.dtype)
    for start in tl.range(0, num_vocab, BV, num_stages=STAGES):
        o_V, b_z, _ = tile_scores(p_row, p_bias, start, stride, num_vocab, inner, outer, HAS_BIAS, HAS_SOFTCAP, BV)
        if start + BV > num_vocab:
            b_z = tl.where(o_V < num_vocab, b_z, LOWEST)
        # A NaN stays one: it is the only sign of what went wrong.
        b_z = tl.maximum(b_z, LOWEST, propagate_nan=tl.PropagateNan.ALL)
        b_new = tl.maximum(b_top, tl.max(b_z, 1))
        b_shift, b_z = b_top - b_new, b_z - b_new[:, None]
        b_keep, b_e = tl.exp2(b_shift), tl.exp2(b_z)
        b_moment = b_keep * (b_moment + b_shift * b_total) + tl.sum(b_e * b_z, 1)
        b_total = b_keep * b_total + tl.sum(b_e, 1)
        b_top = b_new
    top = tl.max(b_top, 0)
    b_shift = b_top - top
    b_keep = tl.exp2(b_shift)
    moment = tl.sum(b_keep * (b_moment + b_shift * b_total), 0)
    # No possible token at all: softmax is not defined.
    total = tl.where(top > LOWEST, tl.sum(b_keep * b_total, 0), float("nan"))
    return top, total, moment


@triton.jit
def target_logp(p_row, p_bias, i_y, num_vocab, top, total, inner, outer, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Log-prob of token i_y; NaN for an id outside the vocabulary."""
    m_y = (i_y >= 0) & (i_y < num_vocab)
    raw = tl.load(p_row + i_y, mask=m_y, other=float("nan")).to(outer.dtype)
    z, _ = scores(raw, p_bias, i_y, m_y, inner, outer, HAS_BIAS, HAS_SOFTCAP)
    logp = (z - top) * LN2 - tl.log(total)
    return tl.where(logp > 0, 0.0, logp)


@triton.jit
def row_entropy(num_vocab, total, moment):
    """Both terms are >= 0: nothing cancels, however peaked the softmax."""
    entropy, limit = tl.log(total) - moment / total * LN2, tl.log(tl.full((), num_vocab, total.dtype))
    return tl.where(entropy > limit, limit, entropy)


@triton.jit
def write_gradient(
    p_row, p_bias, i_y, g, top, total, stride, num_vocab, inner, outer,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Overwrite a row of raw logits by their gradient, from its end, which the first sweep left in the L2 cache.

    Columns beyond the vocabulary, which no matmul reads, are left with anything.
    """
    num_tiles = (num_vocab + BV - 1) // BV
    g *= inner * outer * LN2
    share = -g / total
    for i in tl.range(0, num_tiles, num_stages=STAGES):
        start = (num_tiles - 1 - i) * BV
        o_V, b_z, b_slope = tile_scores(p_row, p_bias, start, stride, num_vocab, inner, outer, HAS_BIAS, HAS_SOFTCAP, BV)
        b_draw = tl.exp2(b_z - top) * share
        if (i_y >= start) & (i_y < start + BV):
            b_draw += tl.where(o_V == i_y, g, 0.0)
        b_draw *= b_slope
        tl.store(p_row + o_V, b_draw.to(p_row.dtype.element_ty), mask=o_V < stride)


@triton.jit
def clear_row(p_row, stride, num_vocab, BV: tl.constexpr):
    for start in range(0, num_vocab, BV):
        o_V = start + tl.arange(0, BV)
        tl.store(p_row + o_V, tl.full((BV,), 0, p_row.dtype.element_ty), mask=o_V < stride)


class Operands(NamedTuple):
    """What the library multiplies, detached and of one dtype, without padding rows; the buffer of its logits; the chunks."""

    hidden_TD: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    logits_cV: Tensor
    cuts: list[slice]


def operands(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, head: Head, chunk_bytes: int | None) -> Operands:
    """The weight is cast once. Rows of the buffer start at multiples of 64 elements: matrix units want that, whatever V is."""

    def regular(x: Tensor) -> Tensor:  # the library copies anything else at every chunk
        return x if 1 in x.stride() else x.contiguous()

    hidden_TD, weight_VD = hidden_TD.detach(), weight_VD.detach()[: head.vocab_size].to(hidden_TD.dtype)
    bias_V = None if bias_V is None else bias_V.detach()[: head.vocab_size].contiguous()
    V, dtype, device = len(weight_VD), hidden_TD.dtype, hidden_TD.device
    stride = triton.cdiv(V, 64) * 64
    cuts = list(chunks(len(hidden_TD), stride, dtype.itemsize, chunk_budget(chunk_bytes, device)))
    logits_cV = torch.empty(cuts[0].stop, stride, dtype=dtype, device=device)[:, :V]
    return Operands(regular(hidden_TD), regular(weight_VD), bias_V, logits_cV, cuts)


def row_arguments(ready: Operands, head: Head) -> tuple[tuple, dict[str, Any]]:
    """The last arguments of every kernel that sweeps over rows of logits, and what it is compiled for.

    inner and outer: z / ln 2 = outer raw, with a soft-cap outer tanh(inner raw).
    """
    stride, V = ready.logits_cV.stride(0), ready.logits_cV.shape[1]
    inner, outer = 1.0, head.logit_scale
    if head.softcap is not None:
        inner, outer = head.logit_scale / head.softcap, head.softcap
    BV = max(VECTOR.value, min(BLOCK_BYTES // ready.logits_cV.itemsize, triton.next_power_of_2(V)))
    switches = dict(HAS_BIAS=ready.bias_V is not None, HAS_SOFTCAP=head.softcap is not None, BV=BV, num_warps=NUM_WARPS)
    return (stride, V, inner, outer * math.log2(math.e) / head.temperature), switches
