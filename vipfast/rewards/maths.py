r"""The maths verifier: a completion's final answer against the gold answer, with as little algebra as will do.

Numbers, words and equal spellings are settled without it (rewards/compare.py); the rest goes to math-verify in worker
processes that are killed past a time limit (rewards/equal.py, rewards/pool.py). The gold always comes first: math-verify
follows its form.

A gold that cannot be parsed whole, or is prose, leaves its rollouts unscored. Two different boxes are right only if each of
them is, or if the gold is those two values; a thinking part that never ends holds no answer; an answer past a limit is wrong,
and counted.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from vipfast.errors import DataError, RewardError, UsageError
from vipfast.rewards.answers import final_answers, gold_answer
from vipfast.rewards.base import Verdict
from vipfast.rewards.compare import one_form, plainly_usable, spelling, told_apart
from vipfast.rewards.pool import Outcome, Pool
from vipfast.rewards.units import contradict, unit
from vipfast.types import ZERO_ONE, Prompt

MEMORY_BYTES = 2 << 30
MOST_KEPT = 20_000
"""Verdicts remembered."""
CHECKED_GOLDS = 256
LEAST_GOLDS, GOOD_GOLDS = 0.9, 0.99
"""Shares of the golds checked below which the run stops, or says so."""


class Maths:
    """Reward 1.0 or 0.0, None where the gold cannot be graded against (``rewards.base.Reward``).

    Args:
        workers: processes for algebra; they start importing at once.
        timeout_s: seconds one comparison may take; past it the answer is wrong.

    Raises:
        UsageError: math-verify is not installed.
    """

    reward_range, has_answers, beside = ZERO_ONE, True, True

    def __init__(self, *, workers: int, timeout_s: float = 10.0):
        if find_spec("math_verify") is None:
            raise UsageError("--reward maths: needs the math-verify library; pip install 'vipfast[tasks]'")
        self.pool = Pool("vipfast.rewards.equal:judge", workers=workers, timeout_s=timeout_s, memory_bytes=MEMORY_BYTES)
        self.pool.start()
        self._lock = threading.Lock()
        self._usable: dict[str, bool] = {}
        self._judged: dict[tuple[str, str], Verdict] = {}

    def close(self) -> None:
        self.pool.close()

    def __call__(self, completions: list[str], answers: list, metadata: list[dict]) -> list[Verdict]:
        rows = [(_gold(answer), final_answers(text)) for answer, text in zip(answers, completions)]
        told = self._verdicts((gold, answer) for gold, found in rows for answer in found or (None,))
        several = {row for row in rows if len(row[1]) > 1}
        wrong = {row for row in several if contradict(row[1]) or not all(told[row[0], answer].reward for answer in row[1])}
        together = {(gold, found): (gold, ", ".join(found)) for gold, found in wrong}
        told |= self._verdicts(together.values())
        return [told[together.get((gold, found), (gold, found[0] if found else None))] for gold, found in rows]

    def _verdicts(self, pairs: Iterable[tuple[str, str | None]]) -> dict[tuple[str, str | None], Verdict]:
        """The verdict on each pair of a tidied gold and an answer to it, None being none."""
        told = {pair: self._told(*pair) for pair in dict.fromkeys(pairs)}
        if unsettled := {pair: verdict for pair, (verdict, usable) in told.items() if verdict is None or usable is None}:
            told |= self._asked(unsettled)
        return {pair: verdict for pair, (verdict, _) in told.items()}

    def _told(self, gold: str, answer: str | None) -> tuple[Verdict | None, bool | None]:
        """What needs no algebra, or is known from before: the verdict, and whether the gold can be graded against."""
        usable = self._usable.get(gold)
        usable = plainly_usable(gold) if usable is None else usable
        if usable is False:
            return Verdict(None, spelling(answer)), False
        known = self._judged.get((gold, answer))
        return known or (Verdict(0.0) if answer is None else told_apart(gold, answer)), usable

    def _asked(self, pairs: dict[tuple[str, str | None], Verdict | None]) -> dict[tuple, tuple[Verdict, bool]]:
        """The same by algebra, of pairs some of which have a verdict that only waits for the gold to be found usable."""
        tasks = [(_task(gold, gold)[0], None) if told else _task(gold, answer) for (gold, answer), told in pairs.items()]
        found = {}
        for (pair, told), outcome in zip(pairs.items(), self.pool.map(tasks)):
            verdict, gold = _verdict(*pair, told, outcome), pair[0]
            if outcome.value:
                self._keep(self._usable, gold, outcome.value[0])
            elif outcome.gave_up and not self.usable([gold])[gold]:  # it was not the answer that hung
                verdict = replace(verdict, reward=None)
            if told is None and outcome.error is None:  # what went wrong is not the answer's, and may go right next time
                self._keep(self._judged, pair, verdict)
            found[pair] = verdict, True
        return found

    def usable(self, golds: Sequence[str]) -> dict[str, bool]:
        """Whether each tidied gold can be graded against: a number, words, or what parses whole and equals itself.

        Raises:
            RewardError: a worker that was to look at one died.
        """
        known = {gold: self._usable.get(gold, plainly_usable(gold)) for gold in golds}
        unknown = [gold for gold, found in known.items() if found is None]
        for gold, outcome in zip(unknown, self.pool.map([(_task(gold, gold)[0], None) for gold in unknown])):
            if outcome.error is not None:
                raise RewardError(f"the gold answer {gold[:100]!r} could not be checked: {outcome.error}")
            known[gold] = outcome.gave_up is None and outcome.value[0]
            self._keep(self._usable, gold, known[gold])
        return known

    def _keep(self, kept: dict, name, found) -> None:
        """Rollouts of a prompt often agree, and an answer that hangs should not do so for each of them."""
        with self._lock:
            if len(kept) >= MOST_KEPT:
                kept.clear()
            kept[name] = found

    def check_golds(self, prompts: Sequence[Prompt], seed: int) -> list[str]:
        """Check a seeded sample of at most 256 golds, each against itself; returns what there is to say about them.

        Raises:
            DataError: fewer than 90 % can be graded against, so the column is probably not that of the answers.
        """
        picked = np.random.default_rng(seed).permutation(len(prompts))[:CHECKED_GOLDS]
        golds = [_gold(prompts[i].answer) for i in sorted(picked)]
        usable = self.usable(golds)
        bad = [gold for gold in golds if not usable[gold]]
        share = 1 - len(bad) / max(len(golds), 1)
        if share >= GOOD_GOLDS:
            return []
        examples = ", ".join(repr(gold if len(gold) <= 80 else gold[:80] + "…") for gold in list(dict.fromkeys(bad))[:3])
        what = f"{len(bad)} of {len(golds)} answers looked at cannot be graded against, e.g. {examples}"
        if share < LEAST_GOLDS:
            raise DataError(f"--answer-field: {what}; name the column of final answers, or use --reward exact")
        return [f"warning: {what}; rollouts of such prompts stay unscored"]


def _gold(answer: Any) -> str:
    return "" if answer is None else gold_answer(str(answer))


def _task(gold: str, answer: str) -> tuple[str, str]:
    """What algebra compares; units have been compared, and math-verify knows some of them as products of letters."""
    gold, answer = one_form(gold, answer)
    gold_number, gold_unit = unit(gold)
    return gold if gold_unit is None else gold_number, unit(answer)[0]


def _verdict(gold: str, answer: str | None, told: Verdict | None, outcome: Outcome) -> Verdict:
    if outcome.error is not None:
        return Verdict(None, error=f"comparing {str(answer)[:100]!r} with {gold[:100]!r}: {outcome.error}")
    if outcome.gave_up is not None:
        return Verdict(0.0, spelling(answer), timed_out=True)
    usable, right, spelled = outcome.value
    if told or not usable:
        return told if usable else Verdict(None, spelling(answer))
    return Verdict(1.0, spelling(gold)) if right else Verdict(0.0, spelled)
