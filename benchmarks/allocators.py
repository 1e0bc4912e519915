"""What planning a step costs: exact allocation at B = 1 024, SciPy's SLSQP at B = 512, the posterior over a large pool.

    python benchmarks/allocators.py [--smoke] [--million]

``plan_ms``: exact plan of C = 8 B rollouts. ``exact``: its objective equals that of a heap that hands out units one by one.
``slsqp_ratio``: SLSQP's time on the relaxed problem at B = 512 over the solver's there; it is stopped after 100 iterations, and
what it reached by then is printed. ``posterior_ms`` and ``posterior_mb``: mean of the gp predictor's logits over N = 17 000
prompts from 512 observations in 384 dimensions, and the memory it takes at its peak beyond the embeddings;
``posterior_var_ms``, ``posterior_var_mb``: mean and variance. ``--million`` adds N = 1 000 000 (``million_*``; the embeddings
alone are 0.8 GB). Times are medians with their range: CPU time of one thread; on a GPU the plan is also timed there
(``gpu_plan_ms``, and with mean and variance over the pool before it ``gpu_whole_ms``; wall time until the counts are on the
host), and ``gpu_same`` says whether its integers are the same.
"""

import argparse
import heapq
import json
import time
import tracemalloc

import numpy as np
from common import append_results, print_table
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

from vipfast import xp
from vipfast.allocate.objective import rloo
from vipfast.allocate.solver import solve
from vipfast.predict.gp import GP

LOW, HIGH = 2, 32
DIMENSIONS = 384

Times = tuple[float, float, float]
"""Least, median and most milliseconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny: 16 prompts, a pool of 300")
    parser.add_argument("--million", action="store_true", help="also the posterior over a pool of a million prompts")
    arguments = parser.parse_args()
    smoke = arguments.smoke
    B, small, window, pool, repeats = (16, 8, 64, 300, 2) if smoke else (1024, 512, 512, 17_000, 15)
    rng = np.random.default_rng(0)
    a_B, ties_B = rng.uniform(0.01, 0.25, B), rng.permutation(B).astype(np.uint64)
    rows: dict[str, Times] = {}

    rows[f"plan, B = {B}"] = plan = timed(lambda: solve(a_B, 8 * B, LOW, HIGH, ties_B, rloo), repeats)
    planned_B, heaped_B = solve(a_B, 8 * B, LOW, HIGH, ties_B, rloo), heap(a_B, 8 * B)
    exact = bool(np.isclose(variance(a_B, planned_B), variance(a_B, heaped_B), rtol=1e-12))

    few = a_B[:small], 8 * small
    rows[f"plan, B = {small}"] = ours = timed(lambda: solve(*few, LOW, HIGH, ties_B[:small], rloo), repeats)
    reached = []
    rows[f"SLSQP, B = {small}"] = theirs = timed(lambda: reached.append(slsqp(*few)), 1)
    best = variance(few[0], solve(*few, LOW, HIGH, ties_B[:small], rloo))
    slsqp_says = f"{reached[0].nit} iterations, {reached[0].message.lower()}: {reached[0].fun:.6f} in fractions of rollouts"
    slsqp_says += f", against {best:.6f} in whole ones"

    result = {"plan_ms": round(plan[1], 3), "exact": exact, "slsqp_ratio": round(theirs[1] / ours[1], 1)}
    sizes = {"": pool, **({"million_": 1_000_000} if arguments.million else {})}
    for prefix, num_prompts in sizes.items():
        predictor, X_ND = observed_pool(rng, window, num_prompts)
        if not prefix:
            result |= on_gpu(a_B, ties_B, predictor, X_ND, repeats, rows)
        for name, variance_too in (("posterior", False), ("posterior_var", True)):
            times, peak_bytes = posterior_cost(predictor, X_ND, variance_too, 1 if prefix else repeats)
            result |= {f"{prefix}{name}_ms": round(times[1], 1), f"{prefix}{name}_mb": round(peak_bytes / 1e6, 1)}
            rows[f"{name}, N = {num_prompts:,}"] = times
    result |= {"prompts": B, "slsqp_prompts": small, "pool": pool, "slsqp": slsqp_says, "spread_ms": rows}
    table = [("", "least ms", "median ms", "most ms")]
    print_table("time", table + [(name, *(f"{ms:.2f}" for ms in times)) for name, times in rows.items()])
    print(f"SLSQP: {slsqp_says}")
    append_results("allocators.py", result, smoke=smoke)
    print(json.dumps(result))


def timed(work, repeats: int, clock=time.process_time) -> Times:
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(1e3 * (clock() - start))
    return round(min(times), 3), round(float(np.median(times)), 3), round(max(times), 3)


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


def slsqp(a_B: np.ndarray, budget: int):
    """The relaxed problem by a general solver, as the method's authors released it (without their extra terms)."""
    whole = {"type": "eq", "fun": lambda n: n.sum() - budget}
    start, bounds = np.full(len(a_B), budget / len(a_B)), [(LOW, HIGH)] * len(a_B)
    limit = {"maxiter": 100}
    return minimize(lambda n: variance(a_B, n), start, method="SLSQP", bounds=bounds, constraints=whole, options=limit)


def observed_pool(rng: np.random.Generator, window: int, num_prompts: int) -> tuple[GP, np.ndarray]:
    """A gp predictor that has seen a full window of the pool, and the pool's embeddings, float16 [N, D] as stored."""
    X_ND = np.empty((num_prompts, DIMENSIONS), np.float16)
    for start in range(0, num_prompts, 10_000):
        part = rng.normal(size=(min(10_000, num_prompts - start), DIMENSIONS))
        X_ND[start : start + 10_000] = part / np.linalg.norm(part, axis=1, keepdims=True)
    names = [str(i) for i in range(window)]
    predictor = GP(lambda texts: X_ND[[int(text) for text in texts]], names, window=window)
    predictor.update(names, names, rng.binomial(8, 0.3, window), np.full(window, 8), step=0)
    return predictor, X_ND


def posterior_cost(predictor: GP, X_ND: np.ndarray, variance: bool, repeats: int) -> tuple[Times, int]:
    """Times and peak bytes of the posterior over the whole pool."""
    work = lambda: predictor.posterior(X_ND, variance)  # noqa: E731
    work()  # the factor of the window is a step's, not the pool's
    times = timed(work, repeats)
    tracemalloc.start()
    work()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return times, peak_bytes


def on_gpu(a_B: np.ndarray, ties_B: np.ndarray, predictor: GP, X_ND: np.ndarray, repeats: int, rows: dict[str, Times]) -> dict:
    """The same plan, alone and after the pool's posterior, by the CuPy path, timed until the counts are on the host."""
    cupy, why_not = xp.choose("cuda")
    if why_not:
        print(f"GPU: not measured, {why_not}")
        return {}
    B, there_B, there_ND = len(a_B), cupy.asarray(a_B), cupy.asarray(X_ND)
    plan = lambda: xp.to_host(solve(there_B, 8 * B, LOW, HIGH, ties_B, rloo))[0]  # noqa: E731
    whole = lambda: (predictor.posterior(there_ND, variance=True), plan())  # noqa: E731
    same = bool((plan() == solve(a_B, 8 * B, LOW, HIGH, ties_B, rloo)).all())
    whole()
    rows[f"plan on the GPU, B = {B}"] = planned = timed(plan, 10 * repeats, time.perf_counter)
    rows[f"posterior_var and plan on the GPU, N = {len(X_ND):,}"] = both = timed(whole, 10 * repeats, time.perf_counter)
    return {"gpu_plan_ms": planned[1], "gpu_whole_ms": both[1], "gpu_same": same}


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
