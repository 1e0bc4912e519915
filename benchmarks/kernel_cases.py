"""What the kernel benchmark calls: one step's data, each operation on it, and what others compute from the same data.

Shape letters as in kernels/README.md. Rows have one length and every token is trained, so that implementations which want
rectangles pay for no padding.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from vipfast.kernels.group_advantage import ESTIMATORS, group_advantages_ref, group_statistics, group_statistics_ref
from vipfast.kernels.policy_head import policy_head
from vipfast.kernels.policy_loss import policy_loss
from vipfast.kernels.token_logprob import token_logprob

MODELS = {"Qwen2.5-1.5B": (1536, 151936), "Qwen2.5-7B": (3584, 152064)}
"""(D, V) of the output embedding."""
TOKENS = (2048, 8192, 32768)
CLIP = dict(clip_low=0.2, clip_high=0.28)
RATIO_CAP = 2.0
ROW_TOKENS = 512
LONG = 2**25
"""Tokens of the policy_loss that is compared with a copy."""


@dataclass
class Batch:
    """Tokens of a step, all on one device; a field that is None is not passed on."""

    reward_R: Tensor
    group_offsets: Tensor
    plan: SimpleNamespace
    rows_r: Tensor
    token_offsets: Tensor
    weight_R: Tensor
    sampler_logp_T: Tensor
    old_logp_T: Tensor | None
    ref_logp_T: Tensor | None
    loss_mask_T: Tensor | None
    targets_T: Tensor | None = None
    hidden_TD: Tensor | None = None
    weight_VD: Tensor | None = None
    bias_V: Tensor | None = None
    logp_T: Tensor | None = None

    def step(self) -> tuple:
        """The arguments that describe the step and its tokens, in the order of the operations."""
        return self.reward_R, self.group_offsets, self.plan, self.rows_r, self.token_offsets

    def tokens(self) -> tuple:
        return self.sampler_logp_T, self.old_logp_T, self.ref_logp_T, self.loss_mask_T

    @property
    def row_tokens(self) -> int:
        return len(self.sampler_logp_T) // len(self.reward_R)


def make_batch(
    T: int, D: int, V: int, dtype: torch.dtype, device: str, *,
    old=True, ref=False, mask=False, bias=False, frozen=False, seed=0,
) -> Batch:  # fmt: skip
    """Random states and weights; log-probs near -ln V. D = 0 leaves the head out (policy_loss alone)."""
    torch.manual_seed(seed)
    length = ROW_TOKENS if T % ROW_TOKENS == 0 else next(n for n in (4, 3, 2, 1) if T % n == 0)
    R = T // length
    sizes = [3, 5, 8, 4, 12]  # unequal groups, as allocators make them
    bounds = [0]
    while bounds[-1] < R:
        bounds.append(min(R, bounds[-1] + sizes[len(bounds) % len(sizes)]))

    def floats(*shape: int, kind=torch.float32) -> Tensor:
        return torch.randn(*shape, device=device, dtype=kind)

    def on(values, kind) -> Tensor:
        return torch.as_tensor(values, dtype=kind).to(device)

    offsets_B = on(bounds, torch.int64)
    logp_T = floats(T) - math.log(max(V, 2))
    batch = Batch(
        reward_R=(torch.arange(R, device=device) % 2).float(),  # no constant group: its tokens would be less work
        group_offsets=offsets_B,
        plan=SimpleNamespace(
            use_R=torch.ones(R, dtype=torch.bool, device=device),
            baseline_B=torch.full((len(bounds) - 1,), float("nan"), dtype=torch.float64, device=device),
        ),
        rows_r=torch.arange(R, device=device),
        token_offsets=torch.arange(R + 1, device=device) * length,
        weight_R=torch.full((R,), 1 / (R * length), dtype=torch.float64, device=device),
        sampler_logp_T=logp_T,
        old_logp_T=logp_T.clone() if old else None,  # memory of its own, as in a run
        ref_logp_T=logp_T + 0.1 * floats(T) if ref else None,
        loss_mask_T=torch.ones(T, dtype=torch.bool, device=device) if mask else None,
        logp_T=logp_T + 0.1 * floats(T),
    )
    if D:
        batch.targets_T = torch.randint(0, V, (T,), device=device)
        batch.hidden_TD = floats(T, D, kind=dtype).mul_(D**-0.5).requires_grad_()
        batch.weight_VD = floats(V, D, kind=dtype).requires_grad_(not frozen)
        batch.bias_V = floats(V, kind=dtype).requires_grad_() if bias else None
    return batch


def set_old_policy(batch: Batch) -> None:
    """Sampler and old log-probs a little off the present ones, and ratios far enough inside the clip bounds that rounding does
    not decide between a gradient and none.
    """
    logp_T, _ = token_logprob(batch.hidden_TD.detach(), batch.weight_VD.detach(), batch.targets_T, backend="torch")
    batch.old_logp_T = logp_T + 0.05 * torch.randn_like(logp_T)
    batch.sampler_logp_T = batch.old_logp_T.clone()


def call_group_advantage(batch: Batch, backend: str | None = None, estimator="rloo") -> Tensor:
    run = group_statistics_ref if backend == "torch" else group_statistics
    return run(batch.reward_R, batch.plan.use_R, batch.group_offsets, batch.plan.baseline_B, estimator)


def call_policy_loss(batch: Batch, backend: str | None = None, estimator="rloo", beta=0.0) -> Any:
    return policy_loss(
        *batch.step(), batch.logp_T, *batch.tokens(), weight_R=batch.weight_R, estimator=estimator, beta=beta,
        ratio_cap=RATIO_CAP, backend=backend, **CLIP,
    )  # fmt: skip


def call_policy_head(batch: Batch, backend: str | None = None, estimator="rloo", beta=0.0, **transform) -> Any:
    return policy_head(
        batch.hidden_TD, batch.weight_VD, batch.targets_T, *batch.step(), *batch.tokens(), weight_R=batch.weight_R,
        estimator=estimator, beta=beta, ratio_cap=RATIO_CAP, bias_V=batch.bias_V, backend=backend, **CLIP, **transform,
    )  # fmt: skip


def call_token_logprob(batch: Batch, backend: str | None = None, **transform) -> Any:
    hidden_TD, weight_VD = batch.hidden_TD.detach(), batch.weight_VD.detach()
    return token_logprob(hidden_TD, weight_VD, batch.targets_T, bias_V=batch.bias_V, backend=backend, **transform)


CALLS: dict[str, Callable] = {
    "group_advantage": call_group_advantage,
    "policy_loss": call_policy_loss,
    "policy_head": call_policy_head,
    "token_logprob": call_token_logprob,
}


def advantages(batch: Batch) -> Tensor:
    """[R] in fp32, for those who take ready-made advantages."""
    plan = batch.plan
    return group_advantages_ref(batch.reward_R, batch.group_offsets, plan.use_R, plan.baseline_B, "rloo").float()


def dense_loss(batch: Batch, advantage_R: Tensor) -> Tensor:
    """The loss as one writes it in plain torch: all logits, log-softmax, clipped surrogate; autograd does the rest."""
    logits_TV = batch.hidden_TD @ batch.weight_VD.T
    logp_TV = torch.log_softmax(logits_TV.float(), -1)
    del logits_TV
    logp_T = logp_TV.gather(1, batch.targets_T[:, None])[:, 0]
    row_T = torch.arange(len(logp_T), device=logp_T.device) // batch.row_tokens
    A_T, w_T = advantage_R[row_T], batch.weight_R.float()[row_T]
    ratio_T = (logp_T - batch.old_logp_T).exp()
    low, high = 1 - CLIP["clip_low"], 1 + CLIP["clip_high"]
    surrogate_T = torch.minimum(ratio_T * A_T, ratio_T.clamp(low, high) * A_T)
    correction_T = (batch.old_logp_T - batch.sampler_logp_T).exp().clamp(max=RATIO_CAP)
    return -(w_T * correction_T * surrogate_T).sum()


def dense_logprob(batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy from all logits at once."""
    with torch.no_grad():
        logp_TV = torch.log_softmax((batch.hidden_TD @ batch.weight_VD.T).float(), -1)
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        return logp_TV.gather(1, batch.targets_T[:, None])[:, 0], entropy_T


def compile_cases(*, full: bool, T: int = 8192, D: int = 1536, V: int = 151936) -> Iterator[tuple[str, str, Callable]]:
    """(operation, description, call on meta tensors) at production shapes: with every option; ``full`` adds both dtypes,
    pointers that are None, every estimator, odd sizes, and sizes of 1, which Triton turns into constants.
    """
    transform = dict(temperature=0.7, logit_scale=0.5, softcap=30.0, vocab_size=V - 265)
    given, loss = dict(ref=True, mask=True), dict(estimator="grpo", beta=0.1)
    everything = (given | dict(bias=True), loss | transform), (dict(bias=True), transform)

    def heads(name: str, shape: tuple, head: tuple[dict, dict], logprob: tuple[dict, dict]) -> list[tuple]:
        return [("policy_head", name, shape, *head), ("token_logprob", name, shape, *logprob)]

    cases = [
        ("group_advantage", "grpo", (T, 0, 0, torch.float32), {}, dict(estimator="grpo")),
        ("policy_loss", "everything", (T, 0, 0, torch.float32), given, loss),
        *heads("bf16, everything", (T, D, V, torch.bfloat16), *everything),
    ]
    if full:
        rest = [estimator for estimator in ESTIMATORS if estimator != "grpo"]
        cases += [("group_advantage", name, (T, 0, 0, torch.float32), {}, dict(estimator=name)) for name in rest]
        cases += [("policy_loss", "on-policy", (T, 0, 0, torch.float32), dict(old=False), {})]
        nothing, plain, odd = ({}, {}), (dict(old=False), {}), (dict(frozen=True), {})
        cases += heads("bf16, sizes of 1", (1, 1, 1, torch.bfloat16), nothing, nothing)
        cases += heads("bf16, on-policy", (T, D, V, torch.bfloat16), plain, nothing)
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            cases += heads(f"{name}, odd sizes, frozen", (T - 1, D - 1, V + 1, dtype), odd, nothing)
        cases += heads("fp32, everything", (T, D, V, torch.float32), *everything)
    for op, description, shape, fields, options in cases:
        yield op, description, _on_meta(op, shape, fields, options)


def _on_meta(op: str, shape: tuple, fields: dict, options: dict) -> Callable[[], None]:
    def call() -> None:
        result = CALLS[op](make_batch(*shape, "meta", **fields), backend="triton", **options)
        if op == "policy_head":
            result.loss.backward()

    return call
