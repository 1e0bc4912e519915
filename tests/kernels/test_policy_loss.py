import math

import numpy as np
import pytest
import torch

from vipfast.kernels.policy_loss import add_sums, policy_loss
from vipfast.types import StepPlan

NAN = float("nan")
ESTIMATORS = ["rloo", "dr_grpo", "grpo"]


def naive_advantage(group, estimator):
    scored = [r for r in group if not math.isnan(r)]
    if len(set(scored)) < 2:
        return [0.0] * len(group)
    mean, n = sum(scored) / len(scored), len(scored)
    std = math.sqrt(sum((r - mean) ** 2 for r in scored) / n)
    scale = {"rloo": n / (n - 1), "dr_grpo": 1, "grpo": 1 / (std + 1e-4)}[estimator]
    return [0.0 if math.isnan(r) else (r - mean) * scale for r in group]


# The loss. Three prompts: rewards [1, 0, unscored], [1, 1], [0, 1]; lengths 3 1 2 2 1 4 0.
REWARD = np.array([1, 0, NAN, 1, 1, 0, 1], np.float32)
GROUPS = np.array([0, 3, 5, 7])
LENGTHS = np.array([3, 1, 2, 2, 1, 4, 0])
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])
PLAN = StepPlan.plain([np.array([3, 2, 2])])
T = OFFSETS[-1]
RULE = dict(clip_low=0.2, clip_high=0.28, beta=0.0)


def columns(seed=0, spread=0.5):
    rng = np.random.default_rng(seed)
    base = -rng.uniform(0.1, 3, T)
    return [torch.tensor(base + rng.normal(0, spread, T) * (k > 0)) for k in range(4)]


def call(logp, sampler, old=None, ref=None, mask=None, rows=None, weight=None, estimator="rloo", **rule):
    rows = np.arange(len(LENGTHS)) if rows is None else np.array(rows)
    at = np.concatenate([np.arange(OFFSETS[i], OFFSETS[i + 1]) for i in rows]).astype(int)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS[rows])])
    cut = [None if x is None else x[at] for x in (logp, sampler, old, ref, mask)]
    weight = np.linspace(0.1, 0.7, len(LENGTHS)) if weight is None else weight
    return policy_loss(REWARD, GROUPS, PLAN, rows, offsets, *cut, weight_R=weight, estimator=estimator, **(RULE | rule)), at


def naive_loss(logp, sampler, old, ref, mask, estimator, clip_low, clip_high, beta, ratio_cap=2.0):
    """The formula, one token at a time, differentiable."""
    weight = np.linspace(0.1, 0.7, len(LENGTHS))
    advantage = [a for a, b in zip(GROUPS, GROUPS[1:], strict=False) for a in naive_advantage(REWARD[a:b].tolist(), estimator)]
    total = logp.sum() * 0
    for i in range(len(LENGTHS)):
        for t in range(OFFSETS[i], OFFSETS[i + 1]):
            if math.isnan(REWARD[i]) or not mask[t]:
                continue
            before = logp[t].detach() if old is None else old[t]
            ratio = (logp[t] - before).exp()
            v = min(math.exp(before - sampler[t]), ratio_cap)
            clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
            total = total - weight[i] * v * torch.minimum(ratio * advantage[i], clipped * advantage[i])
            if ref is not None:
                d = ref[t] - logp[t]
                total = total + weight[i] * beta * (d.exp() - d - 1)
    return total


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("clip", [(0.2, 0.28), (0.05, 0.05), (1.0, 10.0)])
@pytest.mark.parametrize("cap", [2.0, 1.0])
@pytest.mark.parametrize("off_policy", [False, True])
def test_matches_autograd_of_the_formula(estimator, beta, clip, cap, off_policy):
    logp, sampler, old, ref = columns()
    old, ref = old if off_policy else None, ref if beta else None
    mask = np.ones(T, bool)
    mask[[1, 10]] = False
    rule = dict(clip_low=clip[0], clip_high=clip[1], beta=beta, ratio_cap=cap)
    found, _ = call(logp, sampler, old, ref, mask, estimator=estimator, **rule)
    leaf = logp.clone().requires_grad_()
    expected = naive_loss(leaf, sampler, old, ref, mask, estimator, **rule)
    (grad,) = torch.autograd.grad(expected, leaf)
    assert abs(float(expected.detach())) > 1e-3
    assert float(found.loss) == pytest.approx(float(expected.detach()), abs=1e-12)
    assert torch.allclose(found.dlogp_T, grad, rtol=0, atol=1e-12)


def test_one_value_by_hand():
    # rloo of [1, 0] is +1, -1; ratios e^.5 = 1.6487 (clipped at 1.28) and e^-.5 = .6065 (at .8); v = min(e, 2) = 2 and e^0 = 1
    # loss = .5 (-2 · 1.28) + .25 (-1 · min(-.6065, -.8)) = -1.28 + .2
    plan = StepPlan.plain([np.array([2])])
    logp, old, sampler = (torch.tensor(x, dtype=torch.float64) for x in ([-0.5, -1.5], [-1.0, -1.0], [-2.0, -1.0]))
    found = policy_loss(
        np.array([1.0, 0.0]), np.array([0, 2]), plan, np.arange(2), np.arange(3), logp, sampler, old,
        weight_R=np.array([0.5, 0.25]), estimator="rloo", **RULE,
    )  # fmt: skip
    assert float(found.loss) == pytest.approx(-1.08)
    assert found.dlogp_T.tolist() == [0.0, 0.0]
    assert {k: float(x) for k, x in found.sums.items()} == pytest.approx(
        dict(tokens=2, clip_low=1, clip_high=1, kl=0, ratio_raw=math.e + 1, ratio_raw_max=math.e, gap=1)
    )


def test_on_policy_derivative_is_minus_weight_times_advantage():
    logp, *_ = columns()
    found, _ = call(logp, logp)
    assert found.dlogp_T[:3].tolist() == pytest.approx([-0.1] * 3) and found.dlogp_T[3].item() == pytest.approx(0.2)


@pytest.mark.parametrize(
    "split", [[[i] for i in range(7)], [[0, 1, 2], [3, 4], [5, 6]], [[6, 2, 4], [0, 1, 3, 5]], [[0], [1, 2, 3, 4, 5, 6]]]
)
def test_any_split_adds_up(split):
    logp, sampler, old, ref = columns()
    whole, at = call(logp, sampler, old, ref, beta=0.1)
    loss, sums, grad = 0.0, {}, torch.zeros(T, dtype=torch.float64)
    for rows in split:
        part, at = call(logp, sampler, old, ref, rows=rows, beta=0.1)
        loss, sums = loss + float(part.loss), add_sums(sums, part.sums)
        grad[at] = part.dlogp_T
    assert loss == pytest.approx(float(whole.loss), abs=1e-12)
    assert torch.allclose(grad, whole.dlogp_T, rtol=0, atol=1e-12)
    assert {k: float(x) for k, x in sums.items()} == pytest.approx({k: float(x) for k, x in whole.sums.items()})


def test_unused_slots_may_hold_nan():
    logp, sampler, old, ref = columns()
    mask = np.ones(T, bool)
    mask[[0, 11]] = False
    clean, _ = call(logp, sampler, old, ref, mask, beta=0.1)
    unused = torch.from_numpy(~mask)
    unused[4:6] = True  # the unscored row
    for column in (logp, sampler, old, ref):
        column[unused] = NAN
    dirty, _ = call(logp, sampler, old, ref, mask, beta=0.1)
    assert torch.equal(dirty.dlogp_T, clean.dlogp_T) and dirty.loss == clean.loss
    assert all(torch.equal(dirty.sums[k], clean.sums[k]) for k in clean.sums)


def test_a_missing_sampler_logp_of_a_trained_token_is_loud():
    logp, sampler, *_ = columns()
    sampler[0] = NAN
    assert math.isnan(call(logp, sampler)[0].loss)


def test_huge_log_ratios_stay_finite():
    logp, sampler, old, ref = columns()
    found, _ = call(logp, logp - 900, logp - 500, logp + 200, beta=0.1)
    assert torch.isfinite(found.dlogp_T).all() and torch.isfinite(found.loss)
    assert all(math.isfinite(x) for x in found.sums.values())
    # The pull towards a reference that finds the token far likelier is up, also beyond the clamp.
    only_kl, _ = call(logp, logp, None, logp + 200, beta=0.1)
    assert (only_kl.dlogp_T[6:8] < 0).all()


def test_dead_groups_feel_the_kl_term_alone():
    logp, _, _, ref = columns()
    assert call(logp, logp)[0].dlogp_T[6:9].tolist() == [0, 0, 0]
    found = call(logp, logp, None, ref, beta=0.1)[0].dlogp_T[6:9]
    weight = torch.tensor([0.4, 0.4, 0.5], dtype=torch.float64)
    assert torch.allclose(found, 0.1 * weight * (1 - (ref - logp)[6:9].exp()))


def test_no_tokens():
    empty = torch.zeros(0)
    found = policy_loss(
        REWARD, GROUPS, PLAN, np.array([6]), np.array([0, 0]), empty, empty, weight_R=np.ones(7), estimator="rloo", **RULE
    )
    assert float(found.loss) == 0 and found.dlogp_T.shape == (0,) and float(found.sums["tokens"]) == 0


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(weight_R=np.ones(1)), "weight_R has 1 entries for 2 rewards"),
        (dict(rows_r=[0, 5]), "rows_r names rows 0 to 5 of 2"),
        (dict(rows_r=[-1, 0]), "rows_r names rows -1 to 0 of 2"),
        (dict(token_offsets=[0, 4]), "2 token_offsets for 2 rows"),
        (dict(group_offsets=[0, 1]), "group_offsets end at 1 for 2 rewards"),
        (dict(plan=StepPlan.plain([np.array([3])])), "plan.use_R has 3 entries for 2 rewards"),
        (dict(group_offsets=[0, 1, 2]), "plan.baseline_B has 1 entries for 2 groups"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_parts_of_a_step_that_do_not_fit_are_refused(backend, change, message):
    logp = -torch.ones(4)
    step = dict(reward_R=np.array([1.0, 0.0]), group_offsets=[0, 2], plan=StepPlan.plain([np.array([2])]), rows_r=[0, 1])
    step |= dict(token_offsets=[0, 2, 4], weight_R=np.ones(2)) | change
    rule = dict(estimator="rloo", clip_low=0.2, clip_high=0.28, beta=0.0, backend=backend)
    with pytest.raises(ValueError, match=message):
        policy_loss(logp_T=logp, sampler_logp_T=logp, **step, **rule)
