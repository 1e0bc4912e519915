"""The pools that ``predictors.py`` replays: simulated ones, and real runs recorded with many rollouts per prompt.

A pool hands out steps: which prompts are drawn, the signal p (1 - p) of each (for a record an unbiased estimate), and up to U
outcomes of each, the k-th of which is the same whatever a predictor asks for.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from scipy.special import betaincinv
from scipy.stats import norm

from vipfast.predict.embed import SHIPPED, Embedder

MOST = 32
"""U, outcomes kept ready per prompt and step."""
RATES = {
    "U(0,1)": lambda u: u,
    "Beta(.4,.6)": lambda u: betaincinv(0.4, 0.6, u),
    "Beta(.2,.2)": lambda u: betaincinv(0.2, 0.2, u),
    "70% p=.002, rest Beta(.5,2)": lambda u: np.where(u < 0.7, 0.002, betaincinv(0.5, 2, np.clip((u - 0.7) / 0.3, 0, 1))),
}
WALK, COMMON = 0.1, 0.02
"""With drift, every logit walks by N(0, WALK^2) a step, and all of them rise by COMMON."""
TOLD = 0.8
"""Share of the variance that an informative text explains."""


@dataclass(frozen=True, eq=False)
class Step:
    """B prompts of one step."""

    rows: np.ndarray  # int64 [B], prompts of the pool
    signal: np.ndarray  # float64 [B], p (1 - p)
    outcomes: np.ndarray  # bool [B, MOST]
    ties: np.ndarray  # uint64 [B]
    judged: tuple[np.ndarray, np.ndarray]  # successes, trials [B] that predictions are judged by


@dataclass(frozen=True)
class Simulated:
    """``rates`` a key of RATES; whether texts tell; whether the policy drifts."""

    rates: str
    text: bool
    drift: bool
    num_prompts: int = 1024
    num_epochs: int = 4
    prompts_per_step: int = 64

    @property
    def name(self) -> str:
        return f"{self.rates}{', text tells' if self.text else ', text says nothing'}{', drift' if self.drift else ''}"

    def embeddings(self, seed: int) -> tuple[list[str], list[str], np.ndarray]:
        """uids, texts (the same) and vectors [N, 384] of the pool, which are MiniLM's of the embedded task's prompts."""
        rows = np.random.default_rng((seed, 1)).permutation(len(_vectors()))[: self.num_prompts]
        uids = [f"{i:05d}" for i in range(self.num_prompts)]
        return uids, uids, _vectors()[rows]

    def steps(self, seed: int) -> Iterator[Step]:
        rng = np.random.default_rng((seed, 2))
        N, B = self.num_prompts, self.prompts_per_step
        X = self.embeddings(seed)[2].astype(np.float64)
        told = _function(X, rng) if self.text else np.zeros(N)
        latent = np.sqrt(TOLD) * told + np.sqrt(1 - TOLD) * rng.normal(size=N)
        p = np.clip(RATES[self.rates]((np.argsort(np.argsort(latent)) + 0.5) / N), 1e-4, 1 - 1e-4)
        logit = np.log(p / (1 - p))
        for _ in range(self.num_epochs):
            order = rng.permutation(N)
            for start in range(0, N, B):
                if self.drift:
                    logit = logit + WALK * rng.normal(size=N) + COMMON
                rows = order[start : start + B]
                p = 1 / (1 + np.exp(-logit[rows]))
                outcomes = rng.random((len(rows), MOST)) < p[:, None]
                many = np.full(len(rows), 10**6)
                ties = rng.integers(0, 2**63, len(rows)).astype(np.uint64)
                yield Step(rows, p * (1 - p), outcomes, ties, (p * many, many))


@dataclass(frozen=True)
class Recorded:
    """A run with at least MOST rollouts of every prompt, as ``read_run`` or a .csv file made from it keeps it."""

    name: str
    step: np.ndarray  # int64 [R]
    uids: list[str]
    texts: list[str]
    successes: np.ndarray  # int64 [R]
    trials: np.ndarray  # int64 [R]

    def embeddings(self, seed: int) -> tuple[list[str], list[str], np.ndarray]:
        return self.uids, self.texts, Embedder()(self.texts)

    def steps(self, seed: int) -> Iterator[Step]:
        """The run's own steps; outcomes are drawn from its rollouts without replacement."""
        rng = np.random.default_rng((seed, 3))
        for step in np.unique(self.step):
            rows = np.flatnonzero(self.step == step)
            k, n = self.successes[rows], self.trials[rows]
            outcomes = np.stack([rng.permutation(np.arange(n[i]) < k[i])[:MOST] for i in range(len(rows))])
            ties = rng.integers(0, 2**63, len(rows)).astype(np.uint64)
            yield Step(rows, k * (n - k) / (n * (n - 1.0)), outcomes, ties, (k, n))


def read(path: Path) -> Recorded:
    """A record from a run's folder (rollouts/STEP.parquet) or from a file that ``write`` made.

    Raises:
        SystemExit: there is nothing to read, or too few rollouts of a prompt.
    """
    rows = _csv_rows(path) if path.suffix == ".csv" else _run_rows(path)
    step, uids, texts, k, n = zip(*rows, strict=True)
    record = Recorded(path.stem, np.array(step), list(uids), list(texts), np.array(k), np.array(n))
    if record.trials.min() < MOST:
        raise SystemExit(f"{path}: a prompt has {record.trials.min()} scored rollouts, a replay needs {MOST} of each; {HOW}")
    return record


HOW = "record with: python scripts/train.py --allocator uniform --rollouts-per-prompt 64 --sample-rollouts all"


def write(record: Recorded, path: Path) -> None:
    """Keep a record as .csv: step, uid, text, successes, trials."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("step", "uid", "text", "successes", "trials"))
        writer.writerows(zip(record.step, record.uids, record.texts, record.successes, record.trials, strict=True))


def _csv_rows(path: Path) -> list[tuple]:
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return [(int(r["step"]), r["uid"], r["text"], int(r["successes"]), int(r["trials"])) for r in rows]


def _run_rows(path: Path) -> list[tuple]:
    from pyarrow import parquet

    files = sorted((path / "rollouts").glob("*.parquet"), key=lambda file: int(file.stem))
    if not files:
        raise SystemExit(f"--run {path}: no rollouts/*.parquet there; {HOW}")
    rows = []
    for file in files:
        counts: dict[tuple[str, str], list[int]] = {}
        columns = parquet.read_table(file, columns=["uid", "prompt", "reward"]).to_pydict()
        for uid, text, reward in zip(*columns.values(), strict=True):
            if reward is not None:
                seen = counts.setdefault((uid, text), [0, 0])
                seen[0], seen[1] = seen[0] + (reward >= 1), seen[1] + 1
        rows += [(int(file.stem), uid, text, k, n) for (uid, text), (k, n) in counts.items()]
    return rows


@cache
def _vectors() -> np.ndarray:
    with np.load(SHIPPED / "arithmetic" / "embeddings.npz") as arrays:
        return arrays["vectors"]


def _function(X: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A draw of a Matérn-3/2 process over the embeddings, length scale their median distance, as standard normal ranks."""
    distance = np.sqrt(np.maximum((X**2).sum(1)[:, None] + (X**2).sum(1) - 2 * X @ X.T, 0.0))
    np.fill_diagonal(distance, 0.0)
    scaled = np.sqrt(3) * distance / np.median(distance)
    K = (1 + scaled) * np.exp(-scaled) + 1e-6 * np.eye(len(X))
    drawn = np.linalg.cholesky(K) @ rng.normal(size=len(X))
    return norm.ppf((np.argsort(np.argsort(drawn)) + 0.5) / len(X))
