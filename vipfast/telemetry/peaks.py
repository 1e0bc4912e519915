"""What each phase of a run took at most, beside what was expected of it; told once, after the first step."""

import os
from pathlib import Path

from vipfast.memory import size
from vipfast.telemetry.step import peak_bytes

CLEAR = Path("/proc/self/clear_refs")
"""Linux: writing 5 starts the process's peak anew. Elsewhere a phase shows the peak of all before it too."""


class Peaks:
    """Peak memory by phase: of torch's allocator on a GPU, of this process beyond what it holds now on a CPU.

    Phases are what lies between calls of ``mark``; once the table has been told nothing is read or reset any more.

    Args:
        device: "cpu" or "cuda".
    """

    def __init__(self, device: str):
        self.device, self.used, self.told = device, {}, False
        self._restart()
        self.start = 0 if device == "cuda" else peak_bytes(device)
        self._highest = self.start

    def mark(self, phase: str) -> None:
        """What was there at most since the last mark was there in ``phase``."""
        if self.told:
            return
        peak = peak_bytes(self.device)
        self.used[phase] = max(self.used.get(phase, 0), peak - self.start)
        self._highest = max(self._highest, peak)
        self._restart()

    def highest(self) -> int:
        """Peak since the beginning, in bytes."""
        return max(self._highest, peak_bytes(self.device))

    def table(self, step: int, expected: dict[str, float]) -> str:
        """A line per phase, narrow enough for any terminal: its name, used, expected.

        Args:
            step: the step that has just ended.
            expected: bytes by phase; a phase that is missing here or was not measured shows a dash.
        """
        self.told = True
        phases = [phase for phase in expected if phase != "always"]
        phases += [phase for phase in self.used if phase not in phases]
        rows = [(f"memory, step {step}", "used", "expected")]
        for phase in phases:
            rows.append((f"  {phase}", *(size(found[phase]) if phase in found else "-" for found in (self.used, expected))))
        text = "\n".join(f"{name:<16}{used:>11}{planned:>11}" for name, used, planned in rows)
        return text + (f"\n  besides: {size(self.start)} of Python, its libraries and the data" if self.start else "")

    def _restart(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
        elif os.access(CLEAR, os.W_OK):
            CLEAR.write_text("5")
