"""How the ranks of a run hold the policy: each all of it (ddp), or a shard of every weight (FSDP2's ``fully_shard``)."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from vipfast.learn.policy import Policy
from vipfast.learn.recompute import outermost_layers


def shard(policy: Policy) -> None:
    """Shard the layers, then the root with embedding, norm and head, in place. Gradients are summed over the ranks.

    A policy in main memory moves to the device part by part, each cut to this rank's share before the next one comes.
    """
    from torch.distributed.fsdp import fully_shard

    for module in (*outermost_layers(policy.body), policy):
        sharded = fully_shard(module)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # else torch asks for a scaled sum, which gloo does not have


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; told by what it has, since importing that class takes seconds."""
    return hasattr(tensor, "device_mesh")


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered from all ranks, which all call this; any other as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def gathered(parameters: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors of sharded ones, all ranks at once, one exchange for up to ``bucket_bytes`` of them (a larger tensor is a
    bucket of its own); what is not sharded passes as it is. A bucket is held until the next is asked for.
    """
    bucket, held_bytes = [], 0
    for name, tensor in parameters:
        if not is_sharded(tensor):
            yield name, tensor.detach()
            continue
        if bucket and (held_bytes + tensor.nbytes > bucket_bytes or tensor.dtype != bucket[0][1].dtype):
            yield from _exchanged(bucket)
            bucket, held_bytes = [], 0
        bucket.append((name, tensor.detach()))
        held_bytes += tensor.nbytes
    if bucket:
        yield from _exchanged(bucket)


def _exchanged(bucket: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    from torch import distributed as dist

    mesh = bucket[0][1].device_mesh
    num_rows = [-(-tensor.shape[0] // mesh.size()) for _, tensor in bucket]  # of a full piece; the last pieces may be shorter
    sizes = [rows * math.prod(tensor.shape[1:]) for rows, (_, tensor) in zip(num_rows, bucket)]
    local = bucket[0][1].to_local()
    sent = local.new_zeros(sum(sizes))
    for (_, tensor), space in zip(bucket, sent.split(sizes)):
        own = tensor.to_local().reshape(-1)
        space[: len(own)] = own
    received = sent.new_empty(mesh.size(), len(sent))
    # Newer torch has the same under another name, and warns of the old one.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(received.view(-1), sent, group=mesh.get_group())
    for (name, tensor), pieces in zip(bucket, received.split(sizes, dim=1)):
        yield name, pieces.reshape(-1)[: tensor.numel()].view(tensor.shape)


def own_rows(tensor: Tensor) -> tuple[int, int]:
    """The rows of a whole tensor that this rank keeps, [first, last); all of one that is not sharded.

    fully_shard cuts the first dimension as torch.chunk does; a rank behind the last piece keeps none.
    """
    num_rows = tensor.shape[0]
    if not is_sharded(tensor):
        return 0, num_rows
    size, rank = -(-num_rows // tensor.device_mesh.size()), tensor.device_mesh.get_local_rank()
    return min(rank * size, num_rows), min((rank + 1) * size, num_rows)


def own_part(full: Tensor, like: Tensor) -> Tensor:
    """What this rank keeps of a whole tensor, sharded as ``like`` is; the whole where that is not sharded."""
    return as_shard(full[slice(*own_rows(like))], like) if is_sharded(like) else full


def as_shard(rows: Tensor, like: Tensor) -> Tensor:
    """This rank's rows as part of a tensor that is sharded as ``like`` is; as they are where that is not sharded."""
    if not is_sharded(like):
        return rows
    from torch.distributed.tensor import DTensor

    local = rows.to(like.device, like.dtype).clone()
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def present_everywhere(parameters: Sequence[nn.Parameter], used: Sequence[bool]) -> list[Tensor]:
    """The gradients of parameters that some rank has used; zeros are made where this one has not."""
    found = []
    for parameter, somewhere in zip(parameters, used):
        if somewhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found.append(parameter.grad)
    return found
