"""Predictor ``kernel_beta``: pseudo-counts lent by prompts with like texts, beside a prompt's own.

Of the last W distinct prompts, those near a prompt's text (RBF weights w, itself left out) say what rate to expect: m = (c r +
sum w k) / (c + sum w n), r the window's mean rate. Its Beta has s m and s (1 - m) pseudo-counts besides its own aged counts.
How near (the length scale) and how strong (s) is tuned online: of a small grid, the pair under which the counts of past steps
were likeliest (beta-binomial, old steps forgotten).
"""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import betaln

from vipfast.predict.base import Prediction
from vipfast.predict.history import History
from vipfast.predict.kernel import length_scale, squared_distances
from vipfast.predict.pool import Pool
from vipfast.predict.rows import by_uid, check_points, distinct, positions


class KernelBeta:
    """Args: ``embed``, ``pool_texts``, ``pool_uids``, ``window`` (W) and ``drift`` as for ``GP``."""

    name = "kernel_beta"
    LENGTHS = (0.25, 0.4, 0.7)
    """Length scales tried, in units of the pool's median distance."""
    STRENGTHS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    POOLED = 8.0
    """c, rollouts' worth of the window's mean rate in every neighbourhood."""
    REMEMBERED = 0.95
    """What a step's likelihood counts one step later."""

    def __init__(
        self,
        embed: Callable[[Sequence[str]], np.ndarray],
        pool_texts: Sequence[str],
        pool_uids: Sequence[str] = (),
        window: int = 512,
        drift: float = 0.01,
    ):
        self.embed, self.window = embed, window
        self.history, self.pool = History(drift), Pool(pool_uids)
        self._pool_texts = pool_texts
        self._scale: float | None = None
        self._step = 0
        self._uids: list[str] = []  # window, oldest first
        self._X = np.zeros((0, 0))  # float64 [W, D]
        self._score = np.zeros((len(self.LENGTHS), len(self.STRENGTHS)))

    def predict(self, uids: Sequence[str], texts: Sequence[str]) -> Prediction:
        """See ``Predictor.predict``."""
        order = by_uid(uids)
        names = [uids[i] for i in order]
        length, strength = np.unravel_index(int(np.argmax(self._score)), self._score.shape)
        rate_B = self._rates(names, [texts[i] for i in order], self._step + 1)[length]
        k, n, _ = self.history.aged(names, self._step + 1)
        prior = self.STRENGTHS[strength]
        prediction = Prediction.of_beta(k + prior * rate_B, n - k + prior * (1 - rate_B))
        back = np.argsort(order)
        return Prediction(*(values[back] for values in prediction))

    def update(self, uids: Sequence[str], texts: Sequence[str], successes: np.ndarray, trials: np.ndarray, step: int) -> None:
        """See ``Predictor.update``."""
        batch = distinct(uids, texts, successes, trials)
        if not batch.uids:
            return
        k, n, _ = self.history.aged(batch.uids, step)
        rate_HB = self._rates(batch.uids, batch.texts, step)
        self._score *= self.REMEMBERED
        for at, strength in enumerate(self.STRENGTHS):
            alpha_HB, beta_HB = k + strength * rate_HB, n - k + strength * (1 - rate_HB)
            won = betaln(alpha_HB + batch.successes, beta_HB + batch.trials - batch.successes)
            self._score[:, at] += (won - betaln(alpha_HB, beta_HB)).sum(1)
        self._step = step
        self.history.add(batch.uids, batch.successes, batch.trials, 0.0, step)
        again = set(batch.uids)
        rest = [row for row, uid in enumerate(self._uids) if uid not in again]
        X = self._points(batch.uids, batch.texts)
        self._uids = ([self._uids[row] for row in rest] + batch.uids)[-self.window :]
        self._X = (np.concatenate([self._X[rest], X]) if rest else X)[-self.window :]

    def _rates(self, uids: Sequence[str], texts: Sequence[str], step: int) -> np.ndarray:
        """float64 [lengths, B], the rate m that a prompt's neighbours lead to expect, for each length scale."""
        X = self._points(uids, texts)
        if self._scale is None:
            self._scale = length_scale(self.embed, self._pool_texts or texts)
        if not self._uids:
            return np.full((len(self.LENGTHS), len(uids)), 0.5)
        k, n, _ = self.history.aged(self._uids, step)
        pooled = (k.sum() + 0.5) / (n.sum() + 1)
        squares_BW = squared_distances(X, self._X)
        row = positions({uid: i for i, uid in enumerate(self._uids)}, uids)
        own = np.flatnonzero(row >= 0)
        squares_BW[own, row[own]] = np.inf
        rates = []
        for length in self.LENGTHS:
            weight_BW = np.exp(squares_BW * (-0.5 / (length * self._scale) ** 2))
            rates.append((self.POOLED * pooled + weight_BW @ k) / (self.POOLED + weight_BW @ n))
        return np.stack(rates)

    def _points(self, uids: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        X = np.asarray(self.embed(texts), np.float64)
        check_points(X, uids)
        return X

    def state_dict(self) -> dict:
        """window list [W], X float32 [W, D], score float64 [3, 6], step, scale (0 = not measured); history's and pool's."""
        own = {"window": list(self._uids), "X": self._X.astype(np.float32), "score": self._score.copy()}
        own |= {"step": self._step, "scale": self._scale or 0.0}
        return {**own, **self.history.state_dict(), **self.pool.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """See ``Predictor.load_state_dict``."""
        self._uids, self._X = list(state["window"]), np.array(state["X"], np.float64)
        self._score = np.array(state["score"], np.float64)
        self._step, self._scale = int(state["step"]), float(state["scale"]) or None
        self.history.load_state_dict(state)
        self.pool.load_state_dict(state, self.history.uids)
