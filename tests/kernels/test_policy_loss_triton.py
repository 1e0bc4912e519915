"""The kernel against its twin: compiled on a GPU, interpreted on a CPU (0.5 s a call, so a test asks much of each)."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rounding import assert_within, gamma, stored, token_errors
from small_step import DEVICE, NAN, RULE, SMALL, Step, scalars

from vipfast.kernels import policy_loss as module
from vipfast.kernels.group_advantage import group_statistics_kernel
from vipfast.kernels.launch import recorded
from vipfast.kernels.policy_loss import SUMS, TILE_BYTES, add_sums, policy_loss, reduced, token_terms_ref

LENGTHS = {
    "no token": [0, 0, 0, 0],
    "one token": [0, 1, 0, 0],
    "63 tokens": [3, 0, 1, 9, 17, 0, 2, 8, 1, 22],
    "255 tokens": [255 - 66, 0, 1, 9, 17, 0, 2, 33, 1, 3],
    "a full tile": [512],
    "tiles of one row": [1300],
    "rows over tiles": [511, 1, 1, 0, 510, 0, 2, 300, 0, 211],
}


def errors_of(step, exact, estimator, old=True, ref=True, mask=True):
    """Bounds of dlogp_T in float32, and of each scalar: the tokens' own, and what adding those of a tile in float32 brings."""
    columns = [column.to(DEVICE) for column in step.columns]
    known = (columns[0], columns[1], columns[2] if old else None, columns[3] if ref else None)
    rows, trained = np.arange(len(step.lengths)), step.mask if mask else None
    terms = token_terms_ref(
        step.reward, step.groups, step.plan, rows, step.offsets, trained, step.weight, estimator, columns[0]
    )
    found = token_errors(terms, *known, clip_high=RULE["clip_high"], beta=0.1 if ref else 0.0)
    added = gamma(TILE_BYTES // 4)
    scalar = dict.fromkeys(("tokens", "clip_low", "clip_high"), 0.0)
    scalar |= dict(loss=found.loss.sum() + added * found.size.sum(), kl=found.kl.sum() + added * exact.sums["kl"])
    scalar |= {name: getattr(found, name).sum() + added * exact.sums[name] for name in ("ratio_raw", "gap")}
    return found.dlogp, scalar | dict(ratio_raw_max=found.ratio_raw.max() if len(found.loss) else 0.0)


@pytest.mark.parametrize(
    ("estimator", "old", "ref", "mask", "lengths"),
    [
        ("rloo", False, False, False, "63 tokens"),
        ("rloo", True, False, True, "rows over tiles"),
        ("rloo", True, True, True, "a full tile"),
        ("rloo", False, True, True, "no token"),
        ("dr_grpo", False, False, True, "rows over tiles"),
        ("dr_grpo", True, False, False, "255 tokens"),
        ("dr_grpo", False, True, True, "one token"),
        ("dr_grpo", True, True, False, "63 tokens"),
        ("grpo", False, False, True, "255 tokens"),
        ("grpo", True, False, True, "one token"),
        ("grpo", False, True, False, "rows over tiles"),
        ("grpo", True, True, True, "tiles of one row"),
    ],
)
def test_everything_is_within_what_float32_rounds(estimator, old, ref, mask, lengths):
    step = Step(LENGTHS[lengths], {1: [1], 4: [3, 1], 10: [3, 1, 0, 5, 1]}[len(LENGTHS[lengths])])
    step.columns = [column.float().double() for column in step.columns]  # what the kernel reads; float64 starts from the same
    options = dict(old=old, ref=ref, mask=mask, estimator=estimator)
    exact, found = step.call("torch", torch.float64, **options), step.call("triton", torch.float32, **options)
    assert found.dlogp_T.dtype == torch.float32 and found.loss.dtype == torch.float64
    dlogp_error, errors = errors_of(step, exact, **options)
    assert_within(found.dlogp_T, exact.dlogp_T, dlogp_error)
    ours, truth = scalars(found), scalars(exact)
    assert errors.keys() == truth.keys()
    for name, value in truth.items():
        assert abs(ours[name] - value) <= errors[name], name


def test_float64_is_exact_to_rounding():
    # clips, beta and cap are no numbers of binary fractions: they reach the kernel in full
    options = dict(dtype=torch.float64, clip_low=0.1, clip_high=0.3, beta=0.7, ratio_cap=1.3)
    expected, found = SMALL.call("torch", **options), SMALL.call("triton", **options)
    assert expected.sums["clip_low"] > 0 and expected.sums["clip_high"] > 0 and found.dlogp_T.dtype == torch.float64
    assert torch.allclose(found.dlogp_T, expected.dlogp_T, rtol=1e-13, atol=0)
    assert scalars(found) == pytest.approx(scalars(expected), rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_for_memory_alone(dtype):
    low = SMALL.call(dtype=dtype)
    wide = Step.call(SimpleNamespace(**vars(SMALL) | dict(columns=[c.to(dtype) for c in SMALL.columns]), at=SMALL.at))
    assert low.dlogp_T.dtype == dtype and scalars(low) == scalars(wide)
    exact = wide.dlogp_T.double()
    assert_within(low.dlogp_T, exact, 2 * stored(exact, dtype))  # twice: the interpreter cuts what it makes bfloat16


def test_dtypes_may_differ():
    at = SMALL.at(range(10))
    logp, sampler = SMALL.columns[0].to(DEVICE), SMALL.columns[1].float().to(DEVICE)
    args = (SMALL.reward, SMALL.groups, SMALL.plan, np.arange(10), SMALL.offsets, logp, sampler)
    found, plain = (policy_loss(*args, weight_R=SMALL.weight, backend=b, **RULE) for b in ("triton", "torch"))
    assert found.dlogp_T.dtype == torch.float64 and len(at) == len(found.dlogp_T)
    assert torch.allclose(found.dlogp_T, plain.dlogp_T, rtol=1e-13, atol=0)


def test_by_hand_groups_of_three_and_one():
    # rewards 1 0 0 | 1, rloo: advantages 1, -1/2, -1/2 | 0. Lengths 2 1 1 | 1, weights 1/4, beta 1/2, cap 2, clips 1/5 and 1/4.
    #        token   rho          v                    surrogate                     ref - logp
    #  row 0   a     e^.1=1.1052  e^.5=1.6487     -v * rho * 1   = -1.822119          0
    #          b     e^.4=1.4918  min(e^1, 2)=2   -v * 1.25 * 1  = -2.5 (clipped)     .2
    #  row 1   c     e^-.1=.9048  1                v * rho / 2   =  .452419           0
    #  row 2   d     e^-.5=.6065  1                v * .8 / 2    =  .4 (clipped)     -.3
    #  row 3   e     1            1                0                                  .1
    old = torch.tensor([-1.1, -1.4, -0.9, -0.5, -2.0], dtype=torch.float64)
    logp = torch.tensor([-1.0, -1.0, -1.0, -1.0, -2.0], dtype=torch.float64)
    sampler = torch.tensor([-1.6, -2.4, -0.9, -0.5, -2.0], dtype=torch.float64)
    ref = torch.tensor([-1.0, -0.8, -1.0, -1.3, -1.9], dtype=torch.float64)
    plan = SimpleNamespace(use_R=np.ones(4, bool), baseline_B=np.full(2, NAN))
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
        found = policy_loss(
            np.array([1.0, 0, 0, 1]), np.array([0, 3, 4]), plan, np.arange(4), np.array([0, 2, 3, 4, 5]),
            *(x.to(dtype).to(DEVICE) for x in (logp, sampler, old, ref)), weight_R=np.full(4, 0.25), estimator="rloo",
            clip_low=0.2, clip_high=0.25, beta=0.5, backend="triton",
        )  # fmt: skip
        # k3 e^d - d - 1 of .2, -.3, .1: .021403, .040818, .005171; slopes 1 - e^d: -.221403, .259182, -.105171
        # loss = (-1.822119 - 2.5 + .452419 + .4) / 4 + (.021403 + .040818 + .005171) / 8
        assert found.loss.item() == pytest.approx(-0.859001, abs=tolerance)
        assert found.dlogp_T.tolist() == pytest.approx([-0.455530, -0.027675, 0.113105, 0.032398, -0.013146], abs=tolerance)
        assert scalars(found) | {"loss": 0} == pytest.approx(
            dict(loss=0, tokens=5, clip_low=1, clip_high=1, kl=0.067392, ratio_raw=3 + 1.648721 + 2.718282, gap=1.5)
            | dict(ratio_raw_max=2.718282),
            abs=3 * tolerance,
        )


def test_advantages_reach_the_right_tokens():
    # on the policy itself and with weight 1, d loss / d logp = -A: rloo of 1 0 unscored 1 is 1/2, -1, 0, 1/2
    lengths, T = [1, 2, 1, 600], 604
    plan = SimpleNamespace(use_R=np.ones(5, bool), baseline_B=np.full(2, NAN))
    logp = torch.full((T,), -1.0, device=DEVICE)
    for rows in ([0, 1, 3, 4], [4, 3, 1, 0]):
        sizes = dict(zip([0, 1, 3, 4], lengths, strict=True))
        found = policy_loss(
            np.array([1.0, 0, NAN, 1, 5]), np.array([0, 4, 5]), plan, np.array(rows), np.cumsum([0] + [sizes[i] for i in rows]),
            logp, logp, weight_R=np.ones(5), backend="triton", **RULE,
        )  # fmt: skip
        expected = {0: -0.5, 1: 1.0, 3: -0.5, 4: 0.0}
        assert found.dlogp_T.tolist() == [expected[i] for i in rows for _ in range(sizes[i])]
        assert found.sums["tokens"] == T and found.sums["ratio_raw"] == T and found.sums["gap"] == 0


@pytest.mark.parametrize(
    "split", [[[6, 2, 4], [0, 1, 9, 3, 5, 8, 7]], [[1, 5], list(range(9, -1, -1))[:8], [0]]], ids=["2", "3"]
)
def test_any_split_adds_up(split):
    split = [[i for i in rows if i not in sum(split[:k], [])] for k, rows in enumerate(split)]
    whole = SMALL.call(dtype=torch.float64)
    loss, sums, grad = 0.0, {}, torch.zeros_like(whole.dlogp_T)
    for rows in split:
        part = SMALL.call(dtype=torch.float64, rows=rows)
        loss, sums = loss + part.loss, add_sums(sums, part.sums)
        grad[SMALL.at(rows)] = part.dlogp_T
    missing = np.setdiff1d(np.arange(10), sum(split, []))
    assert not SMALL.lengths[missing].any()
    assert loss.item() == pytest.approx(whole.loss.item(), abs=1e-12)
    assert torch.allclose(grad, whole.dlogp_T, rtol=0, atol=1e-12)
    assert {k: x.item() for k, x in sums.items()} == pytest.approx({k: x.item() for k, x in whole.sums.items()}, rel=1e-12)


def test_permuting_prompts_permutes_and_changes_nothing_else():
    whole = SMALL.call(dtype=torch.float64)
    order = [3, 0, 4, 2, 1]
    rows = np.concatenate([np.arange(SMALL.groups[q], SMALL.groups[q + 1]) for q in order]).astype(int)
    at = SMALL.at(rows)
    other = Step(SMALL.lengths[rows], np.diff(SMALL.groups)[order])
    other.reward, other.weight, other.mask = SMALL.reward[rows], SMALL.weight[rows], SMALL.mask[at]
    other.plan = SimpleNamespace(use_R=SMALL.plan.use_R[rows], baseline_B=SMALL.plan.baseline_B[order])
    other.columns = [column[at] for column in SMALL.columns]
    found = other.call(dtype=torch.float64)
    assert torch.equal(found.dlogp_T, whole.dlogp_T[at])
    assert scalars(found) == pytest.approx(scalars(whole), rel=1e-13)


def test_unused_slots_may_hold_anything():
    step = Step(LENGTHS["rows over tiles"], [3, 1, 0, 5, 1])
    clean = step.call()
    unused = torch.from_numpy(~step.trained())
    assert unused.sum() > 200 and not unused.all()
    for column, garbage in zip(step.columns, (NAN, -math.inf, math.inf, NAN), strict=True):
        column[unused] = garbage
    dirty = step.call()
    assert torch.equal(dirty.dlogp_T, clean.dlogp_T) and scalars(dirty) == scalars(clean)
    assert dirty.dlogp_T[unused.to(DEVICE)].abs().max() == 0
    again = step.call()
    assert torch.equal(again.dlogp_T, dirty.dlogp_T) and scalars(again) == scalars(dirty)  # the same bits each time


@pytest.mark.parametrize("column", [0, 1, 2, 3])
def test_a_missing_logp_of_a_trained_token_is_loud(column):
    step = Step(SMALL.lengths, np.diff(SMALL.groups))
    (token, later), trained = np.flatnonzero(step.trained())[[0, -1]], step.trained().sum()
    for at in (token, later):
        step.columns[column][at] = NAN
    found = step.call()
    assert math.isnan(found.loss) and found.sums["tokens"] == trained
    assert math.isnan(found.sums["ratio_raw_max"]) == (column in (1, 2))  # the largest of the others would hide it


def test_huge_log_ratios_stay_finite():
    step = Step(SMALL.lengths, np.diff(SMALL.groups))
    logp = step.columns[0]
    step.columns[1:] = [logp - 900, logp - 500, logp + 200]
    found, plain = step.call(), step.call("torch")
    assert torch.isfinite(found.dlogp_T).all() and all(map(math.isfinite, scalars(found).values()))
    assert torch.allclose(found.dlogp_T, plain.dlogp_T, rtol=1e-5)
    assert found.sums["ratio_raw_max"].item() == pytest.approx(math.exp(20), rel=1e-5)


def test_gradcheck():
    # three tokens away from every kink: not clipped, not capped
    logp = torch.tensor([-1.0, -0.7, -2.0, -0.4], dtype=torch.float64, device=DEVICE, requires_grad=True)
    sampler, old, ref = (logp.detach() + torch.tensor(d, dtype=torch.float64, device=DEVICE) for d in (
        [0.02, -0.01, 0.05, 0.0], [0.05, -0.1, 0.03, 0.0], [0.3, -0.4, 0.2, 0.1]))  # fmt: skip
    plan = SimpleNamespace(use_R=np.ones(3, bool), baseline_B=np.full(1, NAN))

    def loss(logp):
        return policy_loss(
            np.array([1.0, 0, 0]), np.array([0, 3]), plan, np.arange(3), np.array([0, 2, 3, 4]), logp, sampler, old, ref,
            weight_R=np.array([0.5, 0.25, 1.0]), backend="triton", **(RULE | dict(beta=0.3)),
        ).loss  # fmt: skip

    assert torch.autograd.gradcheck(loss, logp, fast_mode=True)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_backward_scales_out_of_place(backend):
    result, logp = SMALL.call(backend, grad=True)
    assert result.loss.requires_grad and not result.dlogp_T.requires_grad
    assert not any(total.requires_grad for total in result.sums.values())
    before = result.dlogp_T.clone()
    for upstream in (1.0, 2.0, 0.0, 1.0):
        dloss = torch.tensor(upstream, dtype=torch.float64, device=DEVICE)
        (grad,) = torch.autograd.grad(result.loss, logp, dloss, retain_graph=True)
        assert torch.equal(grad, upstream * before) and grad.dtype == logp.dtype
    (2 * result.loss - 1).backward()
    assert torch.equal(logp.grad, 2 * before) and torch.equal(result.dlogp_T, before)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_nothing_to_train_is_differentiable(backend):
    step = Step([2, 3], [2])
    step.mask[:] = False
    for found, logp in (step.call(backend, grad=True), SMALL.call(backend, rows=[1, 5], grad=True)):
        assert scalars(found) == dict.fromkeys(("loss", *SUMS), 0.0)
        found.loss.backward()
        assert torch.equal(logp.grad, torch.zeros_like(logp))


def test_sums_of_any_number_of_partials():
    g = torch.Generator().manual_seed(0)
    partial = torch.rand(3, 20000, generator=g, dtype=torch.float64).to(DEVICE)
    found = reduced(partial, ("a", "b_max", "c"))
    assert found["a"].item() == pytest.approx(partial[0].sum().item(), rel=1e-14)
    assert found["b_max"] == partial[1].max() and list(found) == ["a", "b_max", "c"]
    partial[1, 7] = NAN
    assert math.isnan(reduced(partial, ("a", "b_max", "c"))["b_max"])


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(logp_T=torch.zeros(8, device=DEVICE)[::2]), "stride 2"),
        (dict(sampler_logp_T=torch.zeros(3, device=DEVICE)), r"sampler_logp_T of shape \(3,\)"),
        (dict(old_logp_T=torch.zeros(4, 1, device=DEVICE)), "one value per token"),
        (dict(ref_logp_T=torch.zeros(4, device="meta")), "on meta"),
        (dict(loss_mask_T=np.ones(5, bool)), "5 entries for 4"),
        (dict(token_offsets=np.array([0, 1, 3])), "end at 3 for 4 tokens"),
        (dict(estimator="gae"), "one of rloo, dr_grpo, grpo"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(backend, change, message):
    good = dict(
        reward_R=np.array([0.0, 1]), group_offsets=np.array([0, 2]), rows_r=np.arange(2), token_offsets=np.array([0, 1, 4]),
        plan=SimpleNamespace(use_R=np.ones(2, bool), baseline_B=np.full(1, NAN)), weight_R=np.ones(2),
        logp_T=torch.zeros(4, device=DEVICE), sampler_logp_T=torch.zeros(4, device=DEVICE),
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        policy_loss(backend=backend, **(RULE | good | change))


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="'triton', 'torch' or None"):
        SMALL.call("cuda")


def test_lengths_and_numbers_are_run_time_arguments():
    # a constexpr is compiled in: every new value would be a new kernel
    allowed = {"BT", "BP", "BR", "ESTIMATOR"}
    for kernel in (module.policy_loss_kernel, module.reduce_partials, group_statistics_kernel):
        names = {name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}
        assert names <= allowed and names, kernel
    numbers = {"num_tokens", "num_rows", "clip_low", "clip_high", "beta", "ratio_cap"}
    assert numbers <= set(module.policy_loss_kernel.fn.__annotations__)


@pytest.mark.skipif(DEVICE == "cpu", reason="only a compiler makes variants")
def test_few_variants_over_many_lengths():
    variants = lambda: sum(len(x[0]) for x in module.policy_loss_kernel.device_caches.values())  # noqa: E731
    SMALL.call()
    before = variants()
    for k in range(50):
        Step([k + 1] * (k % 10 + 1), [k % 10 + 1]).call(clip_low=0.1 + k / 1000, ratio_cap=1.0 + k)
    assert variants() - before <= 2  # columns that start at a multiple of 16 bytes, and others


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has nothing to wait for")
def test_nobody_waits_for_the_device():
    step = Step(LENGTHS["rows over tiles"], [3, 1, 0, 5, 1])
    on = lambda x: torch.as_tensor(x).to(DEVICE)  # noqa: E731
    step.plan = SimpleNamespace(use_R=on(step.plan.use_R), baseline_B=on(step.plan.baseline_B))
    logp, sampler, old, ref = (on(column.float()) for column in step.columns)
    args = (on(step.reward), on(step.groups), step.plan, on(np.arange(10)), on(step.offsets), logp.requires_grad_(), sampler)
    rest = dict(weight_R=on(step.weight), loss_mask_T=on(step.mask), backend="triton", **RULE)
    policy_loss(*args, old, ref, **rest).loss.backward()  # compiled by now
    torch.cuda.set_sync_debug_mode("error")
    try:
        policy_loss(*args, old, ref, **rest).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_recorded_on_meta_tensors():
    column = torch.empty(5000, device="meta", dtype=torch.bfloat16)
    plan = SimpleNamespace(use_R=np.ones(4, bool), baseline_B=np.full(2, NAN))
    offsets = torch.empty(5, dtype=torch.int64, device="meta")
    with recorded() as launches:
        policy_loss(
            np.ones(4), np.array([0, 1, 4]), plan, np.arange(4), offsets, column, column,
            weight_R=np.ones(4), backend="triton", **RULE,
        )  # fmt: skip
    assert [(launch.kernel.fn.__name__, launch.grid) for launch in launches] == [
        ("group_statistics_kernel", 2),
        ("policy_loss_kernel", 10),
        ("reduce_partials", 8),
    ]
