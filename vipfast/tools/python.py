"""Python in the code sandbox: what a program prints."""

from collections.abc import Callable
from typing import Any

from vipfast.tools.base import Output

_REASONS = {"error": "error: the program failed", "signal": "error: the program crashed"}


class Python:
    """Implements ``tools.base.Tool``.

    Args:
        run: (source, seconds) -> stdout, stderr and ended of the program: "exit" (by itself), "error" (an exception), "signal"
            (crashed), or what it took too much of, such as "time".
    """

    name = "python"
    description = "Runs a Python program, without network, and returns what it prints; nothing is kept between calls."
    parameters = {"code": "The program; print what you want to see"}
    beside = True

    def __init__(self, run: Callable[[str, float], Any]):
        self.run = run

    def __call__(self, time_s: float, code: str) -> Output:
        # Half a surrogate pair, which JSON can spell, is no source text.
        done = self.run(code.encode("utf-8", "replace").decode(), time_s)
        text = "\n".join(part.rstrip() for part in (done.stdout, done.stderr) if part.strip())
        if done.ended == "exit":
            return Output(text or "(no output)")
        reason = _REASONS.get(done.ended, f"error: the program took too much {done.ended}")
        return Output("\n".join(filter(None, (text, reason))), error=True)

    def close(self) -> None: ...
