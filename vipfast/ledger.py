"""The ledger of a step: every rollout that was asked for, and what became of it."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter

import numpy as np

from vipfast.engine.base import Finished, Request
from vipfast.learn.pack import ranges
from vipfast.placement import HERE, Placement
from vipfast.rewards.base import Grades
from vipfast.tools.use import columns_of
from vipfast.types import Finish, PromptBatch, RewardRange, Rollouts, StepPlan, Tally


@dataclass
class Ledger:
    """Rows keyed by (slot, index): the rollout, its reward and the verifier's part of that. A group is what was asked of a
    prompt at once.

    With several ranks each keeps a ledger: the counts of all prompts, the rows of those that are at home here.

    ``so_far``: whether to keep the tally of unfinished groups too; rollouts are then asked for one by one.
    """

    batch: PromptBatch
    stream: int
    threshold: float
    placement: Placement = HERE
    reward_range: RewardRange | None = None
    so_far: bool = False
    tally: Tally = None
    home_B: np.ndarray = None
    rows: dict[tuple[int, int], tuple[Finished, float, float]] = field(default_factory=dict)
    groups: dict[int, deque[range]] = field(default_factory=dict)  # of each slot, those not yet merged
    fresh: list[tuple[int, int]] = field(default_factory=list)
    behind: set[int] = field(default_factory=set)  # slots whose next group may be finished too

    def __post_init__(self):
        # Ranks that do not wait for one another cannot agree on homes later.
        self.home_B = self.placement.dealt(self.batch.uids) if self.so_far else np.full(len(self.batch), -1)
        self.tally = Tally.empty(self.batch.uids)
        self.tally.reward_range = self.reward_range
        if self.so_far:
            self.tally.so_far = replace(Tally.empty(self.batch.uids), reward_range=self.reward_range)

    def ask(self, counts_B: np.ndarray) -> list[Request]:
        """Book the counts [B] of rollouts to start; returns the engine's requests for those at home here."""
        if len(counts_B) != len(self.tally.uids):
            self.tally = self.tally.grown(self.batch.uids)
            self.home_B = np.pad(self.home_B, (0, len(counts_B) - len(self.home_B)), constant_values=-1)
        self.home_B = self.placement.homes(self.tally.uids, counts_B, self.home_B)
        requests = []
        for slot in np.flatnonzero((counts_B > 0) & (self.home_B == self.placement.home)):
            first, count = int(self.tally.asked[slot]), int(counts_B[slot])
            prompt = self.batch.prompts[slot]
            named = (prompt.uid, self.batch.step, first, count, self.stream, self.so_far)
            requests.append(Request(int(slot), prompt.tokens, *named))
            self.groups.setdefault(int(slot), deque()).append(range(first, first + count))
        for tally in (self.tally, self.tally.so_far):
            if tally is not None:
                tally.asked += counts_B
                tally.pending += counts_B
        return requests

    def book(self, finished: Sequence[Finished], grades: Grades) -> None:
        for row, reward, verified in zip(finished, grades.reward.tolist(), grades.verified.tolist()):
            self.rows[row.slot, row.index] = (row, reward, verified)
            self.fresh.append((row.slot, row.index))

    def brought_up_to_date(self) -> Tally:
        """The tally with finished groups merged, each whole, in the order they were asked for and at most one per prompt.

        So arrival order moves no bit of it, and a prompt is seen as it was after each of its groups.
        """
        if self.so_far:
            self._merge(self.tally.so_far, sorted(self.fresh))
        slots = {slot for slot, _ in self.fresh} | self.behind
        self.fresh.clear()
        self.behind.clear()
        for slot in sorted(slots):
            groups = self.groups[slot]
            names = [(slot, index) for index in groups[0]]
            if all(name in self.rows for name in names):
                self._merge(self.tally, names)
                groups.popleft()
                if groups:
                    self.behind.add(slot)
        return self.tally

    def alone(self, finish: Callable[[], None]) -> Tally:
        """Run ``finish`` and bring the tally up to date, as far as this rank knows."""
        finish()
        return self.brought_up_to_date()

    def merged(self, finish: Callable[[], None]) -> Tally:
        """Run ``finish`` on every rank, then bring the tally up to date and take each prompt's row from its home.

        Rows are taken whole, so nothing is added up and the tally is bit for bit that of a single process. An error that one
        rank runs into is raised on all.
        """

        def own() -> tuple[np.ndarray, dict[str, np.ndarray]]:
            tally, here_B = self.alone(finish), self.home_B == self.placement.home
            return here_B, {name: column[here_B] for name, column in vars(tally).items() if isinstance(column, np.ndarray)}

        for here_B, columns in self.placement.ranks.together(own):
            for name, column in columns.items():
                getattr(self.tally, name)[here_B] = column
        return self.tally

    def _merge(self, tally: Tally, names: Iterable[tuple[int, int]]) -> None:
        for slot, members in groupby(names, key=itemgetter(0)):
            rows = [self.rows[name] for name in members]
            tokens = sum(len(row.tokens) for row, _, _ in rows)
            truncated = sum(row.finish == Finish.LENGTH for row, _, _ in rows)
            tally.add(slot, np.array([verified for _, _, verified in rows]), self.threshold, tokens, truncated)

    def book_lost(self) -> None:
        """Rollouts the engine never handed back are rows with finish = error, unscored."""
        empty = np.zeros(0, np.int64), np.zeros(0, np.float32)
        waited = [(slot, index) for slot, groups in self.groups.items() for group in groups for index in group]
        lost = [Finished(*name, *empty, Finish.ERROR) for name in waited if name not in self.rows]
        self.book(lost, Grades.plain(np.full(len(lost), np.nan)))

    def rollouts(self, plan: StepPlan) -> Rollouts:
        """The ragged batch, rows ordered by prompt and index."""
        names = sorted(self.rows) if self.placement.leads else []
        rows = [self.rows[name][0] for name in names]
        prompts, ranks = self.batch.prompts, self.placement.ranks
        own = dict(
            slot=np.array([slot for slot, _ in names], np.int64),
            index=np.array([index for _, index in names], np.int64),
            reward=np.array([self.rows[name][1] for name in names], np.float32),
            verified=np.array([self.rows[name][2] for name in names], np.float32),
            finish=np.array([row.finish for row in rows], np.uint8),
            length=np.array([len(row.tokens) for row in rows], np.int64),
            holder=np.full(len(rows), ranks.rank),
            tool_use=columns_of(rows, [prompts[slot].metadata for slot, _ in names]),
        )
        # Which tokens are trained is known everywhere, since every rank divides by the same counts.
        masks = None if all(row.sampled.all() for row in rows) else _joined([row.sampled for row in rows], bool)
        every, masks = zip(*ranks.gather((own, masks)))
        column = {name: np.concatenate([part[name] for part in every]) for name in own}
        sampled = np.concatenate(
            [np.ones(part["length"].sum(), bool) if mask is None else mask for part, mask in zip(every, masks)]
        )
        start_R = np.cumsum(column["length"]) - column["length"]
        order = np.lexsort((column["index"], column.pop("slot")))
        column = {name: values[order] for name, values in column.items()}
        length_R, holder_R, use = column.pop("length"), column.pop("holder"), column.pop("tool_use")
        tokens, logp = np.full(length_R.sum(), -1), np.full(length_R.sum(), np.nan, np.float32)
        held_T = np.repeat(holder_R == ranks.rank, length_R)
        tokens[held_T] = _joined([row.tokens for row in rows], np.int64)
        logp[held_T] = _joined([row.logp for row in rows], np.float32)
        return Rollouts(
            prompts=prompts,
            prompt_tokens=_joined([prompt.tokens for prompt in prompts], np.int64),
            prompt_offsets=_offsets([len(prompt.tokens) for prompt in prompts]),
            group_offsets=_offsets(self.tally.asked),
            token_offsets=_offsets(length_R),
            tokens=tokens,
            loss_mask=sampled[ranges(start_R[order], length_R)],
            sampler_logp=logp,
            round=plan.round_R,
            plan=plan,
            tool_use=use if use["turns"].any() else None,
            holder_R=holder_R if ranks.size > 1 else None,
            rank=ranks.rank,
            **column,
        )


def _offsets(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _joined(parts: list[np.ndarray], dtype) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
