"""A small ragged step for tests of policy_loss, which may drop columns, rows and masks of it."""

from types import SimpleNamespace

import numpy as np
import torch

from vipfast.kernels.policy_loss import policy_loss

NAN = float("nan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULE = dict(clip_low=0.2, clip_high=0.28, beta=0.0, estimator="rloo")


class Step:
    """A step of rollouts of given lengths in groups of given sizes; some unscored, one out of use, one baseline given."""

    def __init__(self, lengths, sizes, seed=0):
        assert len(lengths) == sum(sizes)
        rng = np.random.default_rng(seed)
        self.lengths, R, T = np.array(lengths, int), len(lengths), sum(lengths)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self.groups = np.concatenate([[0], np.cumsum(sizes)])
        self.reward = rng.choice([0.0, 1.0, 0.3], R).astype(np.float32)
        self.reward[3::7] = NAN
        use, baseline = np.arange(R) % 5 != 4, np.full(len(sizes), NAN)
        baseline[1:2] = 0.4
        self.plan = SimpleNamespace(use_R=use, baseline_B=baseline)
        self.weight = rng.uniform(0.5, 1.5, R) / max(T, 1)
        base = -rng.uniform(0.1, 3, T)
        self.columns = [torch.tensor(base + rng.normal(0, 0.4, T)) for _ in range(4)]
        self.mask = rng.random(T) < 0.8

    def at(self, rows):
        return np.concatenate([np.arange(self.offsets[i], self.offsets[i + 1]) for i in rows] or [[]]).astype(int)

    def trained(self):
        return np.repeat(self.plan.use_R & ~np.isnan(self.reward), self.lengths) & self.mask

    def call(self, backend="triton", dtype=torch.float32, old=True, ref=True, mask=True, rows=None, grad=False, **rule):
        rows = np.arange(len(self.lengths)) if rows is None else np.array(rows, int)
        at = self.at(rows)
        logp, *others = (column[at].to(dtype).to(DEVICE) for column in self.columns)
        sampler, old, ref = (column if given else None for column, given in zip(others, (True, old, ref), strict=True))
        offsets = np.concatenate([[0], np.cumsum(self.lengths[rows])])
        rule = RULE | dict(beta=0.0 if ref is None else 0.1) | rule
        result = policy_loss(
            self.reward, self.groups, self.plan, rows, offsets, logp.requires_grad_(grad), sampler, old, ref,
            self.mask[at] if mask else None, weight_R=self.weight, backend=backend, **rule,
        )  # fmt: skip
        return (result, logp) if grad else result


SMALL = Step([3, 0, 1, 9, 17, 0, 2, 8, 1, 3], [3, 1, 0, 5, 1])


def scalars(result):
    return {"loss": result.loss.item()} | {name: total.item() for name, total in result.sums.items()}
