"""The policy's weights as its checkpoint would name them: LoRA merged into scratch copies, a bucket at a time.

Base weights are only ever read: merging in place and taking the product out again would leave them changed by rounding.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vipfast.errors import UsageError
from vipfast.frozen import FrozenLinear


class PlainWeights:
    """Turns ``(name, tensor)`` of a policy's parameters into those of the same model without LoRA.

    Args:
        model: the policy, LoRA-wrapped (peft) or not. Only names and scalings are taken from it, so the tensors may come from
            elsewhere, e.g. gathered from shards.
        bucket_bytes: most bytes merged at a time (a larger weight is a bucket of its own); weights without adapters pass
            through as they are, without a copy.

    Raises:
        UsageError: adapters that are more than a product of two matrices beside a linear layer.

    Attributes: ``names``, all names that come out; of a weight tied under several names, the first. ``tied``, that first name
    -> its other names.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int = 2**30):
        self.bucket_bytes = bucket_bytes
        self._scaling: dict[str, float] = {}  # of every layer with an adapter, by its name without the wrapper's prefix
        self._prefix = ""
        if hasattr(model, "get_base_model"):
            base = model.get_base_model()
            self._prefix = next(name for name, module in model.named_modules() if module is base) + "."
            self._scaling = _scalings(base)
        plain = {name: self._plain(name) for name, _ in model.named_parameters()}
        self.names = {name for name in plain.values() if name is not None}
        first = {id(parameter): plain[name] for name, parameter in model.named_parameters()}
        self.tied: dict[str, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name not in plain:
                self.tied.setdefault(first[id(parameter)], []).append(self._plain(name))

    def __call__(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Read ``weights`` once; yields every plain weight when all its parts have come."""
        parts: dict[str, dict[str, Tensor]] = {}
        bucket: list[tuple[str, dict[str, Tensor]]] = []
        for name, tensor in weights:
            name = name.removeprefix(self._prefix)
            layer, part = _split(name)
            if layer not in self._scaling or part == "bias":
                yield self._plain(name) or name, tensor
                continue
            parts.setdefault(layer, {})[part] = tensor.detach()
            if len(parts[layer]) == 3:
                bucket.append((layer, parts.pop(layer)))
                if sum(held["weight"].numel() * held["lora_B"].itemsize for _, held in bucket) >= self.bucket_bytes:
                    yield from self._merged(bucket)
                    bucket = []
        yield from self._merged(bucket)

    def _merged(self, bucket: list[tuple[str, dict[str, Tensor]]]) -> list[tuple[str, Tensor]]:
        with torch.no_grad():
            return [(f"{layer}.weight", _sum(**held, scaling=self._scaling[layer])) for layer, held in bucket]

    def _plain(self, name: str) -> str | None:
        """The plain name of a parameter; None for an adapter's own."""
        name = name.removeprefix(self._prefix)
        layer, part = _split(name)
        if layer not in self._scaling:
            return name
        return f"{layer}.{part}" if part in ("weight", "bias") else None


def _sum(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
    """In the adapters' dtype: a base in bfloat16 would round away what they have learned."""
    return torch.addmm(weight.to(lora_B.dtype), lora_B, lora_A, alpha=scaling)


def _split(name: str) -> tuple[str, str]:
    """ "…q_proj.base_layer.weight" -> ("…q_proj", "weight"); "…q_proj.lora_A.default.weight" -> ("…q_proj", "lora_A")."""
    for part in ("lora_A", "lora_B"):
        layer, found, _ = name.partition(f".{part}.")
        if found:
            return layer, part
    layer, _, part = name.rpartition(".")
    return layer.removesuffix(".base_layer"), part


def _scalings(base: Any) -> dict[str, float]:
    scalings = {}
    for name, module in base.named_modules():
        if not hasattr(module, "base_layer"):
            continue
        adapters = set(getattr(module, "scaling", ()))
        plain = type(module.base_layer) in (nn.Linear, FrozenLinear) and not getattr(module, "lora_magnitude_vector", None)
        biased = any(linear.bias is not None for linear in getattr(module, "lora_B", {}).values())
        if len(adapters) != 1 or not plain or biased:
            raise UsageError(
                f"LoRA on {name}: one plain adapter on a linear layer can be merged for the sampler, not "
                f"{type(module).__name__} over {type(module.base_layer).__name__} with {len(adapters)} adapters; "
                "use --engine transformers"
            )
        scalings[name] = float(module.scaling[adapters.pop()])
    return scalings
