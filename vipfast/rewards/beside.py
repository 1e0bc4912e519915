"""Grading beside generation: a reward that waits for other processes is called from threads while the engine goes on."""

import queue
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from vipfast.engine.base import Finished
from vipfast.rewards.base import Grades
from vipfast.types import Prompt

THREADS = 32
"""Most calls of a reward at once; each waits, none computes."""


class Beside:
    """Takes finished rollouts, hands back graded ones.

    Args:
        grader: has ``grade(prompts, finished) -> Grades``; with an attribute ``beside`` that is True it is called from threads,
            else at once.

    Attributes: ``pending`` int, calls not yet handed back.
    """

    def __init__(self, grader):
        self.grader, self.pending = grader, 0
        self._done: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(THREADS, "grading") if getattr(grader, "beside", False) else None

    def __enter__(self) -> "Beside":
        return self

    def __exit__(self, *error) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=not any(error), cancel_futures=True)

    def submit(self, prompts: Sequence[Prompt], finished: Sequence[Finished]) -> None:
        """Grade these rollouts, of the prompts given for each."""
        self.pending += 1
        if self._threads is None:
            future: Future = Future()
            future.set_result(self.grader.grade(prompts, finished))
        else:
            future = self._threads.submit(self.grader.grade, prompts, finished)
        future.add_done_callback(lambda future: self._done.put((finished, future)))

    def done(self, wait: bool) -> list[tuple[Sequence[Finished], Grades]]:
        """What has been graded since, in the order it was; ``wait``: at least one call if any is pending.

        Raises:
            whatever the grader raised.
        """
        graded = []
        while self.pending and (not self._done.empty() or (wait and not graded)):
            finished, future = self._done.get()
            self.pending -= 1
            graded.append((finished, future.result()))
        return graded
