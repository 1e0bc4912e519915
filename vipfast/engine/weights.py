"""Taking the policy's weights into the engine's model, and refusing anything but exactly those."""

from collections.abc import Iterable

import torch

from vipfast.errors import SyncError


def copy_weights(weights: Iterable[tuple[str, torch.Tensor]], model: torch.nn.Module) -> None:
    """Copy ``weights`` into ``model``'s own parameters, in place; a tensor that is the parameter's own memory costs nothing.

    A tied weight may come under any one of its names, or under several if they agree.

    Args:
        weights: (name, tensor) pairs, read once, so they may be made one at a time.
        model: the engine's model. After an error it holds some new weights and some old ones.

    Raises:
        SyncError: names missing, unknown or of another shape, or two different tensors for one tied weight.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    unknown, taken = [], {}
    with torch.no_grad():
        for name, tensor in weights:
            if name not in named:
                unknown.append(name)
                continue
            mine = named[name]
            if mine.shape != tensor.shape:
                raise SyncError(f"{name}: the policy's shape is {tuple(tensor.shape)}, the engine's {tuple(mine.shape)}")
            if id(mine) in taken and not torch.equal(mine, tensor.to(mine)):
                raise SyncError(f"{name} and {taken[id(mine)]} are one tied weight in the engine, two in the policy")
            taken[id(mine)] = name
            if mine.data_ptr() != tensor.data_ptr() or mine.dtype != tensor.dtype:
                mine.copy_(tensor)
    missing = [name for name, mine in named.items() if id(mine) not in taken]
    if unknown or missing:
        raise SyncError(
            f"the policy's weights are not the engine's: {len(missing)} missing {missing[:5]}, "
            f"{len(unknown)} unknown {unknown[:5]}; both must hold the same model"
        )
