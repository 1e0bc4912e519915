"""The command line of ``vipfast train``: Config's fields as flags, over a YAML file; and how a run's end is told to a shell.

Exit codes: 0 done; 1 the run had to stop (reward, nothing learned, sync, non-finite, checkpoint, memory, lost process); 2
bad input; 3 saved and stopped on SIGTERM or Ctrl-C.
"""

import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from vipfast import collection, preflight, run_folder
from vipfast.config import Config
from vipfast.config_file import continued, load_yaml, read_yaml
from vipfast.config_rules import flag
from vipfast.distributed import Ranks, join
from vipfast.errors import CheckpointError, DeadRunError, NonFiniteError, RankError, RewardError, SyncError, UsageError
from vipfast.inherited import inherited, starting_point, told
from vipfast.names import check_argv
from vipfast.resolve import resolve
from vipfast.settled import Settled, resumed_from, settled
from vipfast.shortage import ShortageError
from vipfast.stop import STOPPED_AT_ONCE, NothingYet
from vipfast.telemetry.activity import NOW
from vipfast.telemetry.status import StatusLine


@dataclass(frozen=True)
class Command:
    """What the command line asks for. ``notes`` are lines to print first, e.g. which run is continued."""

    config: Config
    resume: bool
    dry_run: bool
    gpu_bytes: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Flags(Config):
    """Train a language model on verifiable rewards, with a fixed rollout budget spent where it teaches."""

    config: str | None = None
    """YAML file of options (see recipes/); flags go over it."""
    resume: bool = False
    """Continue the run in --output-dir, or the one under runs/ that saved last; keep its options but for a few."""
    dry_run: bool = False
    """Print budget, rounds, tokens and memory without loading a model, and stop."""
    gpu_memory_gb: float | None = None
    """With --dry-run: the GPU to plan for, on whatever machine; what cannot fit it is refused as a run there would."""

    def __post_init__(self):
        # Validated as a Config, once file and flags have met.
        pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    go_on = "--resume goes on from the last checkpoint"
    return guarded(lambda ranks: _run(sys.argv[1:] if argv is None else argv, ranks), go_on)


def guarded(run: Callable[[Ranks], int], go_on: str) -> int:
    """Run a command; returns the exit code. An error is one message on stderr (VIPFAST_TRACEBACK=1: a traceback).

    Args:
        run: the command, told which ranks it is one of; returns 0 or 3.
        go_on: what to do after it was stopped at once, where the StopRequest says nothing better.
    """
    ranks = join()
    nothing_yet = NothingYet(shown=ranks.rank == 0)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's or a test's has not
            stream.reconfigure(errors="replace")  # a terminal without our signs shows "?" rather than a traceback
    try:
        with nothing_yet, _plain_warnings(), ranks.losses_named():
            code = run(ranks)
    except KeyboardInterrupt as stopped:
        _tell(f"stopped at once; {stopped.args[0] if stopped.args else go_on}", ranks)
        return STOPPED_AT_ONCE
    except (UsageError, RewardError, DeadRunError, SyncError, NonFiniteError, RankError, ShortageError) as error:
        if os.environ.get("VIPFAST_TRACEBACK"):
            raise
        _tell(f"error: {error}", ranks)
        return 2 if isinstance(error, UsageError) and not isinstance(error, CheckpointError) else 1
    ranks.leave()
    return code


def parse(argv: Sequence[str]) -> Command:
    """Arguments -> Command. On ``--resume`` the config is the saved one with the permitted changes.

    Raises:
        UsageError: an option, file or run folder that cannot be used; a flag that does not exist or comes twice.
        SystemExit: 0 after --help; 2 after a value of the wrong kind (told on stderr).
    """
    switches = [field.name for field in dataclasses.fields(Config) if field.type is bool]
    check_argv(argv, [field.name for field in dataclasses.fields(_Flags)], switches)
    given = _flags(argv, {})
    gpu_bytes = _planned_gpu(given)
    values = read_yaml(given.config) if given.config else {}
    if not given.resume:
        config, notes = _started(argv, _flags(argv, values) if values else given, values)
        return Command(config, resume=False, dry_run=given.dry_run, gpu_bytes=gpu_bytes, notes=notes)
    run = run_folder.resumable(given.output_dir or values.get("output_dir"))
    saved = load_yaml(run / "config.yaml")
    asked = _config(_flags(argv, dataclasses.asdict(saved) | values | {"output_dir": str(run)}))
    if asked.model != saved.model:  # a run's folder may stand for the model that was found in it
        asked = dataclasses.replace(asked, model=starting_point(asked.model).base)
    config, notes = continued(saved, asked)
    return Command(config, resume=True, dry_run=given.dry_run, gpu_bytes=gpu_bytes, notes=(f"continuing {run}", *notes))


def _started(argv: Sequence[str], flags: _Flags, values: dict) -> tuple[Config, tuple[str, ...]]:
    """The options of a new run, and lines on what the run behind its model brings along, under file and flags."""
    source = starting_point(flags.model)
    if brought := inherited(source, flags.lora_rank):
        flags = _flags(argv, brought | values)
    taken = {name: value for name, value in brought.items() if getattr(flags, name) == value}
    return dataclasses.replace(_config(flags), model=source.base), (*source.notes, *told(source, taken))


def _run(argv: Sequence[str], ranks: Ranks) -> int:
    with StatusLine(shown=ranks.rank == 0):
        with collection.held():
            NOW.begin("starting", "settling the options")
            run = ranks.decided(lambda: _prepare(argv))
            if run is None:
                return 0
            NOW.enter("importing torch")
            from vipfast.trainer import Trainer

        trainer = Trainer(run)
    return trainer.run()


def _prepare(argv: Sequence[str]) -> Settled | None:
    """Settle the options and print what there is to say of them; None after a dry run."""
    command = parse(argv)
    if not command.resume and command.config.output_dir is not None:
        run_folder.check_fresh(command.config.output_dir)
    if command.dry_run:
        _plan(command)
        return None
    preflight.check_rows(command.config)
    run = settled(command.config, command.resume)
    for note in dict.fromkeys([*command.notes, *run.notes]):  # what was changed is told by both
        print(note, flush=True)
    return dataclasses.replace(run, notes=[])


def _plan(command: Command) -> None:
    """Print what a run would do, without torch."""
    from vipfast import dry_run

    if command.resume:
        resumed_from(command.config)
    run = resolve(command.config, ask_torch=False, gpu_bytes=command.gpu_bytes, resumed=command.resume)
    for line in (*command.notes, *run.lines):
        print(line, flush=True)
    dry_run.show(run.config, command.gpu_bytes)


def _tell(message: str, ranks: Ranks) -> None:
    if ranks.first_to_say(message):
        print(message, file=sys.stderr)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Our own warnings speak of options; a source line beside them would say nothing."""
    usual = warnings.formatwarning

    def format_warning(message, category, *place, **kwargs):
        return f"warning: {message}\n" if category is UserWarning else usual(message, category, *place, **kwargs)

    warnings.formatwarning = format_warning
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _flags(argv: Sequence[str], defaults: dict) -> _Flags:
    # Imported here so that a notebook's Trainer needs no command-line library.
    import tyro

    # Flags such as --resume stand alone; their --no-resume twins would only lengthen the help. What a file or a saved run sets
    # can be taken back all the same: a twin that is given has its option on by default.
    on = {field.name: True for field in dataclasses.fields(Config) if field.type is bool and flag(f"no_{field.name}") in argv}
    return tyro.cli(
        _Flags, args=argv, default=_Flags(**{**defaults, **on}), prog="vipfast train", config=(tyro.conf.FlagCreatePairsOff,)
    )


def _planned_gpu(flags: _Flags) -> float | None:
    """Bytes of the GPU that --gpu-memory-gb names."""
    size = flags.gpu_memory_gb
    if size is None:
        return None
    if not flags.dry_run:
        raise UsageError(f"--gpu-memory-gb {size:g}: a run asks its GPU; use it with --dry-run, or leave it out")
    if flags.device == "cpu":
        raise UsageError(f"--gpu-memory-gb {size:g}: --device cpu plans for no GPU; leave one of both out")
    if not 0 < size <= 1e6:
        raise UsageError(f"--gpu-memory-gb {size:g}: must lie in (0, 1e+06]")
    return size * 1e9


def _config(flags: _Flags) -> Config:
    return Config(**{field.name: getattr(flags, field.name) for field in dataclasses.fields(Config)})
