"""Predictor ``vip``: the noise-free Gaussian process of VIP (arXiv 2602.01601, section 4).

p(x) = sigmoid(g(x)), g ~ GP(m, K), RBF over text embeddings, zero prior mean. After a batch with k of n successes, g^ = logit
clip(k/n, eps, 1 - eps); m[rest] += K[rest, batch] a with a = K[batch, batch]^-1 (g^ - m[batch]); m[batch] = g^.

Where the paper is silent: K is fixed (its covariance recursion would need N x N and grow ever surer of a moving policy), eps =
1e-6, jitter 1e-6 on K[batch, batch], length scale by the median heuristic.

With A the sum of every observed prompt's weights a over all steps, the recursion unrolls to m(x) = K[x, seen] A + jitter A[x]
(the last term, for a prompt that was itself observed, is what "m[batch] = g^" adds to the jittered solve). So the mean is
formed for a step's prompts when they are planned: nothing of the pool has to be embedded before, and no N x N matrix exists.
"""

from collections.abc import Callable, Sequence

import numpy as np

from vipfast.predict.base import Prediction
from vipfast.predict.kernel import Factor, length_scale, rbf
from vipfast.predict.logit import sigmoid
from vipfast.predict.pool import Pool
from vipfast.predict.rows import check_points, distinct, positions


class PaperGP:
    """Args: ``embed``, ``pool_texts``, ``pool_uids`` as for ``GP``; ``eps`` bounds rates."""

    name = "vip"
    JITTER = 1e-6

    def __init__(
        self,
        embed: Callable[[Sequence[str]], np.ndarray],
        pool_texts: Sequence[str],
        pool_uids: Sequence[str] = (),
        eps: float = 1e-6,
    ):
        self.embed, self.eps = embed, eps
        self.pool = Pool(pool_uids)
        self._pool_texts = pool_texts
        self._scale: float | None = None
        self._uids: list[str] = []  # S prompts observed so far
        self._rows: dict[str, int] = {}
        self._X: np.ndarray | None = None  # float64 [S, D]
        self._weight = np.zeros(0)  # float64 [S], A
        self._means: dict[str, float] = {}  # of the last prediction, until the next update

    def predict(self, uids: Sequence[str], texts: Sequence[str]) -> Prediction:
        """See ``Predictor.predict``; the paper plugs the mean in, so nothing is uncertain and the signal is p (1-p) there."""
        mean = self._mean(uids, texts)
        self._means = dict(zip(uids, mean, strict=True))
        p = sigmoid(mean)
        return Prediction(p, np.zeros(len(p)), p * (1 - p))

    def update(self, uids: Sequence[str], texts: Sequence[str], successes: np.ndarray, trials: np.ndarray, step: int) -> None:
        """See ``Predictor.update``."""
        batch = distinct(uids, texts, successes, trials)
        if not batch.uids:
            return
        rate = np.clip(batch.successes / batch.trials, self.eps, 1 - self.eps)
        target = np.log(rate) - np.log1p(-rate)
        known = all(uid in self._means for uid in batch.uids)
        mean = np.array([self._means[uid] for uid in batch.uids]) if known else self._mean(batch.uids, batch.texts)
        X = np.asarray(self.embed(batch.texts), np.float64)
        factor = Factor(rbf(X, X, self._scale) + self.JITTER * np.eye(len(X)))
        change = factor.whiten(np.eye(len(X))).T @ factor.whiten((target - mean)[:, None])[:, 0]
        self._keep(batch.uids, X)
        self._weight[positions(self._rows, batch.uids)] += change
        self._means = {}

    def _mean(self, uids: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        """float64 [B], m of the step's prompts; formed in uid order, so that shuffling a batch changes no bit."""
        X = np.asarray(self.embed(texts), np.float64)
        check_points(X, uids)
        if self._scale is None:
            self._scale = length_scale(self.embed, self._pool_texts or texts)
        if not self._uids:
            return np.zeros(len(uids))
        order = sorted(range(len(uids)), key=uids.__getitem__)
        row = positions(self._rows, uids)
        mean = np.where(row >= 0, self.JITTER * self._weight[row], 0.0)
        mean[order] += rbf(X[order], self._X, self._scale) @ self._weight
        return mean

    def _keep(self, uids: Sequence[str], X: np.ndarray) -> None:
        new = np.flatnonzero(positions(self._rows, uids) < 0)
        for i in new:
            self._rows[uids[i]] = len(self._uids)
            self._uids.append(uids[i])
        self._X = X[new] if self._X is None else np.concatenate([self._X, X[new]])
        self._weight = np.concatenate([self._weight, np.zeros(len(new))])

    def state_dict(self) -> dict:
        """uids list [S], embeddings float32 [S, D], weight float64 [S], scale (0 = not measured yet), that of the pool."""
        X = np.zeros((0, 0)) if self._X is None else self._X
        return {
            "uids": list(self._uids),
            "embeddings": X.astype(np.float32),
            "weight": self._weight.copy(),
            "scale": self._scale or 0.0,
            **self.pool.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        self._uids = list(state["uids"])
        self._rows = {uid: row for row, uid in enumerate(self._uids)}
        self._X = np.array(state["embeddings"], np.float64) if self._uids else None
        self._weight = np.array(state["weight"], np.float64)
        self._scale = float(state["scale"]) or None
        self._means = {}
        self.pool.load_state_dict(state, self._uids)
