"""Memory that ran out is an error with a remedy, on a CPU as on a GPU."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from vipfast.config import Config
from vipfast.gpu_fit import remedies

_ALLOCATORS = "can't allocate memory|not enough memory|cannot allocate memory|bad_alloc|CUDA out of memory|_ALLOC_FAILED"

_THEN = "--resume keeps these options, so start a new run with them; --dry-run tells what it would take"


class ShortageError(RuntimeError):
    """Memory ran out; the message says what lowers the need."""


@contextmanager
def shortage_told(config: Config, helps: Sequence[str] = (), then: str = _THEN) -> Iterator[None]:
    """Inside, an error that says there is no memory left becomes a ShortageError that names the options that help.

    Args:
        config: the options of the run.
        helps: what lowers the need; what helps a training run unless given.
        then: how to go on with them.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        words = " ".join(str(error).split())[:200] or type(error).__name__
        options = ", ".join(helps or [*remedies(config, "update"), *remedies(config, "generate")])
        raise ShortageError(
            f"--device {config.device}: out of memory ({words}); what helps: {options}, or a smaller model. {then}"
        ) from error


def is_shortage(error: Exception) -> bool:
    """Whether an error means that memory could not be had; torch tells of a CPU's in words only."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or type(error) is RuntimeError and re.search(_ALLOCATORS, str(error), re.IGNORECASE) is not None
