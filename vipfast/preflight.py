"""What a run would be refused for later on, asked before torch is imported, a model loaded or a folder made."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

from vipfast.config import Config
from vipfast.errors import UsageError

GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of tokenizers that are read from tokenizer.json alone."""


def check(config: Config, model_folder: Path | None) -> None:
    """Refuse boards and adapters without their packages, and prompts and stops that the tokenizer of ``--model`` cannot serve.

    Args:
        config: options as given.
        model_folder: where the model stands on this disk; None: not here, so its tokenizer cannot be asked.

    Raises:
        UsageError: naming the option and the remedy.
    """
    for name in config.trackers:
        if find_spec(name) is None:
            raise UsageError(f"--trackers {name}: its package is missing; install it with: pip install 'vipfast[trackers]'")
    if config.lora_rank and find_spec("peft") is None:
        raise UsageError(f"--lora-rank {config.lora_rank}: needs the peft library; pip install 'vipfast[lora]'")
    if config.output_dir is not None:
        _check_place(config.output_dir)
    if model_folder is None:
        return
    settings = _settings(model_folder)
    if config.prompt_template == "chat" and not ("chat_template" in settings or _has_template(model_folder)):
        raise UsageError(
            f"--prompt-template chat: the tokenizer of --model {config.model} has no chat template; use plain, qa or auto"
        )
    if config.stop and settings.get("tokenizer_class") in GENERIC_TOKENIZERS and (model_folder / "tokenizer.json").is_file():
        _check_stops(config.stop, model_folder / "tokenizer.json")


def check_rows(config: Config) -> None:
    """Refuse a file or folder of ``--task`` whose first rows hold no prompts and answers (DataError); other tasks pass."""
    from vipfast.tasks.dataset import check_layout
    from vipfast.tasks.reading import READERS

    path = Path(config.task).expanduser()
    if path.is_dir() or path.suffix in READERS:
        check_layout(config)


def _check_place(folder: str) -> None:
    path = Path(folder).expanduser().absolute()
    place = next(part for part in (path, *path.parents) if part.exists())
    if not place.is_dir():
        raise UsageError(f"--output-dir {folder}: {'' if place == path else f'{place} '}is a file; give a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"--output-dir {folder}: {place} may not be written to; give a folder where you may")


def _check_stops(stops: tuple[str, ...], path: Path) -> None:
    import tokenizers  # what transformers reads the file with, and without torch

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    for text in stops:
        if (num := len(tokenizer.encode(text, add_special_tokens=False).ids)) != 1:
            raise UsageError(
                f"--stop {text!r}: is {num} tokens of this tokenizer; give a string that is a single token, such as its "
                "end-of-turn token"
            )


def _settings(folder: Path) -> dict:
    path = folder / "tokenizer_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except json.JSONDecodeError as error:
        raise UsageError(f"--model {folder}: its tokenizer_config.json is not valid JSON ({error}); save it again") from error
    return settings if isinstance(settings, dict) else {}


def _has_template(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json", "processor_config.json"))
