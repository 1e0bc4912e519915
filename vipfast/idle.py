"""Options that were changed but that a run does not read, or not to the end, told rather than passed over."""

import math

from vipfast.config import FACTS, Config
from vipfast.config_rules import flag
from vipfast.cores import cores_allowed, counted
from vipfast.distributed import join
from vipfast.options.values import REASONING_GYM

ARITHMETIC_HELDOUT = 512
"""Held-out problems of the embedded task."""


def idle_options(config: Config, device: str, engine: str) -> list[str]:
    """A line for each option that was changed but that this run does not read, or does not read to the end.

    Args:
        config: options as given, resolved or not.
        device: where the run trains.
        engine: what samples.
    """
    defaults, lines = Config(), []
    changed = {name for name in FACTS if getattr(config, name) != getattr(defaults, name)}
    for name in (name for name in FACTS if name in changed):
        why = next(filter(None, (idle(config, device, engine) for idle in FACTS[name].idle)), None)
        if why is not None:
            lines.append(f"note: {flag(name)} {_shown(getattr(config, name))} has no effect with {why}")
    return lines + _beyond_what_is_there(config, changed)


def _beyond_what_is_there(config: Config, changed: set[str]) -> list[str]:
    """Numbers that ask for more than there is."""
    lines = []
    if 0 < config.steps <= config.warmup_steps:
        lines.append(
            f"note: with --warmup-steps {config.warmup_steps} the learning rate peaks only at the end of --steps {config.steps}"
        )
    if config.updates_per_step > config.prompts_per_step:
        lines.append(
            f"note: --updates-per-step {config.updates_per_step} makes at most {config.prompts_per_step} mini-batches, one per "
            f"prompt of --prompts-per-step {config.prompts_per_step}"
        )
    procedural = config.task.startswith(REASONING_GYM)
    available = config.task_size // 10 if procedural else ARITHMETIC_HELDOUT if config.task == "arithmetic" else math.inf
    if "heldout_prompts" in changed and config.heldout_prompts > available:
        why = f"a tenth of --task-size {config.task_size}" if procedural else f"all that --task {config.task} has"
        lines.append(f"note: of --heldout-prompts {config.heldout_prompts} there are {available}, {why}")
    if config.threads is not None and config.threads * join().size > cores_allowed():
        processes = f" in {join().size} processes" if join().size > 1 else ""
        lines.append(
            f"note: --threads {config.threads}{processes} on {counted(cores_allowed(), 'core')} makes threads wait for one "
            "another; leave it out to have as many as cores are free"
        )
    return lines


def _shown(value) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
