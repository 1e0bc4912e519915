"""What can be known of a model without loading it: shape and positions, from config.json, else from the size in its name."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from vipfast.errors import UsageError

STARTER = Path(__file__).parent / "assets" / "starter"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

# Shapes of the Qwen2.5 family, which stand in for a model known by its size alone:
# parameters in billions -> layers, hidden, intermediate, heads, key/value heads.
_TYPICAL = {
    0.5: (24, 896, 4864, 14, 2),
    1.5: (28, 1536, 8960, 12, 2),
    3: (36, 2048, 11008, 16, 2),
    7: (28, 3584, 18944, 28, 4),
    14: (48, 5120, 13824, 40, 8),
    32: (64, 5120, 27648, 40, 8),
    72: (80, 8192, 29568, 64, 8),
}


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a decoder with gated MLPs (Llama, Qwen, Mistral and their like). ``source`` says where they were read."""

    source: str
    num_parameters: int
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    positions: int | None

    def lora_parameters(self, rank: int) -> int:
        """Parameters of adapters of this rank on all seven linear layers of every block: rank·(inputs + outputs) each."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sides = 2 * (self.hidden + q) + 2 * (self.hidden + kv) + 3 * (self.hidden + self.intermediate)
        return rank * sides * self.num_layers

    @property
    def gathered_parameters(self) -> int:
        """Parameters that FSDP holds whole at once: two of the layers, and the embedding and head, which are no layer's."""
        layer = self.linear_parameters // self.num_layers
        return 2 * layer + max(self.num_parameters - self.linear_parameters, self.vocab * self.hidden)

    @property
    def linear_parameters(self) -> int:
        """Weights of all layers' linear maps, on which adapters sit, biases apart."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.num_layers * (2 * self.hidden * (q + kv) + 3 * self.hidden * self.intermediate)


def model_folder(model: str) -> Path | None:
    """The folder of ``--model`` on this disk: the starter's, a given one, or the hub cache's; None for a hub id not there.

    Raises:
        UsageError: a folder that lacks config.json or a tokenizer, or a name that is neither folder nor hub id.
    """
    if model == "starter":
        return _checked(model, STARTER, "the package data is incomplete; install vipfast again")
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(model, path, "give the folder save_pretrained wrote, with the tokenizer saved beside the model")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model[0] in "./":
        raise UsageError(
            f"--model {model}: no such folder, and no hub id either; give starter, a from_pretrained folder, or owner/name"
        )
    return _cached_snapshot(model)


def read_facts(model: str) -> ModelFacts:
    """Sizes of ``--model`` without loading it.

    Raises:
        UsageError: see ``model_folder``; or a hub id not on disk whose name holds no size such as 0.5B; or a config.json
            without the usual sizes.
    """
    folder = model_folder(model)
    if folder is None:
        return _facts_from_name(model)
    config = read_config(folder)
    missing = [key for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size") if key not in config]
    if missing:
        raise UsageError(f"--model {model}: its config.json lacks {', '.join(missing)}, so its memory cannot be estimated")
    heads = config["num_attention_heads"]
    return _facts(
        source=str(folder / "config.json"),
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config.get("intermediate_size") or 4 * config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        positions=config.get("max_position_embeddings"),
        tied=config.get("tie_word_embeddings", False),
        attention_bias=config.get("attention_bias", config.get("model_type") == "qwen2"),
    )


def known_facts(model: str) -> ModelFacts | None:
    """``read_facts``, or None for a model whose sizes cannot be told without loading it."""
    try:
        return read_facts(model)
    except UsageError:
        return None


def read_config(folder: Path) -> dict:
    """A model folder's config.json; of a multimodal model, its text part."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UsageError(f"--model {folder}: its config.json is not valid JSON ({error}); save the model again") from error
    return config.get("text_config", config)


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a model folder words prompts as a chat."""
    settings = folder / "tokenizer_config.json"
    inside = settings.is_file() and bool(json.loads(settings.read_text(encoding="utf-8")).get("chat_template"))
    return inside or (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file()


def size_in_name(model: str) -> float | None:
    """Parameters in billions as a model's name tells them: "Qwen/Qwen2.5-0.5B-Instruct" -> 0.5, "SmolLM2-135M" -> 0.135."""
    sizes = re.findall(r"(?<![\d.A-Za-z])(\d+(?:\.\d+)?)([BbMm])(?![A-Za-z\d])", model)
    return max((float(number) / (1 if unit in "Bb" else 1000) for number, unit in sizes), default=None)


def _facts(
    *, source, layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, positions, tied, attention_bias
) -> ModelFacts:
    """Count the parameters of a decoder with gated MLPs and RMS norms."""
    q, kv = heads * head_dim, kv_heads * head_dim
    attention = 2 * hidden * q + 2 * hidden * kv + attention_bias * (q + 2 * kv)
    block = attention + 3 * hidden * intermediate + 2 * hidden
    total = layers * block + hidden + vocab * hidden * (1 if tied else 2)
    return ModelFacts(source, total, layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, positions)


def _facts_from_name(model: str) -> ModelFacts:
    size = size_in_name(model)
    if size is None:
        raise UsageError(
            f"--model {model}: not on this disk, and its name holds no size such as 0.5B, so nothing can be estimated; "
            "download it first"
        )
    near = min(_TYPICAL, key=lambda typical: abs(typical - size))
    layers, hidden, intermediate, heads, kv_heads = _TYPICAL[near]
    source = f"not on this disk: {size:g}B parameters from its name, shape of Qwen2.5-{near:g}B assumed"
    return ModelFacts(source, round(size * 1e9), layers, hidden, intermediate, heads, kv_heads, hidden // heads, 151936, None)


def _checked(model: str, folder: Path, remedy: str) -> Path:
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            remedy = "it holds LoRA adapters only; merge them into their base model first"
        raise UsageError(f"--model {model}: {folder} has no config.json; {remedy}")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UsageError(f"--model {model}: {folder} has no tokenizer (tokenizer.json or tokenizer_config.json); {remedy}")
    return folder


def _cached_snapshot(model: str) -> Path | None:
    """The snapshot the hub cache holds for ``main``, if its config.json is there."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    repo = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{model.replace('/', '--')}"
    main = repo / "refs" / "main"
    if not main.is_file():
        return None
    snapshot = repo / "snapshots" / main.read_text().strip()
    return snapshot if (snapshot / "config.json").is_file() else None
