"""--tools and what goes with it: refused, filled in, said to be idle; and what a step's rollouts tell of them."""

import math

import numpy as np
import pytest

from vipfast.config import Config
from vipfast.engine.base import Finished, ToolUse
from vipfast.errors import UsageError
from vipfast.resolve import resolve
from vipfast.telemetry.metrics import unknown
from vipfast.tools import make_tools, with_tools
from vipfast.tools.use import columns_of, metrics_of, retrieved
from vipfast.types import Finish

CPU = dict(device="cpu", threads=1, output_dir="mine")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tools=("calculator", "calculator")), "--tools calculator calculator: names a tool twice"),
        (dict(tools=("abacus",)), "--tools .*calculator, python, search"),
        (dict(tools=("search",)), "--tools search: needs a corpus .* give --search-corpus"),
        (dict(tools=("calculator",), engine_seeds="engine"), "--engine-seeds engine: .*use --engine-seeds rollout"),
        (dict(max_turns=1), r"--max-turns 1: must lie in \[2, "),
        (dict(tool_timeout=0.0), "--tool-timeout 0.0: must lie in"),
        (dict(search_k=0), "--search-k 0: must lie in"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message):
        Config(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_tool_tokens=20, max_new_tokens=21), "--max-tool-tokens 20: leaves no room in --max-new-tokens 21"),
        (dict(tools=("search",), search_corpus="nowhere.jsonl"), "--search-corpus nowhere.jsonl: no such file or folder"),
    ],
)
def test_what_cannot_work_here_is_refused_before_anything_is_loaded(options, message):
    with pytest.raises(UsageError, match=message):
        resolve(Config(**({"tools": ("calculator",)} | options), **CPU), ask_torch=False)


def test_the_length_of_an_output_follows_the_length_of_a_rollout():
    run = resolve(Config(tools=("calculator",), max_new_tokens=100, **CPU), ask_torch=False)
    config, lines = run.config, run.lines
    assert config.max_tool_tokens == 25 and "max_tool_tokens = 25 (a quarter of max_new_tokens, at most 512)" in lines
    assert resolve(Config(tools=("calculator",), max_new_tokens=4000, **CPU), ask_torch=False).config.max_tool_tokens == 512
    run = resolve(Config(**CPU), ask_torch=False)
    config, lines = run.config, run.lines
    assert config.max_tool_tokens is None and not any("tool" in line for line in lines)


def test_options_that_nothing_reads_are_told():
    lines = resolve(Config(max_turns=7, search_k=5, tool_timeout=1.0, **CPU), ask_torch=False).lines
    for option in ("--max-turns 7", "--search-k 5", "--tool-timeout 1.0"):
        assert f"note: {option} has no effect with no --tools" in lines
    lines = resolve(Config(tools=("calculator",), max_new_tokens=50, max_turns=7, search_k=5, **CPU), ask_torch=False).lines
    assert [line for line in lines if "no effect" in line] == [
        "note: --search-k 5 has no effect with --tools calculator, without search"
    ]


def test_without_tools_the_engine_is_left_alone():
    engine = object()
    assert with_tools(Config(), engine, None, None) is engine


def test_tools_are_made_in_the_order_they_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "corpus.txt").write_text("One passage.\n\nAnother.")
    config = Config(tools=("search", "calculator"), search_corpus=str(tmp_path / "corpus.txt"), search_k=1)
    search, calculator = make_tools(config)
    assert (search.name, calculator.name) == ("search", "calculator")
    assert search(5.0, query="passage another").found == ("corpus.txt:2",)
    assert list((tmp_path / "cache" / "vipfast" / "search").iterdir())
    search.close()


def test_what_searches_found_by_hand():
    assert retrieved(("a", "b", "c", "a"), {"gold_ids": ["a", "x"]}) == (0.5, 0.5, 0.5)
    assert retrieved(("1", "2"), {"supporting": [2]}) == (0.5, 1.0, pytest.approx(2 / 3))
    assert retrieved(("a", "a"), {"gold_ids": ["a", "x", "y", "z"]}) == (1.0, 0.25, pytest.approx(0.4))
    assert retrieved(("b",), {"gold_ids": ["a"]}) == (0.0, 0.0, 0.0)
    for found, metadata in (((), {"gold_ids": ["a"]}), (("a",), {}), (("a",), {"gold_ids": []}), (("a",), {"supporting": "a"})):
        assert all(map(math.isnan, retrieved(found, metadata)))


def row(use):
    return Finished(0, 0, np.zeros(1, np.int64), np.zeros(1, np.float32), Finish.STOP, use=use)


def test_metrics_of_a_step_by_hand():
    uses = [ToolUse(2, 1, 0, 0.5, ("a", "b")), ToolUse(3, 3, 2, 1.0, ("c",)), ToolUse(1), None]
    columns = columns_of(list(map(row, uses)), [{"gold_ids": ["a"]}, {"gold_ids": ["a"]}, {}, {}])
    metrics = metrics_of(columns, 3)
    assert metrics == {
        "tools/turns_mean": 2.0,
        "tools/calls_mean": 4 / 3,
        "tools/errors_frac": 0.5,
        "tools/precision@3": 0.25,
        "tools/recall@3": 0.5,
        "tools/f1@3": pytest.approx(1 / 3),
        "time/tools_s": 1.5,
    }
    assert unknown(metrics) == []
    quiet = metrics_of(columns_of([row(ToolUse(1))], [{}]), 3)
    assert quiet["tools/errors_frac"] is None and all(
        quiet[f"tools/{name}@3"] is None for name in ("precision", "recall", "f1")
    )
    assert metrics_of(None, 3) == {}
