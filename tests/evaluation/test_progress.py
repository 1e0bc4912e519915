"""What is told of an evaluation under way: rate and time left by what this process has sampled, in lines that flood no log."""

from types import SimpleNamespace

import numpy as np
import pytest

from vipfast.engine.base import Finished, Request
from vipfast.evaluation import progress
from vipfast.evaluation.progress import Progress, Watched
from vipfast.evaluation.report import took
from vipfast.telemetry import flow
from vipfast.types import Finish


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.s)
    monkeypatch.setattr(flow, "_lengths", [])
    return now


def test_time_left_counts_the_tokens_of_this_process_and_lines_flood_no_log(clock, capsys):
    with Progress(1000, 400, longest=100) as seen:
        seen.task = "t"
        assert seen.left_s is None
        seen.ask([Request(0, np.ones(1), "u", 0, 0, 600, 0)])
        steps = iter([[0], *[[]] * 19])
        row = [Finished(0, 0, np.zeros(1, int), np.zeros(1, np.float32), Finish.STOP)]
        engine = SimpleNamespace(pending=599, step=lambda: row if next(steps) else [])
        for _ in range(20):
            clock.s += 0.45
            seen.advance(engine)
        seen.more(1)
        # 599 rows have 20 tokens, expected to become 40: 20 further steps of 0.45 s. By finished samples it were 599 times 9 s.
        assert seen.done == 401 and seen.left_s == pytest.approx(9, rel=0.05) and capsys.readouterr().out == ""
        clock.s += 1
        seen.more(99)
        assert capsys.readouterr().out == "t: 500 of 1000 samples, 10/s, 0:10 left\n"
        clock.s += 9.5
        seen.at(600)
        assert capsys.readouterr().out == ""


def test_a_rank_stands_for_the_others_until_the_chunk_is_whole(clock, capsys):
    seen = Progress(10, 0, shown=False, share=4)
    seen.more(2)
    assert seen.done == 8
    seen.more(2)
    assert seen.done == 10
    clock.s += 60
    seen.at(9)
    assert seen.done == 9 and capsys.readouterr().out == ""


def test_a_watched_grader_is_the_grader_and_counts(clock):
    grader = SimpleNamespace(grade=lambda prompts, finished: [f"{p}{f}" for p, f in zip(prompts, finished)], beside=True)
    seen = Progress(10, 0)
    watched = Watched(grader, seen)
    assert watched.grade("ab", "cd") == ["ac", "bd"] and seen.done == 2
    assert watched.beside and not hasattr(watched, "other")


def test_how_it_went_tells_new_samples_from_old():
    assert took(4096, 4096, 4.0) == "4096 samples in 0:04 (1,024/s)"
    assert took(10, 30, 5.0) == "10 samples in 0:05 (2/s), 20 were there already"
    assert took(0, 30, 0.0) == "all 30 samples were there already"
