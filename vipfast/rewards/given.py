"""A reward given in Python, ``Trainer(…, reward=function)``: called in this process, in whatever way it wants to be."""

from collections.abc import Sequence
from typing import Any

from vipfast.distributed import join
from vipfast.errors import RewardError, UsageError
from vipfast.rewards.base import Verdict, verdicts
from vipfast.rewards.shapes import REMEDY, shaped, shown
from vipfast.rewards.trial import judge, pick
from vipfast.types import Prompt

PROMISES = ("reward_range", "has_answers", "beside", "names", "weights", "rewards")
"""Attributes of the function that hold for it here as well."""


class Given:
    """The user's function as ``rewards.base.Reward``; what it promises by attributes stays promised.

    Args:
        reward: a function of (completions, answers, metadata), or one written for TRL or verl.
        gold_names, task: as in ``rewards.shapes.shaped``.

    Raises:
        UsageError: it cannot be called in any of these ways.
    """

    def __init__(self, reward: Any, *, gold_names: Sequence[str] = (), task: str = ""):
        self.reward = reward
        self.name = getattr(reward, "__name__", type(reward).__name__)
        try:
            self.shaped = shaped(reward, gold_names=gold_names, task=task)
        except TypeError as error:
            raise UsageError(f"reward={self.name}: {error}") from error
        self.wants = self.shaped.wants
        self.note = f"reward {self.name} is called as {self.shaped.whose} calls it" if self.shaped.whose else None
        vars(self).update({name: getattr(reward, name) for name in PROMISES if hasattr(reward, name)})

    def __call__(self, completions: list[str], answers: list, metadata: list[dict], **columns: list) -> Sequence:
        return self.shaped.call(completions, answers, metadata, **columns)

    def close(self) -> None:
        if close := getattr(self.reward, "close", None):
            close()

    def check_golds(self, prompts: Sequence[Prompt], seed: int) -> list[str]:
        """One trial call (rewards/trial.py), which the first of several ranks makes for all, and what the reward itself finds
        wrong with the gold answers.

        Raises:
            UsageError: the trial shows that it is wired wrongly.
        """
        check = getattr(self.reward, "check_golds", None)
        return join().decided(lambda: self._tried(*pick(prompts))) + (check(prompts, seed) if check else [])

    def _tried(self, prompt: Prompt, text: str) -> list[str]:
        columns = shown(self.wants, [prompt], [text], [prompt.tokens])
        try:
            (verdict,) = verdicts(self([text], [prompt.answer], [prompt.metadata], **columns), 1)
        except RewardError as error:
            raise UsageError(f"reward={self.name}: {error} (found in a trial call on {text!r})") from error
        except Exception as error:  # noqa: BLE001 - it is the user's code, and may raise anything
            verdict = Verdict(None, error=f"{type(error).__name__}: {error}")
        return judge(f"reward={self.name}", self.shaped.whose, verdict, prompt, text, REMEDY)
