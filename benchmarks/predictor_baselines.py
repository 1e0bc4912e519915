"""Guesses that ``predictors.py`` compares the predictors with: simple averages, ridge regression, and the truth."""

import numpy as np

from vipfast.predict.base import Prediction


def plugged(p_B: np.ndarray) -> Prediction:
    """A rate taken at its word: no variance, signal p (1 - p)."""
    return Prediction(p_B, np.zeros(len(p_B)), p_B * (1 - p_B))


class MovingAverage:
    """Every prompt at the mean rate of past steps, exponentially forgotten: the plan is uniform."""

    def __init__(self, embed, uids):
        self.rate = 0.5

    def predict(self, uids, texts) -> Prediction:
        return plugged(np.full(len(uids), self.rate))

    def update(self, uids, texts, successes, trials, step) -> None:
        self.rate += (1.0 if step <= 1 else 0.1) * (float((successes / trials).mean()) - self.rate)


class PromptAverage:
    """k/n over a prompt's visits, plugged in; unseen prompts at the mean rate of the seen ones."""

    last_only = False

    def __init__(self, embed, uids):
        self.counts: dict[str, tuple[float, float]] = {}

    def predict(self, uids, texts) -> Prediction:
        k, n = np.array(list(self.counts.values()) or [(1, 2)], float).T
        pooled = float((k / n).mean())
        rates = [self.counts[uid][0] / self.counts[uid][1] if uid in self.counts else pooled for uid in uids]
        return plugged(np.array(rates))

    def update(self, uids, texts, successes, trials, step) -> None:
        for uid, k, n in zip(uids, successes, trials, strict=True):
            old_k, old_n = (0, 0) if self.last_only else self.counts.get(uid, (0, 0))
            self.counts[uid] = (old_k + k, old_n + n)


class Raw(PromptAverage):
    """k/n of a prompt's last visit, plugged in."""

    last_only = True


class Ridge:
    """Rates regressed on embeddings over everything observed, every visit a row; plugged in, within [0.01, 0.99]."""

    PENALTY = 1.0

    def __init__(self, embed, uids):
        self.embed, self.normal, self.target = embed, None, None

    def predict(self, uids, texts) -> Prediction:
        if self.normal is None:
            return plugged(np.full(len(uids), 0.5))
        return plugged(np.clip(self._rows(texts) @ np.linalg.solve(self.normal, self.target), 0.01, 0.99))

    def update(self, uids, texts, successes, trials, step) -> None:
        X = self._rows(texts)
        if self.normal is None:
            free = np.ones(X.shape[1])
            free[-1] = 1e-6  # the constant
            self.normal, self.target = self.PENALTY * np.diag(free), np.zeros(X.shape[1])
        self.normal += X.T @ X
        self.target += X.T @ (successes / trials)

    def _rows(self, texts) -> np.ndarray:
        return np.concatenate([np.asarray(self.embed(texts), float), np.ones((len(texts), 1))], 1)


class Oracle:
    """Is told the truth before every step: what no predictor can beat."""

    def __init__(self, embed, uids):
        self.truth: Prediction | None = None

    def learn_truth(self, p_B: np.ndarray, signal_B: np.ndarray) -> None:
        self.truth = Prediction(p_B, np.zeros(len(p_B)), signal_B)

    def predict(self, uids, texts) -> Prediction:
        return self.truth

    def update(self, uids, texts, successes, trials, step) -> None:
        pass
