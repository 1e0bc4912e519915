"""The model to evaluate: starter, a run's folder or a part of it, LoRA adapters, any from_pretrained folder, a hub id."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from vipfast.config import Config
from vipfast.config_file import load_yaml
from vipfast.errors import UsageError
from vipfast.model_facts import model_folder

PIECES, PIECE_BYTES = 64, 1 << 16
"""Of a file of weights, what its fingerprint reads."""


@dataclass(frozen=True)
class Source:
    """``name`` as given; ``base`` is what ``Config.model`` takes; ``adapter``, LoRA adapters to put on it; ``run``, the
    training run it comes from; ``notes``, what was chosen."""

    name: str
    base: str
    adapter: Path | None = None
    run: Path | None = None
    notes: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """Of the weights, from samples all over their files; of a hub id, the commit it stands for."""
        folder = self.adapter or model_folder(self.base)
        if folder is None:
            return self.base
        if folder.parent.name == "snapshots":
            return folder.name
        digest = hashlib.sha256(self.base.encode() if self.adapter else b"")
        for file in sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")):
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            with open(file, "rb") as stream:
                for i in range(PIECES):
                    stream.seek(size * i // PIECES)
                    digest.update(stream.read(PIECE_BYTES))
        return digest.hexdigest()


def find(name: str) -> Source:
    """The model behind ``--model``.

    Raises:
        UsageError: a run that has saved no model, or adapters that do not say what they belong to.
    """
    given = Path(name).expanduser()
    if name == "starter" or not given.is_dir():
        return Source(name, name)  # resolve judges what it is
    run = next((path for path in (given, *given.absolute().parents[:3]) if _is_run(path)), None)
    folder = _weights(given) or (_weights_of_run(given) if run == given else given)
    notes = () if folder == given else (f"model: {folder}",)
    if not (folder / "adapter_config.json").is_file():
        return Source(name, str(folder), run=run, notes=notes)
    # The run's own word for it holds on other machines too; peft writes down a path.
    base = load_yaml(run / "config.yaml").model if run else _base_of(folder)
    return Source(name, base, folder, run, (*notes, f"model: LoRA adapters on {base}"))


def load(source: Source, config: Config, tokenizer):
    """The policy to sample from, over the ids of ``tokenizer``, adapters beside its layers as in training.

    Raises:
        UsageError: no model there, or adapters without the peft library or of another model.
    """
    from vipfast.frozen import keep_in_bfloat16
    from vipfast.policy import load_policy

    model = load_policy(config, tokenizer)
    if source.adapter is None:
        return model.to(config.device)
    if config.base_dtype == "bfloat16":
        keep_in_bfloat16(model.requires_grad_(False))
    return with_adapters(model, source).to(config.device)


def with_adapters(model, source: Source):
    """The base model, wrapped with the adapters of ``source``.

    Raises:
        UsageError: no peft library, or adapters of another model.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        raise UsageError(f"--model {source.name}: LoRA adapters need the peft library; pip install 'vipfast[lora]'") from error
    try:
        return peft.PeftModel.from_pretrained(model, source.adapter)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"--model {source.name}: its adapters do not fit {source.base} ({str(error).splitlines()[0]})"
        ) from error


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and any((path / part).exists() for part in ("metrics.jsonl", "checkpoints"))


def _weights(folder: Path) -> Path | None:
    """The folder itself, or the model of a checkpoint step-N, if weights or adapters are described there."""
    for path in (folder, folder / "model"):
        if any((path / f"{kind}config.json").is_file() for kind in ("", "adapter_")):
            return path
    return None


def _weights_of_run(run: Path) -> Path:
    from vipfast.checkpoint import newest_complete  # NumPy comes with it, which --help should not wait for

    if _weights(run / "final"):
        return run / "final"
    step = newest_complete(run)
    if step is None:
        raise UsageError(f"--model {run}: this run has saved neither final/ nor a complete checkpoint yet; let it go on first")
    return step / "model"


def _base_of(adapter: Path) -> str:
    try:
        described = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UsageError(f"--model {adapter}: its adapter_config.json cannot be read ({error})") from error
    base = described.get("base_model_name_or_path") if isinstance(described, dict) else None
    if not isinstance(base, str) or not base or (os.path.isabs(base) and not Path(base).is_dir()):
        raise UsageError(
            f"--model {adapter}: its adapter_config.json says they belong to {base!r}, which is not here; set "
            "base_model_name_or_path there to the model's folder or hub id"
        )
    return base
