"""A causal language model cut into body and head, so that no [tokens, vocabulary] tensor is ever formed whole."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vipfast.errors import UsageError
from vipfast.kernels.policy_head import PolicyHead, policy_head
from vipfast.kernels.token_logprob import token_logprob
from vipfast.learn.batch import Batch
from vipfast.learn.pack import PACKED
from vipfast.learn.recompute import checkpointed_layers, recomputed
from vipfast.vocabulary import num_known_ids

VARLEN_ATTENTION = "flash_attention_2"
"""transformers' name of the attention that ``--packing varlen`` runs through."""


class Policy(nn.Module):
    """The model and its loss in one module, whose ``forward`` is the only place that touches a weight.

    So it can be the root of a sharded model (learn/sharding.py): the head's weight is gathered with the embedding and the norm
    before ``forward`` and its gradient reduced with theirs. Loss weights describe the whole step over all ranks, so gradients
    of ranks are summed. A rank without rows left passes ``pack.blank``.

    Dropout is off, also while training: log-probs must be those that were sampled from.

    Args:
        model: causal language model, LoRA-wrapped or not; kept as ``model``, moved to ``device`` and its master dtype.
        dtype: compute dtype as in ``--dtype``. bfloat16 computes over float32 master weights: at small learning rates a bf16
            weight never moves.
        temperature: divides the logits.
        train: False freezes all weights (a reference).
        backend: of the head, "triton", "torch" or None for the device's own.
        packing: whose attention packed rows run through.
        recompute: layers keep their input alone for the backward pass.
        placed: False leaves the model where it is, to be sharded; ``check`` is to be called then.

    Raises:
        UsageError: the head is no plain linear layer, the logits are not the head's, or the model cannot be packed or
            recomputed.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: str,
        device: str,
        temperature: float,
        train: bool,
        backend: str | None = None,
        packing: str = "rectangles",
        recompute: bool = False,
        placed: bool = True,
    ):
        super().__init__()
        self.device, self.backend, self.packing = torch.device(device), backend, packing
        self.attention = VARLEN_ATTENTION if packing == "varlen" else None  # else the one the model was loaded with
        self.dtype = torch.float64 if dtype == "float64" else torch.float32
        self.model = model.to(self.device if placed else None, self.dtype)
        self.eval()
        self.autocast = dtype == "bfloat16"
        if not train:
            self.model.requires_grad_(False)
        head = self.lm_head
        if type(head) is not nn.Linear:
            raise UsageError(
                f"--model {type(self.causal).__name__}: its output head is a {type(head).__name__}, and the loss needs a plain "
                "linear one (adapters belong on the linear layers of the body: leave the head out of LoRA's target modules "
                "and of modules_to_save)"
            )
        config = self.causal.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        self.head = dict(temperature=temperature, logit_scale=scale, softcap=softcap, vocab_size=num_known_ids(model))
        self._recomputed = checkpointed_layers(self.body) if recompute and train else []
        if placed:
            self.check()

    def check(self) -> None:
        """Compare the model with itself, as far as architectures differ in what is assumed here; all ranks call this alike.

        Raises:
            UsageError: as the class says.
        """
        self(None)  # the root's weights are gathered for a call of the whole module alone
        if hasattr(self, "reshard"):
            self.reshard()  # the root waits for a backward pass that does not come

    # Looked up, not kept: a second name for a submodule would show in named_modules and state_dict.
    @property
    def causal(self) -> nn.Module:
        """The causal language model itself, without LoRA's wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def body(self) -> nn.Module:
        return self.causal.get_decoder()

    @property
    def lm_head(self) -> nn.Module:
        return self.causal.get_output_embeddings()

    def train(self, mode: bool = True) -> "Policy":
        """Gradients are recorded either way; dropout stays off."""
        return super().train(False)

    def forward(self, batch: Batch | None, loss: dict[str, Any] | None = None) -> PolicyHead | Tensor | None:
        """One pass over body and head.

        Args:
            batch: the rows; None to check the model instead.
            loss: arguments of ``policy_head`` beyond states, weight, targets and the model's own; None: no gradients.

        Returns:
            PolicyHead, or without ``loss`` the [T] log-probs of the targets.
        """
        if batch is None:
            self._check_head()
            return self._check_packing() if self.packing in PACKED else None
        weight_VD, known = self.lm_head.weight, dict(bias_V=self.lm_head.bias, backend=self.backend, **self.head)
        if loss is not None:
            return policy_head(self._hidden(batch), weight_VD, batch.targets_T, **loss, **known)
        with torch.no_grad():
            return token_logprob(self._hidden(batch), weight_VD, batch.targets_T, **known)[0]

    def _hidden(self, batch: Batch) -> Tensor:
        """[T, D] states that predict the targets, in the compute dtype."""
        with self._attention(), recomputed(self._recomputed, self._attention):
            return self._states(batch).flatten(0, 1)[batch.positions_T]

    def _states(self, batch: Batch) -> Tensor:
        packed: dict[str, Any] = {}
        if batch.position_ids is not None:
            packed["position_ids"] = batch.position_ids
            if self.attention is not None:  # else it would ask the device for them, layer by layer
                packed |= dict(cu_seq_lens_q=batch.row_offsets, cu_seq_lens_k=batch.row_offsets)
                packed |= dict(max_length_q=batch.longest, max_length_k=batch.longest)
        if not self.autocast:
            return self.body(input_ids=batch.input_ids, use_cache=False, **packed)[0]
        # Copies of weights are worth keeping for a backward pass only; while vLLM is awake there is no room for them.
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=torch.is_grad_enabled()):
            states = self.body(input_ids=batch.input_ids, use_cache=False, **packed)[0]
        # The residual stream is float32; the head's matmuls want what the body's have.
        return states.to(torch.bfloat16)

    @contextlib.contextmanager
    def _attention(self) -> Iterator[None]:
        """The packing's attention while the body runs; the same model also generates, with its own."""
        if self.attention is None:
            yield
            return
        config = self.body.config
        before = config._attn_implementation
        config._attn_implementation = self.attention
        try:
            yield
        finally:
            config._attn_implementation = before

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare body and head with the model's own logits once: architectures differ in what they do to them."""
        scale, softcap, num_ids = (self.head[name] for name in ("logit_scale", "softcap", "vocab_size"))
        ids = torch.arange(8, device=self.device)[None] % self.lm_head.weight.shape[0]
        expected = self.model(input_ids=ids, use_cache=False).logits
        states = self.body(input_ids=ids, use_cache=False)[0]
        found = nn.functional.linear(states, self.lm_head.weight, self.lm_head.bias) * scale
        found = found if softcap is None else softcap * torch.tanh(found / softcap)
        found, expected = found[..., :num_ids], expected[..., :num_ids]
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
            raise UsageError(
                f"--model {type(self.model).__name__}: its logits are not head(body(ids)) with logit_scale and "
                "final_logit_softcapping, so its log-probs would be wrong; use an architecture whose logits are"
            )

    @torch.no_grad()
    def _check_packing(self) -> None:
        """Refuse a model whose packed rows are not what they are alone: not every attention follows position_ids."""
        name, remedy = type(self.causal).__name__, "use --packing rectangles"
        if "position_ids" not in inspect.signature(self.body.forward).parameters:
            raise UsageError(f"--packing {self.packing}: {name} takes no position_ids, so rows cannot be packed; {remedy}")
        if self.attention is not None:
            before = self.causal.config._attn_implementation
            try:
                self.causal.set_attn_implementation(self.attention)
            except (ImportError, ValueError) as error:
                raise UsageError(f"--packing {self.packing}: {name} cannot use {self.attention} ({error}); {remedy}") from error
            self.causal.set_attn_implementation(before)
        ids = torch.arange(1, 13, device=self.device) % self.lm_head.weight.shape[0]
        rows = ids.split([7, 5])
        alone = torch.cat([self._states(_alone(row)) for row in rows], 1)
        positions, offsets = (torch.cat([torch.arange(len(row)) for row in rows])[None], torch.tensor([0, 7, 12]))
        batch = _alone(ids)._replace(
            position_ids=positions.to(self.device), row_offsets=offsets.to(self.device, torch.int32), longest=7
        )
        with self._attention():
            packed = self._states(batch)
        tolerance = 0.05 if self.autocast else 1e-3
        if not float((packed - alone).abs().max()) <= tolerance * float(alone.abs().max()):
            raise UsageError(
                f"--packing {self.packing}: {name} gives packed rows other states than the same rows alone, so its attention "
                f"or its positions run across them; {remedy}"
            )


def _alone(ids: Tensor) -> Batch:
    """One row, no targets."""
    none = ids.new_zeros(0)
    return Batch(ids[None], none, none, none, none, none, position_ids=None, row_offsets=None, longest=0)
