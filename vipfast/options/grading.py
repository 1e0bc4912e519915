"""What completions are worth, and where programs are run to find out."""

from dataclasses import dataclass
from typing import Literal

from vipfast.options import idle
from vipfast.options.facts import option


@dataclass(frozen=True)
class GradingOptions:
    """What completions are worth, and where programs are run to find out."""

    truncated: Literal["grade", "mask", "zero"] = "grade"
    """Rollouts that hit the length limit: graded as they stand, kept out of the update, or given reward 0."""
    success_threshold: float = 1.0
    """A rollout counts as a success for metrics and predictors when its reward reaches this."""
    reward: tuple[str, ...] = ()
    """What grades completions: maths, code, exact, task (what the task asks for), or module:function for a reward of your own,
    (completions, answers, metadata) -> list of numbers or None, or as TRL or verl take it; what the task asks for unless given.
    The first of several is the verifier, by which success, evaluation and allocation go; the loss sees the weighted sum."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each --reward, the verifier's first; 1 each unless given."""
    reward_timeout: float | None = option(
        None, low=0.01, high=10**6, resumable=True, moves_samples=False, idle=idle.without_workers
    )
    """Seconds that grading one completion may take: past it a maths answer is wrong, a program fails what is left of its tests,
    and a completion that a reward of your own was asked about is unscored, an error of --max-reward-errors; 10 unless given,
    but for the tests of a program together 20 times --code-timeout."""
    reward_workers: int | None = option(None, low=1, high=1024, resumable=True, moves_samples=False, idle=idle.without_workers)
    """Worker processes that grade at a time; as many as there are cores (at most 16), shared by the processes of a run, unless
    given."""
    reward_shape: Literal["raw", "binary"] = option("raw", evaluated=False)
    """What loss and allocator see of a verifier's reward: the number itself, partial credit and all (raw), or 1 where it
    reaches --success-threshold and 0 elsewhere (binary)."""
    code_reward: Literal["all", "rate"] = option("all", idle=idle.without_programs)
    """What a program of a code task earns: 1 when it passes all tests, or the share of the tests it passes."""
    sandbox: Literal["strict", "weak"] = option("strict", idle=idle.without_sandbox)
    """Where programs run: without network, other processes and files but their own, or not at all (strict), or with as much
    of that as this machine can do (weak)."""
    code_timeout: float = option(6.0, low=0.1, high=3600, idle=idle.without_programs)
    """Seconds (by the clock) a program may take for one test."""
    code_memory_mb: int = option(1024, low=128, high=10**6, idle=idle.without_programs)
    """Megabytes of address space a program may take, Python's own 40 among them."""
    max_reward_errors: int = option(16, low=1, high=10**9, moves_samples=False)
    """Stop after this many rollouts in a row whose reward failed or raised an exception (each is left unscored)."""

    @property
    def success_at(self) -> float:
        """The least reward, as loss and allocator see it, that is a success."""
        return 1.0 if self.reward_shape == "binary" else self.success_threshold
