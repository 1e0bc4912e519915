"""The sweeps over one row of logits, on logits given as they are."""

import inspect
import math
import os
import subprocess
import sys

import pytest
import torch
from rounding import assert_within, softmax_errors, swept_terms

from vipfast.kernels import logit_rows
from vipfast.kernels.launch import launch, tl, triton
from vipfast.kernels.logit_rows import (
    Head,
    chunk_budget,
    chunks,
    clear_row,
    operands,
    row_arguments,
    row_entropy,
    row_statistics,
    target_logp,
    write_gradient,
)
from vipfast.kernels.policy_head import policy_head_kernel
from vipfast.kernels.token_logprob import token_logprob_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = math.inf, math.nan


@triton.jit
def sweep_kernel(
    p_logits, p_bias, p_target, p_g, p_found, num_rows, stride, num_vocab,
    inner: tl.float64, outer: tl.float64,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    inner, outer = tl.full((), inner, p_g.dtype.element_ty), tl.full((), outer, p_g.dtype.element_ty)
    i_T = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_T * stride
    i_y, g = tl.load(p_target + i_T), tl.load(p_g + i_T)
    top, total, moment = row_statistics(p_row, p_bias, stride, num_vocab, inner, outer, HAS_BIAS, HAS_SOFTCAP, BV)
    logp = target_logp(p_row, p_bias, i_y, num_vocab, top, total, inner, outer, HAS_BIAS, HAS_SOFTCAP)
    tl.store(p_found + i_T, logp)
    tl.store(p_found + num_rows + i_T, row_entropy(num_vocab, total, moment))
    tl.debug_barrier()
    if g == 0:
        clear_row(p_row, stride, num_vocab, BV)
    else:
        write_gradient(
            p_row, p_bias, i_y, g, top, total, stride, num_vocab, inner, outer, HAS_BIAS, HAS_SOFTCAP, BV
        )  # fmt: skip


def swept(logits, targets, g=None, head=Head(), block_bytes=256):  # noqa: B008 - immutable
    """(logp, entropy, gradient of sum g logp) of rows of logits, padded as the launchers pad them; tiles of 256 bytes."""
    logits = torch.as_tensor(logits).to(DEVICE)
    n, V = logits.shape
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    g = torch.ones(n) if g is None else torch.as_tensor(g)
    buffer = torch.empty(n, triton.cdiv(V, 64) * 64, dtype=logits.dtype, device=DEVICE)[:, :V]
    buffer[:] = logits
    found = torch.empty(2, n, dtype=wide, device=DEVICE)
    old, logit_rows.BLOCK_BYTES = logit_rows.BLOCK_BYTES, block_bytes
    numbers, switches = row_arguments(logit_rows.Operands(None, None, None, buffer, []), head)
    logit_rows.BLOCK_BYTES = old
    targets = torch.as_tensor(targets, device=DEVICE)
    launch(sweep_kernel, n, buffer, None, targets, g.to(DEVICE, wide), found, n, *numbers, **switches)
    return found[0].cpu(), found[1].cpu(), buffer.cpu()


def expected(logits, targets, g, scale=1.0, softcap=None, temperature=1.0):
    """The same in float64 by autograd."""
    raw = torch.as_tensor(logits).double().requires_grad_()
    z = raw * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    logp = torch.log_softmax(z / temperature, -1)
    target = logp.gather(1, torch.as_tensor(targets)[:, None])[:, 0]
    (draw,) = torch.autograd.grad(target, raw, torch.as_tensor(g, dtype=torch.float64))
    return target.detach(), -(logp.exp() * logp).sum(-1).detach(), draw


def test_known_answer():
    # logits 0, 0, ln 2 -> probabilities 1/4, 1/4, 1/2: entropy 1.5 ln 2; d logp of the last = onehot - softmax
    logp, entropy, draw = swept(torch.tensor([[0.0, 0.0, math.log(2)]]), [2], [2.0])
    # an exponential and a few more roundings of float32, 1e-7 each
    assert [logp.item(), entropy.item()] == pytest.approx([math.log(0.5), 1.5 * math.log(2)], abs=3e-6)
    assert draw.tolist() == [pytest.approx([-0.5, -0.5, 1.0], abs=3e-6)]


@pytest.mark.parametrize("V", [1, 2, 7, 37, 507])
@pytest.mark.parametrize("transform", [{}, dict(temperature=0.6), dict(scale=2.0, softcap=3.0, temperature=1.7)], ids=str)
def test_equals_float64(V, transform):
    rng = torch.Generator().manual_seed(V)
    logits, targets = torch.randn(2, V, generator=rng, dtype=torch.float64) * 3, torch.tensor([V - 1, V // 2])
    head = Head(transform.get("temperature", 1.0), transform.get("scale", 1.0), transform.get("softcap"))
    g = torch.tensor([1.5, -0.5])
    block_bytes = 1024 if V > 100 else 256  # several tiles, the last one in part
    for found, exact in zip(swept(logits, targets, g, head, block_bytes), expected(logits, targets, g, **transform)):
        assert torch.allclose(found, exact, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tile_without_any_possible_token(dtype):
    """The first tile is all -inf, and so is all but one token of the second."""
    logits = torch.full((2, 300), -INF, dtype=dtype)
    logits[0, 200], logits[1, 250:252] = 3.0, 1.0
    logp, entropy, draw = swept(logits, [200, 0], block_bytes=256)
    assert logp.tolist() == [0, -INF] and entropy.tolist() == pytest.approx([0, math.log(2)])
    assert draw[0].abs().max() == 0 and draw[1].isfinite().all() and draw[1].nonzero()[:, 0].tolist() == [0, 250, 251]


def test_extremes_of_half_precision():
    logits = torch.tensor([[65504, -65504, 0], [-65504, -65504, -65504], [65504, 65504, -65504]], dtype=torch.float16)
    logp, entropy, draw = swept(logits, [0, 1, 2])
    assert logp.tolist() == pytest.approx([0, -math.log(3), -131008 - math.log(2)])
    assert entropy.tolist() == pytest.approx([0, math.log(3), math.log(2)]) and draw.isfinite().all()


def test_many_small_probabilities_are_not_lost():
    logits = torch.full((1, 1001), -7.0, dtype=torch.float16)  # summed in fp16 they would be
    logits[0, 500] = 0.0
    logp, entropy, _ = swept(logits, [500], block_bytes=1024)
    errors = softmax_errors(logits.double(), torch.tensor([500]), 0.0, swept_terms(1001, 512))
    for found, exact, error in zip((logp, entropy), expected(logits, [500], [1.0]), errors[:2]):
        assert_within(found, exact, error)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, under the interpreter
def test_what_is_undefined_is_nan():
    logits = torch.zeros(5, 40)
    logits[0, 3], logits[1, 3], logits[2] = NAN, INF, -INF
    logp, entropy, draw = swept(logits, [0, 0, 0, 40, -1])
    assert logp.isnan().all() and entropy[:3].isnan().all() and draw[:3].isnan().any(1).all()
    assert entropy[3:].tolist() == pytest.approx([math.log(40)] * 2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, under the interpreter
def test_a_zero_upstream_clears_the_row_whatever_it_held():
    logits = torch.full((2, 37), NAN)
    assert swept(logits, [0, 0], [0.0, 1.0])[2].isnan().any(1).tolist() == [False, True]
    assert swept(logits, [0, 0], [0.0, 1.0])[2][0].tolist() == [0.0] * 37


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_equals_the_row_among_others_bit_for_bit(dtype):
    logits = (torch.randn(3, 70, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    whole = swept(logits, [3, 69, 0])
    for i, target in enumerate([3, 69, 0]):
        alone = swept(logits[i : i + 1], [target])
        assert all(torch.equal(a[i], b[0]) for a, b in zip(whole, alone))


@pytest.mark.parametrize("seed, V", list(enumerate([1, 1, 2, 3, 8, 9, 16, 31, 33, 57, 64, 80])))
@pytest.mark.parametrize("size", [0.01, 5.0, 300.0])
def test_bounds(seed, V, size):
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(seed)) * size
    logp, entropy, draw = swept(logits, [0, V - 1])
    assert (logp <= 0).all() and (entropy >= 0).all() and (entropy <= math.log(V) + 1e-6).all()
    assert draw.sum(1).abs().max() <= 1e-5 and draw.abs().max() <= 1 + 1e-6


def test_lengths_and_numbers_are_no_constants_of_the_compiler():
    for kernel in (token_logprob_kernel, policy_head_kernel):
        parameters = inspect.signature(kernel.fn).parameters.values()
        constants = {p.name for p in parameters if p.annotation is tl.constexpr}
        assert constants <= {"HAS_BIAS", "HAS_SOFTCAP", "BV", "WRITES"}


def test_chunks_cover_the_tokens_within_the_budget():
    assert list(chunks(0, 100, 4, 1)) == [slice(0, 0)]
    assert list(chunks(5, 100, 4, 800)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(chunks(3, 100, 4, 1)) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    # 1.25e9 bytes hold 4 113 rows of 151 936 bf16: 32 tiles of 128 rows and 17 more, which are left out
    assert chunk_budget(None, torch.device("cuda")) == 1_250_000_000
    assert [cut.stop - cut.start for cut in chunks(8192, 151936, 2, 1_250_000_000)] == [4096, 4096]


def test_the_buffer_is_aligned_and_within_the_budget():
    hidden, weight = torch.zeros(1000, 3, dtype=torch.bfloat16), torch.zeros(507, 3)
    ready = operands(hidden, weight, None, Head(vocab_size=505), 300_000)
    assert ready.logits_cV.shape == (256, 505) and ready.logits_cV.stride() == (512, 1)
    assert ready.logits_cV.untyped_storage().nbytes() == 256 * 512 * 2 <= 300_000
    assert ready.weight_VD.shape == (505, 3) and ready.weight_VD.dtype == torch.bfloat16


GIANT = """
import os, sys, torch
from vipfast.kernels import policy_head as head, token_logprob as logprob
from vipfast.types import StepPlan
import numpy as np

device = "cuda" if torch.cuda.is_available() else "cpu"
S, V, D = 1_200_000_000, 5, 3
giant = torch.empty(2 * S + 64, dtype=torch.bfloat16, device=device).as_strided((3, V), (S, 1))
rng = torch.Generator().manual_seed(0)
hidden, weight = (torch.randn(n, D, generator=rng).to(device, torch.bfloat16).requires_grad_() for n in (3, V))
targets = torch.tensor([4, 0, 2], device=device)
rule = dict(weight_R=np.ones(2), estimator="rloo", clip_low=0.2, clip_high=0.28, beta=0.0)

def results():
    found = head.policy_head(
        hidden, weight, targets, np.array([1.0, 0.0]), np.array([0, 2]), StepPlan.plain([np.array([2])]), np.arange(2),
        np.array([0, 1, 3]), torch.zeros(3, device=device), backend="triton", **rule,
    )
    grads = torch.autograd.grad(found.loss, (hidden, weight))
    return *logprob.token_logprob(hidden, weight, targets, backend="triton"), found.logp_T, *grads

near = results()
for module in (head, logprob):
    module.operands = lambda *args, operands=module.operands: operands(*args)._replace(logits_cV=giant)
far = results()
assert all(torch.equal(a, b) for a, b in zip(near, far)) and near[-1].abs().max() > 0.01
assert giant[2].abs().max() > 0.001
"""


def test_rows_beyond_two_to_the_31_elements():
    """Rows of the buffer lie 1.2e9 elements apart, in memory that is only promised; a 32-bit offset dies or misses."""
    done = subprocess.run(
        [sys.executable, "-c", GIANT], capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS="1")
    )
    assert done.returncode == 0, done.stderr[-2000:]
