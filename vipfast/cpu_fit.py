"""Whether a run fits this machine's main memory, told before a model is loaded; by a dry run in the same words."""

from vipfast import main_memory, memory
from vipfast.config import Config
from vipfast.distributed import join
from vipfast.gpu_fit import remedies
from vipfast.memory import PROCESS_BYTES


def verdict(config: Config, phases: dict[str, dict[str, float]]) -> str:
    """A line on an ``estimate``: which phase takes most, and the memory there is."""
    phase, needed = _most(phases)
    return f"{_there()}: most is taken in {phase}, {memory.size(needed)} with Python and its libraries"


def refusal(config: Config, phases: dict[str, dict[str, float]]) -> str | None:
    """Why a run on the CPU cannot be, and what helps; None if it can."""
    needed = _most(phases)[1]
    return _told(config, phases) if needed > main_memory.total_bytes() else None


def warning(config: Config, phases: dict[str, dict[str, float]]) -> str | None:
    """That a run fits this machine, but not beside what runs there now; None if it fits."""
    needed = _most(phases)[1]
    fits = needed > main_memory.total_bytes() or needed <= main_memory.free_bytes()
    return None if fits else f"warning: {_told(config, phases)}"


def _told(config: Config, phases: dict[str, dict[str, float]]) -> str:
    phase, needed = _most(phases)
    parts = {**phases[phase], **({} if phase in ("always", "load") else phases["always"])}
    largest = sorted(parts, key=parts.get, reverse=True)[:3]
    told = ", ".join(f"{name} {memory.size(parts[name])}" for name in largest)
    each = f" in {join().size} processes" if join().size > 1 else ""
    return (
        f"--device cpu: this run is expected to take {memory.size(needed)} of main memory{each} in its phase {phase} ({told}), "
        f"and there are {_there()}; what helps: {', '.join(remedies(config, phase))}, or a smaller model"
    )


def _there() -> str:
    return f"{memory.size(main_memory.total_bytes())} of main memory, {memory.size(main_memory.free_bytes())} of it free"


def _most(phases: dict[str, dict[str, float]]) -> tuple[str, float]:
    """The phase that takes most, and its bytes in all processes, Python and its libraries among them."""
    sizes = {phase: size for phase, size in memory.totals(phases).items() if phase != "always"}
    phase = max(sizes, key=sizes.get)
    return phase, join().size * (sizes[phase] + PROCESS_BYTES)
