import math

import pytest
import torch
from rounding import assert_within, product_error, softmax_errors

from vipfast.kernels.token_logprob import token_logprob


def data(T, V, D, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(T, D, generator=g, dtype=torch.float64), torch.randn(V, D, generator=g, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), torch.randint(0, V, (T,), generator=g)


def dense(hidden, weight, targets, temperature=1.0, bias=None, scale=1.0, softcap=None):
    z = hidden.double() @ weight.double().T
    z = (z if bias is None else z + bias) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    logp = torch.log_softmax(z / temperature, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("T, V, D", [(1, 37, 5), (7, 1, 3), (13, 2, 1), (33, 258, 16)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"softcap": 3.0},
        {"logit_scale": 0.25},
        {"softcap": 3.0, "logit_scale": 4.0, "temperature": 1.7},
    ],
)
def test_equals_dense_float64(T, V, D, options):
    hidden, weight, targets = data(T, V, D)
    bias = torch.linspace(-1, 1, V, dtype=torch.float64)
    found = token_logprob(hidden, weight, targets, bias_V=bias, chunk_bytes=8 * V * 3, **options)
    options = {"scale" if k == "logit_scale" else k: x for k, x in options.items()}
    for a, b in zip(found, dense(hidden, weight, targets, bias=bias, **options), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_known_answer():
    # logits 0, 0, ln 2 -> probabilities 1/4, 1/4, 1/2: entropy 1.5 ln 2
    logp, entropy = token_logprob(torch.ones(1, 1), torch.tensor([[0.0], [0.0], [math.log(2)]]), torch.tensor([2]))
    # an exponential and a few more roundings of float32, 1e-7 each
    assert [logp.item(), entropy.item()] == pytest.approx([math.log(0.5), 1.5 * math.log(2)], abs=3e-6)


def test_impossible_ids_leave_the_entropy_finite():
    bias = torch.tensor([0.0, 0.0, -math.inf])
    logp, entropy = token_logprob(torch.zeros(2, 4), torch.zeros(3, 4), torch.tensor([0, 2]), bias_V=bias)
    assert entropy.tolist() == pytest.approx([math.log(2)] * 2)
    assert logp.tolist() == pytest.approx([-math.log(2), -math.inf])


def test_padding_rows_take_no_probability():
    hidden, weight, targets = data(5, 30, 4)
    padded = torch.cat([weight, torch.full((7, 4), 50.0, dtype=weight.dtype)])
    for a, b in zip(token_logprob(hidden, padded, targets, vocab_size=30), token_logprob(hidden, weight, targets), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("T, V", [(0, 5), (1, 1), (3, 2), (17, 40), (40, 7), (40, 39)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.1, 3.0, 50.0])
def test_bounds(T, V, dtype, size):
    hidden, weight, targets = data(T, V, 8, dtype, seed=T)
    logp, entropy = token_logprob(hidden * size, weight, targets)
    assert logp.dtype == torch.float32 and logp.shape == entropy.shape == (T,)
    assert (logp <= 0).all() and (entropy >= 0).all() and (entropy <= math.log(V) + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_bytes", [None, 997 * 4 * 5])
def test_all_is_float32_from_the_states_on(dtype, chunk_bytes):
    """States and weights of half precision are exact in float32, and nothing is rounded to their precision again."""
    hidden, weight, targets = data(64, 997, 32, dtype)
    h, w = hidden.double(), weight.double()
    errors = softmax_errors(h @ w.T, targets, product_error(h, w.T), num_terms=997)
    found = token_logprob(hidden, weight, targets, chunk_bytes=chunk_bytes)
    for ours, exact, error in zip(found, dense(hidden, weight, targets), errors[:2], strict=True):
        assert_within(ours, exact, error)


def test_one_chunk_or_many():
    hidden, weight, targets = data(50, 11, 3)
    whole = token_logprob(hidden, weight, targets)
    for chunk_bytes in (1, 8 * 11 * 7, 10**9):
        for a, b in zip(token_logprob(hidden, weight, targets, chunk_bytes=chunk_bytes), whole, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-13)


def test_logits_are_refused():
    hidden, weight, targets = data(5, 30, 4)
    with pytest.raises(ValueError, match="not logits"):
        token_logprob(hidden @ weight.T, weight, targets)
    with pytest.raises(ValueError, match="4 targets for 5"):
        token_logprob(hidden, weight, targets[:4])
