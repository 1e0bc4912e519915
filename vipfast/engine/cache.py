"""Keys and values: one block per prefilled batch of prompts, and one preallocated store for the rows being decoded.

Both hold ``[rows, heads, positions, dim]`` per layer with a row's token ``p`` in position ``p``, so a row's place in a batch
says nothing about its attention: positions beyond its own length are masked, and start as zeros, not as uninitialised memory.
The row store is written in place; rows that end are replaced by rows from the back, which copies a few rows instead of all.
(Positions outside heads would make the write contiguous, but CPU attention then reads at half the speed.)
"""

import torch
from transformers.cache_utils import Cache


class PromptBlock(Cache):
    """Records the keys and values of a left-padded batch of prompts, and what follows its last tokens."""

    def __init__(self, dtype: torch.dtype | None = None):
        super().__init__(layers=[])
        self.dtype = dtype  # of what is kept; None: as computed (under autocast keys come in float32, through their rotation)
        self.tensors: list[torch.Tensor] = []  # key, value, key, value, …
        self.logits: torch.Tensor | None = None  # [prompts, V], of the first token after each prompt

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        assert len(self.tensors) == 2 * layer_idx, "layers are expected once each, in order"
        self.tensors += [key_states.to(self.dtype or key_states.dtype), value_states.to(self.dtype or value_states.dtype)]
        return key_states, value_states

    def align_left(self, num_pad: torch.Tensor) -> None:
        """Move the ``num_pad`` [rows] padded positions in front of each prompt behind it."""
        source = (torch.arange(self.positions, device=num_pad.device) + num_pad[:, None]) % self.positions
        source = source[:, None, :, None]
        self.tensors = [tensor.gather(2, source.expand_as(tensor)) for tensor in self.tensors]

    @property
    def positions(self) -> int:
        return self.tensors[0].shape[2]


class RowCache(Cache):
    """The rows being decoded. ``cursor`` [rows] is where each row's next token is written; ``width`` bounds what is read."""

    def __init__(self):
        super().__init__(layers=[])
        self.tensors: list[torch.Tensor] = []
        self.cursor = self.row = torch.zeros(0, dtype=torch.int64)
        self.width = 0

    def holds(self, rows: int, positions: int) -> bool:
        return bool(self.tensors) and rows <= self.tensors[0].shape[0] and positions <= self.tensors[0].shape[2]

    def resize(self, used: int, rows: int, positions: int, like: list[torch.Tensor]) -> None:
        """Make room for ``rows`` × ``positions``, keeping the first ``used`` rows; ``like`` gives heads, dim and type."""
        old = self.tensors or [None] * len(like)
        for i, layer in enumerate(like):
            new = layer.new_zeros(rows, layer.shape[1], positions, layer.shape[3])
            if used:
                kept = min(old[i].shape[2], positions)
                new[:used, :, :kept] = old[i][:used, :, :kept]
            old[i] = new  # layer by layer, so that only one layer lives twice
        self.tensors = old

    def fill(self, start: int, block: PromptBlock, prompts: torch.Tensor) -> None:
        """Rows ``start …`` begin with the keys and values of ``prompts`` [n], rows of ``block``."""
        for mine, theirs in zip(self.tensors, block.tensors, strict=True):
            mine[start : start + len(prompts), :, : block.positions] = theirs.index_select(0, prompts)

    def move(self, to: torch.Tensor, source: torch.Tensor, width: int) -> None:
        """Copy the first ``width`` positions of rows ``source`` over rows ``to`` (disjoint)."""
        for tensor in self.tensors:
            part = tensor[:, :, :width]
            part.index_copy_(0, to, part.index_select(0, source))

    def aim(self, cursor: torch.Tensor, width: int) -> None:
        """Say where the next forward pass writes (``cursor`` [rows]) and how many positions it reads."""
        self.cursor, self.width = cursor, width
        self.row = torch.arange(len(cursor), device=cursor.device)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = self.tensors[2 * layer_idx : 2 * layer_idx + 2]
        keys[self.row, :, self.cursor] = key_states[:, :, 0].to(keys.dtype)
        values[self.row, :, self.cursor] = value_states[:, :, 0].to(values.dtype)
        rows = len(self.row)
        return keys[:rows, :, : self.width], values[:rows, :, : self.width]
