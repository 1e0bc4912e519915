"""What is told of an evaluation under way: rate and time left by what this process has sampled, in lines that flood no log."""

from types import SimpleNamespace

import pytest

from vipfast.evaluation import progress
from vipfast.evaluation.progress import Progress, Watched
from vipfast.evaluation.report import took


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.s)
    return now


def test_rate_and_time_left_count_what_this_process_has_sampled(clock, capsys):
    with Progress(1000, 400) as seen:
        seen.task = "t"
        assert seen.left_s is None
        clock.s += 9
        seen.more(90)
        assert (seen.done, seen.rate, seen.left_s) == (490, 10, 51) and capsys.readouterr().out == ""
        clock.s += 1
        seen.at(500)
        assert capsys.readouterr().out == "t: 500 of 1000 samples, 10/s, 0:50 left\n"
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
