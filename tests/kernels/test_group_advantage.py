import math
import random

import numpy as np
import pytest
import torch

from vipfast.kernels.group_advantage import group_advantages_ref, group_statistics, group_statistics_ref

NAN = float("nan")
ESTIMATORS = ["rloo", "dr_grpo", "grpo"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def advantages(groups, estimator="rloo", use=None, baseline=None):
    """Advantages as a list per group."""
    offsets = np.cumsum([0] + [len(group) for group in groups])
    reward = np.array([r for group in groups for r in group], np.float32)
    use = np.ones(len(reward), bool) if use is None else np.array(use)
    baseline = np.full(len(groups), np.nan) if baseline is None else np.array(baseline)
    found = group_advantages_ref(reward, offsets, use, baseline, estimator)
    return [found[a:b].tolist() for a, b in zip(offsets[:-1], offsets[1:], strict=True)]


def test_known_answers_of_eight_with_three_right():
    rewards = [1, 1, 1, 0, 0, 0, 0, 0]
    assert advantages([rewards], "rloo")[0] == pytest.approx([5 / 7] * 3 + [-3 / 7] * 5)
    assert advantages([rewards], "dr_grpo")[0] == pytest.approx([0.625] * 3 + [-0.375] * 5)
    std = math.sqrt(3 * 5) / 8
    assert advantages([rewards], "grpo")[0] == pytest.approx([0.625 / (std + 1e-4)] * 3 + [-0.375 / (std + 1e-4)] * 5)


def test_ragged_groups_keep_their_own_means():
    found = advantages([[1, 3], [], [5], [0, 1, 1]], "dr_grpo")
    assert found[0] == pytest.approx([-1, 1]) and found[1] == [] and found[2] == [0]
    assert found[3] == pytest.approx([-2 / 3, 1 / 3, 1 / 3])


def test_statistics_never_cross_prompts():
    assert advantages([[0, 0], [1, 1]], "grpo") == [[0, 0], [0, 0]]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("group", [[0.7], [0.3] * 7, [0.1] * 3, [0.35] * 8, [NAN] * 4, [NAN, 0.7, NAN, NAN], [NAN, 0.3]])
def test_no_signal_is_exactly_zero(estimator, group):
    assert advantages([group], estimator) == [[0.0] * len(group)]


def test_nearly_constant_group_does_not_cancel():
    found = advantages([[0.35] * 7 + [-0.25]], "rloo")[0]
    assert found == pytest.approx([0.6 / 7] * 7 + [-0.6], rel=1e-6)


def test_population_std():
    assert advantages([[1, 0, 0, 0]], "grpo")[0][0] == pytest.approx(0.75 / (0.4330127 + 1e-4))


def test_std_floor_in_a_near_tie():
    reward = np.float32(1.00001)
    std = float(reward - np.float32(1)) * math.sqrt(3) / 4
    assert advantages([[1, 1, 1, reward]], "grpo")[0][3] == pytest.approx(
        0.75 * float(reward - np.float32(1)) / (std + 1e-4), rel=1e-5
    )


def test_unscored_is_out_of_the_baseline():
    assert advantages([[NAN, 1, 0, 1]], "rloo")[0] == pytest.approx([0, 0.5, -1, 0.5])
    assert advantages([[NAN, 1, 0, 1]], "dr_grpo")[0] == pytest.approx([0, 1 / 3, -2 / 3, 1 / 3])


def test_rows_not_in_use_are_out_of_the_baseline():
    assert advantages([[100, 1, 0, 1]], "rloo", use=[False, True, True, True])[0] == pytest.approx([0, 0.5, -1, 0.5])


@pytest.mark.parametrize("estimator", ["rloo", "dr_grpo"])
def test_a_given_baseline_gives_signal_to_any_group(estimator):
    found = advantages([[1, 1], [0], [1, 0]], estimator, baseline=[0.25, 0.25, NAN])
    assert found[0] == pytest.approx([0.75, 0.75]) and found[1] == pytest.approx([-0.25])
    assert found[2] == advantages([[1, 0]], estimator)[0]


def drawn_groups(seed):
    """One to five groups of up to six rewards, and the generator that drew them."""
    draw = random.Random(seed)
    sizes = [draw.randint(0, 6) for _ in range(draw.randint(1, 5))]
    return [[draw.choice([0.0, 1.0, 0.3, -0.25, NAN]) for _ in range(size)] for size in sizes], draw


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", range(12))
def test_shuffling_shuffles_and_nothing_else(seed, estimator):
    groups, draw = drawn_groups(seed)
    expected = advantages(groups, estimator)
    order = draw.sample(range(len(groups)), len(groups))
    inner = [draw.sample(range(len(groups[q])), len(groups[q])) for q in order]
    found = advantages([[groups[q][i] for i in rows] for q, rows in zip(order, inner, strict=True)], estimator)
    for q, rows, group in zip(order, inner, found, strict=True):
        assert group == pytest.approx([expected[q][i] for i in rows], abs=1e-12)


def naive_advantage(group, estimator):
    scored = [r for r in group if not math.isnan(r)]
    if len(set(scored)) < 2:
        return [0.0] * len(group)
    mean, n = sum(scored) / len(scored), len(scored)
    std = math.sqrt(sum((r - mean) ** 2 for r in scored) / n)
    scale = {"rloo": n / (n - 1), "dr_grpo": 1, "grpo": 1 / (std + 1e-4)}[estimator]
    return [0.0 if math.isnan(r) else (r - mean) * scale for r in group]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("seed", range(12))
def test_equals_plain_python(seed, estimator):
    groups = [[float(np.float32(r)) for r in group] for group in drawn_groups(seed)[0]]
    for group, found in zip(groups, advantages(groups, estimator), strict=True):
        assert found == pytest.approx(naive_advantage(group, estimator), abs=1e-12)


# The kernel.
def statistics(groups, estimator, use=None, baseline=None, dtype=torch.float32):
    """Centre and scale of every group, from the twin and from the kernel, and each row's own."""
    sizes = [len(group) for group in groups]
    reward = torch.tensor([r for group in groups for r in group], dtype=dtype, device=DEVICE)
    offsets = torch.tensor(np.cumsum([0, *sizes]), device=DEVICE)
    use = torch.ones_like(reward, dtype=torch.bool) if use is None else torch.tensor(use, device=DEVICE)
    baseline = torch.full((len(groups),), NAN) if baseline is None else torch.tensor(baseline)
    args = (reward, use, offsets, baseline.double().to(DEVICE), estimator)
    return group_statistics_ref(*args), group_statistics(*args)


def sampled_groups(seed=0):
    """Sizes 0, 1, 2, 3, 30 and 4096, with one reward in ten unscored, and groups of equal rewards between them."""
    rng = np.random.default_rng(seed)
    groups = [list(rng.choice([0.0, 1.0, 0.3, NAN], size, p=[0.4, 0.4, 0.1, 0.1])) for size in (3, 0, 1, 30, 2, 4096, 129, 1)]
    return [*groups, [0.3] * 7, [0.1] * 200, [NAN] * 3, [NAN, 0.7, NAN]]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kernel_equals_its_twin(estimator):
    groups = sampled_groups()
    rng = np.random.default_rng(1)
    use = rng.random(sum(map(len, groups))) < 0.9
    baseline = [0.25 if i in (2, 3, 8, 10) else NAN for i in range(len(groups))]
    expected, found = statistics(groups, estimator, use, baseline)
    assert found.dtype == torch.float64 and found.shape == (len(groups), 2)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-15)
    assert torch.equal(found[:, 1] == 0, expected[:, 1] == 0)


def test_kernel_by_hand():
    # 8 with 3 right; equal non-dyadic rewards; one rollout; an odd one, once -4013 under E[r^2] - E[r]^2; two of four unscored
    groups = [[1, 1, 1, 0, 0, 0, 0, 0], [0.3] * 7, [0.7], [0.35] * 7 + [-0.25], [NAN, 2, 0, NAN]]
    _, rloo = statistics(groups, "rloo")
    assert rloo[0].tolist() == [0.375, 8 / 7] and rloo[4].tolist() == [1.0, 2.0]
    assert rloo[1:3, 1].tolist() == [0.0, 0.0]
    assert ((-0.25 - rloo[3, 0]) * rloo[3, 1]).item() == pytest.approx(-0.6, rel=1e-6)
    _, dr_grpo = statistics(groups, "dr_grpo")
    assert dr_grpo[:, 1].tolist() == [1.0, 0.0, 0.0, 1.0, 1.0]
    _, grpo = statistics(groups, "grpo")
    assert grpo[4].tolist() == [1.0, pytest.approx(1 / 1.0001)]
    assert grpo[0, 1].item() == pytest.approx(1 / (math.sqrt(15) / 8 + 1e-4))


def test_kernel_takes_a_given_baseline():
    # around .25: rms of [1, 0] is sqrt((.75^2 + .25^2) / 2); no n / (n - 1); signal for one rollout and for equal rewards
    groups, baseline = [[1, 0], [1], [1, 1]], [0.25] * 3
    assert statistics(groups, "rloo", baseline=baseline)[1].tolist() == [[0.25, 1.0]] * 3
    assert statistics(groups, "grpo", baseline=baseline)[1][0, 1].item() == pytest.approx(1 / (math.sqrt(0.3125) + 1e-4))


def test_groups_do_not_know_of_each_other():
    groups = [group for group in sampled_groups(2) if len(group) < 129]
    order = [5, 3, 0, 1, 7, 2, 4, 8, 6]
    whole = statistics(groups, "grpo", dtype=torch.float64)[1]
    assert torch.equal(statistics([groups[q] for q in order], "grpo", dtype=torch.float64)[1], whole[order])
    assert torch.equal(statistics(groups, "grpo", dtype=torch.float64)[1], whole)  # the same bits each time


def test_no_groups():
    assert group_statistics(*(torch.zeros(n, device=DEVICE, dtype=t) for n, t in (
        (0, torch.float32), (0, torch.bool), (1, torch.int64), (0, torch.float64))), "rloo").shape == (0, 2)  # fmt: skip
