"""A reward of your own by name, ``--reward module:function``, run in worker processes so that what hangs or dies in it costs
its time limit and not the run. Nothing of it is imported in the trainer."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence

from vipfast.distributed import join
from vipfast.errors import RewardError, UsageError
from vipfast.rewards.base import Verdict, verdicts
from vipfast.rewards.pool import Outcome, Pool
from vipfast.rewards.shapes import REMEDY, shaped, shown
from vipfast.rewards.trial import judge, pick
from vipfast.types import Prompt, RewardRange


class Own:
    """Calls the function, in whatever way it wants to be (rewards/shapes.py), on one completion at a time; a
    ``rewards.base.Reward``.

    None and NaN leave a rollout unscored, as they do from Python. What raises, takes longer than its limit or returns anything
    else than one finite number does so too, with the error named and counted. Calls are dealt to several workers, so a reward
    must not count on what an earlier one kept.

    Args:
        name: "module:function", importable as in the folder the run was started from.
        workers: calls at a time.
        timeout_s: seconds a call may take.
        gold_names, task: as in ``rewards.shapes.shaped``.

    Raises:
        UsageError: there is no such module or function, or it cannot be called in any of the ways there are.
    """

    beside = True

    def __init__(self, name: str, *, workers: int, timeout_s: float, gold_names: Sequence[str] = (), task: str = ""):
        self.name, self.timeout_s = name, timeout_s
        how = (name, os.getcwd(), tuple(gold_names), task)
        self.pool = Pool("vipfast.rewards.own:child", how, workers=workers, timeout_s=timeout_s)
        try:
            low_high_binary, self.has_answers, self.wants, self.whose = self.pool.facts()
        except RuntimeError as error:
            self.pool.close()
            raise UsageError(
                f"--reward {name}: cannot be used ({error}); give maths, code, exact, task, or an importable module:function"
            ) from error
        self.reward_range = low_high_binary and RewardRange(*low_high_binary)
        self.note = f"reward {name} is called as {self.whose} calls it" if self.whose else None

    def close(self) -> None:
        self.pool.close()

    def check_golds(self, prompts: Sequence[Prompt], seed: int) -> list[str]:
        """One trial call (rewards/trial.py), in a worker; the first of several ranks makes it for all.

        Raises:
            UsageError: it shows that the reward is wired wrongly.
        """
        return join().decided(lambda: self._tried(*pick(prompts)))

    def _tried(self, prompt: Prompt, text: str) -> list[str]:
        columns = shown(self.wants, [prompt], [text], [prompt.tokens])
        (verdict,) = self([text], [prompt.answer], [prompt.metadata], **columns)
        return judge(f"--reward {self.name}", self.whose, verdict, prompt, text, REMEDY)

    def __call__(self, completions: list[str], answers: list, metadata: list[dict], **columns: list) -> list[Verdict]:
        shares = [dict(zip(columns, row)) for row in zip(*columns.values())] or [{}] * len(completions)
        return [self._verdict(outcome) for outcome in self.pool.map(zip(completions, answers, metadata, shares))]

    def _verdict(self, outcome: Outcome) -> Verdict:
        if outcome.gave_up == "time":
            return Verdict(None, timed_out=True, error=f"a call longer than --reward-timeout {self.timeout_s:g} s")
        if outcome.error is not None or outcome.gave_up is not None:
            return Verdict(None, error=outcome.error or "MemoryError")
        return Verdict(*outcome.value)


def child(name: str, folder: str, gold_names: Sequence[str] = (), task: str = "") -> Callable:
    """In the worker: the user's function, which takes and gives single values."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module, _, function = name.partition(":")
    reward = getattr(importlib.import_module(module), function)
    called = shaped(reward, gold_names=gold_names, task=task)

    def call(completion: str, answer, metadata: dict, columns: dict) -> tuple[float | None, str | None]:
        values = called.call([completion], [answer], [metadata], **{key: [value] for key, value in columns.items()})
        try:
            (verdict,) = verdicts(values, 1)
        except RewardError as error:
            raise TypeError(error) from error  # wired wrongly, as the trial call says (rewards/trial.py)
        return verdict.reward, verdict.answer

    promised = getattr(reward, "reward_range", None)
    promised = promised and (promised.low, promised.high, promised.binary)
    call.facts = promised, bool(getattr(reward, "has_answers", False)), called.wants, called.whose
    return call
