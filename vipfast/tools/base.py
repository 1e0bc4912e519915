"""What a tool is: named, described, called with texts, and done within its time."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Output:
    """What a call gave. ``error`` tells that it failed, and ``text`` then says why; ``found`` are ids of retrieved passages."""

    text: str
    error: bool = False
    found: tuple[str, ...] = ()


class Tool(Protocol):
    """``parameters`` maps each argument, a text always, to the sentence that describes it; all are needed.

    ``beside``: True where a call takes long enough to run beside generation, in a thread; several may run at once.
    """

    name: str
    description: str
    parameters: dict[str, str]
    beside: bool

    def __call__(self, time_s: float, **arguments: str) -> Output:
        """Run within about ``time_s`` seconds. What a policy may have written is answered with an error, never raised."""

    def close(self) -> None: ...


def schema(tool: type[Tool] | Tool) -> dict:
    """The tool as chat templates and models know it: a JSON schema of a function."""
    properties = {name: {"type": "string", "description": meaning} for name, meaning in tool.parameters.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": parameters}}
