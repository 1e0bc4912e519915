"""Offsets of policy_loss beyond 2^31 tokens, in a process of its own."""

import os
import subprocess
import sys


def child(script: str, **environment: str) -> str:
    """Output of a Python process of its own: a wrong address ends it, and Triton asks for the interpreter when it starts."""
    run = subprocess.run(
        [sys.executable, "-c", script], env={k: x for k, x in os.environ.items() if k != "TRITON_INTERPRET"} | environment,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, f"exit {run.returncode}: {run.stderr[-2000:]}"
    return run.stdout


FAR = """
import torch
from triton.runtime import interpreter
from vipfast.kernels.policy_loss import policy_loss_kernel

BT, FIRST_FAR = 512, 2**31 // 512 + 1  # the tile's first token is number 2^31 + 512
builder = interpreter.interpreter_builder
set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx

def run(tile, num_left):
    # Memory is reserved, not touched: the columns lie one tile apart in one buffer, the program sees one tile of each.
    start = tile * BT
    buffer = torch.empty(start + 5 * BT, dtype=torch.bfloat16)
    mask = torch.empty(start + BT, dtype=torch.bool)
    g = torch.Generator().manual_seed(0)
    buffer[start:] = -torch.rand(5 * BT, generator=g)
    mask[start:] = torch.rand(BT, generator=g) < 0.8
    columns = [buffer[k * BT:] for k in range(5)]
    cut = start + num_left // 3
    first = torch.empty(tile + 2, dtype=torch.int64)
    first[tile:] = torch.tensor([1, 3])
    partial = torch.empty(8, tile + 1)
    ones = torch.ones(2, dtype=torch.float64)
    builder.set_grid_dim = lambda *_: set_dim(tile + 1, 1, 1)
    builder.set_grid_idx = lambda *_: set_idx(tile, 0, 0)
    policy_loss_kernel[(1,)](
        *columns[:4], mask, torch.tensor([1.0, 0.0]), torch.ones(2, dtype=torch.bool), ones,
        torch.tensor([[0.5, 2.0]], dtype=torch.float64), torch.arange(2), torch.ones(2, dtype=torch.int64),
        torch.tensor([0, cut, start + num_left]), first, columns[4], partial, start + num_left, 2, 0.2, 0.28, 0.1, 2.0, BT=BT,
    )
    return columns[4][start:][:num_left].clone(), partial[:, tile].clone()

for num_left in (BT, 7):
    for near, far in zip(run(0, num_left), run(FIRST_FAR, num_left)):
        assert torch.equal(near, far) and near.abs().sum() > 0, (near, far)
print("equal")
"""


def test_addresses_beyond_31_bits():
    assert child(FAR, TRITON_INTERPRET="1") == "equal\n"
