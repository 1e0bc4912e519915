"""What an evaluation is asked for: Config's options of sampling and grading, and its own; a run's model brings its run's.

Imports neither torch nor a command-line library.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vipfast.config import FACTS, Config
from vipfast.config_file import load_yaml, read_yaml
from vipfast.config_rules import flag
from vipfast.errors import UsageError
from vipfast.evaluation.model import Source, find
from vipfast.evaluation.split import default_split
from vipfast.inherited import told
from vipfast.options.allocation import AllocationOptions
from vipfast.options.facts import facts_of
from vipfast.options.update import UpdateOptions
from vipfast.options.values import CUSTOM, PYTHON

TRAINING = frozenset(
    {name for name, facts in FACTS.items() if not facts.evaluated}
    | set(facts_of(AllocationOptions))
    | set(facts_of(UpdateOptions))
)
"""Config's fields that an evaluation does not read: no flags of its command."""

FREE = frozenset(name for name, facts in FACTS.items() if not facts.moves_samples)
"""Fields that change no sample, so that an evaluation may go on with others."""

GO_ON = "start the same command again to go on"
"""What to do after an evaluation was stopped."""

ROWS_AT_ONCE = {"transformers": 512, "vllm": 4096}
"""Most samples in flight on a process, by engine, unless given."""

GREEDY_TOP_P = 1e-9
"""A nucleus that holds the likeliest token alone, whatever the engine."""

MOST_SAMPLES = 4096


@dataclass(frozen=True)
class Flags(Config):
    """Evaluate a model on tasks: mean@k, pass@k and maj@k with intervals. A killed evaluation goes on when started again."""

    task: tuple[str, ...] = ()
    """One or several, each as --task of training: arithmetic (embedded), a file or a hub dataset id. Unless given: what the
    model's own run trained on, else arithmetic."""
    task_split: str | None = None
    """Of a folder the files of this split, of a hub dataset its split; test where there is one, else train, unless given."""
    model: str = "starter"
    """What to evaluate: starter (embedded), a run's folder (its final model, else its newest checkpoint), RUN/best,
    RUN/checkpoints/step-N, any from_pretrained folder, LoRA adapters, or a hub model id."""
    samples: int = 8
    """Samples per prompt (n)."""
    k: tuple[int, ...] = ()
    """The k of pass@k and maj@k; powers of two up to --samples, and --samples itself, unless given."""
    split: Literal["auto", "all", "heldout", "train"] = "auto"
    """Which prompts: what training would hold out (heldout), what it would train on (train), or both (all); auto is heldout
    where the task has such a pool of its own or the model's own run trained on it, else all."""
    max_prompts: int | None = None
    """Most prompts of a task, a seeded choice; all unless given."""
    by: tuple[str, ...] = ()
    """Metadata keys to tell apart in tables of their own; level, difficulty, family, size, subject, source and year as far as a
    task has them unless given."""
    rows_at_once: int | None = None
    """Most samples in flight on a process, and written down together: 512, with vLLM 4096, unless given."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token always (greedy), with --samples 1."""
    heldout_prompts: int = 512
    """Prompts that training would hold out, where the task has no such pool of its own."""
    output_dir: str | None = None
    """The evaluation's folder; evals/<model>-<tasks>-<hash of options, weights and prompts> unless given."""
    config: str | None = None
    """YAML file of training options (see recipes/); what concerns sampling and grading is taken, flags go over it."""

    def __post_init__(self):
        # Judged as a Config and an Evaluation, once file, run and flags have met.
        pass


@dataclass(frozen=True)
class Evaluation:
    """Settled options. ``config`` is Config's part, with the first task; ``greedy``: its temperature and nucleus are stand-ins
    for temperature 0. ``task_splits``: each task's. ``trained_on``: the options of the model's own run. ``notes`` are lines to
    print first."""

    config: Config
    source: Source
    tasks: tuple[str, ...]
    task_splits: tuple[str, ...]
    samples: int
    k: tuple[int, ...]
    split: str
    max_prompts: int | None
    by: tuple[str, ...]
    rows_at_once: int | None
    greedy: bool
    trained_on: Config | None
    notes: tuple[str, ...] = ()

    @property
    def configs(self) -> list[Config]:
        """Of each task."""
        both = zip(self.tasks, self.task_splits)
        return [dataclasses.replace(self.config, task=task, task_split=split) for task, split in both]

    @property
    def decisive(self) -> dict:
        """Options that decide what is sampled and how it is graded, by name; evaluations in which they differ share nothing."""
        fields = dataclasses.asdict(self.config)
        kept = {name: value for name, value in fields.items() if name not in TRAINING | FREE | {"task", "model"}}
        kept |= {"temperature": 0.0, "top_p": 1.0} if self.greedy else {}
        kept |= {name: list(value) for name, value in kept.items() if isinstance(value, tuple)}
        splits = dict.fromkeys(self.task_splits)
        kept["task_split"] = self.task_splits[0] if len(splits) == 1 else list(self.task_splits)
        own = {"model": self.source.name, "task": list(self.tasks), "samples": self.samples, "split": self.split}
        return own | {"max_prompts": self.max_prompts} | kept


def defaults(given: Flags) -> tuple[dict, Source, Config | None, list[str]]:
    """What the model's own run and --config say, under the flags; the model's place, its run's options, and lines to print."""
    source, values, notes = find(given.model), {}, []
    trained_on = load_yaml(source.run / "config.yaml") if source.run else None
    left_out = {"never", "with_its_task"} if given.task else {"never"}
    if trained_on:
        brought = {name for name, facts in FACTS.items() if facts.travels not in left_out} - TRAINING
        values = {name: value for name, value in dataclasses.asdict(trained_on).items() if name in brought}
        notes += told(source, values)
    if given.config:
        values |= {name: value for name, value in read_yaml(given.config).items() if name not in TRAINING}
    if "task" in values:
        values["task"] = (values["task"],)
    return values, source, trained_on, [*source.notes, *notes]


def settle(flags: Flags, source: Source, trained_on: Config | None, notes: list[str]) -> Evaluation:
    """Judge the options together.

    Raises:
        UsageError: an option that cannot work, named with its value and the remedy.
    """
    tasks, samples = flags.task or ("arithmetic",), flags.samples
    if len(set(tasks)) < len(tasks):
        raise UsageError(f"--task {' '.join(tasks)}: a task is named twice; name it once")
    for name, most in (("samples", MOST_SAMPLES), ("max_prompts", 10**9), ("rows_at_once", 10**9)):
        value = getattr(flags, name)
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"{flag(name)} {value}: must lie in [1, {most}]")
    if flags.k and not 1 <= min(flags.k) <= max(flags.k) <= samples:
        raise UsageError(f"--k {' '.join(map(str, flags.k))}: must lie in [1, {samples}], as far as --samples {samples} reach")
    if PYTHON in flags.reward:
        on_what = "--task, and with " if CUSTOM in tasks else ""
        raise UsageError(
            f"--model {source.name}: its run was graded by a function given in Python, which cannot be called from here; say "
            f"with {on_what}--reward what grades: task, maths, code, exact, or a function of your own as module:function"
        )
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    greedy = flags.temperature == 0
    if greedy and samples > 1:
        raise UsageError(
            f"--temperature 0: takes the likeliest token always, so all --samples {samples} of a prompt would be alike; "
            "use --samples 1, or a temperature above 0"
        )
    if greedy and flags.top_p != 1:
        raise UsageError(f"--top-p {flags.top_p}: has no effect with --temperature 0; leave one of them out, or --top-p 1")
    kept = {field.name: getattr(flags, field.name) for field in dataclasses.fields(Config) if field.name not in TRAINING}
    kept |= {"task": tasks[0], "task_split": flags.task_split or "train", "model": source.base} | (
        {"temperature": 1.0, "top_p": GREEDY_TOP_P} if greedy else {}
    )
    config = Config(**kept)
    if flags.task_split:
        splits = (flags.task_split,) * len(tasks)
    else:
        splits, chosen = zip(*(default_split(dataclasses.replace(config, task=task)) for task in tasks))
        notes = [*notes, *filter(None, chosen)]
        config = dataclasses.replace(config, task_split=splits[0])
    k = tuple(sorted(set(flags.k or (*powers, samples))))
    own = {name: getattr(flags, name) for name in ("split", "max_prompts", "rows_at_once")}
    return Evaluation(
        config, source, tasks, splits, samples, k, by=tuple(dict.fromkeys(flags.by)), greedy=greedy, trained_on=trained_on,
        notes=tuple(notes), **own,
    )  # fmt: skip


def short_name(text: str) -> str:
    """A model's or task's name as part of a folder's: its last two parts at most."""
    name = "-".join(Path(text).parts[-2:]) if "/" in text else Path(text).stem if "." in text else text
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name).strip("-.") or "x"
