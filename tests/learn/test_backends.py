"""The loss by Triton kernels (emulated where there is no GPU) and by plain torch trains the same model."""

import copy

import numpy as np
import pytest
import torch
from ragged_steps import configured, sampled, tiny

from vipfast.kernels import launch
from vipfast.learn.learner import Learner

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def trained(model, reference, kernels, **options):
    """Metrics and the whole gradient of two updates. Few tokens: each costs the interpreter milliseconds."""
    config = configured(kernels=kernels, device=DEVICE, **options)
    learner = Learner(copy.deepcopy(model), config, 0, copy.deepcopy(reference))
    step = sampled(tiny(), counts=[2, 0, 3], lengths=[4, 1, 3, 2, 5], reward=np.array([1, 0, 0, 1, 1], np.float32))
    gradients = []
    learner.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(torch.cat([p.grad.ravel().double() for p in learner.policy.model.parameters()]))
    )
    metrics = [learner.update(step, number) for number in range(2)]
    return learner, metrics, gradients


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (dict(dtype="float64"), 1e-10),
        (dict(dtype="float64", estimator="grpo", updates_per_step=2, beta=0.1, micro_batch_tokens=30), 1e-10),
        # Small steps: AdamW makes a whole one of a gradient that is nothing but rounding.
        (dict(dtype="float32", temperature=0.7, learning_rate=1e-6, packing="masked"), 1e-5),
        (dict(dtype="bfloat16", learning_rate=1e-6, gradient_checkpointing=True), 1e-2),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_kernels_and_plain_torch_train_alike(options, tolerance):
    # the same rollouts twice, so that the policy has moved away from them
    model, reference = tiny(), tiny(1)
    (fused, found, gradients), (plain, expected, others) = (
        trained(model, reference, kernels, **options) for kernels in ("required", "off")
    )
    assert (fused.backend, plain.backend) == ("triton", "torch")
    assert all((line["train/grad_norm"] or 0) > 1e-3 for line in expected)
    for ours, theirs in zip(found, expected, strict=True):
        names = ["train/loss", "policy/entropy", "policy/ratio_raw_mean", *(["policy/kl"] if "beta" in options else [])]
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), name
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=10 * tolerance)
    assert len(gradients) == len(others) >= 2
    assert all((a - b).norm() <= 10 * tolerance * b.norm() for a, b in zip(gradients, others, strict=True))


@pytest.mark.parametrize(("kernels", "other"), [("required", "ref"), ("off", "triton")])
def test_every_call_of_the_head_gets_the_backend_that_was_chosen(monkeypatch, kernels, other):
    from vipfast.kernels import policy_head, token_logprob

    def refuse(*args, **kwargs):
        raise AssertionError(f"--kernels {kernels} came to {other}")

    monkeypatch.setattr(policy_head, f"policy_head_{other}", refuse)
    monkeypatch.setattr(token_logprob, f"token_logprob_{other}", refuse)
    # the reference, old log-probs and the loss
    learner, _, _ = trained(tiny(), tiny(1), kernels, beta=0.1, updates_per_step=2)
    learner.policy.backend = "torch" if other == "ref" else "triton"
    with pytest.raises(AssertionError, match=other):
        learner.sync_gap(sampled(tiny()))


def test_required_kernels_are_not_replaced(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="Triton runs on CUDA devices, not on cpu"):
        Learner(tiny(), configured(kernels="required"), 0)
