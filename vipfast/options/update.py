"""The loss and the optimizer."""

from dataclasses import dataclass
from typing import Literal

from vipfast.options import idle
from vipfast.options.facts import option


@dataclass(frozen=True)
class UpdateOptions:
    """The loss and the optimizer."""

    estimator: Literal["rloo", "dr_grpo", "grpo"] = "rloo"
    """Advantage of a rollout within its group: leave-one-out, centred, or centred and divided by the std."""
    weighting: Literal["prompt", "rollout", "token"] = "prompt"
    """Whether each prompt, each rollout or each token weighs the same in the loss."""
    length_term: Literal["constant", "sequence", "token"] = "constant"
    """Tokens of a rollout are divided by max_new_tokens, by its own length, or (prompt weighting) by its group's tokens."""
    clip_low: float = option(0.2, low=0, high=1, idle=idle.with_one_update)
    """The ratio is clipped at 1 - clip_low for negative advantages."""
    clip_high: float = option(0.28, low=0, high=1e6, idle=idle.with_one_update)
    """The ratio is clipped at 1 + clip_high for positive advantages."""
    beta: float = option(0.0, low=0, high=1e6)
    """Weight of the KL term towards the starting policy; at 0 no reference model is loaded."""
    updates_per_step: int = option(1, low=1, high=10**4)
    """Mini-batches (optimizer steps) a step's prompts are dealt into."""
    epochs: int = option(1, low=1, high=10**4)
    """Passes over a step's rollouts."""
    learning_rate: float | None = option(None, low=0, high=10)
    """Peak AdamW learning rate; 1e-4 for the starter, 1e-6 full, 1e-5 with LoRA unless given."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up; linear and cosine would reach 0 one step after the last."""
    warmup_steps: int = option(0, low=0, high=10**9)
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: float = option(0.0, low=0, high=10)
    """AdamW's decoupled weight decay."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """AdamW with its two moments as the master weights are (8 bytes a parameter), or in 8 bits (2 bytes; bitsandbytes)."""
    offload_optimizer: bool = option(False, resumable=True)
    """Keep AdamW's moments in main memory: the same numbers for 8 bytes a parameter less on the GPU, and slower steps."""
    max_grad_norm: float = option(1.0, low=1e-12, high=1e12)
    """The gradient is clipped to this norm once, after accumulation."""
    micro_batch_tokens: int = option(8192, low=1, high=10**9)
    """Padded tokens of one forward pass of the body; smaller saves memory and changes nothing else."""
    packing: Literal["auto", "varlen", "masked", "rectangles"] = option("auto", decided=True)
    """How rollouts pass through the body: one packed row with flash-attn's varlen attention, one packed row under a
    block-diagonal mask (masked, which varlen becomes without flash-attn), or small rectangles of like length; auto takes varlen
    where flash-attn is installed, on a CUDA device in bfloat16."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations: less memory, about a third more time."""
    kernels: Literal["auto", "required", "off"] = option("auto", decided=True, idle=idle.as_on_any_cpu)
    """The loss on CUDA: Triton kernels where they can run (auto), Triton or an error (required), or plain torch (off)."""
    max_nonfinite: int = option(5, low=1, high=10**9)
    """Stop after this many steps in a row with a non-finite loss or gradient (each is skipped)."""
