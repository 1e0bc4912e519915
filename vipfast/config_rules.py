"""What options must be, one by one and together, before anything is looked at: types, ranges, pairs that contradict."""

import dataclasses
import math
import types
import typing
from typing import TYPE_CHECKING, Literal

from vipfast.errors import UsageError
from vipfast.names import nearest
from vipfast.options.facts import facts_of

if TYPE_CHECKING:
    from vipfast.config import Config


class NamedOptions:
    """Refuses, with the nearest name, an option that a config does not have.

    A base class and no method of Config, whose signature is then still that of its fields.
    """

    def __new__(cls, *values, **options):
        for name in options:
            if name not in cls.__dataclass_fields__:
                meant = nearest(name, cls.__dataclass_fields__)
                remedy = f"did you mean {meant}?" if meant else "vipfast/options/ and --help have all of them"
                raise UsageError(f"{name}: no such option; {remedy}")
        return super().__new__(cls)


def take_lists(config: "Config") -> None:
    """Make tuples of the lists that a config was given, as one writes them in Python."""
    for field in dataclasses.fields(config):
        if isinstance(value := getattr(config, field.name), list):
            object.__setattr__(config, field.name, tuple(value))


def check(config: "Config") -> None:
    """Refuse a config that no model, task or machine could make sense of.

    Raises:
        UsageError: naming the option, its value and what is allowed.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        check_type(field.name, value, hints[field.name])
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{flag(field.name)} {value}: must be a finite number")
    for name, facts in facts_of(type(config)).items():
        value, low, high = getattr(config, name), facts.low, facts.high
        if low is not None and isinstance(value, int | float) and not low <= value <= high:  # a word such as "all" has no range
            raise UsageError(f"{flag(name)} {value}: must lie in [{low:g}, {high:g}]")
    if config.temperature <= 0:
        raise UsageError(
            f"--temperature {config.temperature}: must be above 0, since greedy decoding gives every rollout of a prompt "
            "the same text and no gradient; use e.g. 1.0"
        )
    if not 0 < config.top_p <= 1:
        raise UsageError(f"--top-p {config.top_p}: must lie in (0, 1]; 1 samples from the whole distribution")
    if config.weighting == "token" and config.length_term != "constant":
        raise UsageError(f"--length-term {config.length_term}: --weighting token takes no length term; leave it out")
    if config.weighting == "rollout" and config.length_term == "token":
        raise UsageError("--length-term token: needs --weighting prompt (it divides by the tokens of a prompt's group)")
    if config.budget_unit == "tokens" and config.allocator != "vip":
        raise UsageError(
            f"--budget-unit tokens: --allocator {config.allocator} plans in rollouts; use --allocator vip, or leave it out"
        )
    _check_tools(config)
    if config.optimizer == "adamw8bit" and config.dtype == "float64":
        raise UsageError("--optimizer adamw8bit: its weights are float32, not --dtype float64; use --optimizer adamw")
    if config.optimizer == "adamw8bit" and config.offload_optimizer:
        raise UsageError(
            "--offload-optimizer: moves --optimizer adamw's moments, and adamw8bit's stay on the GPU; leave one out"
        )
    if config.round_mode != "barrier" and config.allocator != "vigor":
        raise UsageError(
            f"--round-mode {config.round_mode}: --allocator {config.allocator} has a single round; use --allocator vigor, or "
            "leave it out"
        )
    if config.allocator == "vigor" and config.correction == "lagged":
        _check_lagged(config)
    if abs(config.budget - config.prompts_per_step * config.rollouts_per_prompt) > 1e-6:
        raise UsageError(
            f"--rollouts-per-prompt {config.rollouts_per_prompt:g}: times --prompts-per-step {config.prompts_per_step} is not "
            f"a whole number of rollouts; the nearest that is: {config.budget / config.prompts_per_step:.12g}"
        )


def _check_tools(config: "Config") -> None:
    if len(set(config.tools)) < len(config.tools):
        raise UsageError(f"--tools {' '.join(config.tools)}: names a tool twice; name each once")
    if "search" in config.tools and config.search_corpus is None:
        raise UsageError("--tools search: needs a corpus to search in; give --search-corpus")
    if config.tools and config.engine_seeds == "engine":
        raise UsageError(
            "--engine-seeds engine: texts would depend on how long each of --tools takes; use --engine-seeds rollout"
        )


def _check_lagged(config: "Config") -> None:
    """Refuse what would bring this step's rewards back into the weights or baselines that ``lagged`` keeps free of them."""
    for name, wanted, why in (
        ("weighting", ("rollout",), "divides by counts that this step's rewards decided"),
        ("update_on", ("all",), "leaves out prompts by this step's rewards"),
        ("estimator", ("rloo", "dr_grpo"), "divides by the spread of this step's rewards"),
    ):
        value = getattr(config, name)
        if value not in wanted:
            remedy = f"{flag(name)} {' or '.join(wanted)}, or --correction fresh"
            raise UsageError(f"--correction lagged: {flag(name)} {value} {why}; use {remedy}")


def flag(name: str) -> str:
    """The command-line spelling of a field: max_new_tokens -> --max-new-tokens."""
    return "--" + name.replace("_", "-")


def check_type(name: str, value, hint) -> None:
    """Refuse a value of the wrong type or outside a Literal (UsageError), naming what is allowed."""
    if not _fits(value, hint):
        allowed = [str(choice) for arm in _arms(hint) for choice in typing.get_args(arm) if typing.get_origin(arm) is Literal]
        allowed += ["a whole number"] if allowed and int in _arms(hint) else []
        wanted = "one of " + ", ".join(allowed) if allowed else f"of type {hint if typing.get_args(hint) else hint.__name__}"
        if typing.get_origin(hint) is tuple:
            item = typing.get_args(hint)[0]
            items = [str(choice) for choice in typing.get_args(item)] or ["numbers" if item is float else "texts"]
            wanted = f"a list of {', '.join(items)}"
            wanted += f": [{value!r}] in Python, [{value}] in YAML" if isinstance(value, str) else ""
        raise UsageError(f"{flag(name)} {value!r}: must be {wanted}")


def _arms(hint) -> tuple:
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _fits(value, hint) -> bool:
    origin = typing.get_origin(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(_fits(value, arm) for arm in _arms(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    if isinstance(value, bool) and hint is not bool:
        return False
    return isinstance(value, (int, float) if hint is float else hint)
