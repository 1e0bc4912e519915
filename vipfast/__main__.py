"""The ``vipfast`` command, and ``python -m vipfast``: train, evaluate, compare or merge, each with its own --help."""

import importlib
import sys
from collections.abc import Sequence

from vipfast.unread import pipes_may_close

COMMANDS = {
    "train": ("vipfast.cli", "train a policy on verifiable rewards, go on with a run, or show a run's plan (--dry-run)"),
    "evaluate": ("vipfast.evaluation.command", "mean@k, pass@k and maj@k of a model, with intervals"),
    "compare": ("vipfast.compare", "train every allocator on the same seeds and compare"),
    "merge": ("vipfast.merge", "make one model of a run's LoRA adapters and their base"),
}
"""Module whose ``main(argv)`` runs the command and returns its exit code, and what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; returns its exit code, or 2 where there is no such command."""
    with pipes_may_close():
        return _run(*(sys.argv[1:] if argv is None else argv) or ["--help"])


def _run(name: str, *rest: str) -> int:
    if name in COMMANDS:
        # Each imports what it needs, and this page nothing.
        try:
            command = importlib.import_module(COMMANDS[name][0])
        except KeyboardInterrupt:
            print("stopped; nothing was started yet", file=sys.stderr)
            return 130
        return command.main(list(rest))
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        from vipfast import __version__

        print(f"vipfast {__version__}")
        return 0
    from vipfast.names import nearest

    meant = nearest(name, COMMANDS)
    guess = f"did you mean {meant}? " if meant else ""
    print(f"error: vipfast {name}: no such command; {guess}there are {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def _help() -> str:
    lines = ["usage: vipfast COMMAND [OPTIONS]", ""]
    lines += [f"  {name:<10}{told}" for name, (_, told) in COMMANDS.items()]
    return "\n".join([*lines, "", "vipfast COMMAND --help lists the options of each."])


if __name__ == "__main__":
    sys.exit(main())
