"""How long VIGOR's rounds take beside uniform's single one, on a simulated engine with long-tailed lengths.

    python benchmarks/makespan.py [--seeds 20] [--smoke]

The trainer's own ``collect`` and allocators run on an engine that decodes a token of each rollout in flight per tick of its
clock and has ``slots`` places, in which rollouts are taken in the order they were submitted. A rollout's length is lognormal
(median 256 tokens, sigma as given), its reward 1 with the probability of its prompt; both follow from (seed, prompt, index), so
all rules see the same rollouts. Prompts come from four pools alike: p ~ U(0,1), Beta(.4,.6), Beta(.2,.2), and 70 % p = .002,
rest Beta(.5,2).

``barrier_makespan``, ``early_makespan``, ``streaming_makespan``: ticks until all 8 B rollouts are back over uniform's ticks, of
all seeds (steps) together, at B = 160, 256 slots and sigma .8; ``*_interval``: 95 % by bootstrap over seeds. ``settings`` holds
the others too (the 256 rollouts of B = 32 fit into 256 slots at once); at "long prompts" half of the variance of log lengths
lies between prompts. ``mean_ratio``: mean of each seed's own ratio, ``range`` its extremes; seeds whose uniform step
happens to be quick weigh most in it. ``signal``: mean p (1 - p) over the rollouts drawn, relative to the barrier's (early draws
the same); ``tokens`` likewise. ``decision_ms``: CPU time of collect beyond the barrier's per return of rollouts at B = 1 024,
nearly all of them alone: the decision, and the tally of unfinished groups.
"""

import argparse
import heapq
import json
import time
import warnings
from collections import deque
from collections.abc import Sequence

import numpy as np
from common import append_results, print_table
from scipy.special import ndtri
from threadpoolctl import threadpool_limits

from vipfast import streams
from vipfast.allocation import make_allocator
from vipfast.config import Config
from vipfast.engine.base import Finished, Request
from vipfast.rewards.base import Grades
from vipfast.rollout import collect
from vipfast.types import ZERO_ONE, Finish, Prompt, PromptBatch

MEDIAN = 256
SETTINGS = {  # prompts, slots, sigma, share of the variance of log lengths that lies between prompts
    "B = 160, 256 slots, sigma .8": (160, 256, 0.8, 0.0),
    "the same, long prompts": (160, 256, 0.8, 0.5),
    "B = 160, unlimited, sigma .8": (160, None, 0.8, 0.0),
    "B = 32, unlimited, sigma 1.2": (32, None, 1.2, 0.0),
}
RULES = {
    "uniform": dict(allocator="uniform"),
    "barrier": dict(),
    "early": dict(round_mode="early"),
    "streaming": dict(round_mode="streaming"),
}


class SimulatedEngine:
    """Implements ``engine.base.Engine`` without a model, and ``grade``; a ``step`` runs the clock to the next end of a rollout.

    Args:
        seed: names lengths, rewards and success rates.
        num_prompts: prompts a step may have; slot q succeeds with probability ``p_B[q]``.
        slots: most rollouts decoded at once; None: no bound.
        sigma: standard deviation of log lengths; between: share of its square that lies between prompts.
    """

    name, reward_range = "simulated", ZERO_ONE

    def __init__(self, seed: int, num_prompts: int, slots: int | None, sigma: float, between: float = 0.0):
        self.seed, self.slots = seed, slots
        rng = np.random.default_rng(seed)
        self.p_B = np.choose(
            rng.integers(0, 4, num_prompts),
            [
                rng.random(num_prompts),
                rng.beta(0.4, 0.6, num_prompts),
                rng.beta(0.2, 0.2, num_prompts),
                np.where(rng.random(num_prompts) < 0.7, 0.002, rng.beta(0.5, 2, num_prompts)),
            ],
        )
        self.scale_B = MEDIAN * np.exp(sigma * np.sqrt(between) * rng.normal(size=num_prompts))
        self.spread = sigma * np.sqrt(1 - between)
        self.clock, self.num_steps = 0, 0
        self._waiting: deque[tuple[int, int, int]] = deque()  # length, slot, index
        self._running: list[tuple[int, int, int, int]] = []  # a heap: end, length, slot, index

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._running)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            indices = np.arange(request.first_index, request.first_index + request.count)
            normal = ndtri(np.clip(self._uniforms(request.slot, indices, 0), 1e-12, None))
            lengths = np.ceil(self.scale_B[request.slot] * np.exp(self.spread * normal)).astype(np.int64)
            self._waiting += [(length, request.slot, index) for length, index in zip(lengths.tolist(), indices.tolist())]

    def step(self) -> list[Finished]:
        while self._waiting and (self.slots is None or len(self._running) < self.slots):
            length, slot, index = self._waiting.popleft()
            heapq.heappush(self._running, (self.clock + length, length, slot, index))
        self.clock, self.num_steps = self._running[0][0], self.num_steps + 1
        finished = []
        while self._running and self._running[0][0] == self.clock:
            _, length, slot, index = heapq.heappop(self._running)
            finished.append(
                Finished(slot, index, np.broadcast_to(0, length), np.broadcast_to(np.float32(0), length), Finish.STOP)
            )
        return finished

    def grade(self, prompts: Sequence[Prompt], finished: Sequence[Finished]) -> Grades:
        return Grades.plain([float(self._uniforms(row.slot, row.index, 1) < self.p_B[row.slot]) for row in finished])

    def _uniforms(self, slot: int, indices, position: int) -> np.ndarray:
        return streams.uniforms(streams.keys(streams.TRAIN, self.seed, 0, slot, indices), position)


def play(rule: str, seed: int, prompts: int, slots: int | None, sigma: float, between: float) -> tuple[float, ...]:
    """One step: its ticks, mean p (1 - p) over the rollouts drawn, their tokens, CPU milliseconds, and engine steps."""
    engine = SimulatedEngine(seed, prompts, slots, sigma, between)
    allocator = make_allocator(Config(prompts_per_step=prompts, **RULES[rule]))
    batch = PromptBatch([Prompt(f"p{q}", "", np.zeros(1, np.int64)) for q in range(prompts)], step=1, seed=seed)
    started = time.process_time()
    _, tally, _ = collect(allocator, batch, 8 * prompts, engine, engine)
    cpu_ms = 1e3 * (time.process_time() - started)
    signal = float((tally.asked * engine.p_B * (1 - engine.p_B)).sum() / tally.asked.sum())
    return engine.clock, signal, float(tally.tokens.sum()), cpu_ms, engine.num_steps


def makespans(seeds: int, setting: tuple) -> dict[str, dict]:
    """Per rule but uniform: makespan over uniform's, with interval and seeds' own ratios; signal and tokens over barrier's."""
    played = {rule: np.array([play(rule, seed, *setting) for seed in range(seeds)]) for rule in RULES}
    found = {}
    for rule in list(RULES)[1:]:
        ticks, base = played[rule][:, 0], played["uniform"][:, 0]
        ratio = ticks / base
        drawn = np.random.default_rng(0).integers(0, seeds, (2000, seeds))
        interval = np.percentile(ticks[drawn].sum(1) / base[drawn].sum(1), [2.5, 97.5])
        found[rule] = {
            "makespan": round(float(ticks.sum() / base.sum()), 3),
            "interval": interval.round(3).tolist(),
            "mean_ratio": round(float(ratio.mean()), 3),
            "range": [round(float(ratio.min()), 3), round(float(ratio.max()), 3)],
            "signal": round(float((played[rule][:, 1] / played["barrier"][:, 1]).mean()), 3),
            "tokens": round(float((played[rule][:, 2] / played["barrier"][:, 2]).mean()), 3),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="2 seeds, the smallest setting alone")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="--allocator vigor")  # of few survivors
    names, seeds, prompts = list(SETTINGS), args.seeds, 1024
    if args.smoke:
        names, seeds, prompts = names[-1:], 2, 32
    started = time.perf_counter()
    table, settings = [("makespan over uniform's", "rule", "all", "95 %", "mean ratio", "least, most", "signal", "tokens")], {}
    for name in names:
        settings[name] = makespans(seeds, SETTINGS[name])
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        for rule, of in settings[name].items():
            interval, span = ("{:.2f} … {:.2f}".format(*of[key]) for key in ("interval", "range"))
            numbers = f"{of['mean_ratio']:.2f}", span, f"{of['signal']:.3f}", f"{of['tokens']:.3f}"
            table.append((name, rule, f"{of['makespan']:.2f}", interval, *numbers))
    print_table(f"{seeds} seeds", table)
    result = {f"{rule}_{key}": of[key] for rule, of in settings[names[0]].items() for key in ("makespan", "interval")}
    *_, waiting_ms, _ = play("barrier", 0, prompts, 256, 0.8, 0.0)
    decision = {}
    for rule in ("early", "streaming"):
        *_, cpu_ms, num_steps = play(rule, 0, prompts, 256, 0.8, 0.0)
        decision[rule] = round((cpu_ms - waiting_ms) / num_steps, 3)
    print(f"milliseconds of a decision at B = {prompts}: " + ", ".join(f"{rule} {ms}" for rule, ms in decision.items()))
    result |= {"settings": settings, "decision_ms": decision, "seeds": seeds, "seconds": round(time.perf_counter() - started)}
    append_results("makespan.py", result, smoke=args.smoke)
    print(json.dumps(result))


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
