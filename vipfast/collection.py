"""Python's garbage collector, kept out of start-up: it would walk all that the imports make, over and over, for nothing."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held() -> Iterator[None]:
    """Import without the collector, and let it pass over what was imported from then on; once in a process.

    Modules stay until the process ends. Models do not, so they are loaded afterwards. On the default run this takes half a
    second of CPU time off the first step.
    """
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # libraries that look for leaks at exit would find the frozen objects
