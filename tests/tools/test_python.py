"""The Python tool over a stand-in for the sandbox."""

import sys
from types import ModuleType, SimpleNamespace

import vipfast
from vipfast.config import Config
from vipfast.tools import make_tools
from vipfast.tools.python import Python


def tool(stdout="", stderr="", ended="exit"):
    seen = []
    made = Python(
        lambda source, time_s: seen.append((source, time_s)) or SimpleNamespace(stdout=stdout, stderr=stderr, ended=ended)
    )
    return made, seen


def test_what_is_printed_comes_back():
    python, seen = tool("4\n", "a warning\n")
    output = python(2.0, code="print(2+2)")
    assert (output.text, output.error) == ("4\na warning", False) and seen == [("print(2+2)", 2.0)]
    assert tool()[0](1.0, code="x = 1").text == "(no output)"


def test_a_program_that_ended_badly_is_an_error_with_its_output():
    output = tool("so far\n", "Traceback\n", "time")[0](1.0, code="while True: pass")
    assert output.error and output.text == "so far\nTraceback\nerror: the program took too much time"
    assert tool(ended="signal")[0](1.0, code="").text == "error: the program crashed"
    assert tool(stderr="NameError: x\n", ended="error")[0](1.0, code="x").text == "NameError: x\nerror: the program failed"


def test_half_a_surrogate_pair_reaches_no_sandbox():
    python, seen = tool()
    python(1.0, code="print('\ud800')")
    assert seen == [("print('?')", 1.0)]


def test_the_tool_is_made_over_the_sandbox(monkeypatch):
    class Broken(RuntimeError):
        pass

    checked = []

    def run_python(source, limits, *, strength):
        assert strength == "weak"
        if source == "broken":
            raise Broken("no room")
        return SimpleNamespace(stdout=f"{source} within {limits.wall_s} and {limits.memory_mb}", stderr="", ended="exit")

    sandbox = ModuleType("vipfast.sandbox")
    sandbox.run_python, sandbox.SandboxError = run_python, Broken
    sandbox.Limits = lambda wall_s, memory_mb: SimpleNamespace(wall_s=wall_s, memory_mb=memory_mb)
    sandbox.check = checked.append
    sandbox.Output = lambda stdout, stderr, ended: SimpleNamespace(stdout=stdout, stderr=stderr, ended=ended)
    monkeypatch.setitem(sys.modules, "vipfast.sandbox", sandbox)
    monkeypatch.setattr(vipfast, "sandbox", sandbox, raising=False)
    [python] = make_tools(Config(tools=("python",), sandbox="weak", code_memory_mb=256))
    assert checked == ["weak"]
    assert python(2.5, code="x").text == "x within 2.5 and 256"
    failed = python(2.5, code="broken")
    assert failed.error and "the sandbox could not run it: no room" in failed.text
