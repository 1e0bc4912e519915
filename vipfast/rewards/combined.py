"""Several rewards in one: the first is the verifier, by whose part alone success, evaluation and allocation go; the loss sees
the weighted sum. A rollout that any of them cannot grade is unscored."""

from collections.abc import Sequence
from dataclasses import replace

from vipfast.rewards.base import Reward, Verdict


class Combined:
    """reward = w_0 · verifier (after --reward-shape) + Σ w_i · reward_i (``rewards.base.Reward``).

    Args:
        parts: (name, reward, weight), the verifier first; every reward returns Verdicts.
    """

    def __init__(self, parts: Sequence[tuple[str, Reward, float]]):
        self.names, self.rewards, self.weights = zip(*parts)
        verifier = self.rewards[0]
        self.reward_range, self.has_answers = getattr(verifier, "reward_range", None), getattr(verifier, "has_answers", False)
        self.beside = any(getattr(reward, "beside", False) for reward in self.rewards)
        self.wants = tuple(dict.fromkeys(name for reward in self.rewards for name in getattr(reward, "wants", ())))

    def close(self) -> None:
        for reward in self.rewards:
            if close := getattr(reward, "close", None):
                close()

    def __call__(self, completions: list[str], answers: list, metadata: list[dict], **columns: list) -> list[Verdict]:
        found = []
        for reward in self.rewards:
            wanted = {name: columns[name] for name in getattr(reward, "wants", ())}
            found.append(reward(completions, answers, metadata, **wanted))
        return [self._joined(row) for row in zip(*found)]

    def _joined(self, row: Sequence[Verdict]) -> Verdict:
        errors = [f"{name}: {part.error}" for name, part in zip(self.names, row) if part.error is not None]
        return replace(
            row[0],
            others=tuple(part.reward for part in row[1:]),
            timed_out=any(part.timed_out for part in row),
            error="; ".join(errors) or None,
        )
