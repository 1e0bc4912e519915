"""The bounds that other tests rely on hold in any order of adding, and are narrow enough to show half precision."""

import math

import pytest
import torch
from rounding import assert_within, product_error, softmax_errors, stored


@pytest.fixture(params=[1, 7, 100, 4096])
def factors(request):
    g = torch.Generator().manual_seed(request.param)
    return torch.randn(5, request.param, generator=g), torch.randn(request.param, 4, generator=g)


def test_products_in_any_order_are_within_their_bound(factors):
    left, right = (x.double() for x in factors)
    exact, error = left @ right, product_error(left, right)
    terms = factors[0][:, :, None] * factors[1]
    for added in (terms.cumsum(1)[:, -1], terms.flip(1).cumsum(1)[:, -1], terms.sort(1)[0].cumsum(1)[:, -1], terms.sum(1)):
        assert_within(added, exact, error)
    with pytest.raises(AssertionError, match="off by up to"):
        assert_within(factors[0].bfloat16().float() @ factors[1], exact, error)


def test_softmax_of_float32_is_within_its_bounds_and_of_half_precision_is_not():
    z, targets = 5 * torch.randn(64, 300, generator=torch.Generator().manual_seed(0)), torch.arange(64)
    exact = torch.log_softmax(z.double(), -1).gather(1, targets[:, None])[:, 0]
    error = softmax_errors(z.double(), targets, 0.0, 300).logp_T
    assert_within(torch.log_softmax(z, -1)[range(64), targets], exact, error)
    with pytest.raises(AssertionError, match="off by up to"):
        assert_within(torch.log_softmax(z.half(), -1)[range(64), targets], exact, error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_move_less_than_stored_says_down_to_the_smallest(dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=g, dtype=torch.float64) * torch.logspace(0, -45, 1000, dtype=torch.float64)
    assert_within(x.to(dtype), x, stored(x, dtype))
    with pytest.raises(AssertionError):
        assert_within(x.to(dtype), x, stored(x, dtype) / 4)


def test_a_nan_is_within_no_bound():
    with pytest.raises(AssertionError, match="1 of 2"):
        assert_within(torch.tensor([math.nan, 0.0]), torch.zeros(2).double(), torch.ones(2).double())
