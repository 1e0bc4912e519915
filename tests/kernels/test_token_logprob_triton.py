import math

import pytest
import torch
import torch.distributed as dist
from rounding import assert_within, product_error, softmax_errors, stored, swept_terms

from vipfast.kernels import logit_rows
from vipfast.kernels import token_logprob as module
from vipfast.kernels.launch import INTERPRETED, recorded
from vipfast.kernels.token_logprob import token_logprob, token_logprob_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="counts what a GPU compiles")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles even for small vocabularies."""
    monkeypatch.setattr(logit_rows, "BLOCK_BYTES", 1024)


def data(T, V, D, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(T, D, generator=g, dtype=torch.float64), torch.randn(V, D, generator=g, dtype=torch.float64)
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), torch.randint(0, V, (T,), generator=g).to(DEVICE)


def dense(hidden, weight, targets, temperature=1.0, bias_V=None, logit_scale=1.0, softcap=None):
    """Log-probs and entropies by log-softmax of all logits in float64."""
    z = hidden.double() @ weight.double().T
    z = (z if bias_V is None else z + bias_V) * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return of_scores(z / temperature, targets)


def of_scores(z, targets):
    logp = torch.log_softmax(z, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def assert_rounded_once(watch_rows, hidden, weight, targets, chunk_bytes=None):
    """Logits are float32 sums rounded to the dtype of the states, and all that follows from them is float32."""
    rows = watch_rows(module)
    found = token_logprob(hidden, weight, targets, backend="triton", chunk_bytes=chunk_bytes)
    logits, (h, w) = torch.cat(rows.given), (hidden.double(), weight.double())
    exact = h @ w.T
    assert_within(logits, exact, product_error(h, w.T) + stored(exact, hidden.dtype))
    errors = softmax_errors(logits, targets, 0.0, swept_terms(len(weight), rows.BV))
    for ours, exact, error in zip(found, of_scores(logits, targets), errors[:2], strict=True):
        assert ours.dtype == torch.float32 and not ours.requires_grad
        assert_within(ours, exact, error)


OPTIONS = [{}, dict(temperature=0.6), dict(softcap=3.0), dict(logit_scale=0.25, softcap=2.0, temperature=1.7)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_dense_float64(options):
    hidden, weight, targets = data(5, 258, 7)
    bias = torch.linspace(-1, 1, 258, dtype=torch.float64, device=DEVICE)
    found = token_logprob(hidden, weight, targets, bias_V=bias, chunk_bytes=8 * 320 * 3, backend="triton", **options)
    for a, b in zip(found, dense(hidden, weight, targets, bias_V=bias, **options)):
        assert a.dtype == torch.float64 and torch.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "T, V, D, dtype",
    [
        (0, 7, 3, torch.bfloat16),
        (1, 1, 3, torch.float16),
        (63, 37, 5, torch.float32),
        (65, 7, 3, torch.bfloat16),
        (9, 507, 17, torch.float32),
        (9, 507, 17, torch.bfloat16),
        (9, 507, 17, torch.float16),
    ],
)
def test_logits_are_rounded_once_and_the_rest_is_float32(watch_rows, T, V, D, dtype):
    assert_rounded_once(watch_rows, *data(T, V, D, dtype), chunk_bytes=4 * 512 * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_odd_vocabulary(watch_rows, monkeypatch, dtype):
    monkeypatch.setattr(logit_rows, "BLOCK_BYTES", 16384)
    hidden, weight, targets = data(2, 50257, 9, dtype)
    targets[0] = 50256
    assert_rounded_once(watch_rows, hidden, weight, targets)


def test_softcap_of_large_logits():
    hidden, weight, targets = torch.full((1, 1), 120.0), torch.linspace(-1, 1, 41)[:, None], torch.tensor([40])
    found = token_logprob(
        hidden.to(DEVICE), weight.to(DEVICE), targets.to(DEVICE), softcap=30.0, logit_scale=0.5, backend="triton"
    )
    for a, b in zip(found, dense(hidden, weight, targets, softcap=30.0, logit_scale=0.5)):
        assert a.item() == pytest.approx(b.item(), abs=1e-5)
    logits = 120 * weight[:, 0].double() * 0.5  # as large as they are, the cap keeps the others possible
    assert found[0].item() == pytest.approx(torch.log_softmax(30 * torch.tanh(logits / 30), 0)[40].item(), abs=1e-5)


def test_padding_rows_take_no_probability_and_are_not_read():
    hidden, weight, targets = data(4, 30, 4)
    padded = torch.cat([weight, torch.full((7, 4), math.nan, dtype=weight.dtype, device=DEVICE)])
    bias = torch.zeros(37, dtype=weight.dtype, device=DEVICE)
    found = token_logprob(hidden, padded, targets, bias_V=bias, vocab_size=30, backend="triton")
    for a, b in zip(found, token_logprob(hidden, weight, targets, backend="triton")):
        assert torch.equal(a, b)


def test_impossible_ids_leave_the_entropy_finite():
    bias = torch.tensor([0.0, 0.0, -math.inf], device=DEVICE)
    hidden, weight, targets = torch.zeros(2, 4), torch.zeros(3, 4), torch.tensor([0, 2])
    logp, entropy = token_logprob(hidden.to(DEVICE), weight.to(DEVICE), targets.to(DEVICE), bias_V=bias, backend="triton")
    assert entropy.tolist() == pytest.approx([math.log(2)] * 2) and logp.tolist() == pytest.approx([-math.log(2), -math.inf])


def test_views_with_strides_are_read_right():
    hidden, weight, targets = data(4, 37, 6)
    expected = token_logprob(hidden, weight, targets, backend="triton")
    wide_hidden = torch.zeros(4, 12, dtype=hidden.dtype, device=DEVICE)[:, ::2]
    wide_bias = torch.zeros(74, dtype=hidden.dtype, device=DEVICE)[::2]
    wide_targets = torch.zeros(8, dtype=torch.int64, device=DEVICE)[::2]
    wide_hidden[:], wide_targets[:] = hidden, targets
    rows = torch.zeros(74, 6, dtype=hidden.dtype, device=DEVICE)[::2]
    rows[:] = weight
    for h, w in ((wide_hidden, weight.T.contiguous().T), (hidden.T.contiguous().T, rows)):
        found = token_logprob(h, w, wide_targets, bias_V=wide_bias, backend="triton")
        assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(found, expected))


def test_runs_repeat_and_chunks_do_not_matter():
    hidden, weight, targets = data(11, 37, 5)
    whole = token_logprob(hidden, weight, targets, backend="triton")
    again = token_logprob(hidden, weight, targets, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(whole, again))
    for chunk_bytes in (1, 8 * 64 * 4):
        found = token_logprob(hidden, weight, targets, backend="triton", chunk_bytes=chunk_bytes)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(found, whole))


def test_a_master_weight_is_cast_to_the_states():
    hidden, weight, targets = data(3, 37, 5, torch.bfloat16)
    master = weight.float() + 2.0**-12  # gone in bf16
    found = token_logprob(hidden, master, targets, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(found, token_logprob(hidden, master.bfloat16(), targets, backend="triton")))


def test_inputs_are_left_alone():
    inputs = data(3, 37, 5)
    before = [x.clone() for x in inputs]
    token_logprob(*inputs, 0.7, softcap=2.0, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(before, inputs))


def test_launches_at_production_shapes():
    """Two chunks of 4 096 tokens and one matmul each, found without any data on a device."""
    hidden, weight = (torch.empty(n, 1536, dtype=torch.bfloat16, device="meta") for n in (8192, 151936))
    with recorded() as launches:
        token_logprob(hidden, weight, torch.empty(8192, dtype=torch.int64, device="meta"), backend="triton")
    assert [(one.kernel, one.grid) for one in launches] == [(token_logprob_kernel, 4096)] * 2


def test_what_cannot_be_right_is_refused():
    hidden, weight, targets = data(3, 30, 4)
    for arguments, message in (
        ((hidden @ weight.T, weight, targets), "not logits"),
        ((hidden, weight, targets[:2]), "2 targets for 3"),
        ((hidden, weight, targets, 1.0, weight[:7, 0]), r"a bias of shape \(7,\)"),
    ):
        bias_V = arguments[4] if len(arguments) > 4 else None
        with pytest.raises(ValueError, match=message):
            token_logprob(*arguments[:4], bias_V=bias_V, backend="triton")
    with pytest.raises(ValueError, match="must be 'triton', 'torch' or None"):
        token_logprob(hidden, weight, targets, backend="cuda")


def test_a_sharded_weight_is_refused_with_the_remedy():
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = distribute_tensor(torch.zeros(5, 3), dist.init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(ValueError, match=r"DTensor.*weight.full_tensor\(\)"):
            token_logprob(torch.zeros(2, 3), weight, torch.zeros(2, dtype=torch.int64))
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(DEVICE == "cpu" or not INTERPRETED, reason="needs a GPU and TRITON_INTERPRET=1")
def test_the_interpreter_refuses_cuda():
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        token_logprob(*data(3, 30, 4), backend="triton")


@needs_gpu
def test_few_variants_for_many_lengths():
    before = len(token_logprob_kernel.device_caches[torch.cuda.current_device()][0])
    for T in range(1, 51):
        token_logprob(*data(T, 96, 16, torch.bfloat16), 1 + T / 7, backend="triton")
    assert len(token_logprob_kernel.device_caches[torch.cuda.current_device()][0]) - before <= 2


@needs_gpu
@pytest.mark.parametrize("V", [151936, 262144])
def test_real_vocabularies(watch_rows, monkeypatch, V):
    monkeypatch.setattr(logit_rows, "BLOCK_BYTES", 16384)
    assert_rounded_once(watch_rows, *data(257, V, 64, torch.bfloat16))
