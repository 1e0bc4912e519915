"""Options in YAML: ``--config run.yaml``, the recipes, and the ``config.yaml`` every run leaves behind.

A file is one flat mapping from Config's field names to values. Whatever Config does not know is refused with a suggestion, for
an ignored key costs hours of training at default settings; so is a key given twice.
"""

import dataclasses
import types
import typing
from difflib import get_close_matches
from pathlib import Path

import yaml

from vipfast import atomic
from vipfast.config import FACTS, Config
from vipfast.config_rules import check_type, flag
from vipfast.errors import UsageError
from vipfast.names import nearest
from vipfast.options.values import PYTHON

RECIPES = Path(__file__).parent / "recipes"

HINTS = typing.get_type_hints(Config)

RESUMABLE = frozenset(name for name, facts in FACTS.items() if facts.resumable)
"""Options a resumed run may change; any other difference is refused by name."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (YAML forbids it, PyYAML keeps the last one silently)."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> dict:
    """Options a YAML file sets, as Config's own types; everything it does not mention is absent.

    Args:
        path: the file, or the name of a recipe; ``1e-6`` counts as a number, ``null`` as None, a list as a tuple. An empty file
            sets nothing.

    Returns:
        dict from field name to value.

    Raises:
        UsageError: no such file, no YAML, no flat mapping, an unknown or repeated key, or a value of the wrong type; the
            message names the file and the key.
    """
    path = _found(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must be a mapping of options such as 'steps: 60', got a {type(content).__name__}")
    values = {}
    for key, value in content.items():
        if key not in HINTS or isinstance(value, dict):
            raise UsageError(f"{path}: {_unknown(key, value)}")
        values[key] = _typed(value, HINTS[key])
        try:
            check_type(key, values[key], HINTS[key])
        except UsageError as error:
            raise UsageError(f"{path}: {key}: {error}") from error
    return values


def _found(path: str | Path) -> Path:
    """The file, or the recipe of that name that comes with vipfast, from whatever folder it is asked for."""
    path = Path(path).expanduser()
    if path.is_file() or path.name == "config.yaml":
        return path
    name, recipes = path.name.removesuffix(".yaml"), {file.name.removesuffix(".yaml"): file for file in RECIPES.glob("*.yaml")}
    if name in recipes and str(path.parent) in (".", "recipes"):
        return recipes[name]
    meant = get_close_matches(name, recipes, n=1)
    guess = f"did you mean {meant[0]}? " if meant else ""
    raise UsageError(f"--config {path}: cannot be read: no such file; {guess}the recipes are {', '.join(sorted(recipes))}")


def load_yaml(path: str | Path) -> Config:
    """The Config a file describes: its options over the defaults (``RUN/config.yaml`` holds all of them)."""
    return Config(**read_yaml(path))


def save_yaml(config: Config, path: str | Path) -> None:
    """Write every option, so that ``load_yaml(path) == config``, floats to the last bit. The file is complete or absent."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(config).items()}
    # Escaped to ASCII: PyYAML writes U+0085 as it is and reads it back as a space.
    atomic.write_file(Path(path), yaml.safe_dump(values, sort_keys=False).encode())


def continued(saved: Config, asked: Config) -> tuple[Config, list[str]]:
    """The config a resumed run goes on with, and a line per permitted change.

    None in ``asked``, and --base-dtype auto, mean "as saved".

    Runs of earlier versions did not tell a reward that was given in Python: where no reward is saved, one given now is taken.

    Raises:
        UsageError: options outside RESUMABLE differ; each is named with both values.
    """
    old, new = dataclasses.asdict(saved), dataclasses.asdict(asked)
    # Unlike other choices, --base-dtype is kept by the folder as it was decided, since weights were trained over it.
    new = {
        name: old[name] if value is None or (name, value) == ("base_dtype", "auto") else value for name, value in new.items()
    }
    if saved.reward == (PYTHON,) and not asked.reward:
        new["reward"] = saved.reward  # and whoever is to call it finds it missing
    changed = [name for name in new if new[name] != old[name]]
    untold = {"reward"} if (saved.reward, asked.reward) == ((), (PYTHON,)) else set()
    refused = [name for name in changed if name not in RESUMABLE | untold]
    if refused:
        told = "; ".join(f"{flag(name)} is {new[name]}, the run has {old[name]}" for name in refused)
        may = ", ".join(sorted(flag(name) for name in RESUMABLE))
        raise UsageError(f"--resume cannot change what the run learns from: {told}. It may change {may}; or start a new run")
    notes = [f"{name} = {new[name]} (was {old[name]})" for name in changed if name != "output_dir"]
    if "threads" in changed:
        notes.append("warning: another --threads adds floats in another order, so bits will differ from an uninterrupted run's")
    return Config(**new), notes


def _unknown(key, value) -> str:
    """What is wrong with a key, and which name was probably meant."""
    if isinstance(value, dict):
        known = [name for name in value if name in HINTS]
        moved = f"; move {', '.join(known)} to the top level" if known else ""
        return f"{'section' if key in HINTS else 'unknown key'} {key!r}: options stand at the top level, not in sections{moved}"
    meant = nearest(key, HINTS)
    remedy = f"did you mean {meant!r}?" if meant else "see --help for all options (underscores instead of dashes)"
    return f"unknown key {key!r}: {remedy}"


def _typed(value, hint):
    """A YAML value as the field's type where that is unambiguous; anything else is left for the type check to refuse."""
    arms = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if typing.get_origin(arms[0]) is tuple and isinstance(value, list):
        return tuple(value)
    if float in arms and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if float in arms and isinstance(value, str):
        # YAML 1.1 wants a dot in "1.0e-6", so PyYAML reads the usual spelling as a string.
        try:
            return float(value)
        except ValueError:
            return value
    return value
