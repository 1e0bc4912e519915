"""Whether a run still learns, told from its lines of metrics.jsonl alone. A resumed run reads its earlier lines first, and so
says what an uninterrupted one would."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vipfast.telemetry.history import printable

UNSCORED_STEPS = 3
"""Steps in a row without any score: there is no chance in it, but the first step alone may be an outage."""
FALLEN_STEPS, FALLEN_REWARD = 5, 20
"""Steps in a row with reward 0 after better ones, in which at the mean so far this much reward was to be expected: by chance it
stays away with probability e^-20, and a few steps of hard prompts are not enough."""
ALIKE_STEPS, ALIKE_ROLLOUTS = 10, 500
"""Steps and rollouts in a row whose rewards differ in no group. Where one rollout in 100 succeeds, 500 without any have
probability .7 %; where one in 1000 does, a step of 512 has none in three cases of five, ten steps in a row in one of 170."""
DETERMINISTIC = 0.01
"""Nats of entropy under which the rollouts of a prompt are all but copies."""


@dataclass
class _Silence:
    """Steps in a row from which nothing can be learned: no rollout has a reward, the rewards differ in no group, or none is in
    the update. ``unscored``: steps at its end without any score; ``means``: lowest and highest mean reward of a step."""

    since: int
    steps: int = 0
    rollouts: int = 0
    unscored: int = 0
    means: set[float] = field(default_factory=set)
    all_truncated: bool = True
    all_solved: bool = True

    def add(self, line: dict[str, Any]) -> None:
        mean = line.get("reward/mean")
        self.steps += 1
        self.rollouts += line["budget/rollouts"]
        self.unscored = self.unscored + 1 if mean is None else 0
        self.all_truncated &= line.get("rollout/truncated_frac") == 1
        if mean is not None:
            self.means = {min(self.means | {mean}), max(self.means | {mean})}
            self.all_solved &= line.get("signal/frac_all_one") == 1


class Health:
    """Fed with every line, in order.

    Attributes: ``dead``, what is wrong and its likely causes once nothing has been learned for too long, else None.
    """

    def __init__(self):
        self.dead: str | None = None
        self._silence: _Silence | None = None
        self._reward = self._scored = 0.0  # in the steps that were not silent
        self._entropy: float | None = None
        self._quiet_until, self._gap = 0, ALIKE_STEPS

    def add(self, line: dict[str, Any]) -> str | None:
        """Take in a line (plain values, ``step`` among them). Returns ``dead`` when it is time to say it: at once, and again
        after intervals that double."""
        if "budget/rollouts" not in line:
            return None
        if line.get("policy/entropy") is not None:
            self._entropy = line["policy/entropy"]
        mean = line.get("reward/mean")
        if mean is None or line.get("signal/frac_wasted_rollouts") == 1 or line.get("train/trained_rollouts") == 0:
            self._silence = self._silence or _Silence(line["step"] - 1)
            self._silence.add(line)
        else:
            self._silence = None
            num_scored = line["budget/rollouts"] - line.get("reward/unscored", 0)
            self._reward, self._scored = self._reward + mean * num_scored, self._scored + num_scored
        why = self._silence and self._why(self._silence)
        self.dead = why and f"nothing has been learned since step {self._silence.since}: {why}"
        if self.dead is None or line["step"] < self._quiet_until:
            return None
        self._quiet_until, self._gap = line["step"] + self._gap, 2 * self._gap
        return self.dead

    def _why(self, silence: _Silence) -> str | None:
        """What is wrong, the surest cause first; None while it may be chance."""
        of = f"of the {silence.rollouts} rollouts of {silence.steps} steps"
        again = "start again, or from an earlier checkpoint, with a lower --learning-rate"
        if silence.unscored >= UNSCORED_STEPS:
            return (
                f"the reward has scored no rollout for {silence.unscored} steps (None, NaN or an error); perhaps it looks for "
                "something that is not in these prompts' answers or metadata"
            )
        mean = self._reward / self._scored if self._scored else 0.0
        expected = min(mean, 1) * silence.rollouts
        if silence.steps >= FALLEN_STEPS and silence.means == {0} and expected >= FALLEN_REWARD:
            return f"none {of} earned anything, before the mean was {mean:.3g}; the policy is probably ruined: {again}"
        if silence.steps < ALIKE_STEPS or silence.rollouts < ALIKE_ROLLOUTS:
            return None
        if silence.all_truncated:
            return (
                f"all {of} ran into the length limit; --max-new-tokens is too small, or the policy gives no stop id (another "
                "--prompt-template may help, or --stop)"
            )
        if self._entropy is not None and self._entropy < DETERMINISTIC:
            return f"the rollouts of a prompt are all but copies (entropy {self._entropy:.2g}), in reward alike {of}: {again}"
        if len(silence.means) > 1:
            return f"rewards differed in no prompt's group {of}; perhaps the reward looks at the prompt alone"
        what = f"every one {of} got the reward {max(silence.means, default=0):g}"
        if silence.all_solved:
            return f"{what}; the task is solved, or the reward accepts anything"
        return (
            f"{what}; perhaps it looks for another form than the completions have, gold answers are wrong, or the task is too "
            "hard for the policy"
        )


def example(rows: Sequence[dict[str, Any]]) -> str:
    """A completion beside its gold answer, both cut short, from rows of ``telemetry.samples.sample_rows``."""
    if not rows:
        return ""
    row = next((row for row in rows if row["answer"] is not None), rows[0])
    gold = "" if row["answer"] is None else f", where the gold answer is {printable(row['answer'], 60)!r}"
    return f". E.g. the completion {printable(row['completion'], 120)!r}{gold}"
