"""A thread that redraws what time alone changes, while the main thread waits for torch, an import or a disk.

Ticks from the caller's thread would stand still in exactly the moments that make one wonder: an update of a large model returns
once in minutes. The thread only reads plain attributes and draws, 2 ms of one core each time (.4 % of it). Reward workers are
started by ``subprocess``, which execs; a ``fork`` of the user's own waits until no frame is half drawn, so a child inherits no
locked terminal.
"""

import os
import threading
from collections.abc import Callable

LOCK = threading.RLock()
"""Held by whoever draws."""

os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


class Ticker:
    """Calls ``tick`` every ``every_s`` seconds, under LOCK, until ``stop``."""

    def __init__(self, tick: Callable[[], None], every_s: float = 0.5):
        self._tick, self._every_s, self._end = tick, every_s, threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._end.clear()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when no further tick comes."""
        if self._thread is not None:
            self._end.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            with LOCK:
                if not self._end.is_set():
                    self._tick()
