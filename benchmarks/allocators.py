"""What planning a step costs: the exact solver at B = 512, C = 4 096, SciPy's SLSQP on the same problem, and the gp predictor.

    python benchmarks/allocators.py [--smoke]

``plan_ms``: exact plan of the full step. ``exact``: it equals a heap that hands out units one by one. ``slsqp_ratio``: SLSQP's
time on the relaxed problem over the solver's, both at a small B in this run. ``posterior_ms`` and ``posterior_mb``: predict +
update of 64 prompts against a full window of 384, and the memory that takes at its peak. Times are CPU medians with their
range.
"""

import argparse
import heapq
import json
import time
import tracemalloc

import numpy as np
from common import append_results, print_table
from scipy.optimize import minimize

from vipfast.allocate.solver import rloo, solve
from vipfast.predict.gp import GP

LOW, HIGH = 2, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a step of 16 prompts, a window of 64")
    smoke = parser.parse_args().smoke
    B, small, window, repeats = (16, 4, 64, 2) if smoke else (512, 32, 384, 20)
    rng = np.random.default_rng(0)
    a_B, ties_B = rng.uniform(0.01, 0.25, B), rng.permutation(B).astype(np.uint64)
    plan = timed(lambda: solve(a_B, 8 * B, LOW, HIGH, ties_B, rloo), repeats)
    planned_B, heaped_B = solve(a_B, 8 * B, LOW, HIGH, ties_B, rloo), heap(a_B, 8 * B)
    exact = bool(np.isclose(variance(a_B, planned_B), variance(a_B, heaped_B), rtol=1e-12))
    ours = timed(lambda: solve(a_B[:small], 8 * small, LOW, HIGH, ties_B[:small], rloo), repeats)
    theirs = timed(lambda: slsqp(a_B[:small], 8 * small), 1 if smoke else 5)
    posterior, peak_bytes = predictor_cost(rng, window, repeats)
    result = {
        "plan_ms": round(plan[1], 3),
        "exact": exact,
        "slsqp_ratio": round(theirs[1] / ours[1], 1),
        "posterior_ms": round(posterior[1], 2),
        "posterior_mb": round(peak_bytes / 1e6, 1),
        "prompts": B,
        "slsqp_prompts": small,
        "spread_ms": {"plan": plan[::2], "slsqp": theirs[::2], "posterior": posterior[::2]},
    }
    rows = [("", "least ms", "median ms", "most ms")]
    named = {f"plan, B = {B}": plan, f"plan, B = {small}": ours, f"SLSQP, B = {small}": theirs, "gp": posterior}
    rows += [(name, *(f"{ms:.2f}" for ms in times)) for name, times in named.items()]
    print_table("CPU time", rows)
    append_results("allocators.py", result, smoke=smoke)
    print(json.dumps(result))


def timed(work, repeats: int) -> tuple[float, float, float]:
    """Least, median and most milliseconds of CPU time."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(1e3 * (time.process_time() - start))
    return round(min(times), 3), float(np.median(times)), round(max(times), 3)


def variance(a_B: np.ndarray, counts_B: np.ndarray) -> float:
    return float(np.sum(a_B * rloo(np.asarray(counts_B, float))))


def heap(a_B: np.ndarray, budget: int) -> np.ndarray:
    """Units one by one to the largest gain: the textbook form of the same optimum."""
    counts = np.full(len(a_B), LOW)
    gain = lambda q: a_B[q] * (rloo(float(counts[q])) - rloo(counts[q] + 1.0))  # noqa: E731
    queue = [(-gain(q), q) for q in range(len(a_B))]
    heapq.heapify(queue)
    for _ in range(budget - LOW * len(a_B)):
        _, q = heapq.heappop(queue)
        counts[q] += 1
        if counts[q] < HIGH:
            heapq.heappush(queue, (-gain(q), q))
    return counts


def slsqp(a_B: np.ndarray, budget: int) -> np.ndarray:
    """The relaxed problem by a general solver, as the method's authors released it (without their extra terms)."""
    whole = {"type": "eq", "fun": lambda n: n.sum() - budget}
    start = np.full(len(a_B), budget / len(a_B))
    return minimize(lambda n: variance(a_B, n), start, method="SLSQP", bounds=[(LOW, HIGH)] * len(a_B), constraints=whole).x


def predictor_cost(rng: np.random.Generator, window: int, repeats: int) -> tuple[tuple[float, float, float], int]:
    """(CPU ms of predict + update, peak bytes) with 4 096 pool prompts of 384 dimensions and the window full."""
    X = rng.normal(size=(4096, 384)).astype(np.float16)
    uids = [str(i) for i in range(len(X))]
    predictor = GP(lambda texts: X[[int(text) for text in texts]], uids, window=window)
    batches = iter([uids[i : i + 64] for i in range(0, len(uids), 64)] * 2)

    def step():
        names = next(batches)
        predictor.predict(names, names)
        predictor.update(names, names, rng.binomial(8, 0.3, 64), np.full(64, 8), step=0)

    for _ in range(window // 64 + 1):
        step()
    times = timed(step, repeats)
    tracemalloc.start()
    step()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return times, peak_bytes


if __name__ == "__main__":
    main()
