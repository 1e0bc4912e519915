"""The data that flows between rooms: ragged at two levels (prompts -> rollouts -> tokens), never a padded rectangle.

Shape letters: B prompts of a step, R rollouts, T tokens after the prompts, P prompt tokens, K allocation rounds.
Everything here is NumPy, so allocators, rewards and tests need no torch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from vipfast import streams


class Finish(IntEnum):
    """Why a rollout ended: a stop id, the length limit, or an engine error (its row stays, with no tokens)."""

    STOP = 0
    LENGTH = 1
    ERROR = 2


@dataclass(frozen=True)
class RewardRange:
    """What a reward function promises of its scores: they lie in [low, high] and, if ``binary``, take those two values only."""

    low: float
    high: float
    binary: bool = False

    def __post_init__(self):
        if not -math.inf < self.low < self.high < math.inf:
            raise ValueError(f"a reward's range needs finite low < high, got {self.low} and {self.high}")

    def holds(self, reward: float) -> bool:
        return reward in (self.low, self.high) if self.binary else self.low <= reward <= self.high


ZERO_ONE = RewardRange(0.0, 1.0, binary=True)


@dataclass(frozen=True, eq=False)
class Prompt:
    """One problem. ``uid`` hashes task, text and verifier data, so it is stable over epochs, resume and dataset order.

    Example: ``Prompt(uid="a3f…", text="sort 3 1 2 =", tokens=array([…]), answer="123", metadata={"family": "sort"})``
    """

    uid: str
    text: str
    tokens: np.ndarray  # int64 [P]
    answer: Any = None
    metadata: dict = field(default_factory=dict)
    problem: str = ""  # its own words, before any template: held-out splits go by them; "" where text is all there is
    messages: list[dict] | None = None  # the chat it was given as; None: it was a text


class PromptBatch:
    """The prompts of one step, as an allocator sees them. It only grows.

    Attributes: ``prompts`` list [B]; ``uids`` list of str [B]; ``step``, ``seed`` int; ``ties_B`` uint64 [B], seeded keys that
    break ties the same way on every backend, hashed from (seed, step, prompt_uid).
    """

    def __init__(self, prompts: Sequence[Prompt], step: int, seed: int, draw: Callable[[int], list[Prompt]] | None = None):
        self.prompts = list(prompts)
        self.step, self.seed = step, seed
        self._draw = draw

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def uids(self) -> list[str]:
        return [prompt.uid for prompt in self.prompts]

    @property
    def ties_B(self) -> np.ndarray:
        hashes = np.array([streams.uid_hash(uid) for uid in self.uids], dtype=np.uint64)
        return streams.keys(streams.TIES, self.seed, self.step, hashes)

    def more(self, num_prompts: int) -> None:
        """Append ``num_prompts`` newly drawn prompts (for rules that draw until they have enough signal)."""
        if self._draw is None:
            raise ValueError("this batch has no selector behind it, so it cannot draw more prompts")
        self.prompts += self._draw(num_prompts)


@dataclass(eq=False)
class Tally:
    """What has been seen of each prompt so far: counts and moments, merged without ever summing squares.

    All arrays are [B]. ``successes`` counts scored rewards >= the success threshold; ``m2`` is the sum of squared deviations
    from ``mean`` (population variance = m2 / scored), exactly 0 for a constant group; ``min``, ``max``: NaN if none is scored.
    Example: rewards [1, 0, 1] and one unscored -> asked 4, scored 3, successes 2, mean 2/3, m2 2/3, min 0, max 1.
    """

    uids: list[str]
    asked: np.ndarray  # int64, rollouts started
    scored: np.ndarray  # int64, rollouts with a reward
    successes: np.ndarray  # int64
    mean: np.ndarray  # float64, 0 where nothing is scored
    m2: np.ndarray  # float64
    min: np.ndarray  # float64
    max: np.ndarray  # float64
    tokens: np.ndarray  # int64, completion tokens
    truncated: np.ndarray  # int64, rollouts that hit the length limit
    pending: np.ndarray  # int64, rollouts asked for and not yet merged
    # For an allocator without barrier: the same of every rollout that is back, those of unfinished groups included, merged as
    # they came, so that the last bits of mean and m2 depend on the order.
    so_far: "Tally | None" = None
    reward_range: RewardRange | None = None  # what the reward function promises; None: it promises nothing

    @classmethod
    def empty(cls, uids: Sequence[str]) -> "Tally":
        B = len(uids)
        ints, floats = (lambda: np.zeros(B, np.int64)), (lambda: np.zeros(B))
        nan = np.full(B, np.nan)
        return cls(list(uids), ints(), ints(), ints(), floats(), floats(), nan, nan.copy(), ints(), ints(), ints())

    def grown(self, uids: Sequence[str]) -> "Tally":
        """The same tally with room for the prompts appended to the batch."""
        new = Tally.empty(uids)
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                getattr(new, name)[: len(column)] = column
        new.so_far, new.reward_range = self.so_far and self.so_far.grown(uids), self.reward_range
        return new

    def of(self, slots: np.ndarray) -> "Tally":
        """The tally of some prompts alone, int64 [b]; a copy."""
        columns = {name: column[slots] for name, column in vars(self).items() if isinstance(column, np.ndarray)}
        so_far = self.so_far and self.so_far.of(slots)
        return Tally([self.uids[q] for q in slots], **columns, so_far=so_far, reward_range=self.reward_range)

    @property
    def variance(self) -> np.ndarray:
        """float64 [B], population variance of the scored rewards; 0 where fewer than two are scored."""
        return self.m2 / np.maximum(self.scored, 1)

    def add(self, slot: int, rewards: np.ndarray, threshold: float, tokens: int, truncated: int) -> None:
        """Merge finished rollouts of prompt ``slot`` (rewards float [k], NaN = unscored) by Chan's pairwise update."""
        self.tokens[slot] += tokens
        self.truncated[slot] += truncated
        self.pending[slot] -= len(rewards)
        # Plain floats: a group is too small for NumPy to pay, and fsum is exact, whatever the order.
        new = [reward for reward in map(float, rewards) if reward == reward]
        if not new:
            return
        n, k, mean = int(self.scored[slot]), len(new), float(self.mean[slot])
        new_mean = math.fsum(new) / k
        low, high = min(new), max(new)
        if n:
            low, high = min(low, float(self.min[slot])), max(high, float(self.max[slot]))
        delta = new_mean - mean
        m2 = float(self.m2[slot]) + math.fsum((reward - new_mean) ** 2 for reward in new) + delta * delta * n * k / (n + k)
        self.mean[slot] = low if low == high else mean + delta * k / (n + k)
        self.m2[slot] = 0.0 if low == high else m2
        self.min[slot], self.max[slot] = low, high
        self.scored[slot] = n + k
        self.successes[slot] += sum(reward >= threshold for reward in new)


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What an allocator decided about a finished step: who counts in the update, against which baseline, and why.

    ``asked_KB`` int64 [K, B]: rollouts started in round k for prompt q; rollout rows of a prompt are ordered by round.
    ``use_KB`` bool [K, B]: whether the rollouts of that round and prompt enter the update (``use_R`` spreads it to rows).
    ``weight_B`` float64 [B]: multiplies the prompt's weight in the loss; 1 is plain.
    ``baseline_B`` float64 [B]: a fixed baseline; NaN means "from the group" (leave-one-out or mean).
    ``note``: numbers worth logging, e.g. {"alloc/ceiling": 1.2}; names as in the README's metric table.
    ``predicted_B`` float64 [B] or None: success probability the predictor expected before sampling.
    """

    asked_KB: np.ndarray
    use_KB: np.ndarray
    weight_B: np.ndarray
    baseline_B: np.ndarray
    note: dict[str, float | None] = field(default_factory=dict)
    predicted_B: np.ndarray | None = None

    @classmethod
    def plain(cls, asked_KB: Sequence[np.ndarray], **kwargs) -> "StepPlan":
        """Everything asked is used, with weight 1 and the group's own baseline. Rounds may differ in length (a batch grows)."""
        B = max(len(row) for row in asked_KB)
        asked = np.stack([np.pad(np.asarray(row, np.int64), (0, B - len(row))) for row in asked_KB])
        fields = dict(use_KB=np.ones_like(asked, bool), weight_B=np.ones(B), baseline_B=np.full(B, np.nan))
        return cls(asked, **{**fields, **kwargs})

    def among(self, slots: np.ndarray, num_prompts: int) -> "StepPlan":
        """The same plan where its prompts are ``slots`` int64 [b] of more, of which nothing is asked."""
        rounds = len(self.asked_KB)
        asked_KB, use_KB = np.zeros((rounds, num_prompts), np.int64), np.ones((rounds, num_prompts), bool)
        asked_KB[:, slots], use_KB[:, slots] = self.asked_KB, self.use_KB
        weight_B, baseline_B = np.ones(num_prompts), np.full(num_prompts, np.nan)
        weight_B[slots], baseline_B[slots] = self.weight_B, self.baseline_B
        return StepPlan(asked_KB, use_KB, weight_B, baseline_B, self.note)

    @property
    def counts_B(self) -> np.ndarray:
        """int64 [B], rollouts asked of each prompt over all rounds."""
        return self.asked_KB.sum(0)

    @property
    def use_R(self) -> np.ndarray:
        """bool [R], rows that enter the update."""
        return np.repeat(self.use_KB.T.ravel(), self.asked_KB.T.ravel())

    @property
    def round_R(self) -> np.ndarray:
        """int64 [R], the round that asked for each row."""
        rounds, prompts = self.asked_KB.shape
        return np.repeat(np.tile(np.arange(rounds), prompts), self.asked_KB.T.ravel())

    @property
    def used_B(self) -> np.ndarray:
        """int64 [B], rollouts of each prompt that enter the update, unscored and zero-advantage ones included."""
        return (self.asked_KB * self.use_KB).sum(0)


@dataclass(frozen=True, eq=False)
class Rollouts:
    """A whole step: B prompts, R rollouts, T tokens, all sizes free.

    Rollouts of prompt q are rows ``group_offsets[q]:group_offsets[q+1]`` (n_q may differ and may be 0); tokens of rollout i are
    ``token_offsets[i]:token_offsets[i+1]``. Example: n = [2, 0, 1], lengths [3, 1, 2] -> group_offsets [0, 2, 2, 3],
    token_offsets [0, 3, 4, 6].

    With several ranks every one knows all of it but the tokens: ``holder_R`` names the rank that holds a row's ``tokens`` and
    ``sampler_logp`` (elsewhere -1 and NaN), ``rank`` this one. None: everything is here.
    """

    prompts: list[Prompt]  # [B]
    prompt_tokens: np.ndarray  # int64 [P]
    prompt_offsets: np.ndarray  # int64 [B+1]
    group_offsets: np.ndarray  # int64 [B+1]
    token_offsets: np.ndarray  # int64 [R+1]
    tokens: np.ndarray  # int64 [T], as the engine saw them; never re-tokenised
    loss_mask: np.ndarray  # bool [T], False for ids the policy did not sample
    sampler_logp: np.ndarray  # float32 [T], at the sampling temperature; 0 and never read where loss_mask is False
    reward: np.ndarray  # float32 [R], what the loss sees; NaN = unscored
    index: np.ndarray  # int64 [R], k-th rollout of its prompt in this step
    round: np.ndarray  # int64 [R]
    finish: np.ndarray  # uint8 [R], Finish
    plan: StepPlan
    verified: np.ndarray | None = None  # float32 [R], the verifier's part of ``reward``, as allocation sees it; None: all of it
    tool_use: np.ndarray | None = None  # tools.use.COLUMNS [R], what each did with tools; None: there were none
    holder_R: np.ndarray | None = None  # int64 [R]
    rank: int = 0

    def __post_init__(self):
        if self.verified is None:
            object.__setattr__(self, "verified", self.reward)

    @property
    def num_prompts(self) -> int:
        return len(self.group_offsets) - 1

    @property
    def num_rollouts(self) -> int:
        return len(self.token_offsets) - 1

    @property
    def counts_B(self) -> np.ndarray:
        return np.diff(self.group_offsets)

    @property
    def lengths_R(self) -> np.ndarray:
        return np.diff(self.token_offsets)

    @property
    def group_R(self) -> np.ndarray:
        """int64 [R], the prompt slot of each row."""
        return np.repeat(np.arange(self.num_prompts), self.counts_B)

    @property
    def held_R(self) -> np.ndarray:
        """bool [R], rows whose tokens are here."""
        return np.ones(self.num_rollouts, bool) if self.holder_R is None else self.holder_R == self.rank
