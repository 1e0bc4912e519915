r"""The maths verifier: a completion's final answer against the gold answer, with as little algebra as will do.

Numbers, words and equal spellings are settled here (rewards/answers.py); the rest goes to math-verify in worker processes that
are killed past a time limit (rewards/equal.py, rewards/pool.py). The gold always comes first: math-verify follows its form.

A gold that cannot be parsed whole, or is prose, leaves its rollouts unscored. Two different boxes are right only if the gold is
those two values; a thinking part that never ends holds no answer; an answer past a limit is wrong, and counted.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from vipfast.errors import DataError, RewardError, UsageError
from vipfast.rewards import answers as read
from vipfast.rewards.base import Verdict
from vipfast.rewards.pool import Outcome, Pool
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
        pairs = [(_gold(answer), read.final_answer(text)) for answer, text in zip(answers, completions)]
        told = {pair: self._told(*pair) for pair in dict.fromkeys(pairs)}
        told |= self._asked({pair: verdict for pair, (verdict, usable) in told.items() if verdict is None or usable is None})
        return [told[pair][0] for pair in pairs]

    def _told(self, gold: str, answer: str | None) -> tuple[Verdict | None, bool | None]:
        """What needs no algebra, or is known from before: the verdict, and whether the gold can be graded against."""
        usable = self._usable.get(gold, plainly_usable(gold))
        if usable is False:
            return Verdict(None, spelling(answer)), False
        return self._judged.get((gold, answer)) or told_apart(gold, answer), usable

    def _asked(self, pairs: dict[tuple[str, str | None], Verdict | None]) -> dict[tuple, tuple[Verdict, bool]]:
        """The same by algebra, of pairs some of which have a verdict that only waits for the gold to be found usable."""
        # A unit has been compared; math-verify knows some of them as products of letters.
        tasks = [(gold, None if verdict else read.unit(answer)[0]) for (gold, answer), verdict in pairs.items()]
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
        for gold, outcome in zip(unknown, self.pool.map([(gold, None) for gold in unknown])):
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
    return "" if answer is None else read.gold_answer(str(answer))


def plainly_usable(gold: str) -> bool | None:
    """What can be said of a tidied gold without parsing it; None: only the parser knows."""
    if not gold or len(gold) > read.LONGEST:
        return False
    stripped = read.unit(gold)[0]
    if read.value(stripped) is not None or read.in_base(gold) is not None:
        return True
    if (found := read.words(gold)) is not None and found[1]:
        return True
    return False if read.is_prose(gold) else True if found is not None else None


def told_apart(gold: str, answer: str | None) -> Verdict | None:
    """The verdict where no algebra is needed: equal spellings, numbers, number bases, units and words."""
    if answer is None:
        return Verdict(0.0)
    right, wrong = Verdict(1.0, spelling(gold)), Verdict(0.0, spelling(answer))
    if gold == answer:
        return right
    if not answer or len(answer) > read.LONGEST or (read.qualified(answer) and not read.qualified(gold)):
        return wrong
    (gold_number, gold_unit), (number, unit) = read.unit(gold), read.unit(answer)
    if gold_unit is not None and unit is not None and gold_unit != unit:
        return wrong
    gold_value, found_value = read.value(gold_number), read.value(number)
    if gold_value is not None and found_value is not None:
        return right if gold_value.same(found_value) else wrong
    if (base := _same_in_base(gold, answer)) is not None:
        return right if base else wrong
    gold_words = read.words(gold)
    if gold_words is not None and gold_words[0] == read.lowered(answer):
        return right
    # Formulas of a letter or two, such as xy, are words too; longer ones would be products that forget their order.
    if gold_words is not None and (gold_words[1] and len(gold_words[0]) > 1 or len(gold_words[0]) > 3):
        return wrong
    return None


def _same_in_base(gold: str, answer: str) -> bool | None:
    """Whether digits and base agree, a base left out being the question's; None where neither names one."""
    expected, found = read.in_base(gold), read.in_base(answer)
    if expected is None and found is None:
        return None
    (digits, base), (other_digits, other_base) = expected or (gold.upper(), None), found or (answer.upper(), None)
    return digits == other_digits and (base == other_base or None in (base, other_base))


def spelling(text: str | None) -> str | None:
    """An answer as it counts in a vote: without unit, words in lower case, numbers in lowest terms."""
    if not text:
        return None
    if len(text) <= read.LONGEST and (found := read.words(text)) is not None:
        return read.bounded(found[0])
    return read.spelled(read.unit(text)[0])


def _verdict(gold: str, answer: str | None, told: Verdict | None, outcome: Outcome) -> Verdict:
    if outcome.error is not None:
        return Verdict(None, error=f"comparing {str(answer)[:100]!r} with {gold[:100]!r}: {outcome.error}")
    if outcome.gave_up is not None:
        return Verdict(0.0, spelling(answer), timed_out=True)
    usable, right, spelled = outcome.value
    if told or not usable:
        return told if usable else Verdict(None, spelling(answer))
    return Verdict(1.0, spelling(gold)) if right else Verdict(0.0, spelled)
