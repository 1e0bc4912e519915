"""What moves beside the main thread: regular ticks, lines where a log is silent for long, and children that inherit no lock."""

import io
import os
import time
from types import SimpleNamespace

import pytest

from vipfast.telemetry import plain, status
from vipfast.telemetry.activity import NOW
from vipfast.telemetry.history import History
from vipfast.telemetry.plain import LONGEST_GAP_S, REMIND_S, PlainView, Reminder
from vipfast.telemetry.status import StatusLine
from vipfast.telemetry.ticker import LOCK, Ticker

PATIENCE_S = 30


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(plain.time, "monotonic", lambda: now.s)
    return now


def test_ticks_come_until_it_is_stopped_and_again_after_a_new_start():
    ticks = []
    ticker = Ticker(lambda: ticks.append(time.monotonic()), every_s=0.01)
    ticker.stop()
    for _ in range(2):
        seen = len(ticks)
        ticker.start()
        deadline = time.monotonic() + PATIENCE_S
        while len(ticks) < seen + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        ticker.stop()
        assert len(ticks) >= seen + 2
    seen = len(ticks)
    time.sleep(0.1)
    assert len(ticks) == seen


def test_nothing_ticks_while_the_lock_is_held():
    ticks = []
    ticker = Ticker(lambda: ticks.append(1), every_s=0.01)
    with LOCK:
        ticker.start()
        time.sleep(0.1)
        assert not ticks
    ticker.stop()


def test_a_forked_child_can_draw_whatever_the_thread_was_at():
    """The thread holds the lock nearly always; a child that inherited it locked would wait for ever."""
    ticker = Ticker(lambda: time.sleep(0.02), every_s=0.0)
    ticker.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                os._exit(0 if LOCK.acquire(timeout=10) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        ticker.stop()


def test_a_silent_log_gets_a_line_now_and_then(clock):
    reminder, moments = Reminder(), []
    for second in range(3000):
        clock.s = 1000.0 + second
        if reminder.due():
            moments.append(second)
    gaps = [b - a for a, b in zip([0, *moments], moments)]
    assert gaps[:5] == [REMIND_S, 2 * REMIND_S, 4 * REMIND_S, 8 * REMIND_S, LONGEST_GAP_S] and set(gaps[5:]) == {LONGEST_GAP_S}
    reminder.said()
    clock.s += REMIND_S
    assert reminder.due(), "what was said starts it anew"


def test_plain_lines_come_between_steps_that_take_long_and_not_else(clock, monkeypatch):
    monkeypatch.setattr(plain.Ticker, "start", lambda self: None)  # the test ticks itself
    file = io.StringIO()
    shown = PlainView(SimpleNamespace(file=file), History(60), "title")
    shown.start()
    NOW.begin("step 5")
    NOW.enter("update", 16, "micro-batches")
    for step in (5, 6):
        for _ in range(30):
            clock.s += 0.5
            shown.tick()
        shown.update({"step": step, "reward/mean": 0.5}, None, ())
    lines = file.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["title", "step", "5", "6"], "15 s a step: a line each and no other"
    clock.s += REMIND_S
    shown.tick()
    shown.tick()
    added = file.getvalue().splitlines()[len(lines) :]
    assert len(added) == 1 and added[0].startswith("  step 5 · update · 0/16 micro-batches · ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_of_the_start_moves_in_a_terminal_and_gives_way_to_all_else(monkeypatch):
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(status.sys, "stdout", out)
    monkeypatch.setattr(status.sys, "stderr", err)
    with StatusLine() as line:
        NOW.begin("starting", "importing torch")
        line.tick()
        print("an option = 1")
        line.tick()
        status.sys.stderr.write("warning: one\n")
        NOW.enter("loading the model")
        line.tick()
    told = out.getvalue().split("\r\x1b[K")
    assert told[0].startswith("starting · importing torch · ") and told[1].startswith("an option = 1\nstarting · importing")
    assert told[-2].startswith("starting · loading the model · ") and told[-1] == "" and err.getvalue() == "warning: one\n"
    assert status.sys.stdout is out and status.sys.stderr is err


def test_the_line_of_the_start_never_wraps(monkeypatch):
    out = Terminal()
    monkeypatch.setattr(status.sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "12")
    with StatusLine() as line:
        NOW.begin("starting", "loading the model")
        line.tick()
    assert max(map(len, out.getvalue().split("\r\x1b[K"))) == 11


def test_in_a_pipe_the_start_is_told_once_it_takes_long(clock, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(status.sys, "stdout", out)
    monkeypatch.setattr(status.Ticker, "start", lambda self: None)
    NOW.begin("starting", "loading the model")
    with StatusLine() as line:
        line.tick()
        assert out.getvalue() == ""
        clock.s += REMIND_S
        line.tick()
    assert out.getvalue().startswith("starting · loading the model · ") and out.getvalue().endswith("\n")


def test_ranks_that_show_nothing_show_nothing(monkeypatch):
    out = Terminal()
    monkeypatch.setattr(status.sys, "stdout", out)
    with StatusLine(shown=False):
        print("said")
    assert out.getvalue() == "said\n"
