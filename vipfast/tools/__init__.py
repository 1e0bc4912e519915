"""What a rollout may call between turns. Nothing here imports torch; the sandbox is imported when it is asked for."""

from collections.abc import Sequence
from typing import Any

from vipfast.config import Config
from vipfast.engine.base import Engine
from vipfast.placement import Placement
from vipfast.tools.base import Tool, schema
from vipfast.tools.calculator import Calculator
from vipfast.tools.python import Python
from vipfast.tools.search import Search

TOOLS: dict[str, type[Tool]] = {tool.name: tool for tool in (Calculator, Python, Search)}


def describe(names: Sequence[str]) -> list[dict]:
    """JSON schemas of the tools, as a chat template's ``tools`` takes them."""
    return [schema(TOOLS[name]) for name in names]


def with_tools(config: Config, engine: Engine, tokenizer: Any, placement: Placement) -> Engine:
    """The engine of a resolved config, with its tools around it if it has any."""
    if not config.tools:
        return engine
    from vipfast.tools.engine import ToolEngine

    return ToolEngine(
        engine, make_tools(config), tokenizer, max_new_tokens=config.max_new_tokens, max_turns=config.max_turns,
        max_tool_tokens=config.max_tool_tokens, time_s=config.tool_timeout, placement=placement,
    )  # fmt: skip


def make_tools(config: Config) -> list[Tool]:
    """The tools of ``--tools``, in that order.

    Raises:
        UsageError: the sandbox or the corpus cannot be used.
    """
    made = {
        "calculator": Calculator,
        "python": lambda: _python(config),
        "search": lambda: Search(config.search_corpus, config.search_k),
    }
    return [made[name]() for name in config.tools]


def _python(config: Config) -> Python:
    # Imported here: it starts processes, and only programs need it.
    from vipfast import sandbox

    sandbox.check(config.sandbox)

    def run(source: str, time_s: float) -> sandbox.Output:
        limits = sandbox.Limits(time_s, config.code_memory_mb)
        try:
            return sandbox.run_python(source, limits, strength=config.sandbox)
        except sandbox.SandboxError as error:
            return sandbox.Output("", f"the sandbox could not run it: {error}", "error")

    return Python(run)
