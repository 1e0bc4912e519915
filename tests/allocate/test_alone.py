"""Allocators and predictors serve in another trainer: no torch, no options, no ranks and no command line come with them."""

import subprocess
import sys

ELSEWHERE = """
import sys
import numpy as np
from vipfast.allocate import Schedule, Uniform, Vigor, Vip
from vipfast.predict import GP
from vipfast.predict.beta import Beta
from vipfast.types import Prompt, PromptBatch, Tally

prompts = [Prompt(f"uid {q}", f"text {q}", np.array([1]), "1", {}) for q in range(8)]
rng = np.random.default_rng(0)
for allocator in (Uniform(), Vip(Beta([]), "rloo", 2, 16), Vigor(Schedule.fit(8, 64, None, 4, 0.5, 2.0))):
    batch = PromptBatch(prompts, 1, 0)
    tally, rounds = Tally.empty(batch.uids), allocator.rounds(batch, 64)
    counts_B = next(rounds)
    while counts_B is not None:
        tally.asked += counts_B
        tally.pending += counts_B
        for q in np.flatnonzero(counts_B):
            tally.add(q, rng.integers(0, 2, counts_B[q]), threshold=1.0, tokens=3 * counts_B[q], truncated=0)
        try:
            counts_B = rounds.send(tally)
        except StopIteration as stop:
            plan, counts_B = stop.value, None
    allocator.learn(tally)
    print(allocator.name, tally.asked.sum(), plan.counts_B.sum())
print(sorted({"torch", "tyro", "vipfast.config", "vipfast.distributed", "vipfast.cli", "vipfast.ranks"} & set(sys.modules)))
"""


def test_a_step_is_planned_without_the_rest_of_vipfast():
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["uniform 64 64", "vip 64 64", "vigor 64 64", "[]"], done.stderr
