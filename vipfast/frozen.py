"""Linear layers that are never trained, their weights kept in bfloat16: half the memory of LoRA's base model.

Under autocast to bfloat16 nothing changes, to the last bit: it would round a float32 weight to just this one at every product.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class FrozenLinear(nn.Linear):
    """A linear layer without gradients of its own, whose weight stays bfloat16 whatever dtype the model around it is moved to.

    A product is computed in the dtype of its input, as if the rounded weight were of that dtype.

    Args:
        linear: the layer it stands in for. Its bias, which is small, is taken over as it is.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight = nn.Parameter(linear.weight.detach().to(torch.bfloat16), requires_grad=False)
        self.bias = None if linear.bias is None else linear.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return nn.functional.linear(x, self.weight, self.bias)
        return _Product.apply(x, self.weight, self.bias)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.weight.data = self.weight.data.to(torch.bfloat16)  # exact: it held no finer number
        return self


class _Product(torch.autograd.Function):
    """x W^T + b with W widened for the moment of each product; autograd would keep the wide copies of all layers."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(weight)
        return nn.functional.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        (weight,) = ctx.saved_tensors
        return dout @ weight.to(dout.dtype), None, None


def keep_in_bfloat16(model: nn.Module) -> nn.Module:
    """Make every frozen linear layer of a causal language model but its head a FrozenLinear, in place; returns the model.

    The head, which the loss reads, and embedding and norms stay as they are, as does all that is trained.
    """
    for parent, name, layer in list(_linear_layers(model)):
        if not layer.weight.requires_grad:
            setattr(parent, name, FrozenLinear(layer))
    return model


def round_to_bfloat16(model: nn.Module) -> None:
    """Give the linear layers of a model without adapters the values that ``keep_in_bfloat16`` would, in their own dtype."""
    for _, _, layer in _linear_layers(model):
        layer.weight.data = layer.weight.data.to(torch.bfloat16).to(layer.weight.dtype)


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Every linear layer of a causal language model, LoRA-wrapped or not, but its head: its place, its name there, itself."""
    head = (model.get_base_model() if hasattr(model, "get_base_model") else model).get_output_embeddings()
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child is not head:
                yield parent, name, child
