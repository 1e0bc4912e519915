"""The policy and the precision it is kept in."""

from dataclasses import dataclass
from typing import Literal

from vipfast.options import idle
from vipfast.options.facts import option


@dataclass(frozen=True)
class ModelOptions:
    """The policy and the precision it is kept in."""

    model: str = option("starter", travels="never")
    """The policy: starter (embedded, under 1 M parameters), a from_pretrained folder, or a hub model id."""
    lora_rank: int = option(0, low=0, high=4096, evaluated=False)
    """Rank of LoRA adapters on the linear layers of the body; 0 trains all weights."""
    base_dtype: Literal["auto", "float32", "bfloat16"] = option("auto", idle=idle.without_adapters)
    """With --lora-rank: how the frozen linear layers under the adapters are kept, and the reference's; auto is bfloat16 where
    --dtype is, which changes no number there, and float32 elsewhere, as in runs saved without this option."""
    dtype: Literal["float32", "bfloat16", "float64"] | None = option(None, travels="never")
    """Compute precision: float32 on CPU, bfloat16 (over float32 master weights) on GPU unless given; float64 is for tests."""

    @property
    def base_in_bfloat16(self) -> bool:
        """Whether LoRA's frozen layers are kept in bfloat16, of a resolved config."""
        return self.lora_rank > 0 and self.base_dtype == "bfloat16"
