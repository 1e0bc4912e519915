"""The run's optimizer: AdamW over float32 (or float64) master weights, and two ways to keep its moments where they fit.

AdamW holds 8 bytes a parameter, twice the weights. ``--optimizer adamw8bit`` keeps both moments in 8 bits (bitsandbytes, blocks
of 256 with a scale each): 2 bytes a parameter, and other numbers. ``--offload-optimizer`` keeps them in main memory and changes
no number; every optimizer step then moves 16 bytes a parameter between host and device.
"""

import torch
from torch import Tensor
from torch.optim.adamw import AdamW, adamw

from vipfast.config import Config
from vipfast.errors import UsageError

BETAS = (0.9, 0.999)
"""AdamW's moment decays: torch's own defaults, which suit the few and noisy steps of RL as well as .95 would."""

PIECE = 2**26
"""Numbers of an offloaded moment on the device at once (256 MB in float32): a large embedding needs no room of its own."""


def make_optimizer(parameters: list[Tensor], config: Config) -> torch.optim.Optimizer:
    """The optimizer of a resolved config over what it trains.

    Args:
        parameters: trained parameters, in the model's order.

    Raises:
        UsageError: shards of parameters, which neither 8-bit nor offloaded moments can follow.
    """
    # Norm gains and biases have no scale to shrink towards.
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options = dict(lr=config.learning_rate, betas=BETAS)
    if config.optimizer == "adamw8bit":
        _refuse_shards(parameters, "--optimizer adamw8bit")
        # bitsandbytes takes seconds to import
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, **options)
    if config.offload_optimizer:
        _refuse_shards(parameters, "--offload-optimizer")
        return OffloadedAdamW(groups, **options, fused=True)
    return AdamW(groups, **options, fused=True)


def _refuse_shards(parameters: list[Tensor], asked: str) -> None:
    from torch.distributed.tensor import DTensor

    if any(isinstance(p, DTensor) for p in parameters):
        raise UsageError(
            f"{asked}: the model is sharded, and AdamW's moments with it already; leave it out, or train unsharded"
        )


class OffloadedAdamW(AdamW):
    """AdamW whose moments rest in main memory, page-locked where the parameters are on a GPU.

    A step takes them through the device piece by piece, to the same fused kernel: weights, moments and ``state_dict`` are bit
    for bit those of AdamW. (torchao's offload computes on the CPU, which rounds otherwise, and keeps weights and gradients
    there as well.)

    Args:
        groups: parameter groups; contiguous parameters on one device.
        options: of ``torch.optim.AdamW``; amsgrad and maximize stay off.
    """

    def __init__(self, groups: list[dict], **options):
        super().__init__(groups, **options)
        self._parameters = [p for group in self.param_groups for p in group["params"]]
        assert all(p.is_contiguous() for p in self._parameters), "a moment's piece must be a parameter's piece"
        # One block for all: page-locked allocations of their own would each be rounded up to a power of two.
        sizes = [p.numel() for p in self._parameters]
        block = torch.zeros(2, sum(sizes), dtype=self._parameters[0].dtype)
        if self._parameters[0].is_cuda:
            _page_lock(block)
        rows = zip(*(row.split(sizes) for row in block))
        self._moments = {p: tuple(row.view_as(p) for row in pair) for p, pair in zip(self._parameters, rows)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        if self._parameters[0].is_cuda:
            torch.cuda.synchronize()  # the moments are on their way back, and a checkpoint may read them next

    def _step(self, parameter: Tensor, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            self._rest(parameter, torch.zeros(()))
        device, (beta1, beta2) = parameter.device, group["betas"]
        # Copies and kernels queue on one stream, so a piece's memory is free again only when it is back in main memory.
        for weight, grad, *moments in zip(
            *(x.reshape(-1).split(PIECE) for x in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]))
        ):
            mean, square = (_on(device, x) for x in moments)
            adamw(
                [weight], [grad], [mean], [square], [], [state["step"].clone()], fused=True, amsgrad=False, maximize=False,
                beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
            )  # fmt: skip
            for host, here in zip(moments, (mean, square)):
                if here is not host:
                    host.copy_(here, non_blocking=True)
        state["step"] += 1

    def _rest(self, parameter: Tensor, step: Tensor) -> None:
        """Enter a parameter's place in the block into the state."""
        mean, square = self._moments[parameter]
        step = step.to(parameter.device, torch.float32, copy=True)
        self.state[parameter].update(step=step, exp_avg=mean, exp_avg_sq=square)

    def load_state_dict(self, state_dict: dict) -> None:
        """As AdamW's, but moments go to main memory and never through the device."""
        super().load_state_dict({**state_dict, "state": {}})
        for moments in self._moments.values():
            for moment in moments:
                moment.zero_()
        for index, saved in state_dict["state"].items():
            parameter = self._parameters[index]
            self._rest(parameter, saved["step"])
            for moment, name in zip(self._moments[parameter], ("exp_avg", "exp_avg_sq")):
                moment.copy_(saved[name])


def _page_lock(block: Tensor) -> None:
    """So that copies run beside the host, at the full speed of the bus."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0))


def _on(device: torch.device, host: Tensor) -> Tensor:
    return host.to(device, non_blocking=True)
