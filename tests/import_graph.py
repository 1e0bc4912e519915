"""Prints how many modules import how many, function-level imports included, and fails where a circle of them is."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def modules() -> dict[str, Path]:
    """Every module of vipfast by its name; kernels/ is imported as vipfast.kernels."""
    files = [*(ROOT / "vipfast").rglob("*.py"), *(ROOT / "kernels").glob("*.py")]
    named = {}
    for path in files:
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = ("vipfast", *parts) if parts[0] == "kernels" else parts
        named[".".join(parts).removesuffix(".__init__")] = path
    return named


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """What a file imports of vipfast, wherever it does; what only type checkers read does not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {name if (name := f"{node.module}.{alias.name}") in known else node.module for alias in node.names}
    return found & known.keys()


def graph() -> dict[str, set[str]]:
    """Module -> the modules of vipfast that it imports."""
    known = modules()
    return {name: imports(path, known) - {name} for name, path in known.items()}


def main() -> int:
    edges = graph()
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        print("a circle of imports: " + " <- ".join(error.args[1]))
        return 1
    print(f"{len(edges)} modules, {sum(map(len, edges.values()))} imports among them, no circle")
    return 0


if __name__ == "__main__":
    sys.exit(main())
