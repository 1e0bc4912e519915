"""How fast an operation can be at best: FLOPs and bytes of each, and the speeds of GPUs, stated or measured."""

import time
from typing import NamedTuple

import torch
from common import print_table
from kernel_cases import CALLS, LONG, MODELS, ROW_TOKENS, TOKENS


class Roof(NamedTuple):
    """Dense bf16 matmul and memory speed of a device."""

    tflops: float
    tb_per_s: float
    source: str


STATED = {
    "H200, measured": Roof(770, 4.3, "8192³ matmul of random bf16 numbers, device-to-device copy"),
    "H200, H100 SXM": Roof(989, 4.8, "NVIDIA data sheets, dense; H100's memory gives 3.35 TB/s"),
    "A100 SXM 80 GB": Roof(312, 2.04, "NVIDIA data sheet, dense"),
}


def flops(op: str, T: int, D: int, V: int) -> int:
    """Of the matmuls: logits, d hidden and d weight for the head, logits alone for token_logprob."""
    return {"policy_head": 6, "token_logprob": 2}.get(op, 0) * T * D * V


def min_bytes(op: str, T: int, D: int, V: int, itemsize: int = 2) -> int:
    """Least traffic of the design, to and from memory.

    group_advantage reads rewards and flags twice (10 bytes per row), and reads and writes 32 per group, of 6.4 rows on average.
    policy_loss reads log-probs of policy, sampler and old policy and the mask (13 per token), writes the derivative (4).
    policy_head: logits written by the matmul, read for the log-sum-exp, read and rewritten as d logits, read by two matmuls;
    hidden and weight read, their gradients written, that of the weight in fp32. token_logprob: logits written and read.
    """
    if op == "group_advantage":
        return 15 * (T // ROW_TOKENS)
    if op == "policy_loss":
        return 17 * T
    inputs = itemsize * D * (T + V)
    if op == "token_logprob":
        return 2 * itemsize * T * V + inputs + 8 * T
    return 6 * itemsize * T * V + inputs + itemsize * T * D + 4 * V * D


def floor_ms(op: str, T: int, D: int, V: int, roof: Roof) -> float:
    """No device of that roof can be faster: the longer of all FLOPs at full speed and all bytes at full speed."""
    return 1e3 * max(flops(op, T, D, V) / roof.tflops, min_bytes(op, T, D, V) / roof.tb_per_s) / 1e12


def print_floors() -> None:
    """One table for the stated roofs."""
    rows = [("operation", "T", "D", "V", "TFLOP", "GB", *(f"{name}, ms" for name in STATED))]
    for op in CALLS:
        if op == "group_advantage":
            continue  # a few bytes per rollout: bounded by the launch alone
        for D, V in MODELS.values() if flops(op, 1, 1, 1) else [(0, 0)]:
            for T in TOKENS if D else (*TOKENS, LONG):
                work = (f"{flops(op, T, D, V) / 1e12:.2f}", f"{min_bytes(op, T, D, V) / 1e9:.3g}")
                floors = (f"{floor_ms(op, T, D, V, roof):.3g}" for roof in STATED.values())
                rows.append((op, T, D or "–", V or "–", *work, *floors))
    print_table("FLOORS, NOT MEASUREMENTS: no kernel on that device can be faster (bf16)", rows)
    for name, roof in STATED.items():
        print(f"  {name}: {roof.tflops:g} TFLOP/s, {roof.tb_per_s:g} TB/s ({roof.source})")


def measure(device: str, *, tiny: bool) -> Roof:
    """Roofs of this machine in this run: best of several matmuls of random bf16 numbers and of copies (read + written)."""
    n, copied = (128, 2**20) if tiny else (8192, 2**30)
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(copied, device=device, dtype=torch.uint8).zero_()
    target = torch.empty_like(source)
    matmul_s = min(seconds(lambda: torch.mm(a, b), device) for _ in range(10))
    copy_s = min(seconds(lambda: target.copy_(source), device) for _ in range(10))
    return Roof(2 * n**3 / matmul_s / 1e12, 2 * copied / copy_s / 1e12, "measured in this run")


def seconds(work, device: str) -> float:
    """Time of one call: CUDA events on a GPU, else the clock."""
    if device == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
