"""A causal language model cut into body and head, so that no [tokens, vocabulary] tensor is ever formed whole."""

import contextlib

import torch
from torch import Tensor, nn

from vipfast.errors import UsageError
from vipfast.kernels.token_logprob import token_logprob
from vipfast.learn.pack import Rectangle


class Policy:
    """Body, head weight and the model's own transform of its logits.

    Dropout is off, also while training: log-probs must be those that were sampled from.

    Attributes: ``model``; ``weight_VD`` and ``bias_V`` (or None) of the head; ``head``: keyword arguments of the head kernels.
    """

    def __init__(self, model: nn.Module, dtype: str, device: str, temperature: float, train: bool):
        self.device = torch.device(device)
        # bfloat16 computes over float32 master weights: at small learning rates a bf16 weight never moves.
        self.model = model.to(self.device, torch.float64 if dtype == "float64" else torch.float32).eval()
        self.autocast = dtype == "bfloat16"
        if not train:
            self.model.requires_grad_(False)
        causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.body, head = causal.get_decoder(), causal.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise UsageError(
                f"--model {type(causal).__name__}: its output head is a {type(head).__name__}, and the loss needs a plain "
                "linear one (adapters belong on the linear layers of the body: leave the head out of LoRA's target modules)"
            )
        self.weight_VD, self.bias_V = head.weight, head.bias
        config = causal.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        self.head = dict(bias_V=self.bias_V, temperature=temperature, logit_scale=scale, softcap=softcap)
        self._check_head(scale, softcap)

    def hidden(self, rectangle: Rectangle) -> Tensor:
        """[T, D] states that predict the rectangle's targets."""
        ids = torch.from_numpy(rectangle.input_ids).to(self.device)
        cast = torch.autocast(self.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with cast:
            states = self.body(input_ids=ids, use_cache=False)[0]
        return states.flatten(0, 1)[torch.from_numpy(rectangle.positions_T).to(self.device)]

    @torch.no_grad()
    def logprob(self, rectangle: Rectangle) -> Tensor:
        """[T] log-probs of the rectangle's targets, without gradients."""
        targets_T = torch.from_numpy(rectangle.targets_T).to(self.device)
        return token_logprob(self.hidden(rectangle), self.weight_VD, targets_T, **self.head)[0]

    @torch.no_grad()
    def _check_head(self, scale: float, softcap: float | None) -> None:
        """Compare body and head with the model's own logits once: architectures differ in what they do to them."""
        ids = torch.arange(8, device=self.device)[None] % self.weight_VD.shape[0]
        expected = self.model(input_ids=ids, use_cache=False).logits
        found = torch.nn.functional.linear(self.body(input_ids=ids, use_cache=False)[0], self.weight_VD, self.bias_V) * scale
        found = found if softcap is None else softcap * torch.tanh(found / softcap)
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
            raise UsageError(
                f"--model {type(self.model).__name__}: its logits are not head(body(ids)) with logit_scale and "
                "final_logit_softcapping, so its log-probs would be wrong; use an architecture whose logits are"
            )
