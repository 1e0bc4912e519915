"""Imports run one way: no circle, and the core knows nothing of the run around it."""

import import_graph
import pytest


def test_there_is_no_circle(capsys):
    assert import_graph.main() == 0, capsys.readouterr().out


def test_a_circle_would_be_found(monkeypatch, capsys):
    monkeypatch.setattr(import_graph, "graph", lambda: {"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert import_graph.main() == 1 and "a circle of imports" in capsys.readouterr().out


@pytest.mark.parametrize("room", ["allocate", "predict", "kernels", "types"])
def test_the_core_imports_no_options_ranks_or_command_line(room):
    edges = import_graph.graph()
    inside = [name for name in edges if name == f"vipfast.{room}" or name.startswith(f"vipfast.{room}.")]
    reached, fresh = set(), set(inside)
    while fresh:
        reached |= fresh
        fresh = set().union(*(edges[name] for name in fresh)) - reached
    outside = {"config", "options", "distributed", "ranks", "cli", "resolve", "learn", "engine", "trainer"}
    assert inside and not {name for name in reached if name.split(".")[1:2] and name.split(".")[1] in outside}


def test_what_auto_stands_for_is_decided_in_one_place():
    choices = {"vipfast.choices"}
    assert {name for name, used in import_graph.graph().items() if used & choices} == {"vipfast.resolve"}
