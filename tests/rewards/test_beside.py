"""A reward that waits runs beside generation, changes nothing of what comes out, and its errors arrive."""

import threading
import time

import numpy as np
import pytest

from vipfast.engine.base import Finished
from vipfast.errors import RewardError
from vipfast.rewards.base import Grades
from vipfast.rewards.beside import THREADS, Beside
from vipfast.types import Finish, Prompt

PROMPTS = [Prompt("u", "p", np.array([1]))] * 100


def rows(*numbers):
    return [Finished(0, number, np.array([number]), np.zeros(1, np.float32), Finish.STOP) for number in numbers]


class Waits:
    """Grades a rollout with its index, once its event is set."""

    beside = True

    def __init__(self, num):
        self.go, self.calls = [threading.Event() for _ in range(num)], []

    def grade(self, prompts, finished):
        self.calls.append(finished[0].index)
        assert self.go[finished[0].index].wait(10)
        return Grades.plain([row.index for row in finished])


def indices(graded):
    return [row.index for finished, grades in graded for row, _ in zip(finished, grades.reward, strict=True)]


def test_submit_returns_at_once_and_what_is_done_first_comes_first():
    grader = Waits(3)
    with Beside(grader) as grading:
        for number in range(3):
            grading.submit(PROMPTS[:1], rows(number))
        assert grading.done(wait=False) == [] and grading.pending == 3
        grader.go[1].set()
        assert indices(grading.done(wait=True)) == [1] and grading.pending == 2
        grader.go[0].set()
        grader.go[2].set()
        assert sorted(indices(grading.done(wait=True)) + indices(grading.done(wait=True))) == [0, 2] and grading.pending == 0
        assert grading.done(wait=True) == []


def test_a_reward_that_computes_is_called_in_this_thread():
    class Here:
        def grade(self, prompts, finished):
            assert threading.current_thread() is threading.main_thread()
            return Grades.plain([1.0] * len(finished))

    with Beside(Here()) as grading:
        grading.submit(PROMPTS[:2], rows(4, 7))
        assert indices(grading.done(wait=False)) == [4, 7]


def test_its_errors_are_raised_where_they_are_waited_for_and_leave_no_thread():
    class Breaks:
        beside = True

        def grade(self, prompts, finished):
            raise RewardError("the grading server is gone")

    before = threading.active_count()
    with pytest.raises(RewardError, match="server is gone"), Beside(Breaks()) as grading:
        grading.submit(PROMPTS[:1], rows(0))
        grading.done(wait=True)
    limit = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < limit:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_more_calls_than_threads_all_come_back():
    grader = Waits(2 * THREADS)
    with Beside(grader) as grading:
        for number in range(2 * THREADS):
            grading.submit(PROMPTS[:1], rows(number))
            grader.go[number].set()
        found = []
        while grading.pending:
            found += indices(grading.done(wait=True))
    assert sorted(found) == list(range(2 * THREADS))
