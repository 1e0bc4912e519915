"""Predictor ``gp``: a Gaussian process on the logit of the success rate that takes counts for what they are.

A prompt's logit is a pool mean, a function of its text (``covariance``), and a part of its own. k of n successes enter by the
exact binomial likelihood, through expectation propagation on the last W distinct prompts (``fit``), so 0 of 8 says "low, and
how low is open", and neighbours' 0 of 8s add up. (A half-count logit with Gaussian noise cannot: it pins 0 of 8 near -2.8.)
How much the text explains and how much is a prompt's own is learnt from the window's evidence, one step of scoring per step.

The plan's numbers are integrals, not plug-ins: what the others say of a prompt is a Gaussian, what its own counts say (however
long ago, if it has left the window) multiplies it exactly, and E[p], Var[p] and E[p (1-p)] are sums over the product's nodes.

The policy moves: a prompt's counts lose weight with age (``history``), and each step's surprise that all prompts share moves
all logits (``logit.common_shift``), the evidence of older steps along with them.

A step costs some linear algebra of W x W matrices, whatever the pool's size: learning on the CPU; planning where asked for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vipfast.predict.base import Prediction
from vipfast.predict.covariance import CONSTANT, centre_and_scale
from vipfast.predict.fit import AMPLITUDES, Fit, Sites
from vipfast.predict.history import History
from vipfast.predict.logit import Posterior, common_shift, condition, sigmoid
from vipfast.predict.pool import Pool
from vipfast.predict.posterior import stream
from vipfast.predict.rows import by_uid, check_points, distinct, positions
from vipfast.xp import namespace_of, scope


class GP:
    """A logit Gaussian process over text embeddings.

    Args:
        embed: texts -> float [B, D].
        pool_texts: the pool, sampled for its centre and length scale.
        pool_uids: its uids, to tell a changed pool on resume.
        window: W, distinct prompts remembered together. On the default task 224 keep a step's allocation below 2 % of its time;
            320 would lower the variance of the plans there by 2 % of it.
        drift: variance a logit gains per step of age.
        shift_variance: prior variance of the shared shift per step.
        arrays: numpy, or cupy to predict on the GPU (``xp.choose``); predictions are its arrays.
    """

    name = "gp"

    def __init__(
        self,
        embed: Callable[[Sequence[str]], np.ndarray],
        pool_texts: Sequence[str],
        pool_uids: Sequence[str] = (),
        window: int = 224,
        drift: float = 0.01,
        shift_variance: float = 0.01,
        arrays: Any = np,
    ):
        self.embed, self.window, self.shift_variance, self.arrays = embed, window, shift_variance, arrays
        self.pool = Pool(pool_uids)
        self.history = History(drift)
        self._pool_texts = pool_texts
        self._frame: tuple[np.ndarray, float] | None = None  # centre float64 [D], scale
        self._step, self._shift = 0, 0.0  # of the newest observation
        self._amplitudes = np.array(AMPLITUDES)
        self._uids: list[str] = []  # window, oldest first
        self._fit: Fit | None = None
        # Of the last prediction on the CPU, until the next update: rows by uid, cavity mean and variance, posterior.
        self._planned: dict[str, int] = {}
        self._cavity: tuple[np.ndarray, np.ndarray, Posterior] | None = None

    def predict(self, uids: Sequence[str], texts: Sequence[str]) -> Prediction:
        """See ``Predictor.predict``."""
        order, xp = by_uid(uids), self.arrays
        with scope(xp):
            posterior = self._plan([uids[i] for i in order], [texts[i] for i in order], xp)
            prediction = Prediction.of_nodes(sigmoid(posterior.logit_BQ), posterior.weight_BQ)
            back = xp.asarray(np.argsort(order))
            return Prediction(*(values[back] for values in prediction))

    def posterior(self, X_ND: Any, variance: bool = False) -> tuple[Any, Any | None]:
        """Mean and variance (None unless asked for) of the logit of a new prompt at each embedding; see ``posterior.stream``.

        Args:
            X_ND: floats [N, D] as ``embed`` gives them, NumPy or CuPy.

        Raises:
            ValueError: nothing is observed yet, or an embedding is not finite.
        """
        if self._fit is None:
            raise ValueError("nothing is observed yet, so every prompt has the same prior; update first")
        with scope(namespace_of(X_ND)):
            return stream(self._fit, *self._frame, X_ND, variance)

    def update(self, uids: Sequence[str], texts: Sequence[str], successes: np.ndarray, trials: np.ndarray, step: int) -> None:
        """See ``Predictor.update``."""
        batch = distinct(uids, texts, successes, trials)
        if not batch.uids:
            return
        if not all(uid in self._planned for uid in batch.uids):
            self._plan(batch.uids, batch.texts, np)
        at = positions(self._planned, batch.uids)
        mean_B, variance_B, posterior = self._cavity
        moved = 0.0
        if self._uids:
            nodes = posterior.logit_BQ[at], posterior.weight_BQ[at]
            moved = common_shift(*nodes, batch.successes, batch.trials, self.shift_variance)
        self._shift += moved
        self._step = step
        self.history.add(batch.uids, batch.successes, batch.trials, self._shift, step)
        new = condition(mean_B[at] + moved, variance_B[at], *self._counts(batch.uids, step))
        self._slide(batch.uids, Sites(self._points(batch.uids, batch.texts), new.natural_B, new.precision_B), moved)
        self._fit = self._fit.improved(*self._counts(self._uids, step))
        self._amplitudes = self._fit.amplitudes
        self._planned, self._cavity = {}, None

    def _plan(self, uids: Sequence[str], texts: Sequence[str], xp: Any) -> Posterior:
        """The next step's logits, from the window and the prompts' own counts.

        Prompts come in uid order. What is computed on the CPU is kept until the update.
        """
        X = xp.asarray(self._points(uids, texts))
        if self._fit is None:
            # Before anything is observed all prompts are alike, wherever their texts lie.
            cavity = xp.zeros(len(uids)), xp.full(len(uids), CONSTANT + self._amplitudes.sum())
        else:
            rows = {uid: row for row, uid in enumerate(self._uids)}
            cavity = self._fit.window.on(xp).marginals(X, positions(rows, uids))
        posterior = condition(*cavity, *map(xp.asarray, self._counts(uids, self._step + 1)))
        if xp is np:
            self._planned, self._cavity = {uid: i for i, uid in enumerate(uids)}, (*cavity, posterior)
        return posterior

    def _counts(self, uids: Sequence[str], step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float64 [B]: own successes and trials as they count at ``step``, and how far logits have moved since."""
        k, n, shift = self.history.aged(uids, step)
        return k, n, np.where(n > 0, self._shift - shift, 0.0)

    def _slide(self, uids: Sequence[str], new: Sites, moved: float) -> None:
        """Put rows of the window's end, dropping their older ones and then the oldest; older evidence moves by ``moved``."""
        old, again = self._fit.sites if self._fit else None, set(uids)
        rest = [row for row, uid in enumerate(self._uids) if uid not in again]
        if rest:
            natural = old.natural[rest] + moved * old.precision[rest]
            new = Sites(
                np.concatenate([old.X[rest], new.X]),
                np.concatenate([natural, new.natural]),
                np.concatenate([old.precision[rest], new.precision]),
            )
        self._uids = ([self._uids[row] for row in rest] + list(uids))[-self.window :]
        kept = slice(max(0, len(new) - self.window), None)
        self._fit = Fit(Sites(new.X[kept], new.natural[kept], new.precision[kept]), self._amplitudes)

    def _points(self, uids: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        """float64 [B, D], embeddings moved to the pool's centre, in units that make the median squared distance 2."""
        if self._frame is None:
            self._frame = centre_and_scale(self.embed, self._pool_texts or texts)
        X = np.asarray(self.embed(texts), np.float64)
        check_points(X, uids)
        return (X - self._frame[0]) / self._frame[1]

    def state_dict(self) -> dict:
        """window list [W]; X float64 [W, D], natural, precision float64 [W]; amplitudes float64 [3]; centre float64 [D], scale
        (0 = not measured yet), step, shift; and those of history and pool.
        """
        sites = self._fit.sites if self._fit else Sites(np.zeros((0, 0)), np.zeros(0), np.zeros(0))
        centre, scale = self._frame or (np.zeros(0), 0.0)
        return {
            "window": list(self._uids),
            "X": sites.X.copy(),
            "natural": sites.natural.copy(),
            "precision": sites.precision.copy(),
            "amplitudes": self._amplitudes.copy(),
            "centre": centre.copy(),
            "scale": scale,
            "step": self._step,
            "shift": self._shift,
            **self.history.state_dict(),
            **self.pool.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """See ``Predictor.load_state_dict``."""
        arrays = {name: np.array(state[name], np.float64) for name in ("X", "natural", "precision", "amplitudes", "centre")}
        self.history.load_state_dict(state)
        self.pool.load_state_dict(state, self.history.uids)
        self._uids, self._amplitudes = list(state["window"]), arrays["amplitudes"]
        self._frame = (arrays["centre"], float(state["scale"])) if state["scale"] else None
        self._step, self._shift = int(state["step"]), float(state["shift"])
        sites = Sites(arrays["X"], arrays["natural"], arrays["precision"])
        self._fit = Fit(sites, self._amplitudes) if self._uids else None
        self._planned, self._cavity = {}, None
