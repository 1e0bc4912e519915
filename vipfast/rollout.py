"""collect(): submit -> engine steps -> grade -> resume the allocator, until the budget is spent. Owns the step's ledger."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vipfast import streams
from vipfast.allocate.base import Allocator
from vipfast.engine.base import Engine, Finished, Request
from vipfast.errors import BudgetError
from vipfast.rewards.grader import Grader
from vipfast.types import Finish, Prompt, PromptBatch, Rollouts, StepPlan, Tally


@dataclass
class Ledger:
    """Every rollout asked for in a step, and what became of it: rows keyed by (slot, index)."""

    batch: PromptBatch
    stream: int
    threshold: float
    tally: Tally = None
    rows: dict[tuple[int, int], tuple[Finished, float]] = field(default_factory=dict)
    rounds: dict[tuple[int, int], int] = field(default_factory=dict)
    fresh: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self):
        self.tally = Tally.empty(self.batch.uids)

    def ask(self, counts_B: np.ndarray, round_: int) -> list[Request]:
        """Book a round's counts [B] and return the engine's requests for them."""
        if len(counts_B) != len(self.tally.uids):
            self._grow()
        requests = []
        for slot in np.flatnonzero(counts_B):
            first, count = int(self.tally.asked[slot]), int(counts_B[slot])
            prompt = self.batch.prompts[slot]
            requests.append(Request(int(slot), prompt.tokens, prompt.uid, self.batch.step, first, count, self.stream))
            self.rounds.update({(int(slot), index): round_ for index in range(first, first + count)})
        self.tally.asked += counts_B
        self.tally.pending += counts_B
        return requests

    def book(self, finished: Sequence[Finished], rewards: np.ndarray) -> None:
        for row, reward in zip(finished, rewards):
            self.rows[row.slot, row.index] = (row, float(reward))
            self.fresh.append((row.slot, row.index))

    def brought_up_to_date(self) -> Tally:
        """The tally with all booked rows merged, per prompt in the order of their indices, so arrival order moves no bit."""
        slots = {}
        for slot, index in sorted(self.fresh):
            slots.setdefault(slot, []).append(self.rows[slot, index])
        for slot, rows in slots.items():
            tokens = sum(len(row.tokens) for row, _ in rows)
            truncated = sum(row.finish == Finish.LENGTH for row, _ in rows)
            self.tally.add(slot, np.array([reward for _, reward in rows]), self.threshold, tokens, truncated)
        self.fresh.clear()
        return self.tally

    def book_lost(self) -> None:
        """Rollouts the engine never handed back are rows with finish = error, unscored."""
        empty = np.zeros(0, np.int64), np.zeros(0, np.float32)
        lost = [Finished(slot, index, *empty, Finish.ERROR) for slot, index in self.rounds if (slot, index) not in self.rows]
        self.book(lost, np.full(len(lost), np.nan))

    def _grow(self) -> None:
        old, self.tally = self.tally, Tally.empty(self.batch.uids)
        for name, column in vars(old).items():
            if name != "uids":
                getattr(self.tally, name)[: len(column)] = column

    def rollouts(self, plan: StepPlan) -> Rollouts:
        """The ragged batch, rows ordered by prompt and index."""
        names = sorted(self.rows)
        rows = [self.rows[name][0] for name in names]
        prompts = self.batch.prompts
        return Rollouts(
            prompts=prompts,
            prompt_tokens=_joined([prompt.tokens for prompt in prompts], np.int64),
            prompt_offsets=_offsets([len(prompt.tokens) for prompt in prompts]),
            group_offsets=_offsets(self.tally.asked),
            token_offsets=_offsets([len(row.tokens) for row in rows]),
            tokens=_joined([row.tokens for row in rows], np.int64),
            loss_mask=np.ones(sum(len(row.tokens) for row in rows), bool),
            sampler_logp=_joined([row.logp for row in rows], np.float32),
            reward=np.array([self.rows[name][1] for name in names], np.float32),
            index=np.array([index for _, index in names], np.int64),
            round=np.array([self.rounds[name] for name in names], np.int64),
            finish=np.array([row.finish for row in rows], np.uint8),
            plan=plan,
        )


def collect(
    allocator: Allocator,
    batch: PromptBatch,
    budget: int,
    engine: Engine,
    grader: Grader,
    *,
    stream: int = streams.TRAIN,
    threshold: float = 1.0,
) -> tuple[Rollouts, Tally, dict[str, float]]:
    """Spend a step's budget on its prompts, in as many rounds as the allocator wants.

    Args:
        allocator: yields counts [B] per round, is resumed with the tally (when nothing is pending, if ``allocator.barrier``).
        batch: the step's prompts; the allocator may append to it.
        budget: rollouts to spend.
        engine, grader: where rollouts and their rewards come from; grading runs as rollouts finish.
        stream: random stream, ``streams.TRAIN`` or ``streams.EVAL``.
        threshold: a reward this high counts as a success.

    Returns:
        The rollouts, the final tally, and seconds: time/allocate_s, time/generate_s, time/reward_s.

    Raises:
        BudgetError: an allocator of budget_kind "exact" asked for another number of rollouts than the budget.
    """
    ledger = Ledger(batch, stream, threshold)
    clock = {"allocate": 0.0, "generate": 0.0, "reward": 0.0}
    rounds = allocator.rounds(batch, budget)
    round_, plan, last = 0, None, time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal last
        now = time.perf_counter()
        clock[phase] += now - last
        last = now

    try:
        counts_B = next(rounds)
        while True:
            lap("allocate")
            engine.submit(ledger.ask(np.asarray(counts_B, np.int64), round_))
            round_ += 1
            while engine.pending:
                finished = engine.step()
                lap("generate")
                if finished:
                    ledger.book(finished, grader.grade([batch.prompts[row.slot] for row in finished], finished))
                    lap("reward")
                    if not allocator.barrier:
                        break
            if not engine.pending:
                ledger.book_lost()
            counts_B = rounds.send(ledger.brought_up_to_date())
    except StopIteration as stop:
        plan = stop.value
    tally = ledger.brought_up_to_date()
    _check_plan(allocator, plan, tally, budget)
    lap("allocate")
    return ledger.rollouts(plan), tally, {f"time/{phase}_s": seconds for phase, seconds in clock.items()}


def sample_uniformly(
    prompts: Sequence[Prompt], num_samples: int, engine: Engine, grader: Grader, *, stream: int, step: int = 0
) -> dict[tuple[int, int], tuple[Finished, float]]:
    """``num_samples`` graded rollouts of every prompt, outside any budget: {(slot, index): (row, reward)}."""
    ledger = Ledger(PromptBatch(prompts, step, 0), stream, 1.0)
    engine.submit(ledger.ask(np.full(len(prompts), num_samples), 0))
    while engine.pending:
        if finished := engine.step():
            ledger.book(finished, grader.grade([prompts[row.slot] for row in finished], finished))
    ledger.book_lost()
    return ledger.rows


def _check_plan(allocator: Allocator, plan: StepPlan, tally: Tally, budget: int) -> None:
    assert np.array_equal(plan.counts_B, tally.asked), "the plan must tell the rollouts that were asked for"
    spent = int(tally.asked.sum())
    if allocator.budget_kind == "exact" and spent != budget:
        raise BudgetError(f"--allocator {allocator.name}: asked for {spent} rollouts of a budget of {budget}")


def _offsets(lengths) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _joined(parts: list[np.ndarray], dtype) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
