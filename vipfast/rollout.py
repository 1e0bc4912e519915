"""collect(): submit -> engine steps -> grade -> resume the allocator, until the budget is spent. ``ledger`` keeps the rows."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from vipfast import streams
from vipfast.allocate.base import Allocator
from vipfast.engine.base import Engine, Finished, Request
from vipfast.errors import BudgetError
from vipfast.ledger import Ledger
from vipfast.placement import HERE, Placement
from vipfast.ranks.apart import joined
from vipfast.rewards.base import Grades
from vipfast.rewards.beside import Beside
from vipfast.rewards.grader import Grader
from vipfast.telemetry.activity import NOW
from vipfast.telemetry.flow import Flow
from vipfast.types import Prompt, PromptBatch, Rollouts, StepPlan, Tally


def collect(
    allocator: Allocator,
    batch: PromptBatch,
    budget: int,
    engine: Engine,
    grader: Grader,
    *,
    stream: int = streams.TRAIN,
    threshold: float = 1.0,
    placement: Placement = HERE,
) -> tuple[Rollouts, Tally, dict[str, float]]:
    """Spend a step's budget on its prompts, in as many rounds as the allocator wants.

    Args:
        allocator: yields counts [B] to start, and is resumed with the tally: with ``allocator.barrier`` when nothing is
            pending, without it whenever rollouts have come back.
        batch: the step's prompts; the allocator may append to it.
        budget: rollouts to spend.
        engine, grader: where rollouts and their rewards come from; grading runs as rollouts finish.
        stream: random stream, ``streams.TRAIN`` or ``streams.EVAL``.
        threshold: a reward this high counts as a success.
        placement: which rank generates and grades a prompt's rollouts. Every rank calls this alike; with ``allocator.barrier``
            with the same counts, without it each with its own (``ranks.apart``).

    Returns:
        The rollouts, the final tally, and seconds: time/allocate_s, time/generate_s, time/reward_s.

    Raises:
        BudgetError: an allocator of budget_kind "exact" asked for another number of rollouts than the budget.
    """
    # A grader of one's own need not promise anything.
    promised = getattr(grader, "reward_range", None)
    ledger = Ledger(batch, stream, threshold, placement, promised, so_far=not allocator.barrier)
    clock = {"allocate": 0.0, "generate": 0.0, "reward": 0.0}
    ranks, last = placement.ranks, time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal last
        now = time.perf_counter()
        clock[phase] += now - last
        last = now

    ungraded = 0  # rollouts
    flow = Flow.of(engine, budget // placement.num_homes)
    NOW.enter("generate", budget, "rollouts", flow)

    def decode(requests: list[Request]) -> None:
        nonlocal ungraded
        engine.submit(requests)
        flow.ask(requests)
        NOW.round += allocator.barrier
        while engine.pending or ungraded:
            NOW.phase = "generate"
            finished = flow.advance(engine)
            lap("generate")
            ungraded += len(finished)
            if not ungraded:
                continue
            NOW.phase = "grade"
            graded = placement.agreed(partial(_graded, grading, batch.prompts, finished, wait=not engine.pending))
            for rows, grades in graded:
                ungraded -= len(rows)
                NOW.done += len(rows) * placement.num_homes
                ledger.book(rows, grades)
            lap("reward")
            if graded and not allocator.barrier:
                return
        ledger.book_lost()

    def play(merge: Callable[[Callable[[], None]], Tally]) -> StepPlan:
        rounds = allocator.rounds(batch, budget)
        try:
            counts_B = next(rounds)
            while True:
                lap("allocate")
                tally = merge(partial(decode, ledger.ask(np.asarray(counts_B, np.int64))))
                lap("generate")
                counts_B = rounds.send(tally)
        except StopIteration as stop:
            return stop.value

    with Beside(grader) as grading:
        if allocator.barrier or ranks.size == 1:
            plan = play(ledger.merged)
        else:
            plan = joined(ranks.together(partial(play, ledger.alone))[:: placement.tensor_parallel])
            ledger.merged(lambda: None)
    tally = ledger.tally
    _check_plan(allocator, plan, tally, budget)
    lap("allocate")
    return ledger.rollouts(plan), tally, {f"time/{phase}_s": seconds for phase, seconds in clock.items()}


def sample_uniformly(
    prompts: Sequence[Prompt],
    num_samples: int,
    engine: Engine,
    grader: Grader,
    *,
    stream: int,
    step: int = 0,
    flow: Flow | None = None,
) -> dict[tuple[int, int], tuple[Finished, float, str | None]]:
    """``num_samples`` graded rollouts of every prompt, outside any budget; ``flow`` is told of them.

    Returns:
        {(slot, index): (rollout, the verifier's reward, the extracted answer)}.
    """
    ledger, flow = Ledger(PromptBatch(prompts, step, 0), stream, 1.0), flow or Flow.of(engine, len(prompts) * num_samples)
    requests = ledger.ask(np.full(len(prompts), num_samples))
    engine.submit(requests)
    flow.ask(requests)
    answers: dict[tuple[int, int], str | None] = {}
    with Beside(grader) as grading:
        while engine.pending or grading.pending:
            finished = flow.advance(engine)
            for rows, grades in _graded(grading, prompts, finished, wait=not engine.pending):
                ledger.book(rows, grades)
                NOW.done += len(rows)
                answers |= {(row.slot, row.index): answer for row, answer in zip(rows, grades.answer)}
    ledger.book_lost()
    return {name: (row, verified, answers.get(name)) for name, (row, _, verified) in ledger.rows.items()}


def _graded(
    grading: Beside, prompts: Sequence[Prompt], finished: Sequence[Finished], wait: bool
) -> list[tuple[Sequence[Finished], Grades]]:
    """Send finished rollouts to be graded; returns what has been, with ``wait`` at least something."""
    if finished:
        grading.submit([prompts[row.slot] for row in finished], finished)
    return grading.done(wait)


def _check_plan(allocator: Allocator, plan: StepPlan, tally: Tally, budget: int) -> None:
    assert np.array_equal(plan.counts_B, tally.asked), "the plan must tell the rollouts that were asked for"
    spent = int(tally.asked.sum())
    if allocator.budget_kind == "exact" and spent != budget:
        raise BudgetError(f"--allocator {allocator.name}: asked for {spent} rollouts of a budget of {budget}")
