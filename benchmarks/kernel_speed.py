"""Each operation beside torch eager, torch.compile and Liger-Kernel: results compared first, then time and memory.

Runs on a GPU; on a CPU the same code runs at tiny sizes through Triton's interpreter, which shows that it works and measures
nothing. Contestants take turns within a repeat; a speed is the median of the repeats.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import NamedTuple

import torch
from common import print_table
from kernel_cases import (
    CALLS,
    CLIP,
    LONG,
    MODELS,
    RATIO_CAP,
    TOKENS,
    Batch,
    advantages,
    dense_logprob,
    dense_loss,
    make_batch,
    set_old_policy,
)
from kernel_roofs import Roof, flops, measure, min_bytes, seconds
from torch import Tensor

torch._logging.set_logs(dynamo=logging.ERROR)  # what it cannot trace is no news here
OURS = "vipfast"
HEADLINE = (8192, *MODELS["Qwen2.5-1.5B"])
TINY = (6, 8, 37)
"""T, D, V"""
MIN_REPEATS, MAX_REPEATS, SECONDS_EACH = 5, 20, 0.5
DIFFERENCE_MAX = 0.03
"""Relative, of the vectors compared: bf16 logits of D = 3584 products differ by about 1 %."""


class Row(NamedTuple):
    """One contestant at one size. ``ms`` is None where there is no speed, and ``note`` says why."""

    op: str
    provider: str
    mode: str
    T: int
    D: int
    V: int
    ms: float | None = None
    ms_min: float | None = None
    ms_max: float | None = None
    peak_mib: float | None = None
    grads_mib: float = 0.0
    rate: float | None = None  # TFLOP/s of a matmul operation, else GB/s
    share: float | None = None
    note: str = ""


Work = Callable[[], Tensor]
"""Runs a contestant once; returns the vector by which contestants are compared."""


def contestants(op: str, batch: Batch, device: str) -> Iterator[tuple[str, Work]]:
    """Name and work of ours first, then of everybody else who computes the same."""
    compiler = "inductor" if device == "cuda" else "eager"  # on a CPU the tracing alone is tried

    def compiled(function: Callable) -> Callable:
        # Every step of a run has a T of its own, so a compiled loss must be one for all sizes.
        return torch.compile(function, backend=compiler, dynamic=True)

    if op in ("group_advantage", "policy_loss"):

        def run(backend: str) -> Tensor:
            result = CALLS[op](batch, backend=backend)
            return result if op == "group_advantage" else result.dlogp_T

        fused = compiled(run)
        yield OURS, lambda: run("triton")
        yield "torch", lambda: run("torch")
        yield "torch.compile", lambda: fused("torch")
    elif op == "token_logprob":
        yield OURS, lambda: CALLS[op](batch, backend="triton")[0]
        yield "torch", lambda: dense_logprob(batch)[0]
        fused = compiled(dense_logprob)
        yield "torch.compile", lambda: fused(batch)[0]
    else:
        fused = compiled(dense_loss)
        yield OURS, lambda: _backward(batch, CALLS[op](batch, backend="triton").loss)
        yield "torch", lambda: _backward(batch, dense_loss(batch, advantages(batch)))
        yield "torch.compile", lambda: _backward(batch, fused(batch, advantages(batch)))
        # Its own default is one row a chunk; 2048 tokens are the piece it works through inside a chunk.
        for rows in dict.fromkeys((1, max(1, 2048 // batch.row_tokens))) if liger_version() else ():
            yield f"liger, chunks of {rows} rows", liger(batch, rows, device)


def _backward(batch: Batch, loss: Tensor) -> Tensor:
    batch.hidden_TD.grad = batch.weight_VD.grad = None
    loss.backward()
    return batch.hidden_TD.grad


def liger_version() -> str | None:
    try:
        return metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        return None


def liger(batch: Batch, chunk_rows: int, device: str) -> Work:
    """Liger's chunked GRPO loss on rectangles [rows, tokens]; its dr_grpo normalises by the 1 / (R length) used here."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    R, length = len(batch.reward_R), batch.row_tokens
    rule = dict(
        beta=0.0, epsilon_low=CLIP["clip_low"], epsilon_high=CLIP["clip_high"], loss_type="dr_grpo", use_ref_model=False
    )
    shape = dict(max_completion_length=length, chunk_size=chunk_rows, compiled=device == "cuda")
    loss = LigerFusedLinearGRPOLoss(**rule, **shape)
    mask = torch.ones(R, length, device=device)

    def work() -> Tensor:
        hidden = batch.hidden_TD.view(R, length, -1)
        ids, old, sampler = (x.view(R, length) for x in (batch.targets_T, batch.old_logp_T, batch.sampler_logp_T))
        correction = (old - sampler).exp().clamp(max=RATIO_CAP)
        value, _ = loss(
            hidden, batch.weight_VD, ids, mask, advantages(batch), old_per_token_logps=old, vllm_is_ratio=correction
        )
        return _backward(batch, value)

    return work


def compare(op: str, T: int, D: int, V: int, device: str, roof: Roof) -> list[Row]:
    """One row per contestant at one size; one that runs out of memory or differs from ours gets a note in place of a speed."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    batch = make_batch(T, D, V, dtype, device, mask=True)
    if D:
        set_old_policy(batch)
    grads = [x for x in (batch.hidden_TD, batch.weight_VD) if x is not None] if op == "policy_head" else []
    # The accumulator of d weight is fp32 whatever the weight is, and counts as a gradient.
    grads_mib = sum(x.numel() * (4 if x is batch.weight_VD else x.element_size()) for x in grads) / 2**20
    row = Row(op, "", "forward + backward" if op == "policy_head" else "forward", T, D, V, grads_mib=grads_mib)
    rows, works, reference = {}, {}, None
    for provider, work in contestants(op, batch, device):
        rows[provider] = row._replace(provider=provider)
        try:
            result, peak_mib = _peak(work, batch, device)
            difference = 0.0 if reference is None else ((result - reference).norm() / reference.norm()).item()
            reference = result.clone() if reference is None else reference
            note = "" if difference <= DIFFERENCE_MAX else f"differs from {OURS} by {difference:.2g}: no speed"
            rows[provider] = rows[provider]._replace(peak_mib=peak_mib, note=note)
            if not note:
                works[provider] = work
            del result
        except RuntimeError as error:  # out of memory, or torch.compile and Liger failing to build
            if provider == OURS:
                raise
            rows[provider] = rows[provider]._replace(note=_reason(error))
    if op == "policy_head" and not liger_version():
        rows["liger"] = row._replace(provider="liger", note="not installed")
    for provider, times in _times(works, batch, device, flush=not D).items():
        ms = 1e3 * statistics.median(times)
        spread = dict(ms=ms, ms_min=1e3 * min(times), ms_max=1e3 * max(times))
        rows[provider] = rows[provider]._replace(**spread, **_rates(op, T, D, V, ms, roof))
    return list(rows.values())


def _reason(error: RuntimeError) -> str:
    return "out of memory" if isinstance(error, torch.OutOfMemoryError) else f"failed: {str(error).splitlines()[0][:60]}"


def _rates(op: str, T: int, D: int, V: int, ms: float, roof: Roof) -> dict:
    if not flops(op, T, D, V):
        gb_per_s = min_bytes(op, T, D, V) / ms / 1e6
        return dict(rate=gb_per_s, share=gb_per_s / 1e3 / roof.tb_per_s)
    tflops = flops(op, T, D, V) / ms / 1e9
    return dict(rate=tflops, share=tflops / roof.tflops)


def _clear(batch: Batch, device: str) -> None:
    if batch.hidden_TD is not None:
        batch.hidden_TD.grad = batch.weight_VD.grad = None
    if device == "cuda":
        torch.cuda.synchronize()


def _peak(work: Work, batch: Batch, device: str) -> tuple[Tensor, float | None]:
    """Result of a call, and the peak MiB a second one allocates (the first compiles)."""
    if device == "cpu":
        return work(), None
    work()
    _clear(batch, device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    return result, (torch.cuda.max_memory_allocated() - before) / 2**20


def _times(works: dict[str, Work], batch: Batch, device: str, *, flush: bool) -> dict[str, list[float]]:
    """Seconds per call, contestants in turn; ``flush`` overwrites the L2 cache before each call."""
    times = {provider: [] for provider in works}
    waste = torch.empty(2**28 if device == "cuda" else 1, dtype=torch.uint8, device=device)
    most = MAX_REPEATS if device == "cuda" else 1
    for repeat in range(most):
        for provider, work in works.items():
            if repeat >= min(MIN_REPEATS, most) and sum(times[provider]) > SECONDS_EACH:
                continue
            _clear(batch, device)
            if flush:
                waste.zero_()
            times[provider].append(seconds(work, device))
    return times


def sizes(tokens: tuple[int, ...]) -> list[tuple[str, int, int, int]]:
    """(operation, T, D, V), those of the summary first."""
    matmuls = [op for op in CALLS if flops(op, 1, 1, 1)]
    rest = [("group_advantage", LONG, 0, 0), *(("policy_loss", T, 0, 0) for T in tokens)]
    rest += [(op, T, *shape) for T in tokens for op in matmuls for shape in MODELS.values()]
    first = [("policy_head", *HEADLINE)] if HEADLINE[0] in tokens else []
    return list(dict.fromkeys([*first, ("policy_loss", LONG, 0, 0), *rest]))


def tiny_sizes() -> list[tuple[str, int, int, int]]:
    return [(op, TINY[0], *(TINY[1:] if flops(op, 1, 1, 1) else (0, 0))) for op in CALLS]


def report(
    device: str, tested: dict[str, bool], tokens: tuple[int, ...] = TOKENS, *, tiny: bool = False, limit_s: float = math.inf
) -> tuple[dict, list[dict]]:
    """Measure what ``tested`` calls green, print one table; returns the summary and a row per contestant.

    No size is started later than ``limit_s`` after the call; what is left out is printed.
    """
    end = time.monotonic() + limit_s
    roof = measure(device, tiny=tiny)
    rows, left_out = [], []
    for op, T, D, V in tiny_sizes() if tiny else sizes(tokens):
        if not tested[op]:
            continue
        if time.monotonic() > end:
            left_out.append(f"{op} at T = {T}, D = {D}, V = {V}")
            continue
        rows += compare(op, T, D, V, device, roof)
        if device == "cuda":
            torch.cuda.empty_cache()
    table = [("operation", "provider", "T", "D", "V", "ms", "spread", "peak MiB", "rate", "of roof", "")]
    for row in rows:
        unit = "TFLOP/s" if row.D else "GB/s"
        speed = ("–",) * 5
        if row.ms is not None:
            peak = "–" if row.peak_mib is None else f"{row.peak_mib:.0f}"
            spread = f"{row.ms_min:.3g}–{row.ms_max:.3g}"
            speed = (f"{row.ms:.3f}", spread, peak, f"{row.rate:.3g} {unit}", f"{row.share:.1%}")
        table.append((row.op, row.provider, row.T, row.D or "–", row.V if row.D else "–", *speed, row.note))
    print_table(f"roofs measured in this run: {roof.tflops:.4g} TFLOP/s bf16, copy {1e3 * roof.tb_per_s:.4g} GB/s", table)
    for op, green in tested.items():
        if not green:
            print(f"  {op}: its tests fail here, so no speed is reported")
    for size in left_out:
        print(f"  left out for want of time: {size}")
    return summary(rows, TINY if tiny else HEADLINE), [row._asdict() for row in rows]


def summary(rows: list[Row], shape: tuple[int, int, int]) -> dict:
    """The figures for tools, the head's at ``shape``; None where there is no speed."""
    at = {row.provider: row for row in rows if row.op == "policy_head" and (row.T, row.D, row.V) == shape}
    long = [row for row in rows if row.op == "policy_loss" and row.provider == OURS and row.T in (LONG, shape[0])]
    ours = at.get(OURS)

    def against(*names: str) -> float | None:
        """The fastest of them over ours."""
        found = [row.ms for name, row in at.items() if name.startswith(names) and row.ms is not None]
        return round(min(found) / ours.ms, 3) if found and ours else None

    extra_mib = None if ours is None or ours.peak_mib is None else ours.peak_mib - ours.grads_mib
    return {
        "head_roof_share": ours and round(ours.share, 4),
        "head_vs_dense": against("torch"),
        "head_vs_liger": against("liger"),
        "head_extra_mb": None if extra_mib is None else round(extra_mib * 2**20 / 1e6, 1),
        "loss_copy_share": round(long[-1].share, 4) if long else None,
    }
