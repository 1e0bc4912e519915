"""The CPU twin of policy_head against dense torch, forward and backward: same loss and gradients, then time and memory.

Memory is the peak of a fresh process beyond what it held once inputs existed and libraries were warm, less the gradients
themselves. Times alternate between the sides in one process. fp32, old log-probs given.
"""

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from common import print_table
from kernel_cases import Batch, advantages, call_policy_head, dense_loss, make_batch, set_old_policy

SIDES = ("twin", "dense torch")
DENSE_LOGITS = 3.5
"""Tensors as large as the logits that dense torch holds at its peak (three measured), with some room."""


def run(side: str, batch: Batch) -> torch.Tensor:
    """Loss, with gradients left on hidden states and weight."""
    batch.hidden_TD.grad = batch.weight_VD.grad = None
    loss = call_policy_head(batch, backend="torch").loss if side == "twin" else dense_loss(batch, advantages(batch))
    loss.backward()
    return loss.detach()


def prepare(T: int, V: int, D: int) -> Batch:
    batch = make_batch(T, D, V, torch.float32, "cpu")
    set_old_policy(batch)
    return batch


def differences(batch: Batch) -> tuple[float, float, float]:
    """Relative difference of the sides' losses, and of their gradients of hidden states and weight (norm over norm)."""
    found = [(run(side, batch), batch.hidden_TD.grad, batch.weight_VD.grad) for side in SIDES]
    return tuple(((a - b).norm() / b.norm()).item() for a, b in zip(*found))


def time_both(T: int, V: int, D: int, threads: int, repeats: int) -> dict:
    """Seconds, and CPU seconds, of both sides in turn, after one unmeasured round that compares their results."""
    torch.set_num_threads(threads)
    batch = prepare(T, V, D)
    times = {"differences": differences(batch), **{side: [] for side in SIDES}}
    for _ in range(repeats):
        for side in SIDES:
            start, cpu_start = time.perf_counter(), time.process_time()
            run(side, batch)
            times[side].append((time.perf_counter() - start, time.process_time() - cpu_start))
    return times


def extra_bytes(side: str, T: int, V: int, D: int, threads: int) -> int:
    """Peak of the process above what it holds once the inputs exist, less the gradients."""
    torch.set_num_threads(threads)
    run(side, prepare(8, 64, D))  # thread pools and workspaces are nobody's fault
    batch = prepare(T, V, D)
    ctypes.CDLL(None).malloc_trim(0)  # freed pages that the process still holds would hide later ones
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    run(side, batch)
    return _status("VmHWM") - before - batch.hidden_TD.grad.nbytes - batch.weight_VD.grad.nbytes


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def in_fresh_process(call: str):
    """Evaluate one call of this file's functions in a new interpreter and return its JSON."""
    code = f"import json, kernel_twin; print(json.dumps(kernel_twin.{call}))"
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=here, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def fitting(T: int, V: int) -> int:
    """T, halved until dense torch fits into the memory that is free."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if Path("/proc/meminfo").exists():
        found = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")]
        free = 1024 * int(found[0].split()[1])
    while 4 * DENSE_LOGITS * T * V > free and T > 1:
        T //= 2
    return T


def report(T: int, V: int, D: int, threads: int, repeats: int) -> dict:
    """Measure, print the table, return ``twin_mem_ratio`` and ``twin_time_ratio`` (twin over dense torch) with their spread."""
    if (fits := fitting(T, V)) < T:
        print(f"  note: dense torch at T = {T} does not fit into the free memory; measured at T = {fits}")
        T = fits
    bytes_of = {side: in_fresh_process(f"extra_bytes({side!r}, {T}, {V}, {D}, {threads})") for side in SIDES}
    times = in_fresh_process(f"time_both({T}, {V}, {D}, {threads}, {repeats})")
    differs = max(times["differences"])
    if not differs < 1e-4:
        raise SystemExit(f"twin and dense torch differ (loss, d hidden, d weight: {times['differences']}): nothing to compare")
    ratios, cpu_ratios = ([a[clock] / b[clock] for a, b in zip(*(times[side] for side in SIDES))] for clock in (0, 1))
    rows = [("", "seconds, median", "least", "most", "CPU seconds, median", "MiB beyond inputs and gradients")]
    for side in SIDES:
        wall, cpu = zip(*times[side])
        cells = (statistics.median(wall), min(wall), max(wall), statistics.median(cpu))
        rows.append((side, *(f"{cell:.3f}" for cell in cells), f"{bytes_of[side] / 2**20:.0f}"))
    title = f"policy_head forward + backward on the CPU, T = {T}, V = {V}, D = {D}, {threads} thread(s), {repeats} rounds"
    print_table(f"{title}; results agree to {differs:.0e}", rows)
    return {
        "twin_mem_ratio": round(bytes_of["twin"] / bytes_of["dense torch"], 4),
        "twin_time_ratio": round(statistics.median(ratios), 3),
        "twin_time_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "twin_cpu_time_ratio": round(statistics.median(cpu_ratios), 3),
        "twin_mib": round(bytes_of["twin"] / 2**20, 1),
        "dense_mib": round(bytes_of["dense torch"] / 2**20, 1),
        "shape": {"T": T, "V": V, "D": D, "threads": threads},
    }
