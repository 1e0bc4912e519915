"""The time left of a run: steps at their pace, and the evaluations that are still to come."""

import io
import time

import pytest
from rich.console import Console

from vipfast.config import Config
from vipfast.telemetry.history import History
from vipfast.telemetry.telemetry import Telemetry

STEP_S, EVAL_S = 3.0, 20.0


@pytest.fixture
def clock_s(monkeypatch):
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def is_evaluated(step: int, total: int, every: int) -> bool:
    return step in (0, total) or bool(every and step % every == 0)


def to_line(history: History, clock_s: list[float], step: int, every: int) -> None:
    """The next line: a step after 3 s, and its evaluation after 20 s more."""
    evaluated = is_evaluated(step, history.total_steps, every)
    clock_s[0] += STEP_S * (step > 0) + EVAL_S * evaluated
    history.add({"step": step, **({"time/eval_s": EVAL_S} if evaluated else {})})
    history.tick(trained=step > 0)


@pytest.mark.parametrize("total, every", [(6, 0), (6, 2), (6, 4), (6, 100), (1, 0)])
def test_time_left_counts_the_evaluations_to_come(clock_s, total, every):
    history = History(total, every)
    for step in range(total + 1):
        to_line(history, clock_s, step, every)
        evals = sum(is_evaluated(later, total, every) for later in range(step + 1, total + 1))
        assert history.left_s == (pytest.approx(STEP_S * (total - step) + EVAL_S * evals) if step else None)


def test_time_left_falls_while_the_last_evaluation_is_under_way(clock_s):
    history = History(2)
    for step in (0, 1):
        to_line(history, clock_s, step, 0)
    left = []
    for _ in range(4):
        left.append(history.left_s)
        clock_s[0] += 10.0
    assert left == pytest.approx([23.0, 13.0, 3.0, 0.0])


def test_time_left_of_a_resumed_run_knows_an_evaluation_of_the_process_before(clock_s):
    history = History(4, 2)
    for step, line in enumerate(({"time/eval_s": EVAL_S}, {}, {"time/eval_s": EVAL_S})):
        history.add({"step": step, **line})
    history.restart_clock()
    to_line(history, clock_s, 3, 2)
    assert history.left_s == pytest.approx(STEP_S + EVAL_S)


def test_the_view_knows_how_often_a_run_evaluates(tmp_path, clock_s):
    console = Console(file=io.StringIO(), force_terminal=False)
    with Telemetry(tmp_path, Config(eval_every=20), total_steps=60, console=console) as telemetry:
        for step in range(2):
            clock_s[0] += STEP_S if step else EVAL_S
            telemetry.log(step, {"reward/mean": 0.25} if step else {"eval/mean@8": 0.27, "time/eval_s": EVAL_S})
        assert telemetry._history.left_s == pytest.approx(59 * STEP_S + 3 * EVAL_S)
