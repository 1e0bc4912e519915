"""Loads the policy and its tokenizer: the embedded starter, a from_pretrained folder or a hub model, with LoRA if asked."""

import dataclasses
import json
from importlib import resources
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from vipfast.config import Config
from vipfast.errors import UsageError
from vipfast.frozen import keep_in_bfloat16
from vipfast.preflight import GENERIC_TOKENIZERS
from vipfast.shortage import shortage_told
from vipfast.vocabulary import limit_to_tokenizer


def model_path(name: str) -> str:
    """The folder (or hub id) behind ``--model``: "starter" is the embedded one."""
    if name == "starter":
        return str(resources.files("vipfast") / "assets" / "starter")
    folder = Path(name).expanduser()
    return str(folder) if folder.is_dir() else name


def read_tokenizer(path: str):
    """The tokenizer saved at ``path`` (folder or hub id), as its own files describe it.

    A folder whose tokenizer_config.json names no class of its own is read from tokenizer.json alone: AutoTokenizer would choose
    a class by the model's type, and Qwen2's, say, adds a normaliser that the file does not have.
    """
    settings = Path(path) / "tokenizer_config.json"
    if settings.is_file() and json.loads(settings.read_text()).get("tokenizer_class") in GENERIC_TOKENIZERS:
        return PreTrainedTokenizerFast.from_pretrained(path)
    return AutoTokenizer.from_pretrained(path)


def load_tokenizer(config: Config):
    """Raises UsageError when ``--model`` has no tokenizer, or one without an end-of-text token."""
    try:
        tokenizer = read_tokenizer(model_path(config.model))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--model {config.model}: no tokenizer could be loaded ({_first_line(error)}); give a folder saved with "
            "tokenizer.save_pretrained, or a hub id that is on disk or reachable"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UsageError(f"--model {config.model}: its tokenizer has no eos token, so no completion could ever end")
    if tokenizer.pad_token_id is None:
        # Only a filler: padding is told by position everywhere, never by this id.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(config: Config, tokenizer=None):
    """The model to train, in main memory.

    Master weights are float64 for ``--dtype float64`` and float32 otherwise: AdamW at 1e-6 moves no bfloat16 weight. What LoRA
    freezes may be bfloat16 (``--base-dtype``).

    Args:
        config: names it.
        tokenizer: ids it does not know, which the model has rows for, are never sampled and take no probability; None: every
            row counts.

    Raises:
        UsageError: no model there, one with fewer rows than the tokenizer has ids, or LoRA asked for without the peft library.
        ShortageError: it does not fit into main memory.
    """
    logging.disable_progress_bar()  # its bars would tear the live view
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    try:
        with shortage_told(config):
            model = AutoModelForCausalLM.from_pretrained(model_path(config.model), dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(
            f"--model {config.model}: no model could be loaded ({_first_line(error)}); give 'starter', a from_pretrained "
            "folder with config.json and safetensors, or a hub id that is on disk or reachable"
        ) from error
    if tokenizer is not None:
        limit_to_tokenizer(model, tokenizer, config.model)
    model = _with_lora(model, config) if config.lora_rank else model
    return keep_in_bfloat16(model) if config.base_in_bfloat16 else model


def load_reference(config: Config, tokenizer=None):
    """The frozen starting policy for the KL term, loaded like the policy but for adapters; None when ``--beta`` is 0."""
    if config.beta == 0:
        return None
    reference = load_policy(dataclasses.replace(config, lora_rank=0), tokenizer).requires_grad_(False).eval()
    return keep_in_bfloat16(reference) if config.base_in_bfloat16 else reference


def _with_lora(model, config: Config):
    try:
        import peft
    except ModuleNotFoundError as error:
        raise UsageError(f"--lora-rank {config.lora_rank}: needs the peft library; pip install 'vipfast[lora]'") from error
    torch.manual_seed(config.seed)
    adapters = peft.LoraConfig(
        r=config.lora_rank, lora_alpha=2 * config.lora_rank, target_modules="all-linear", lora_dropout=0.0
    )
    return peft.get_peft_model(model, adapters)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
