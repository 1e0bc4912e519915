"""The command line of ``vipfast evaluate``. Exit codes are those of ``vipfast.cli``."""

import dataclasses
import sys
import typing
from collections.abc import Sequence
from dataclasses import field

from vipfast import cli, collection
from vipfast.config import Config
from vipfast.distributed import Ranks
from vipfast.evaluation.options import GO_ON, ROWS_AT_ONCE, TRAINING, Evaluation, Flags, defaults, settle
from vipfast.names import check_argv
from vipfast.resolve import resolve_evaluation
from vipfast.shortage import shortage_told
from vipfast.telemetry.activity import NOW
from vipfast.telemetry.status import StatusLine


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return cli.guarded(lambda ranks: _run(sys.argv[1:] if argv is None else argv, ranks), GO_ON)


def parse(argv: Sequence[str]) -> Evaluation:
    """Arguments -> Evaluation; device, lengths and the like are still open.

    Raises:
        UsageError: an option, file or model that cannot be used; a flag that does not exist or comes twice.
        SystemExit: 0 after --help; 2 after a value of the wrong kind.
    """
    read = [name for name in Flags.__dataclass_fields__ if name not in TRAINING]
    check_argv(argv, read, [name for name in read if Flags.__dataclass_fields__[name].type is bool], of_training=TRAINING)
    given = _flags(argv, {})
    values, source, trained_on, notes = defaults(given)
    return settle(_flags(argv, values) if values else given, source, trained_on, notes)


def _run(argv: Sequence[str], ranks: Ranks) -> int:
    with StatusLine(shown=ranks.rank == 0), collection.held():
        NOW.begin("starting", "settling the options")
        asked = ranks.decided(lambda: _prepare(argv))
        NOW.enter("importing torch")
        # torch comes with these, and --help should not wait for it
        from vipfast.evaluation.run import run

    with shortage_told(
        asked.config, ["a lower --rows-at-once"], "What is sampled is kept, and the same command goes on with it"
    ):
        return run(asked, ranks)


def _prepare(argv: Sequence[str]) -> Evaluation:
    """Settle the options and print what was chosen."""
    asked = parse(argv)
    sizes = asked.rows_at_once or max(ROWS_AT_ONCE.values()), asked.samples, asked.source.adapter is not None
    # Of further tasks, all that is wanted is what they are refused for.
    run, *_ = [resolve_evaluation(config, *sizes) for config in asked.configs]
    print(*asked.notes, *run.lines, sep="\n", flush=True)
    return dataclasses.replace(asked, config=run.config)


def _flags(argv: Sequence[str], values: dict) -> Flags:
    import tyro

    hints = typing.get_type_hints(Config)
    # What only training reads is no option here: not shown, and refused by name as an unknown one.
    hidden = [
        (name, tyro.conf.Suppress[tyro.conf.Fixed[hints[name]]], field(default=getattr(Flags, name)))
        for name in sorted(TRAINING)
    ]
    flags = dataclasses.make_dataclass("Flags", hidden, bases=(Flags,), frozen=True)
    options = dict(prog="vipfast evaluate", description=Flags.__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    return tyro.cli(flags, args=argv, default=flags(**values), **options)
