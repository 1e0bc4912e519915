"""Optimizer moments that ranks saved shard by shard: any number of ranks reads the rows it needs, and no more."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


class SavedShards:
    """Reads tensors whose rows lie in several safetensors files, one after the other.

    Args:
        files: in the order of the rows; a file may lack a tensor of which its rank kept no row.

    Attributes: ``names``, set of all tensors' names.
    """

    def __init__(self, files: Sequence[Path]):
        from safetensors import safe_open

        self._files = [safe_open(file, framework="pt") for file in files]
        self._names = [set(file.keys()) for file in self._files]
        self.names = set().union(*self._names)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows first … last - 1 of a tensor, on the CPU."""
        parts, at = [], 0
        for file, names in zip(self._files, self._names):
            if name not in names:
                continue
            saved = file.get_slice(name)
            end = at + saved.get_shape()[0]
            if max(first, at) < min(last, end) or not parts:
                parts.append(saved[max(first, at) - at : max(min(last, end) - at, max(first, at) - at)])
            at = end
        return torch.cat(parts)
