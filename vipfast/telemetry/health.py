"""Whether a run still learns, and what will keep it from learning, told from its lines of metrics.jsonl alone. A resumed run
reads its earlier lines first, and so says what an uninterrupted one would."""

from collections.abc import Iterator, Sequence
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
probability .7 %; where one in 1000 does, a step of 512 has none in three cases of five, ten steps in a row in one of 170.
As many are looked at before truncation or copies are told of in a run that still learns."""
DETERMINISTIC = 0.01
"""Nats of entropy under which the rollouts of a prompt are all but copies."""
TOO_SHORT = "--max-new-tokens is too small, or the policy gives no stop id (another --prompt-template may help, or --stop)"
AGAIN = "start again, or from an earlier checkpoint, with a lower --learning-rate"


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


class _Rarely:
    """When to say what lasts: at once, and again after intervals that double."""

    def __init__(self):
        self._quiet_until, self._gap = 0, ALIKE_STEPS

    def due(self, step: int) -> bool:
        if step < self._quiet_until:
            return False
        self._quiet_until, self._gap = step + self._gap, 2 * self._gap
        return True


@dataclass
class _Lasting:
    """Steps in a row of which the same is true, and their rollouts."""

    steps: int = 0
    rollouts: int = 0
    told: _Rarely = field(default_factory=_Rarely)

    def add(self, holds: bool, line: dict[str, Any]) -> None:
        self.steps = self.steps + 1 if holds else 0
        self.rollouts = self.rollouts + line["budget/rollouts"] if holds else 0

    def due(self, step: int) -> bool:
        """Whether it has lasted so long that it is to be said now."""
        return self.steps >= ALIKE_STEPS and self.rollouts >= ALIKE_ROLLOUTS and self.told.due(step)


class Health:
    """Fed with every line, in order.

    Attributes: ``dead``, what is wrong and its likely causes once nothing has been learned for too long, else None.
    """

    def __init__(self):
        self.dead: str | None = None
        self._told = _Rarely()
        self._truncated, self._copies = _Lasting(), _Lasting()
        self._silence: _Silence | None = None
        self._reward = self._scored = 0.0  # in the steps that were not silent
        self._entropy: float | None = None  # of the last update

    def add(self, line: dict[str, Any]) -> str | None:
        """Take in a line (plain values, ``step`` among them). Returns what is to be said now: ``dead``, or that for as long
        every rollout has been truncated or a copy, though the run still learns."""
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
        self._truncated.add(line.get("rollout/truncated_frac") == 1, line)
        self._copies.add(self._is_copying(), line)
        if self._silence is None:
            return "; ".join(self._harms(line["step"])) or None
        return self.dead if self.dead and self._told.due(line["step"]) else None

    def _harms(self, step: int) -> Iterator[str]:
        """What is to be said of a run that still learns; as causes of silence ``_why`` names the same."""
        if self._truncated.due(step):
            of = f"{self._truncated.rollouts} rollouts of the last {self._truncated.steps} steps"
            yield f"all {of} ran into the length limit; {TOO_SHORT}"
        if self._copies.due(step):
            yield (
                f"for {self._copies.steps} steps the rollouts of a prompt have been all but copies (entropy "
                f"{self._entropy:.2g}), from which little can be learned; unless the task is solved, {AGAIN}"
            )

    def _is_copying(self) -> bool:
        return self._entropy is not None and self._entropy < DETERMINISTIC

    def _why(self, silence: _Silence) -> str | None:
        """What is wrong, the surest cause first; None while it may be chance."""
        of = f"of the {silence.rollouts} rollouts of {silence.steps} steps"
        if silence.unscored >= UNSCORED_STEPS:
            return (
                f"the reward has scored no rollout for {silence.unscored} steps (None, NaN or an error); perhaps it looks for "
                "something that is not in these prompts' answers or metadata"
            )
        mean = self._reward / self._scored if self._scored else 0.0
        expected = min(mean, 1) * silence.rollouts
        if silence.steps >= FALLEN_STEPS and silence.means == {0} and expected >= FALLEN_REWARD:
            return f"none {of} earned anything, before the mean was {mean:.3g}; the policy is probably ruined: {AGAIN}"
        if silence.steps < ALIKE_STEPS or silence.rollouts < ALIKE_ROLLOUTS:
            return None
        if silence.all_truncated:
            return f"all {of} ran into the length limit; {TOO_SHORT}"
        if self._is_copying():
            return f"the rollouts of a prompt are all but copies (entropy {self._entropy:.2g}), in reward alike {of}: {AGAIN}"
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
