"""What ``Trainer.run`` returns: how the run ended, and where everything it left behind is."""

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from vipfast.telemetry.telemetry import read_metrics

DONE, STOPPED = 0, 3
"""Exit codes: all steps done; stopped by SIGTERM or Ctrl-C after saving the step it was in."""


class RunResult(int):
    """The end of a run. It is true where all steps were done, and as a number it is the exit code of the command (0 or 3), so
    ``sys.exit(trainer.run())`` tells a shell.

    Attributes:
        run: the run's folder.
    """

    run: Path

    def __new__(cls, code: int, run: str | Path) -> "RunResult":
        """Args: ``code``: DONE or STOPPED; ``run``: the run's folder."""
        result = super().__new__(cls, code)
        result.run = Path(run)
        return result

    def __bool__(self) -> bool:
        return int(self) == DONE

    @property
    def ended(self) -> Literal["done", "stopped"]:
        """How: all steps done, or stopped on request with everything saved."""
        return "done" if self else "stopped"

    @property
    def final(self) -> Path | None:
        """The trained model, a from_pretrained folder (adapters with --lora-rank); None where the run was stopped before."""
        return _there(self.run / "final")

    @property
    def best(self) -> Path | None:
        """The model of the best evaluation so far; None where nothing was evaluated."""
        return _there(self.run / "best")

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: the state before training, then one per step, those of earlier sittings included."""
        return read_metrics(self.run / "metrics.jsonl")

    @property
    def scores(self) -> dict[str, float | None]:
        """The last evaluation: mean@k, pass@k and maj@k by these names; {} where nothing was evaluated."""
        evaluations = (_scores(row) for row in reversed(self.history))
        return next(filter(None, evaluations), {})

    def __repr__(self) -> str:
        scores = ", ".join(f"{name} {value:.3f}" for name, value in self.scores.items() if value is not None)
        return f"RunResult({self.ended}, {self.run}{', ' + scores if scores else ''})"


def _scores(row: dict[str, Any]) -> dict[str, float | None]:
    return {name.removeprefix("eval/"): value for name, value in row.items() if name.startswith("eval/")}


def _there(folder: Path) -> Path | None:
    return folder if folder.is_dir() else None
