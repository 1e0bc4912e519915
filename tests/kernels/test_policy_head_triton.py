import math

import numpy as np
import pytest
import torch
from rounding import FEW, assert_within, logits_gradient, product_error, softmax_errors, stored, swept_terms, token_errors
from small_head import DEVICE, GROUPS, PLAN, REWARD, RULE, Case, of_scores

from vipfast.kernels import logit_rows
from vipfast.kernels import policy_head as module
from vipfast.kernels.launch import recorded
from vipfast.kernels.policy_head import add_product, fp16_gain, policy_head, policy_head_kernel
from vipfast.kernels.policy_loss import policy_loss, token_terms_ref
from vipfast.kernels.token_logprob import token_logprob
from vipfast.types import StepPlan

needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
TRANSFORMS = [{}, dict(temperature=0.6), dict(softcap=3.0), dict(logit_scale=4.0, softcap=2.0, temperature=1.5)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles even for small vocabularies."""
    monkeypatch.setattr(logit_rows, "BLOCK_BYTES", 512)


def close(a, b, tolerance=1e-12):
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tolerance)


def assert_rounded_once(case, watch_rows, chunk_bytes=None):
    """Every link from states to gradients, each from what the one before left: float32, rounded to the dtype once."""
    rows = watch_rows(module)
    found = case.fused(chunk_bytes=chunk_bytes)
    grads, logits, draw = case.grads(found.loss), torch.cat(rows.given), torch.cat(rows.left)
    h, w, b = (x.detach().double() for x in case.leaves)
    assert_within(logits, h @ w.T, product_error(h, w.T) + stored(h @ w.T, case.dtype))

    z, T = logits + b, len(h)
    errors = softmax_errors(z, case.targets, 0.0, swept_terms(case.V, rows.BV))
    exact_logp, exact_entropy = of_scores(z, case.targets)
    assert_within(found.logp_T, exact_logp, errors.logp_T)
    assert_within(found.entropy_T, exact_entropy, errors.entropy_T)

    logp, (sampler, old, ref, mask) = found.logp_T.double(), case.known()
    result = policy_loss(*case.step(), logp, sampler, old, ref, mask, **case.rule(), backend="torch")
    terms = token_terms_ref(*case.step(), mask, case.weight_R, case.rule()["estimator"], logp)
    token = token_errors(terms, logp, sampler, old, ref, clip_high=0.28, beta=case.beta)
    assert_within(found.loss, result.loss, token.loss.sum() + FEW * result.loss.abs())
    gain = fp16_gain(torch.from_numpy(case.weight_R)).item() if case.dtype == torch.float16 else 1.0
    exact, off = logits_gradient(z, case.targets, gain * result.dlogp_T, gain * token.dlogp, errors.relative_TV)
    assert_within(draw, exact, off + 2 * stored(exact, case.dtype))  # twice: the interpreter cuts what it makes bfloat16

    ones = torch.ones(1, T, dtype=torch.float64, device=DEVICE)
    sums = (draw @ w, draw.T @ h, (ones @ draw)[0])  # all products of bf16 are exact in float32
    offs = (product_error(draw, w), product_error(draw.T, h, T), product_error(ones, draw, T)[0])
    # gradients of the states are stored before they are scaled, and again after it
    for ours, exact, error, times in zip(grads, sums, offs, (2, 1, 1), strict=True):
        assert ours.dtype == case.dtype
        assert_within(ours, exact / gain, error / gain + times * stored(exact / gain, case.dtype))


def test_by_hand():
    """States 1, weights 0, 0, ln 2: probabilities 1/4, 1/4, 1/2. Rewards 1 and 0 of one prompt: advantages 1 and -1."""
    hidden = torch.ones(2, 1, device=DEVICE, requires_grad=True)
    weight = torch.tensor([[0.0], [0.0], [math.log(2)]], device=DEVICE, requires_grad=True)
    sampler = torch.tensor([math.log(0.5), math.log(0.25)], device=DEVICE)
    found = policy_head(
        hidden, weight, torch.tensor([2, 0], device=DEVICE), np.array([1.0, 0.0]), np.array([0, 2]),
        StepPlan.plain([np.array([2])]), np.arange(2), np.arange(3), sampler, backend="triton",
        **(RULE | dict(weight_R=np.full(2, 0.5), beta=0.0)),
    )  # fmt: skip
    found.loss.backward()
    # d loss / d logp = -1/2 and 1/2, so d logits = (1/8, 1/8, -1/4) and (3/8, -1/8, -1/4).
    assert found.loss.item() == pytest.approx(0, abs=1e-6) and found.ratio_T.tolist() == [1, 1]
    assert weight.grad[:, 0].tolist() == pytest.approx([0.5, 0, -0.5], abs=1e-6)
    assert hidden.grad[:, 0].tolist() == pytest.approx([-math.log(2) / 4] * 2, abs=1e-6)


@pytest.mark.parametrize("off_policy, beta", [(False, 0.0), (True, 0.1)])
@pytest.mark.parametrize("options", TRANSFORMS, ids=str)
def test_loss_sums_and_every_gradient_equal_dense_float64(options, off_policy, beta):
    case = Case(off_policy=off_policy, beta=beta, options=options, V=101)
    exact, logp, entropy, grads = case.expected()
    found = case.fused(chunk_bytes=8 * 128 * 4)
    assert all(close(a, b) for a, b in zip(case.grads(found.loss), grads)) and min(g.abs().max() for g in grads) > 1e-3
    assert close(found.loss, exact.loss) and close(found.logp_T, logp) and close(found.entropy_T, entropy)
    twin = case.fused("torch")
    assert close(found.ratio_T, twin.ratio_T) and not found.ratio_T.requires_grad and not found.logp_T.requires_grad
    assert found.sums.keys() == twin.sums.keys()
    assert all(x.item() == pytest.approx(twin.sums[name].item(), abs=1e-10) for name, x in found.sums.items())
    assert off_policy or found.ratio_T.tolist() == [1.0] * 9


def test_gradcheck():
    case = Case((1, 1, 0, 0, 0, 0, 0, 0), V=3, D=2)

    def loss(hidden, weight, bias):
        wide_clip = dict(clip_low=0.99, clip_high=1e3, bias_V=bias)
        options = case.rule() | wide_clip | dict(temperature=0.8)
        known = (case.sampler, case.old, case.ref)
        return policy_head(hidden, weight, case.targets, *case.step(), *known, backend="triton", **options).loss

    assert torch.autograd.gradcheck(loss, case.leaves, eps=1e-6, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize(
    "lengths, V, D, dtype, chunk_tokens",
    [
        ((3, 2, 1, 4, 3, 1, 1, 1), 507, 17, torch.float32, 32),
        ((3, 2, 1, 4, 3, 1, 1, 1), 507, 17, torch.bfloat16, 32),
        ((3, 2, 1, 4, 3, 1, 1, 1), 507, 17, torch.float16, 3),
        ((8, 8, 3, 5, 5, 2, 2, 3), 37, 5, torch.bfloat16, 1),
        pytest.param((100, 30, 20, 40, 15, 5, 5, 40), 7, 5, torch.bfloat16, 32, marks=needs_gpu),  # 16 s in the interpreter
    ],
)
def test_every_link_is_float32_and_rounded_once(watch_rows, lengths, V, D, dtype, chunk_tokens):
    assert_rounded_once(Case(lengths, V=V, D=D, dtype=dtype), watch_rows, chunk_tokens * -(-V // 64) * 64 * dtype.itemsize)


def test_a_token_that_is_certain_moves_nothing():
    case = Case((1, 0, 0, 0, 0, 0, 0, 0), V=1, D=3, dtype=torch.float32)
    assert all(g.abs().max() == 0 and g.dtype == torch.float32 for g in case.grads(case.fused().loss))


def test_a_thousand_products_are_added_without_rounding():
    g = torch.Generator().manual_seed(0)
    left, right = (torch.randn(1024, n, generator=g).to(DEVICE, torch.bfloat16) for n in (6, 5))
    exact, error = left.double().T @ right.double(), product_error(left.double().T, right.double(), 1024)
    for chunks in (16, 1024):
        total = torch.full((6, 5), math.nan, device=DEVICE)
        for i, (a, b) in enumerate(zip(left.chunk(chunks), right.chunk(chunks))):
            add_product(total, a.T, b, first=i == 0)
        assert_within(total, exact, error)
    add_product(total, left[:0].T, right[:0], first=True)  # no tokens
    assert (total == 0).all()


def test_the_library_has_the_product_that_is_used_on_cuda():
    """By schema, since this kind of product runs on CUDA alone: a rename shows here."""
    schemas = {str(s) for name in ("addmm", "mm") for s in torch._C._jit_get_schemas_for_operator(f"aten::{name}")}
    addmm = "self, Tensor mat1, Tensor mat2, ScalarType out_dtype, *, Scalar beta=1, Scalar alpha=1, Tensor(a!) out"
    assert f"aten::addmm.dtype_out(Tensor {addmm}) -> Tensor(a!)" in schemas
    assert "aten::mm.dtype(Tensor self, Tensor mat2, ScalarType out_dtype) -> Tensor" in schemas


@pytest.mark.parametrize("split", [[[i] for i in range(8)], [[0, 1, 2], [3, 4, 5, 6, 7]]], ids=["8x1", "3+5"])
def test_rows_and_chunks_may_be_split_anyhow(split):
    whole = Case()
    loss = whole.fused(chunk_bytes=1).loss
    hidden, weight, bias = whole.grads(loss)
    parts = [(case, found := case.fused(), case.grads(found.loss)) for case in (Case(rows=tuple(rows)) for rows in split)]
    assert sum(found.loss.item() for _, found, _ in parts) == pytest.approx(loss.item(), abs=1e-10) != 0
    dhidden = torch.zeros_like(hidden)
    for case, _, grads in parts:
        dhidden[case.at] = grads[0]
    assert close(dhidden, hidden, 1e-10) and close(sum(g[1] for *_, g in parts), weight, 1e-10)
    assert close(sum(g[2] for *_, g in parts), bias, 1e-10)


def test_repeats_scales_and_leaves_its_inputs_alone():
    case = Case(dtype=torch.bfloat16)
    before = [x.detach().clone() for x in (*case.leaves, case.sampler, case.old, case.ref)]
    first, second = case.fused(), case.fused()
    once = case.grads(first.loss)
    assert torch.equal(first.loss, second.loss) and torch.equal(first.logp_T, second.logp_T)
    assert all(torch.equal(a, b) for a, b in zip(once, case.grads(second.loss)))
    assert all(torch.equal(a, 2 * b) for a, b in zip(case.grads(2 * first.loss), once))
    assert all(a.abs().max() == 0 for a in case.grads(0 * first.loss))
    assert all(torch.equal(a, b) for a, b in zip(case.grads(first.loss), once))  # the kept graph is unharmed
    assert all(torch.equal(a, b) for a, b in zip(before, (*case.leaves, case.sampler, case.old, case.ref)))


def test_weights_of_zero_for_the_first_token_and_for_a_whole_chunk():
    case = Case()
    case.weight_R = np.array([0, 0, 1, 0.2, 0.3, 0.3, 1, 0.1])  # rows 0 and 1 are the first three tokens
    exact, _, _, grads = case.expected()
    found = case.fused(chunk_bytes=8 * 64 * 3)
    assert all(close(a, b) for a, b in zip(case.grads(found.loss), grads)) and close(found.loss, exact.loss)
    assert grads[0][:3].abs().max() == 0 and grads[0].abs().max() > 0.01


def test_untrained_tokens_may_hold_anything():
    case = Case()
    expected = case.fused()
    case.mask[4] = False
    masked = case.fused()
    for column in (case.sampler, case.old, case.ref):
        column[4] = math.nan
    case.targets[4] = -100
    found = case.fused()
    assert torch.equal(found.loss, masked.loss) and not torch.equal(found.loss, expected.loss)
    assert all(torch.equal(x, masked.sums[name]) for name, x in found.sums.items())
    assert all(torch.equal(a, b) for a, b in zip(case.grads(found.loss), case.grads(masked.loss)))


@pytest.mark.parametrize("rows", [(), (0, 3)])
def test_nothing_trained_is_a_differentiable_zero(rows):
    case = Case(rows=rows)
    case.mask[:] = False
    found = case.fused()
    assert found.loss.item() == 0 and found.loss.requires_grad and found.sums["tokens"] == 0
    assert all(g.abs().sum() == 0 and g.shape == x.shape for g, x in zip(case.grads(found.loss), case.leaves))


def test_frozen_parts_cost_no_matmul(monkeypatch):
    products = []
    monkeypatch.setattr(module, "add_product", lambda *args, **_: products.append(args))
    case = Case(rows=(0, 1))
    case.weight.requires_grad_(False), case.bias.requires_grad_(False)
    (dhidden,) = torch.autograd.grad(case.fused().loss, case.hidden)
    assert products == [] and close(dhidden, torch.autograd.grad(case.fused("torch").loss, case.hidden)[0])
    monkeypatch.undo()
    case = Case(rows=(0, 1))
    case.hidden.requires_grad_(False)
    found, twin = (torch.autograd.grad(case.fused(b).loss, (case.weight, case.bias)) for b in ("triton", "torch"))
    assert all(close(a, b) for a, b in zip(found, twin))


def test_on_policy_ratio_is_one_at_any_temperature():
    case = Case(dtype=torch.bfloat16, options=dict(temperature=0.6))
    old, _ = token_logprob(case.hidden.detach(), case.weight.detach(), case.targets, 0.6, bias_V=case.bias, backend="triton")
    h, w, b = (x.detach().double() for x in case.leaves)
    off = (product_error(h, w.T) + stored(h @ w.T, case.dtype)) / 0.6
    assert_within(old, case.dense()[0], softmax_errors((h @ w.T + b) / 0.6, case.targets, off, case.V).logp_T)
    case.old = case.ref = old
    found = case.fused()
    assert torch.equal(found.ratio_T, torch.ones_like(found.ratio_T)) and found.sums["kl"] == 0


def test_padding_rows_and_strided_inputs():
    case, padded = Case(), Case(options=dict(vocab_size=37))
    loss = case.fused().loss
    padding = torch.full((4, 5), math.nan, dtype=torch.float64, device=DEVICE)
    rows = torch.empty(82, 5, dtype=torch.float64, device=DEVICE)[::2]
    rows[:] = torch.cat([case.weight.detach(), padding])
    padded.weight, padded.bias = rows.requires_grad_(), torch.cat([case.bias.detach(), padding[:, 0]]).requires_grad_()
    padded.hidden = case.hidden.detach().T.contiguous().T.requires_grad_()
    found = padded.fused(chunk_bytes=8 * 64 * 4)
    assert close(found.loss, loss)
    for a, b in zip(padded.grads(found.loss), case.grads(loss)):
        assert close(a[: len(b)], b) and (a[len(b) :] == 0).all()


def test_tiny_weights_survive_half_precision():
    """Weights near 1 / (128 prompts x 8 rollouts x 1 024 tokens) are below what fp16 can hold, times a probability."""
    case = Case(dtype=torch.float16)
    loss, exact = case.fused().loss, [g.double() for g in case.grads(case.fused().loss)]
    case.weight_R = case.weight_R * 2.0**-20
    small = case.fused().loss
    assert small.item() == pytest.approx(loss.item() * 2.0**-20)
    # An upstream gradient as a loss scaler sends it brings them back.
    assert all(torch.equal(a.double(), b) for a, b in zip(case.grads(2.0**20 * small), exact))


def test_launches_at_production_shapes_and_asks_the_device_nothing():
    hidden, weight = (torch.empty(n, 1536, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (8192, 151936))
    targets, logp = torch.empty(8192, dtype=torch.int64, device="meta"), torch.empty(8192, device="meta")
    step = (REWARD, GROUPS, PLAN, np.arange(8), np.arange(9) * 1024)
    with recorded() as launches:
        found = policy_head(hidden, weight, targets, *step, logp, backend="triton", weight_R=np.ones(8), beta=0.0, **RULE)
        found.loss.backward()
    assert [one.grid for one in launches if one.kernel is policy_head_kernel] == [4096, 4096]
    assert len(launches) == 4 and weight.grad.shape == (151936, 1536)  # and the group statistics and the sums


@needs_gpu
def test_few_variants_for_many_shapes():
    before = len(policy_head_kernel.device_caches[torch.cuda.current_device()][0])
    for n in range(1, 51):
        Case((n, 2, 1, n % 7, n % 5, 1, n % 3, 1), rows=tuple(range(1 + n % 8)), V=96, D=16, dtype=torch.bfloat16).fused(
            temperature=1 + n / 9, clip_low=n / 100
        )
    assert len(policy_head_kernel.device_caches[torch.cuda.current_device()][0]) - before <= 2


@needs_gpu
@pytest.mark.parametrize("V", [151936, 262144])
def test_real_vocabularies(watch_rows, monkeypatch, V):
    monkeypatch.setattr(logit_rows, "BLOCK_BYTES", 16384)
    assert_rounded_once(Case((40, 30, 20, 40, 15, 5, 5, 40), V=V, D=64, dtype=torch.bfloat16), watch_rows)
