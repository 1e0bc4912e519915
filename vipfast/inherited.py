"""What a run brings along when another one goes on from its model: how it sampled, and its learning rate.

Imports neither torch nor a command-line library.
"""

from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path

from vipfast.config import FACTS, Config
from vipfast.config_file import load_yaml
from vipfast.errors import UsageError
from vipfast.evaluation.model import Source, find

SAMPLING = tuple(name for name, facts in FACTS.items() if facts.travels == "to_training")
"""What decides the texts that a policy was trained on, whatever the task."""


def starting_point(model: str) -> Source:
    """The folder, and the run if any, behind ``--model`` of a training run: a run's folder stands for its final model, else for
    its newest checkpoint.

    Raises:
        UsageError: no such folder; a run that has saved no model; or LoRA adapters, which cannot be trained on as they are.
    """
    source = find(model)
    if source.adapter is not None:
        merged = source.run or source.adapter
        raise UsageError(
            f"--model {model}: {source.adapter} holds LoRA adapters on {source.base}, and training starts from a whole model; "
            f"merge them with python -m vipfast.merge {merged} OUT, then give --model OUT"
        )
    path = Path(source.base).expanduser()
    if "/" in source.base and not path.exists() and path.parent.is_dir() and not _in_the_hub_cache(source.base):
        close = get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
        guess = f"did you mean {path.parent / close[0]}? " if close else ""
        raise UsageError(
            f"--model {model}: no such folder in {path.parent}; {guess}give starter, a run's folder, a from_pretrained folder, "
            "or a hub id (owner/name)"
        )
    return source


def inherited(source: Source, lora_rank: int) -> dict:
    """Config's fields that the run behind a model settles where they are not given, by name.

    Args:
        source: what ``starting_point`` found; without a run it settles nothing.
        lora_rank: of the run to come; its learning rate is the old run's only where both or neither train adapters.
    """
    if source.run is None:
        return {}
    run = load_yaml(source.run / "config.yaml")
    names = SAMPLING + (("learning_rate",) if bool(run.lora_rank) == bool(lora_rank) else ())
    return {name: getattr(run, name) for name in names}


def told(source: Source, values: dict) -> list[str]:
    """A line on those options of a model's own run that are not the usual ones; none where all are."""
    usual = asdict(Config())
    unusual = [f"{name} {_short(value)}" for name, value in values.items() if value not in (None, usual[name])]
    return [f"from {source.run}/config.yaml: {', '.join(unusual)}"] if unusual else []


def _short(value) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _in_the_hub_cache(model: str) -> bool:
    from vipfast.model_facts import model_folder

    return model_folder(model) is not None
