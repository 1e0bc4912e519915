"""Calls the reward function and keeps its failures from becoming wrong labels: a failure is unscored, never a zero."""

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vipfast.cores import counted
from vipfast.engine.base import Finished
from vipfast.errors import RewardError
from vipfast.rewards.base import Grades, Reward, Verdict, verdicts
from vipfast.rewards.shapes import shown
from vipfast.rewards.thinking import Decoder, opened_by
from vipfast.types import ZERO_ONE, Finish, Prompt, RewardRange


class Grader:
    """Decodes finished rollouts and grades them; counts what could not be graded. It may be called from several threads.

    Args:
        reward: the verifier (``rewards.base.Reward``).
        tokenizer: turns ids into the text that is graded.
        truncated: "zero" gives rollouts that hit the length limit reward 0.
        max_errors: failures in a row after which the run stops.
        binary_at: with a number, the loss and the allocator see 1 where the verifier's reward reaches it and 0 elsewhere
            (--reward-shape binary); None: the reward as it is.
        go_on: what to do after ``max_errors``, once the reward is mended.

    Attributes: ``num_errors``, ``num_timeouts`` int, rollouts whose grading failed or was given up since ``start_count``;
    ``reward_range``, what the verifier's part promises, None where it promises nothing; ``beside``, ``has_answers`` as the
    reward says.
    """

    def __init__(
        self, reward: Reward, tokenizer, *, truncated: str = "grade", max_errors: int = 16, binary_at: float | None = None,
        go_on: str = "continue with --resume",
    ):  # fmt: skip
        self.reward, self.tokenizer, self._decode = reward, tokenizer, Decoder(tokenizer)
        self.truncated, self.max_errors, self.binary_at, self.go_on = truncated, max_errors, binary_at, go_on
        self.names, self.weights = getattr(reward, "names", ()), np.array(getattr(reward, "weights", (1.0,)))
        self.beside, self.has_answers = getattr(reward, "beside", False), getattr(reward, "has_answers", False)
        self.wants = getattr(reward, "wants", ())
        self.errors_in_a_row = 0
        self._lock = threading.Lock()
        self.start_count()
        self._promised = getattr(reward, "reward_range", None)
        self.reward_range = ZERO_ONE if binary_at is not None else self._promised
        if truncated == "zero" and self.reward_range and not self.reward_range.holds(0.0):
            low, high = self.reward_range.low, self.reward_range.high
            self.reward_range = RewardRange(min(low, 0.0), max(high, 0.0))

    def start_count(self) -> None:
        self.num_errors = self.num_timeouts = 0
        self._parts: list[np.ndarray] = []

    def metrics(self, gather: Callable[[Any], list]) -> dict[str, float | None]:
        """What was counted since ``start_count``; ``gather`` puts every rank's share in a list."""
        errors, timeouts = (sum(counts) for counts in zip(*gather((self.num_errors, self.num_timeouts))))
        parts = sum(gather(self.part_sums())).tolist() if self.names else []
        means = {f"reward/part/{name}": total / num if num else None for name, (total, num) in zip(self.names, parts)}
        return {"reward/errors": errors, "reward/timeouts": timeouts, **means}

    def part_sums(self) -> np.ndarray:
        """float64 [rewards, 2]: sum and number of what each of several rewards gave scored rollouts since ``start_count``."""
        part_RP = np.concatenate([np.zeros((0, len(self.names))), *self._parts])
        # Exact sums, since threads finish in any order.
        return np.array([(math.fsum(column), len(column)) for column in part_RP.T])

    def close(self) -> None:
        """Give back what the reward holds, such as worker processes."""
        if close := getattr(self.reward, "close", None):
            close()

    def decode(self, prompts: Sequence[Prompt], finished: Sequence[Finished]) -> list[str]:
        """The texts that are graded: a rollout's last turn, so that nothing a tool has put in can pass for its answer. Where
        what comes before it ends by opening a thought, as some chat templates do, they begin with that tag."""
        texts = self._decode([row.last_turn for row in finished])
        return [opened_by(self._before(prompt, row)) + text for prompt, row, text in zip(prompts, finished, texts)]

    def _before(self, prompt: Prompt, row: Finished) -> str:
        """The end of what the last turn was sampled behind: the prompt, or what a tool has put in."""
        if row.sampled.all():
            return prompt.text
        start = len(row.tokens) - len(row.last_turn)
        return self.tokenizer.decode(row.tokens[max(0, start - 32) : start])

    def grade(self, prompts: Sequence[Prompt], finished: Sequence[Finished]) -> Grades:
        """Grade finished rollouts.

        Args:
            prompts: the prompt of each finished rollout.
            finished: rollouts, in any order.

        Returns:
            One grade per rollout; NaN = unscored (engine error, reward None or NaN, or grading failed).

        Raises:
            RewardError: a wrong number of values, a value that is no number, an infinite value or one outside the promised
                range, or ``max_errors`` failures in a row.
        """
        graded = [i for i, row in enumerate(finished) if row.finish != Finish.ERROR]
        found = [Verdict(None)] * len(finished)
        texts = self.decode([prompts[i] for i in graded], [finished[i] for i in graded])
        for i, verdict in zip(graded, self._call(texts, [prompts[i] for i in graded], [finished[i] for i in graded])):
            cut = self.truncated == "zero" and finished[i].finish == Finish.LENGTH
            found[i] = replace(verdict, reward=0.0, others=(0.0,) * (len(self.weights) - 1)) if cut else verdict
        verified = _column(verdict.reward for verdict in found)
        if self.binary_at is not None:
            verified = np.where(np.isnan(verified), np.nan, verified >= self.binary_at)
        rewards, answers = verified, [verdict.answer for verdict in found]
        if self.names:
            missing = (None,) * (len(self.names) - 1)
            others = [_column(column) for column in zip(*(verdict.others or missing for verdict in found))]
            rewards, verified = self._summed(np.stack([verified, *others], 1))
        return Grades(rewards, verified, answers)

    def _summed(self, part_RP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rewards and the verifier's part of them, NaN where any part is."""
        rewards = part_RP @ self.weights
        scored = part_RP[~np.isnan(rewards)]
        with self._lock:
            self._parts.append(scored)
        return rewards, np.where(np.isnan(rewards), np.nan, part_RP[:, 0])

    def _in_range(self, verdict: Verdict) -> Verdict:
        reward, promised = verdict.reward, self._promised
        if reward is not None and promised is not None and not promised.holds(reward):
            raise RewardError(f"the reward returned {reward:g}, outside its own reward_range {promised}; mend one of them")
        return verdict

    def _call(self, texts: list[str], prompts: list[Prompt], rows: list[Finished]) -> list[Verdict]:
        """The verdicts of a batch; after an exception one by one, so that only the failing completion stays unscored."""
        if not texts:
            return []
        columns = shown(self.wants, prompts, texts, [row.last_turn for row in rows])
        try:
            values = self.reward(
                texts, [prompt.answer for prompt in prompts], [prompt.metadata for prompt in prompts], **columns
            )
        except Exception as error:  # noqa: BLE001 - it is the user's code, and may raise anything
            if len(texts) > 1:
                return [self._call([text], [prompt], [row])[0] for text, prompt, row in zip(texts, prompts, rows)]
            self._failed(f"{type(error).__name__}: {error}", texts[0], prompts[0], error)
            return [Verdict(None)]
        found = [self._in_range(verdict) for verdict in verdicts(values, len(texts))]
        for verdict, text, prompt in zip(found, texts, prompts):
            with self._lock:
                self.num_timeouts += verdict.timed_out
                if verdict.error is None:
                    self.errors_in_a_row = 0
            if verdict.error is not None:
                self._failed(verdict.error, text, prompt)
        return found

    def _failed(self, what: str, text: str, prompt: Prompt, cause: Exception | None = None) -> None:
        with self._lock:
            self.num_errors += 1
            self.errors_in_a_row += 1
            in_a_row = self.errors_in_a_row
        if in_a_row >= self.max_errors:
            raise RewardError(
                f"the reward failed {counted(in_a_row, 'time')} in a row (--max-reward-errors), last with {what}, on "
                f"completion {_short(text)!r} of prompt {_short(prompt.text)!r}; mend the reward and {self.go_on}"
            ) from cause


def _column(values: Iterable[float | None]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], np.float64)


def _short(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"
