"""SIGTERM and Ctrl-C as a request: the loop finishes its step, saves, and leaves; a second signal stops at once.

A signal is answered by a thread that the kernel's half of Python's signal handling wakes: a handler waits until torch returns,
and must not print, since it may run inside a print. During imports and loading, when nothing is there to be saved, a signal
ends the process instead.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable

from vipfast.telemetry.activity import NOW

GRACE_S = 5.0
"""After a signal that stops at once: how long torch may keep the main thread until the process is ended under it."""

STOPPED_AT_ONCE = 130


class _Answered:
    """Signals go to ``_handle`` in the main thread, sooner or later, and to ``_hear`` in a thread of their own, at once.

    Outside the main thread (a notebook server) signals stay with their owner.
    """

    numbers: tuple[int, ...] = ()

    def __init__(self):
        self._before: dict = {}
        self._thread: threading.Thread | None = None

    def __enter__(self):
        try:
            for number in self.numbers:
                self._before[number] = signal.signal(number, self._handle)
        except ValueError:  # not the main thread
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._thread is None:
            return
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._write, b"\0")
        self._thread.join()
        self._thread = None
        os.close(self._read)
        os.close(self._write)

    def _listen(self) -> None:
        patience = None
        while select.select([self._read], [], [], patience)[0]:
            for number in os.read(self._read, 64):
                if number == 0:
                    return
                if number in self.numbers and self._hear(number):
                    patience = GRACE_S
        self._end()

    def _end(self) -> None:
        """End the process under a main thread that does not come back."""
        os._exit(STOPPED_AT_ONCE)

    def _handle(self, number: int, frame: object) -> None: ...

    def _hear(self, number: int) -> bool:
        """Answer; returns whether the process has to end now."""
        return False


class StopRequest(_Answered):
    """Context manager; inside it ``name`` is None until a signal asks for a stop, then the signal's name.

    Args:
        say: prints a line, from a thread.
        left: what a stop at once leaves and how to go on from it; may be set anew. None: the command knows.
    """

    numbers = (signal.SIGTERM, signal.SIGINT)
    begun = False
    """Whether this process has come to do something that a stop interrupts."""

    def __init__(self, say: Callable[[str], None] = lambda message: None, left: str | None = None):
        super().__init__()
        self.name: str | None = None
        self.left = left
        self._say, self._heard = say, 0

    def __enter__(self) -> "StopRequest":
        StopRequest.begun = True
        return super().__enter__()

    def _handle(self, number: int, frame: object) -> None:
        if self.name is not None or self._heard > 1:  # two signals in quick succession come here as one
            raise KeyboardInterrupt(*filter(None, [self.left]))
        self.name = signal.Signals(number).name

    def _hear(self, number: int) -> bool:
        self._heard += 1
        if self._heard == 1:
            again = "Ctrl-C again stops now" if number == signal.SIGINT else "a second signal stops now"
            self._say(f"finishing {NOW.task or 'what is under way'}, {again}")
        return self._heard > 1


class NothingYet(_Answered):
    """Context manager around a whole command: until a StopRequest begins, Ctrl-C says that nothing was started and exits.

    An exception would not do: imports lose some, and torch keeps others waiting.

    Args:
        shown: False on ranks that show nothing.
    """

    numbers = (signal.SIGINT,)

    def __init__(self, shown: bool = True):
        super().__init__()
        self._shown = shown
        StopRequest.begun = False

    def _handle(self, number: int, frame: object) -> None:
        if StopRequest.begun:
            raise KeyboardInterrupt

    def _hear(self, number: int) -> bool:
        if not StopRequest.begun:
            if self._shown:
                os.write(2, (("\r\x1b[K" if sys.stdout.isatty() else "") + "stopped; nothing was started yet\n").encode())
            self._end()
        return False


os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
