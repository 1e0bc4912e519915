"""Learners on two gloo processes, sharded (FSDP2) and replicated, against one process that holds every row of the same steps.

    python two_ranks.py FOLDER

writes FOLDER/0.json and FOLDER/1.json: case -> largest differences from the single process.
"""

import copy
import dataclasses
import json
import os
import socket
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed.fsdp  # once, before the fork
from ragged_steps import configured, exact, sampled, tiny
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from vipfast.distributed import Ranks
from vipfast.learn import share
from vipfast.learn.learner import Learner
from vipfast.learn.sharding import gathered, whole
from vipfast.types import StepPlan

PAD_ID = 36
REAL_OWNERS = share.owners
TIMES = {"time/logprob_s", "time/update_s", "train/padding_share"}


def lopsided(first):
    """The first so many trained rows to rank 0, all others to rank 1."""

    def owners(data, step, num_ranks):
        owner_R = data.rollouts.holder_R.copy()
        owner_R[data.rows_r] = np.arange(len(data.rows_r)) >= first
        return owner_R

    return owners


OWNERS = {"dealt": REAL_OWNERS, "one": lopsided(1), "none": lopsided(0)}
"""As in a run; one row of one token on rank 0 against all others on rank 1; nothing at all against everything."""


def mixed(model, seed):
    """14 rollouts of 4 prompts in uneven groups; the first one trained has a single token."""
    lengths = [1, 9, 16, 4, 8, 13, 3, 16, 12, 7, 6, 5, 16, 10]
    step = sampled(model, lengths=lengths, seed=seed)
    step.reward[:] = [1, 0, 1, 0, 1, 0, 1, 1, 0, 1, 1, 0, 0, 1]
    return step


def giant(model, seed):
    """One token on a rank, thousands on the other."""
    return sampled(model, counts=[2], lengths=[1, 2000], seed=seed, reward=np.array([1, 0], np.float32))


def lonely(model, seed):
    """A single trained row, against a given baseline: one rank has no signal at all."""
    plan = StepPlan.plain([np.array([1, 2])], baseline_B=np.array([0.25, np.nan]))
    return sampled(model, counts=[1, 2], lengths=[80, 6, 7], seed=seed, reward=np.ones(3, np.float32), plan=plan)


CASES = {
    "fsdp-tied-dealt": ("fsdp", mixed, "dealt", dict(num_updates=3)),
    "fsdp-untied-one": ("fsdp", mixed, "one", dict(tied=False)),
    "fsdp-untied-recompute-none": ("fsdp", mixed, "none", dict(tied=False, recompute=True)),
    "fsdp-frozen-recompute-one": ("fsdp", mixed, "one", dict(recompute=True, frozen=True)),
    "fsdp-updates-kl-one": ("fsdp", mixed, "one", dict(updates_per_step=2, epochs=2, beta=0.1)),
    "fsdp-giant": ("fsdp", giant, "dealt", {}),
    "fsdp-lonely": ("fsdp", lonely, "dealt", {}),
    "ddp-tied-dealt": ("ddp", mixed, "dealt", dict(num_updates=3)),
    "ddp-untied-none": ("ddp", mixed, "none", dict(tied=False)),
    "ddp-frozen-one": ("ddp", mixed, "one", dict(frozen=True)),
    "ddp-updates-kl-dealt": ("ddp", mixed, "dealt", dict(updates_per_step=2, epochs=2, beta=0.1)),
    "ddp-giant": ("ddp", giant, "dealt", {}),
    "ddp-lonely": ("ddp", lonely, "dealt", {}),
}


def held(step, ranks):
    """The step as a rank sees it that has sampled every other row."""
    holder_R = np.arange(step.num_rollouts) % ranks.size
    here_T = np.repeat(holder_R == ranks.rank, step.lengths_R)
    tokens, logp = np.where(here_T, step.tokens, -1), np.where(here_T, step.sampler_logp, np.nan).astype(np.float32)
    return dataclasses.replace(step, tokens=tokens, sampler_logp=logp, holder_R=holder_R, rank=ranks.rank)


def watched(learner):
    """The learner, and a list that fills with the gradient of each of its optimizer steps."""
    gradients = []

    def catch(*_):
        gradients.append({n: whole(p.grad).clone() for n, p in learner.policy.model.named_parameters() if p.grad is not None})

    learner.optimizer.register_step_pre_hook(catch)
    return learner, gradients


def gap(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).detach().abs().max()) for name in b)


def compare(ranks, parallel, make, owners, options):
    share.owners = OWNERS[owners]
    options = dict(options)
    tied, frozen, num_updates = options.pop("tied", True), options.pop("frozen", False), options.pop("num_updates", 1)
    config = configured(micro_batch_tokens=64, gradient_checkpointing=options.pop("recompute", False), **options)
    model = exact(tiny(tied=tied))
    # with adapters, nothing below the first layer and nothing of the head has a gradient
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or "q_proj" in name)
    reference = exact(tiny(1, tied)) if config.beta else None
    single, expected = watched(Learner(copy.deepcopy(model), config, PAD_ID, copy.deepcopy(reference)))
    both, found = watched(Learner(model, dataclasses.replace(config, parallel=parallel), PAD_ID, reference, ranks))
    apart = []
    for number in range(num_updates):
        step = make(single.policy.model, number)
        ours, theirs = both.update(held(step, ranks), number), single.update(step, number)
        apart += [0.0 if ours[name] == theirs[name] else abs(ours[name] - theirs[name]) for name in ours.keys() - TIMES]
    return {
        "metrics": max(apart),
        "gradient": max(gap(a, b) for a, b in zip(found, expected, strict=True)),
        "parameter": gap(dict(both.weights()), dict(single.weights())),
        "updates": len(found),
        "size": max(float(g.abs().max()) for g in found[0].values()),
    }


def poisoned(ranks, parallel):
    """A NaN on one rank makes both skip the step; returns the skipped steps counted and how far a weight moved."""
    share.owners = REAL_OWNERS
    model = exact(tiny())
    step = mixed(model, 0)
    step.sampler_logp[0] = np.nan
    learner = Learner(copy.deepcopy(model), configured(micro_batch_tokens=64, parallel=parallel), PAD_ID, ranks=ranks)
    metrics = learner.update(held(step, ranks), 0)
    return metrics["train/skipped"], gap(dict(learner.weights()), dict(model.named_parameters()))


def buckets(ranks):
    """Bucket bytes -> how many exchanges they took, and the largest difference from the whole weights."""
    model = exact(tiny(tied=False))
    model.register_parameter("scalars", torch.nn.Parameter(torch.arange(3.0)))  # rank 1 keeps one row, of another type
    model.register_parameter("row", torch.nn.Parameter(torch.full((1, 5), 7.0, dtype=torch.float64)))  # rank 1 keeps none
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model).set_force_sum_reduction_for_comms(True)
    found, sent, name = {}, [], "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    real = getattr(dist, name)

    def counting(received, own, **options):
        sent.append(own.nbytes)
        return real(received, own, **options)

    setattr(dist, name, counting)
    for num_bytes in (1, 20_000, 2**30):
        sent.clear()
        weights = dict(gathered(model.named_parameters(), num_bytes))
        found[num_bytes] = (len(sent), max(sent), gap(weights, expected))
    setattr(dist, name, real)
    return len(expected), max(p.nbytes for p in expected.values()), found


def saved_names(ranks):
    """Names that a checkpoint of shards has and one of the whole model has not, and the other way round."""
    model = exact(tiny())
    model.register_buffer("bias_of_experts", torch.arange(4.0))
    names = set(model.state_dict()) - {"lm_head.weight"}  # tied
    weights = Learner(model, configured(parallel="fsdp"), PAD_ID, ranks=ranks).whole_weights()
    assert ranks.rank or weights["bias_of_experts"].tolist() == [0, 1, 2, 3]
    return sorted(names ^ set(weights)) if ranks.rank == 0 else sorted(weights)


def rank(index, folder, port):
    torch.set_num_threads(1)
    os.environ |= dict(
        TORCHELASTIC_RUN_ID="test", RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    ranks = Ranks(os.environ)
    ranks.connect("cpu", 60)
    found = {name: compare(ranks, *case) for name, case in CASES.items()}
    found["names"] = saved_names(ranks)
    found["buckets"] = buckets(ranks)
    found |= {f"poisoned-{parallel}": poisoned(ranks, parallel) for parallel in ("ddp", "fsdp")}
    (Path(folder) / f"{index}.json").write_text(json.dumps(found))
    ranks.leave()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(rank, args=(sys.argv[1], port), nprocs=2, start_method="fork")
