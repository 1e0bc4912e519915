"""What is known of an option besides its type and default, said where it is declared, so that no list elsewhere repeats it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Idle = Callable[[Any, str, str], str | None]
"""(config, device, engine) -> why the option has no effect there, or None; see ``vipfast.options.idle``."""


@dataclass(frozen=True)
class Facts:
    """Of one option.

    Attributes:
        low, high: the bounds of a number, both allowed; None where the type says all.
        resumable: a resumed run may change it.
        evaluated: ``vipfast evaluate`` reads it.
        travels: whether the options of a run go with its model, where that is evaluated or trained on: "to_evaluation", also
            "to_training", to an evaluation "with_its_task" alone (one that names no task of its own), or "never".
        moves_samples: another value may change what an evaluation samples or how it is graded.
        decided: ``resolve`` decides what ``auto`` stands for, anew on each machine that goes on with a run.
        idle: conditions under which a run does not read it.
    """

    low: float | None = None
    high: float | None = None
    resumable: bool = False
    evaluated: bool = True
    travels: Literal["to_evaluation", "to_training", "with_its_task", "never"] = "to_evaluation"
    moves_samples: bool = True
    decided: bool = False
    idle: tuple[Idle, ...] = ()


def option(default: Any, *, idle: Idle | tuple[Idle, ...] = (), **facts: Any) -> Any:
    """A field with facts; see Facts for their names. One without any is declared by its default alone."""
    conditions = idle if isinstance(idle, tuple) else (idle,)
    return dataclasses.field(default=default, metadata={"facts": Facts(idle=conditions, **facts)})


def facts_of(options: type) -> dict[str, Facts]:
    """The facts of every option of a dataclass, by name."""
    return {field.name: field.metadata.get("facts", Facts()) for field in dataclasses.fields(options)}
