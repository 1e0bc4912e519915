"""Errors a user can act on: each names the option, the value received and the remedy."""


class UsageError(ValueError):
    """An option, file or schedule cannot be used; the message says which one, what it was and what would work."""


class BudgetError(UsageError):
    """A rollout budget cannot be met exactly within the bounds."""


class DataError(UsageError):
    """A dataset, prompt field or tokenizer cannot be used."""


class CheckpointError(UsageError):
    """A checkpoint is missing, incomplete, or belongs to another run."""


class RewardError(RuntimeError):
    """The reward function broke its contract (completions, answers, metadata) -> one float or None per completion."""


class DeadRunError(RuntimeError):
    """The run learns nothing, and --stop-when-dead was set."""


class SyncError(RuntimeError):
    """The engine that samples and the policy that trains disagree (DESIGN invariant 9)."""


class NonFiniteError(RuntimeError):
    """Too many steps in a row produced a non-finite loss or gradient (DESIGN invariant 10)."""


class RankError(RuntimeError):
    """Another process of the run is gone or does not answer."""
