"""Gradient checkpointing: a layer keeps its input alone and runs again in the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vipfast.errors import UsageError


def checkpointed_layers(body: nn.Module) -> list[nn.Module]:
    """The outermost layers that transformers itself would checkpoint.

    Raises:
        UsageError: the model says that it cannot, or marks no layer.
    """
    layers = outermost_layers(body)
    if not layers or not getattr(body, "supports_gradient_checkpointing", False):
        raise UsageError(
            f"--gradient-checkpointing: {type(body).__name__} does not support it; leave it out and lower "
            "--micro-batch-tokens instead"
        )
    return layers


def outermost_layers(body: nn.Module) -> list[nn.Module]:
    """The layers of a transformer, as transformers itself marks them; none inside another."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: dict[str, nn.Module] = {}
    for name, module in body.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not any(name.startswith(f"{outer}.") for outer in layers):
            layers[name] = module
    return list(layers.values())


@contextmanager
def recomputed(layers: list[nn.Module], again: Callable) -> Iterator[None]:
    """Checkpoint these layers in forward passes inside, when they record gradients.

    transformers' own switch asks for ``layer.training``, which in some models also turns on the layer's dropout; and it must be
    off again before the same model generates. So the layers' ``forward`` is replaced from outside, and given back.

    Args:
        layers: as ``checkpointed_layers`` gives them.
        again: context manager factory under which the second run takes place, wherever the first one's had been left by then.
    """
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        # In the instance's own dict: parameters and hooks stay as they are (FSDP2's gather weights around ``forward``).
        vars(layer)["forward"] = _checkpointed(layer.forward, again)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before):
            if forward is None:
                del vars(layer)["forward"]
            else:
                vars(layer)["forward"] = forward


def _checkpointed(forward: Callable, again: Callable) -> Callable:
    def run(*args, **kwargs):
        with again():
            return forward(*args, **kwargs)

    def checkpointed(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Nothing in a layer is random, since dropout is off. Reentrant checkpointing would give no gradient to adapters above
        # frozen embeddings.
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return checkpointed
