"""Held-out evaluation: mean@k, unbiased pass@k and maj@k, on the same random streams, so runs compare sample by sample."""

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from math import comb

import numpy as np

from vipfast import streams
from vipfast.engine.base import Engine
from vipfast.placement import HERE, Placement
from vipfast.rewards.grader import Grader
from vipfast.rollout import sample_uniformly
from vipfast.telemetry.activity import NOW
from vipfast.telemetry.flow import Flow
from vipfast.types import Prompt


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased P(at least one of k samples is right), 1 - C(n-c, k)/C(n, k) (Chen et al., arXiv 2107.03374, eq. 1)."""
    assert 0 < k <= num_samples and 0 <= num_right <= num_samples
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def evaluate(
    prompts: Sequence[Prompt],
    engine: Engine,
    grader: Grader,
    k: int,
    *,
    threshold: float = 1.0,
    rows_at_once: int = 4096,
    placement: Placement = HERE,
) -> dict[str, float | None]:
    """Sample k completions per prompt and score them.

    Args:
        prompts: held-out prompts [B]; an empty list gives nulls.
        engine, grader: as in training; sampling parameters are the run's.
        k: samples per prompt.
        threshold: a reward this high counts as right.
        rows_at_once: most rollouts in flight, so that evaluation needs no more memory than a training step.
        placement: each home samples and grades every so-many-th prompt; all ranks get the scores of all.

    Returns:
        eval/mean@k (share of right samples), eval/pass@k, eval/maj@k (share of prompts whose most frequent answer is right;
        a tie goes to the answer sampled first; None where the reward extracts no answers), each in [0, 1] or None, and
        time/eval_s. An unscored sample is not right.
    """
    start = time.perf_counter()
    num_homes = placement.num_homes
    own = prompts[placement.home :: num_homes]
    parts = placement.ranks.together(partial(_judged, own, engine, grader, k, threshold, rows_at_once))
    right_BK = np.empty((len(prompts), k), bool)
    votes_B = np.empty(len(prompts), bool)
    for home, (right, votes) in enumerate(parts[:: placement.tensor_parallel]):
        right_BK[home::num_homes], votes_B[home::num_homes] = right, votes
    scores = {f"eval/{name}@{k}": None for name in ("mean", "pass", "maj")}
    if len(prompts):
        scores[f"eval/mean@{k}"] = float(right_BK.mean())
        scores[f"eval/pass@{k}"] = float(np.mean([pass_at_k(k, int(num), k) for num in right_BK.sum(1)]))
        if grader.has_answers:
            scores[f"eval/maj@{k}"] = float(votes_B.mean())
    return {**scores, "time/eval_s": time.perf_counter() - start}


def _judged(
    prompts: Sequence[Prompt], engine: Engine, grader: Grader, k: int, threshold: float, rows_at_once: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which samples are right, bool [B, k], and for which prompts the majority is, bool [B]."""
    rows = []
    at_once, flow = max(1, rows_at_once // k), Flow.of(engine, len(prompts) * k)
    NOW.enter("generate", flow.total, "samples", flow)
    for first in range(0, len(prompts), at_once):
        part = sample_uniformly(prompts[first : first + at_once], k, engine, grader, stream=streams.EVAL, flow=flow)
        rows += [part[name] for name in sorted(part)]
        engine.reset()
    right_BK = np.array([reward >= threshold for _, reward, _ in rows], bool).reshape(-1, k)
    answers = [answer for _, _, answer in rows]
    votes_B = np.array([majority_right(answers[b * k : (b + 1) * k], right_BK[b]) for b in range(len(prompts))], bool)
    return right_BK, votes_B


def majority_right(answers: Sequence[str | None], right_K: np.ndarray) -> bool:
    """Whether the most frequent answer is right; a tie goes to the answer that comes first, None has no vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return bool(right_K[list(answers).index(winner)])
