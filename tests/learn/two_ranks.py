"""The policy on two gloo processes, sharded (FSDP2) and replicated (DDP), against one process that holds every row.

    python two_ranks.py FOLDER

prints one JSON object: case -> {"gradient": …, "parameter": …, "loss": …, "size": largest gradient}, the largest differences
from the single process before and after one optimizer step.
"""

import copy
import datetime
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from ragged_steps import configured, exact, sampled, tiny
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vipfast.learn.batch import StepTensors, upload
from vipfast.learn.pack import blank, pack
from vipfast.learn.policy import Policy
from vipfast.learn.trainable import Trainable

PAD_ID = 36
CONFIG = configured(micro_batch_tokens=64)
ROWS = {
    "even": lambda rows: (rows[::2], rows[1::2]),
    "uneven": lambda rows: (rows[:1], rows[1:]),
    "none": lambda rows: ([], rows),
}
"""Which rows a rank holds: both many; one row of one token against all others; nothing at all against everything."""


def passes(step, rows, num_passes):
    """A rank's passes, blank ones at the end: every rank gathers weights equally often."""
    found = pack(step, np.array(rows, int), CONFIG.micro_batch_tokens, PAD_ID) if len(rows) else []
    return found + [blank(PAD_ID)] * (num_passes - len(found))


def train_step(module, policy, step, micro_batches, factor):
    """Loss of these passes; gradients of ``factor`` times it, then one step of AdamW."""
    data, cpu = Trainable.of(step, CONFIG), torch.device("cpu")
    tensors = StepTensors.of(data, cpu)
    _, _, weight_R = next(data.minibatches(0))
    total = torch.zeros((), dtype=torch.float64)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    for batch in upload(micro_batches, cpu):
        result = module(batch, tensors.loss_arguments(batch, torch.from_numpy(weight_R), CONFIG))
        (factor * result.loss).backward()
        total += result.loss.detach()
    gradients = {name: whole(p.grad) for name, p in policy.named_parameters() if p.grad is not None}
    optimizer.step()
    return total, gradients, {name: whole(p) for name, p in policy.named_parameters()}


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def compare(kind, tied, rows, recompute=False, frozen=False):
    model = exact(tiny(tied=tied))
    # with adapters, nothing below the first layer and nothing of the head has a gradient
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "q_proj" in name)
    # rows: the first one trained has a single token
    step = sampled(model, lengths=[1, 9, 16, 4, 8, 13, 3, 16, 12, 7, 6, 5, 16, 10])
    step.reward[:] = [1, 0, 1, 0, 1, 0, 1, 1, 0, 1, 1, 0, 0, 1]
    make = lambda: Policy(copy.deepcopy(model), "float64", "cpu", 1.0, train=True, recompute=recompute)  # noqa: E731
    trained = Trainable.of(step, CONFIG).rows_r
    single = make()
    expected = train_step(single, single, step, passes(step, trained, 0), 1)

    shares = ROWS[rows](trained.tolist())
    num_passes = max(len(passes(step, share, 0)) for share in shares)
    mine = passes(step, shares[dist.get_rank()], num_passes)
    policy = make()
    if kind == "fsdp":
        # Gradients are summed: the loss weights are those of the whole step.
        for module in (*policy.body.layers, policy):
            fully_shard(module).set_gradient_divide_factor(1.0)
        found = train_step(policy, policy, step, mine, 1)
        assert all(isinstance(p, DTensor) for p in policy.parameters())
    else:
        # DDP divides by the number of ranks.
        found = train_step(DistributedDataParallel(policy), policy, step, mine, dist.get_world_size())
    dist.all_reduce(found[0])
    assert found[1].keys() == expected[1].keys() and found[2].keys() == expected[2].keys()

    def gap(a, b):
        return max(float((a[name] - b[name]).abs().max()) for name in b)

    return {
        "gradient": gap(found[1], expected[1]),
        "parameter": gap(found[2], expected[2]),
        "loss": float((found[0] - expected[0]).abs()),
        "size": max(float(g.abs().max()) for g in expected[1].values()),
        "passes": num_passes,
    }


CASES = {
    "fsdp-tied-even": ("fsdp", True, "even"),
    "fsdp-tied-uneven": ("fsdp", True, "uneven"),
    "fsdp-tied-none": ("fsdp", True, "none"),
    "fsdp-untied-uneven": ("fsdp", False, "uneven"),
    "fsdp-untied-recompute-none": ("fsdp", False, "none", True),
    "fsdp-frozen-recompute-uneven": ("fsdp", True, "uneven", True, True),
    "ddp-tied-none": ("ddp", True, "none"),
    "ddp-untied-uneven": ("ddp", False, "uneven"),
}


def rank(index, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=index, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    found = {name: compare(*case) for name, case in CASES.items()}
    (Path(folder) / f"{index}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(rank, args=(sys.argv[1],), nprocs=2, start_method="fork")
