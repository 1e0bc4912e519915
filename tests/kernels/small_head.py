"""Small cases of policy_head: rows of a step with their hidden states, a head, and what the loss knows of their tokens."""

from dataclasses import dataclass, field

import numpy as np
import torch

from vipfast.kernels.policy_head import policy_head
from vipfast.kernels.policy_loss import policy_loss
from vipfast.types import StepPlan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [3, 1, 4]  # rollouts of each prompt; rewards below: mixed, alone, one unscored
REWARD = np.array([1, 0, 0.5, 1, 0, 1, np.nan, 1], np.float32)
PLAN = StepPlan.plain([np.array(SIZES)])
GROUPS = np.cumsum([0, *SIZES])
RULE = dict(estimator="rloo", clip_low=0.2, clip_high=0.28)


def of_scores(z, targets):
    logp = torch.log_softmax(z, -1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@dataclass
class Case:
    """Rows of given lengths and what the loss knows of their tokens, the same for any choice of rows."""

    lengths: tuple[int, ...] = (1, 2, 0, 1, 1, 2, 1, 1)
    rows: tuple[int, ...] = tuple(range(8))
    V: int = 37
    D: int = 5
    dtype: torch.dtype = torch.float64
    beta: float = 0.1
    off_policy: bool = True
    options: dict = field(default_factory=dict)

    def __post_init__(self):
        g, T = torch.Generator().manual_seed(self.V), sum(self.lengths)
        bounds = np.cumsum([0, *self.lengths])
        at = np.concatenate([[], *(np.arange(bounds[i], bounds[i + 1]) for i in self.rows)]).astype(int)
        self.at = torch.from_numpy(at).to(DEVICE)

        def leaf(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(DEVICE)

        hidden, self.weight, self.bias = leaf(T, self.D), leaf(self.V, self.D), leaf(self.V)
        self.hidden = hidden[self.at].to(self.dtype).requires_grad_()
        self.weight, self.bias = (x.to(self.dtype).requires_grad_() for x in (self.weight, self.bias))
        self.targets = torch.randint(0, self.V, (T,), generator=g).to(DEVICE)[self.at]
        noise, self.offsets = 0.3 * leaf(3, T)[:, self.at], np.cumsum([0, *(self.lengths[i] for i in self.rows)])
        # Near the policy's own log-probs, so that some ratios are clipped and none is far away.
        self.sampler, self.old, self.ref = self.dense()[0].detach() + noise
        self.mask = torch.rand(T, generator=g).to(DEVICE)[self.at] > 0.15
        self.weight_R = np.linspace(0.3, 0.1, 8)

    @property
    def leaves(self):
        return self.hidden, self.weight, self.bias

    def known(self):
        return self.sampler, self.old if self.off_policy else None, self.ref if self.beta else None, self.mask

    def dense(self):
        """Log-probs and entropies in float64."""
        o = dict(temperature=1.0, logit_scale=1.0, softcap=None, vocab_size=None) | self.options
        h, w, b = (x.double() for x in self.leaves)
        z = (h @ w.T + b)[:, : o["vocab_size"]] * o["logit_scale"]
        z = z if o["softcap"] is None else o["softcap"] * torch.tanh(z / o["softcap"])
        return of_scores(z / o["temperature"], self.targets)

    def step(self):
        return REWARD, GROUPS, PLAN, np.array(self.rows, int), self.offsets

    def rule(self):
        return dict(RULE, weight_R=self.weight_R, beta=self.beta)

    def fused(self, backend="triton", **options):
        options = self.rule() | dict(bias_V=self.bias) | self.options | options
        return policy_head(self.hidden, self.weight, self.targets, *self.step(), *self.known(), backend=backend, **options)

    def expected(self):
        logp, entropy = self.dense()
        found = policy_loss(*self.step(), logp, *self.known(), **self.rule(), backend="torch")
        return found, logp, entropy, self.grads(found.loss)

    def grads(self, loss):
        return torch.autograd.grad(loss, self.leaves, retain_graph=True)
