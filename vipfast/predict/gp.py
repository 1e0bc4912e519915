"""Predictor ``gp``: a Gaussian process on the logit of the success rate that knows how little a few rollouts say.

An observed prompt with k of n successes enters as y = log((k + 1/2) / (n - k + 1/2)), with noise v = 1/(k + 1/2) + 1/(n - k +
1/2), plus ``drift`` for every step of its age, since the policy moves. The prior mean is the pooled logit of the window (each
prompt once), the covariance a (s RBF(text) + (1 - s) [same prompt]): what the text does not explain is a prompt's own. Its
scale a comes from the window: the spread of y less the noise in it. The window holds the last W = 384 distinct prompts, so a
step costs one 384 x 384 Cholesky factor whatever the pool's size.

A prompt seen again keeps one row: its old counts shrink by v / (v + drift age), as if drift had cost them rollouts, and the new
ones are added. Adding the logits instead would pin a prompt seen as 0 of 2 time and again at logit -1.6 for ever. After each
step all older rows move by a shared shift, the part of the step's surprise that all prompts have in common.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vipfast.predict.kernel import Factor, length_scale, rbf
from vipfast.predict.rows import distinct, positions

_NODES, _WEIGHTS = np.polynomial.hermite.hermgauss(32)


@dataclass(frozen=True, eq=False)
class _Fit:
    """The posterior of one window, kept until the window changes."""

    mean: float
    amplitude: float
    X: np.ndarray  # float64 [W, D]
    factor: Factor
    residual: np.ndarray  # float64 [W], whitened y - mean


class GP:
    """A logit Gaussian process over text embeddings.

    Args:
        embed: texts -> float [B, D].
        pool_texts: the pool, sampled for the length scale (median distance).
        window: W, distinct prompts remembered.
        drift: variance a logit gains per step of age.
        shift_var: prior variance of the shared shift per step.
        share: s, part of the variance that the text explains.
    """

    name = "gp"
    AMPLITUDE_START, AMPLITUDE_RANGE = 4.0, (0.25, 16.0)

    def __init__(
        self,
        embed: Callable[[Sequence[str]], np.ndarray],
        pool_texts: Sequence[str],
        window: int = 384,
        drift: float = 0.02,
        shift_var: float = 0.02,
        share: float = 0.9,
    ):
        self.embed, self.window, self.drift, self.shift_var, self.share = embed, window, drift, shift_var, share
        self._pool_texts = pool_texts
        self._scale: float | None = None
        self._step = 0  # of the newest observation
        self._uids: list[str] = []  # window, oldest first
        self._X = np.zeros((0, 0))  # float64 [W, D]
        self._rbf = np.zeros((0, 0))  # float64 [W, W], of the window; a step computes its new rows only
        self._successes, self._trials, self._shift, self._seen = (np.zeros(0) for _ in range(4))
        self._fit: _Fit | None = None
        # Of the last prediction, until the next update: logits, and RBF to the window's rows (float64 [W]).
        self._logits: dict[str, tuple[float, float]] = {}
        self._cross: dict[str, np.ndarray] = {}

    def predict(self, uids: Sequence[str], texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """See ``Predictor.predict``."""
        # In uid order, so that shuffling a batch changes no bit of it.
        order = sorted(range(len(uids)), key=uids.__getitem__)
        mean, variance = np.empty(len(uids)), np.empty(len(uids))
        mean[order], variance[order] = self.logits([uids[i] for i in order], [texts[i] for i in order])
        self._logits = dict(zip(uids, zip(mean, variance, strict=True), strict=True))
        return expectations(mean, variance)

    def logits(self, uids: Sequence[str], texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """float64 [B], [B]: posterior mean and variance (>= 0) of each prompt's logit, a prompt's own part included."""
        self._measure_scale(texts)
        X = self.embed(texts)
        if not self._uids:
            return np.zeros(len(uids)), np.full(len(uids), self.AMPLITUDE_START)
        fit = self._fitted()
        row = positions({uid: i for i, uid in enumerate(self._uids)}, uids)
        own = np.flatnonzero(row >= 0)
        cross_BW = rbf(X.astype(np.float64), fit.X, self._scale)
        self._cross = dict(zip(uids, cross_BW, strict=True))
        cross_BW = self.share * cross_BW
        cross_BW[own, row[own]] += 1 - self.share
        cross_BW *= fit.amplitude
        explained = fit.factor.whiten(cross_BW.T)
        # k** - v.v cancels to below 0 where a prompt is known almost exactly.
        return fit.mean + fit.residual @ explained, np.maximum(fit.amplitude - (explained**2).sum(0), 0.0)

    def update(self, uids: Sequence[str], texts: Sequence[str], successes: np.ndarray, trials: np.ndarray, step: int) -> None:
        """See ``Predictor.update``."""
        batch = distinct(uids, texts, successes, trials)
        if not batch.uids:
            return
        if self._uids:
            known = all(uid in self._logits for uid in batch.uids)
            planned = np.array([self._logits[uid] for uid in batch.uids]).T if known else self.logits(batch.uids, batch.texts)
            mean, variance = planned
            y, v = observed(batch.successes, batch.trials)
            precision = 1 / (v + variance)
            self._shift += (precision * (y - mean)).sum() / (precision.sum() + 1 / self.shift_var)
        self._measure_scale(texts)
        self._step = step
        row = positions({uid: i for i, uid in enumerate(self._uids)}, batch.uids)
        again, old = np.flatnonzero(row >= 0), row[row >= 0]
        k, n, shift = batch.successes, batch.trials, np.zeros(len(row))
        _, v = observed(self._successes[old], self._trials[old])
        kept = v / (v + self.drift * (step - self._seen[old]))
        shift[again] = self._shift[old] * kept * self._trials[old] / (kept * self._trials[old] + n[again])
        k[again] += kept * self._successes[old]
        n[again] += kept * self._trials[old]
        rest = np.setdiff1d(np.arange(len(self._uids)), old)[max(0, len(self._uids) - len(old) + len(row) - self.window) :]
        X = np.asarray(self.embed(batch.texts), np.float64)
        self._rbf = self._grown(rest, X, batch.uids)[-self.window :, -self.window :]
        self._uids = ([self._uids[i] for i in rest] + batch.uids)[-self.window :]
        self._X = (np.concatenate([self._X[rest], X]) if len(rest) else X)[-self.window :]
        for name, new in (("_successes", k), ("_trials", n), ("_shift", shift), ("_seen", np.full(len(row), float(step)))):
            setattr(self, name, np.concatenate([getattr(self, name)[rest], new])[-self.window :])
        self._fit, self._logits, self._cross = None, {}, {}

    def _grown(self, rest: np.ndarray, X: np.ndarray, uids: Sequence[str]) -> np.ndarray:
        """The window's RBF matrix with only rows ``rest`` kept and rows ``X`` [B, D], of ``uids``, added."""
        grown = np.empty((len(rest) + len(X),) * 2)
        if len(rest) and rest[-1] - rest[0] + 1 == len(rest):  # nobody seen again: a block, copied at once
            grown[: len(rest), : len(rest)] = self._rbf[rest[0] : rest[-1] + 1, rest[0] : rest[-1] + 1]
        else:
            grown[: len(rest), : len(rest)] = self._rbf[np.ix_(rest, rest)]
        grown[len(rest) :, len(rest) :] = rbf(X, X, self._scale)
        if len(rest):
            known = all(uid in self._cross for uid in uids)
            cross_BW = np.stack([self._cross[uid] for uid in uids]) if known else rbf(X, self._X, self._scale)
            grown[len(rest) :, : len(rest)] = cross_BW[:, rest]
            grown[: len(rest), len(rest) :] = grown[len(rest) :, : len(rest)].T
        return grown

    def _fitted(self) -> _Fit:
        if self._fit is None:
            y, v = observed(self._successes, self._trials)
            y = y + self._shift
            v = v + self.drift * (self._step - self._seen)
            rate = np.mean(1 / (1 + np.exp(-y)))
            mean = float(np.log(rate) - np.log1p(-rate))
            amplitude = float(np.clip(np.mean((y - mean) ** 2 - v), *self.AMPLITUDE_RANGE))
            K = self._rbf * (amplitude * self.share)
            K[np.diag_indices_from(K)] += amplitude * (1 - self.share) + v
            factor = Factor(K)
            self._fit = _Fit(mean, amplitude, self._X, factor, factor.whiten((y - mean)[:, None])[:, 0])
        return self._fit

    def _measure_scale(self, texts: Sequence[str]) -> None:
        if self._scale is None:
            self._scale = length_scale(self.embed, self._pool_texts or texts)

    def state_dict(self) -> dict:
        """uids list [W], embeddings float32 [W, D], rbf float64 [W, W], successes, trials, shift, seen float64 [W], step int,
        scale float. The matrix is kept because computing it anew, in other blocks, would move its last bits.
        """
        return {
            "uids": list(self._uids),
            "embeddings": self._X.astype(np.float32),
            "rbf": self._rbf.copy(),
            "successes": self._successes.copy(),
            "trials": self._trials.copy(),
            "shift": self._shift.copy(),
            "seen": self._seen.copy(),
            "step": self._step,
            "scale": self._scale or 0.0,
        }

    def load_state_dict(self, state: dict) -> None:
        self._uids, self._step, self._scale = list(state["uids"]), int(state["step"]), float(state["scale"]) or None
        self._X, self._rbf = np.array(state["embeddings"], np.float64), np.array(state["rbf"], np.float64)
        self._successes, self._trials, self._shift, self._seen = (
            np.array(state[name], np.float64) for name in ("successes", "trials", "shift", "seen")
        )
        self._fit, self._logits, self._cross = None, {}, {}


def observed(successes: np.ndarray, trials: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Empirical logit and its noise variance: finite for k = 0 and k = n, and surer the more trials stand behind it."""
    won, lost = successes + 0.5, trials - successes + 0.5
    return np.log(won / lost), 1 / won + 1 / lost


def expectations(mean: np.ndarray, variance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E[p] and E[p (1-p)] of p = sigmoid(g), g ~ N(mean, variance), by 32-point Gauss-Hermite quadrature; all float64 [B]."""
    p = 1 / (1 + np.exp(-(mean[:, None] + np.sqrt(2 * variance)[:, None] * _NODES)))
    weights = _WEIGHTS / np.sqrt(np.pi)
    return p @ weights, (p * (1 - p)) @ weights
