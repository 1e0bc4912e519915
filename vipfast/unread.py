"""Output whose reader has gone, as in ``vipfast train | head``: the run goes on, and nobody is told of a broken pipe."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class _Unread:
    """A stream that goes on into nothing from the moment that its reader is gone."""

    def __init__(self, file: TextIO):
        self._file = file

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._file.fileno())  # so that what is still buffered goes there too, at exit at the latest
        os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def pipes_may_close() -> Iterator[None]:
    """Inside, standard output that is piped to a program which has ended is written to nowhere."""
    usual = sys.stdout
    sys.stdout = _Unread(usual)
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = usual
