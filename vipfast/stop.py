"""SIGTERM and Ctrl-C as a request: the loop finishes its step, saves, and leaves; a second signal stops at once."""

import signal


class StopRequest:
    """Context manager; inside it ``name`` is None until a signal asks for a stop, then the signal's name.

    Outside the main thread (a notebook server) signals stay with their owner and no stop is ever asked for.
    """

    def __init__(self):
        self.name: str | None = None
        self._before: dict = {}

    def __enter__(self) -> "StopRequest":
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._ask)
        except ValueError:  # not the main thread
            self._before = {}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: object) -> None:
        # Nothing is printed here: a handler may run inside a print.
        if self.name is not None:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
