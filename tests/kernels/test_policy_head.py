import math

import numpy as np
import pytest
import torch
from rounding import assert_within, logits_gradient, product_error, softmax_errors, stored, token_errors

from vipfast.kernels.policy_head import policy_head
from vipfast.kernels.policy_loss import policy_loss, token_terms_ref
from vipfast.types import StepPlan

LENGTHS = np.array([1, 2, 3, 5, 8, 13, 21, 34])
REWARD = np.array([1, 0, 0, 1, 0.5, 0, 1, np.nan])
GROUPS = np.array([0, 3, 8])
PLAN = StepPlan.plain([np.array([3, 5])])
WEIGHT = np.linspace(0.2, 0.02, 8)
RULE = dict(weight_R=WEIGHT, estimator="rloo", clip_low=0.2, clip_high=0.28)


class Case:
    """Inputs for some rows of the eight; a given seed gives the same tokens whatever the rows."""

    def __init__(self, rows=range(8), V=37, D=5, dtype=torch.float64, bias=True, seed=0):
        g = torch.Generator().manual_seed(seed)
        T = int(LENGTHS.sum())
        offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
        self.rows = np.array(list(rows), int)
        at = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in self.rows] or [[]]).astype(int)
        self.at = at
        self.offsets = np.concatenate([[0], np.cumsum(LENGTHS[self.rows])])
        self.hidden = torch.randn(T, D, generator=g, dtype=torch.float64)[at].to(dtype).requires_grad_()
        self.weight = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
        self.bias = torch.randn(V, generator=g, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
        self.targets = torch.randint(0, V, (T,), generator=g)[at]
        noise = torch.randn(3, T, generator=g, dtype=torch.float64)[:, at] * 0.4
        logp = torch.log_softmax(self.logits(), -1).gather(1, self.targets[:, None])[:, 0].detach()
        self.sampler, self.old, self.ref = logp + noise
        self.mask = (torch.rand(T, generator=g) > 0.2).numpy()[at]

    def logits(self, scale=1.0, softcap=None, temperature=1.0, vocab_size=None):
        z = self.hidden.double() @ self.weight.double()[:vocab_size].T
        z = (z if self.bias is None else z + self.bias.double()[:vocab_size]) * scale
        return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature

    def known(self, off_policy, beta):
        return (self.sampler, self.old if off_policy else None, self.ref if beta else None, self.mask)

    def fused(self, off_policy=True, beta=0.1, mask=True, **options):
        sampler, old, ref, loss_mask = self.known(off_policy, beta)
        return policy_head(
            self.hidden, self.weight, self.targets, REWARD, GROUPS, PLAN, self.rows, self.offsets, sampler, old, ref,
            loss_mask if mask else None, **(RULE | dict(beta=beta, bias_V=self.bias) | options),
        )  # fmt: skip

    def grads(self, loss):
        leaves = [x for x in (self.hidden, self.weight, self.bias) if x is not None]
        return torch.autograd.grad(loss, leaves, retain_graph=True)


def dense_grads(case, off_policy, beta, **transform):
    """Autograd through the dense log-softmax, upstream gradient per token from the loss."""
    logp = torch.log_softmax(case.logits(**transform), -1).gather(1, case.targets[:, None])[:, 0]
    result = policy_loss(
        REWARD, GROUPS, PLAN, case.rows, case.offsets, logp, *case.known(off_policy, beta), **(RULE | dict(beta=beta))
    )
    return result, case.grads((logp * result.dlogp_T).sum())


TRANSFORMS = [
    dict(),
    dict(temperature=0.6),
    dict(softcap=3.0),
    dict(scale=0.25),
    dict(scale=4.0, softcap=2.0, temperature=1.5),
]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("rows, V, D", [(range(8), 37, 5), ([0], 37, 5), ([3, 1], 2, 1)])
def test_loss_and_every_gradient_equal_dense_float64(transform, off_policy, beta, rows, V, D):
    case = Case(rows, V, D)
    expected, grads = dense_grads(case, off_policy, beta, **transform)
    options = {"logit_scale" if k == "scale" else k: x for k, x in transform.items()}
    found = case.fused(off_policy, beta, chunk_bytes=8 * V * 10, **options)
    # gradients reach 560, as e^(ref - logp) reaches 22 718: float64 rounds at 1e-12, and float32 anywhere would show at 1e-5
    assert found.loss.item() == pytest.approx(expected.loss.item(), abs=1e-10)
    for a, b in zip(case.grads(found.loss), grads, strict=True):
        assert a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-10)
    if len(list(rows)) == 8:
        assert min(g.abs().max() for g in grads) > 1e-3


def test_gradcheck_on_policy_score():
    """Numerical derivative of an off-policy loss inside the clip range."""
    case = Case([0, 2], V=7, D=3)
    sampler = case.sampler

    def loss(hidden, weight, bias):
        return policy_head(
            hidden, weight, case.targets % 7, REWARD, GROUPS, PLAN, case.rows, case.offsets, sampler, case.old, case.ref,
            bias_V=bias, **(RULE | dict(clip_low=0.99, clip_high=1e3, beta=0.1)),
        ).loss  # fmt: skip

    assert torch.autograd.gradcheck(loss, (case.hidden, case.weight, case.bias), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "split",
    [[[i] for i in range(8)], [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 1, 2], [3, 4, 5, 6, 7]], [range(8)]],
    ids=["8x1", "4x2", "3+5", "1x8"],
)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 10**6])
def test_any_split_gives_the_same_gradient(split, chunk_tokens):
    whole = Case()
    loss = whole.fused().loss
    hidden, weight, bias = whole.grads(loss)
    total, dweight, dbias, dhidden = 0.0, 0.0, 0.0, torch.zeros_like(hidden)
    for rows in split:
        case = Case(rows)
        part = case.fused(chunk_bytes=chunk_tokens * 37 * 8).loss
        dhidden[case.at], dw, db = case.grads(part)
        total, dweight, dbias = total + part.item(), dweight + dw, dbias + db
    assert total == pytest.approx(loss.item(), abs=1e-10) and abs(total) > 0.1
    for a, b in ((dhidden, hidden), (dweight, weight), (dbias, bias)):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)


def gradient_errors(case):
    """(gradient in float64, its bound) of hidden states, weight and bias where all is float32 but the inputs and the results.

    Each is a product of the gradient of the logits: the product's own rounding, and that gradient's times the other factor.
    """
    h, w = case.hidden.detach().double(), case.weight.detach().double()
    z, targets = case.logits().detach(), case.targets
    errors = softmax_errors(z, targets, product_error(h, w.T), num_terms=len(w))
    known = (torch.log_softmax(z, -1).gather(1, targets[:, None])[:, 0], *case.known(True, 0.1))
    terms = token_terms_ref(REWARD, GROUPS, PLAN, case.rows, case.offsets, known[-1], WEIGHT, "rloo", known[0])
    slope_errors = token_errors(terms, *known[:4], clip_high=0.28, beta=0.1, logp_error_T=errors.logp_T).dlogp
    result = policy_loss(REWARD, GROUPS, PLAN, case.rows, case.offsets, *known, **(RULE | dict(beta=0.1)))
    draw, off = logits_gradient(z, targets, result.dlogp_T, slope_errors, errors.relative_TV)
    ones, T = torch.ones(1, len(h), dtype=torch.float64), len(h)  # up to one chunk a token is added
    return (
        (draw @ w, off @ w.abs() + product_error(draw, w)),
        (draw.T @ h, off.T @ h.abs() + product_error(draw.T, h, T)),
        ((ones @ draw)[0], (ones @ off + product_error(ones, draw, T))[0]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_tokens", [88, 7, 1])
def test_gradients_are_float32_and_rounded_once(dtype, chunk_tokens):
    case = Case(V=101, D=16, dtype=dtype)
    found = case.grads(case.fused(chunk_bytes=chunk_tokens * 101 * 4).loss)
    for ours, (exact, error) in zip(found, gradient_errors(case), strict=True):
        assert ours.dtype == dtype
        assert_within(ours, exact, error + stored(exact, dtype))


def test_float32_gradients_have_no_error_of_scale():
    """Rounding errors have any sign, so over a whole gradient they stay near one rounding of the sums: a factor that is off in
    the fifth place, which hides below the bounds of single entries, does not."""
    case = Case(V=101, D=16, dtype=torch.float32)
    _, exact = dense_grads(case, True, 0.1)
    for found, wanted in zip(case.grads(case.fused().loss), exact, strict=True):
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error <= 6 * math.sqrt(101) * torch.finfo(torch.float32).eps / 2


def test_upstream_scale_and_second_backward():
    case = Case()
    loss = case.fused().loss
    once = case.grads(loss)
    assert all(torch.equal(a, b) for a, b in zip(case.grads(loss), once, strict=True))
    assert all(torch.allclose(a, -3 * b) for a, b in zip(case.grads(-3 * loss), once, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(case.grads(loss), once, strict=True))


def test_inputs_are_left_alone():
    case = Case()
    inputs = (case.hidden, case.weight, case.bias, case.sampler, case.old, case.ref)
    before = [x.detach().clone() for x in inputs]
    case.fused(softcap=3.0, temperature=0.7, logit_scale=2.0).loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


def test_frozen_head_gets_no_gradient():
    case = Case()
    case.weight.requires_grad_(False)
    case.bias.requires_grad_(False)
    case.fused().loss.backward()
    assert case.weight.grad is None and case.bias.grad is None and case.hidden.grad.abs().sum() > 0


def test_frozen_body_still_trains_the_head():
    case = Case()
    case.hidden.requires_grad_(False)
    case.fused().loss.backward()
    assert case.weight.grad.abs().sum() > 0 and case.hidden.grad is None


@pytest.mark.parametrize("rows", [[], [0, 4]])
def test_nothing_trained_is_a_differentiable_zero(rows):
    case = Case(rows)
    case.mask[:] = False
    result = case.fused()
    assert result.loss.item() == 0 and result.loss.requires_grad and result.sums["tokens"] == 0
    result.loss.backward()
    assert case.hidden.grad.shape == case.hidden.shape
    assert case.weight.grad.abs().sum() == 0 and case.bias.grad.abs().sum() == 0 and case.hidden.grad.abs().sum() == 0


def test_columns_are_not_differentiable_and_right():
    case = Case()
    result = case.fused(mask=False)
    logp = torch.log_softmax(case.logits(), -1)
    assert not any(x.requires_grad for x in (result.logp_T, result.entropy_T, result.ratio_T))
    assert torch.allclose(result.logp_T, logp.gather(1, case.targets[:, None])[:, 0])
    assert torch.allclose(result.entropy_T, -(logp.exp() * logp).sum(-1))
    scored = slice(0, LENGTHS[:7].sum())  # the last row is unscored
    assert torch.allclose(result.ratio_T[scored], (result.logp_T - case.old).exp()[scored])
    assert result.sums["entropy"].item() == pytest.approx(result.entropy_T[scored].sum().item())


def test_padding_rows_of_the_vocabulary_get_no_gradient():
    case, padded = Case(V=37), Case(V=37)
    padded.weight = torch.cat([case.weight.detach(), torch.full((3, 5), 9.0, dtype=torch.float64)]).requires_grad_()
    padded.bias = torch.cat([case.bias.detach(), torch.full((3,), 9.0, dtype=torch.float64)]).requires_grad_()
    expected, found = case.fused(), padded.fused(vocab_size=37)
    assert torch.equal(expected.loss, found.loss)
    for a, b in zip(padded.grads(found.loss)[1:], case.grads(expected.loss)[1:], strict=True):
        assert torch.equal(a[:37], b) and (a[37:] == 0).all()


def test_logits_are_refused():
    case = Case()
    case.hidden = case.logits()
    with pytest.raises(ValueError, match="not logits"):
        case.fused()


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_an_untrained_token_may_have_any_target(backend):
    """-100 is what other code writes into slots that are not trained; in a trained one it must be loud."""
    case = Case([0, 2, 3])
    trained = torch.from_numpy(case.mask.copy())
    expected = case.fused(backend=backend)
    case.targets = torch.where(trained, case.targets, -100)
    found = case.fused(backend=backend)
    assert found.loss.item() == expected.loss.item() != 0
    assert all(torch.equal(a, b) for a, b in zip(case.grads(found.loss), case.grads(expected.loss)))
    case.targets[trained.nonzero()[0]] = -100
    assert case.fused(backend=backend).loss.isnan()
