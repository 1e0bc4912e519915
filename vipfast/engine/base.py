"""What a rollout engine must do: take requests, decode, hand back finished rollouts, take new weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vipfast.types import Finish


@dataclass(frozen=True, eq=False)
class Request:
    """``count`` rollouts of one prompt; rollout indices run from ``first_index``, which names their random streams.

    With ``made`` above 0 rollouts go on: the last ``made`` of ``tokens`` are theirs already. The streams go on where they were,
    the length limit counts them, and an engine keeps nothing of these tokens once the rollouts have ended.
    """

    slot: int  # position of the prompt in the step's batch, handed back with every finished rollout
    tokens: np.ndarray  # int64 [P], the prompt
    uid: str
    step: int
    first_index: int
    count: int
    stream: int  # streams.TRAIN or streams.EVAL
    one_by_one: bool = False  # each rollout is wanted as it ends; else an engine may hand back all of a request together
    made: int = 0


@dataclass(frozen=True)
class ToolUse:
    """What a rollout did with tools: turns of the policy, calls and those that failed, seconds they took, passages found."""

    turns: int = 0
    calls: int = 0
    errors: int = 0
    seconds: float = 0.0
    found: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Finished:
    """One finished rollout. ``logp`` is float32 [t], of the sampled ids at the sampling temperature (0-length on error).

    ``sampled`` bool [t]: False for ids that a tool put in, whose ``logp`` is 0 and means nothing; left out, all are sampled.
    """

    slot: int
    index: int
    tokens: np.ndarray  # int64 [t], the stop id included when one was sampled
    logp: np.ndarray
    finish: Finish
    sampled: np.ndarray | None = None
    use: ToolUse | None = None  # None where there are no tools

    def __post_init__(self):
        if self.sampled is None:
            object.__setattr__(self, "sampled", np.ones(len(self.tokens), bool))

    @property
    def last_turn(self) -> np.ndarray:
        """int64, what was sampled after the last id that was not: the part that answers."""
        return self.tokens[self.sampled.size - int(np.argmin(self.sampled[::-1])) :] if not self.sampled.all() else self.tokens


@dataclass(frozen=True)
class Sampling:
    """The run's sampling parameters, never the model's own generation_config (stop ids apart)."""

    max_new_tokens: int  # all ids after the prompt, whoever put them there
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0


class Engine(Protocol):
    """Requests may be submitted at any time; keys and values of a step's prompts are kept until ``sync`` or ``reset``."""

    name: str

    @property
    def pending(self) -> int:
        """Rollouts submitted and not yet handed back."""

    def submit(self, requests: Sequence[Request]) -> None: ...

    def step(self) -> list[Finished]:
        """Decode one token for every pending rollout; return those that ended (possibly none)."""

    def reset(self) -> None:
        """Forget pending work and cached prompts."""

    def sync(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Take the policy's weights (name, tensor) and drop everything computed with the old ones.

        Raises:
            SyncError: the names handed over are not exactly the engine's own.
        """

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None:
        """Give everything back; nothing is sampled after."""
