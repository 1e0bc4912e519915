"""Calls the reward function and keeps its failures from becoming wrong labels: a failure is unscored, never a zero."""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vipfast.engine.base import Finished
from vipfast.errors import RewardError
from vipfast.types import Finish, Prompt, RewardRange

Reward = Callable[[list[str], list[Any], list[dict]], Sequence[float | None]]
"""(completions, answers, metadata) -> one finite number, or None for "cannot be graded", per completion.

An attribute ``reward_range`` (``types.RewardRange``) promises where these numbers lie; ``--round-mode early`` makes use of it.
"""


_LARGEST = float(np.finfo(np.float32).max)


class Grader:
    """Decodes finished rollouts and grades them; counts what could not be graded.

    Attributes: ``num_errors`` int, rollouts left unscored because the reward raised, since somebody set it to 0;
    ``reward_range``, what the reward promises, None where it promises nothing.
    """

    def __init__(self, reward: Reward, tokenizer, *, truncated: str = "grade", max_errors: int = 16):
        self.reward, self.tokenizer = reward, tokenizer
        self.truncated, self.max_errors = truncated, max_errors
        self.num_errors = self.errors_in_a_row = 0
        self.reward_range = getattr(reward, "reward_range", None)
        if truncated == "zero" and self.reward_range and not self.reward_range.holds(0.0):
            low, high = self.reward_range.low, self.reward_range.high
            self.reward_range = RewardRange(min(low, 0.0), max(high, 0.0))

    def decode(self, finished: Sequence[Finished]) -> list[str]:
        return self.tokenizer.batch_decode([row.tokens for row in finished], skip_special_tokens=True)

    def grade(self, prompts: Sequence[Prompt], finished: Sequence[Finished]) -> np.ndarray:
        """Grade finished rollouts.

        Args:
            prompts: the prompt of each finished rollout.
            finished: rollouts, in any order.

        Returns:
            float64, one per rollout; NaN = unscored (engine error, reward None or NaN, or the reward raised).

        Raises:
            RewardError: a wrong number of values, a value that is no number, an infinite value or one outside the promised
                range, or ``max_errors`` exceptions in a row.
        """
        rewards = np.full(len(finished), np.nan)
        graded = [i for i, row in enumerate(finished) if row.finish != Finish.ERROR]
        texts = self.decode([finished[i] for i in graded])
        rewards[graded] = self._call(texts, [prompts[i] for i in graded])
        for i in graded:
            if self.truncated == "zero" and finished[i].finish == Finish.LENGTH:
                rewards[i] = 0.0
        return self._in_range(rewards)

    def _in_range(self, rewards: np.ndarray) -> np.ndarray:
        if self.reward_range is not None:
            for reward in rewards[~np.isnan(rewards)]:
                if not self.reward_range.holds(reward):
                    raise RewardError(
                        f"the reward returned {reward:g}, outside its own reward_range {self.reward_range}; mend one of them"
                    )
        return rewards

    def _call(self, texts: list[str], prompts: list[Prompt]) -> list[float]:
        """The reward of a batch; after an exception one by one, so that only the failing completion stays unscored."""
        if not texts:
            return []
        try:
            values = self.reward(texts, [prompt.answer for prompt in prompts], [prompt.metadata for prompt in prompts])
        except Exception as error:
            if len(texts) > 1:
                return [self._call([text], [prompt])[0] for text, prompt in zip(texts, prompts)]
            self.num_errors += 1
            self.errors_in_a_row += 1
            if self.errors_in_a_row >= self.max_errors:
                raise RewardError(
                    f"the reward raised {self.errors_in_a_row} times in a row (--max-reward-errors), last with "
                    f"{type(error).__name__}: {error}, on completion {texts[0]!r} of prompt {prompts[0].text!r}; mend the "
                    "reward and continue with --resume"
                ) from error
            return [math.nan]
        self.errors_in_a_row = 0
        return [_value(value) for value in _checked(values, len(texts))]


def _checked(values, wanted: int) -> Sequence:
    if isinstance(values, dict | str | bytes | set):
        raise RewardError(f"the reward returned a {type(values).__name__}; return a list with one float or None per completion")
    if not hasattr(values, "__len__") or len(values) != wanted:
        got = f"{len(values)} values" if hasattr(values, "__len__") else f"a {type(values).__name__}"
        raise RewardError(f"the reward returned {got} for {wanted} completions; return a list with one float or None each")
    return values


def _value(value) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, numbers.Real) and not (hasattr(value, "item") and np.ndim(value) == 0):
        raise RewardError(f"the reward returned {value!r}; return one float, or None for 'cannot be graded', per completion")
    # Stored as float32: what overflows there would reach the loss as an infinity.
    if value > _LARGEST or value < -_LARGEST:
        raise RewardError("the reward returned a number beyond ±3.4e38; return finite numbers, or None for 'cannot be graded'")
    return float(value)
