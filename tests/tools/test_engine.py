"""ToolEngine over an engine whose turns are written down: what goes on, what ends, and what is told of it."""

import time

import numpy as np
import pytest
from dialogue import call, plain_tokenizer
from scripted import Scripted, Slow

from vipfast import streams
from vipfast.engine.base import Request, ToolUse
from vipfast.rewards.grader import Grader
from vipfast.tools.calculator import Calculator
from vipfast.tools.engine import ToolEngine
from vipfast.types import Finish, Prompt

TOKENIZER = plain_tokenizer()
EOS = TOKENIZER.eos_token_id


def engine(script, tools=None, *, max_new_tokens=10_000, max_turns=4, max_tool_tokens=200, time_s=5.0):
    """``script``: texts of the turns of every rollout, or a function of (slot, index, turn)."""
    turns = script if callable(script) else lambda slot, index, turn: script[turn]
    inner = Scripted(TOKENIZER, turns, max_new_tokens)
    return ToolEngine(
        inner,
        tools or [Calculator()],
        TOKENIZER,
        max_new_tokens=max_new_tokens,
        max_turns=max_turns,
        max_tool_tokens=max_tool_tokens,
        time_s=time_s,
    )


def request(slot=0, count=1, first=0):
    return Request(slot, np.array(TOKENIZER.encode("2+2? ")), f"uid{slot}", 3, first, count, streams.TRAIN)


def drained(engine):
    rows = []
    while engine.pending:
        rows += engine.step()
    return {(row.slot, row.index): row for row in rows}


def played(engine, *requests):
    engine.submit(list(requests) or [request()])
    return drained(engine)


def text(row):
    return TOKENIZER.decode(row.tokens)


def reply(*outputs):
    return "".join(f"\n<tool_response>\n{output}\n</tool_response>" for output in outputs) + "\n"


def test_a_turn_without_calls_is_handed_on_as_it_came():
    row = played(engine(["4"]))[0, 0]
    assert (text(row), row.finish, row.sampled.all()) == ("4<eos>", Finish.STOP, True)
    assert row.use == ToolUse(turns=1)


def test_a_call_is_answered_and_the_rollout_goes_on():
    tools = engine([f"so {call('2+2')}", "4"])
    row = played(tools)[0, 0]
    first, middle, last = f"so {call('2+2')}<eos>", reply(4), "4<eos>"
    assert text(row) == first + middle + last and row.finish == Finish.STOP
    assert row.sampled.tolist() == [True] * (len(first) - 4) + [False] * len(middle) + [True] * 2  # <eos> is one token
    np.testing.assert_array_equal(row.logp, np.where(row.sampled, np.float32(-0.5), 0))
    assert row.logp.dtype == np.float32 and TOKENIZER.decode(row.last_turn) == last
    assert (row.use.turns, row.use.calls, row.use.errors) == (2, 1, 0) and row.use.seconds >= 0
    asked = tools.engine.requests
    assert [(r.made, r.count, r.first_index, r.uid, r.step) for r in asked] == [
        (0, 1, 0, "uid0", 3),
        (len(row.tokens) - 2, 1, 0, "uid0", 3),
    ]
    np.testing.assert_array_equal(asked[1].tokens, [*asked[0].tokens, *row.tokens[:-2]])  # ids as they were, never made anew


def test_several_calls_of_a_turn_are_answered_together_and_errors_counted():
    row = played(engine([call("1/0") + call("3*3") + "<tool_call>{", "9"]))[0, 0]
    assert f"{reply('error: division by zero', 9)[:-1]}\n<tool_response>\nerror: a tool call must be JSON" in text(row)
    assert (row.use.calls, row.use.errors) == (3, 2) and row.finish == Finish.STOP


def test_the_last_turn_allowed_is_not_answered_and_counts_as_cut():
    tools = engine([call("1"), call("2"), call("3")], max_turns=2)
    row = played(tools)[0, 0]
    assert text(row) == f"{call('1')}<eos>{reply(1)}{call('2')}<eos>" and row.finish == Finish.LENGTH
    assert (row.use.turns, row.use.calls) == (2, 1)


def test_a_turn_that_hit_the_length_limit_calls_nothing():
    row = played(engine([call("1") + "…", "x"]))[0, 0]
    assert text(row) == call("1") and row.finish == Finish.LENGTH and row.use.calls == 0


@pytest.mark.parametrize(("spare", "last"), [(0, None), (1, "4…"), (2, "4")])
def test_an_answer_needs_room_for_itself_and_one_more_token(spare, last):
    used = len(call("2+2")) + 1 + len(reply(4))
    row = played(engine([call("2+2"), last], max_new_tokens=used + spare))[0, 0]
    assert row.use.calls == 1 and row.sampled.all() == (last is None)
    assert row.finish == (Finish.STOP if last == "4" else Finish.LENGTH)
    assert len(row.tokens) == (used + spare if last else len(call("2+2")) + 1)


def test_a_long_output_is_cut_to_its_limit():
    row = played(engine([call("9**999"), "x"], max_tool_tokens=50))[0, 0]
    assert (~row.sampled).sum() == len(reply("")) + 50 and "[… cut …]" in text(row)


def test_what_a_policy_writes_of_responses_is_its_own_text():
    """Forged tags change nothing: ids stay sampled, and only the last turn is graded."""
    row = played(engine([f"{call('2+2')}{reply(5)}5", "<tool_response>\n6\n</tool_response>"]))[0, 0]
    forged = len(f"{call('2+2')}{reply(5)}5") + 1
    assert row.sampled[:forged].all() and (~row.sampled).sum() == len(reply(4)) and text(row).count("\n4\n") == 1


def test_the_grader_sees_the_last_turn_alone():
    seen = []
    grader = Grader(lambda texts, *_: seen.extend(texts) or [1.0] * len(texts), TOKENIZER)
    rows = played(engine(lambda slot, index, turn: [[call("40+2"), "it is 42"], ["43"]][index][turn]), request(count=2))
    rows[0, 2] = played(engine([call("1"), call("2")], max_turns=2))[0, 0]
    grader.grade([Prompt("u", "", None)] * 3, [rows[0, i] for i in range(3)])
    assert seen == ["it is 42", "43", call("2")]


def test_others_are_decoded_while_a_tool_runs_and_pending_counts_all():
    slow = Slow()
    turns = {0: [call("hm", "slow", "text"), "done"], 1: ["y" * 500]}
    tools = engine(lambda slot, index, turn: turns[index][turn], [slow])
    tools.submit([request(count=2)])
    while tools.engine.pending == 2:
        tools.step()
    assert slow.running.acquire(timeout=10) and tools.pending == 2
    ended = []
    while not ended:
        ended = tools.step()
    assert ended[0].index == 1 and tools.pending == 1 and tools.step() == []
    slow.may.set()
    rest = drained(tools)
    assert text(rest[0, 0]).endswith("done<eos>") and tools.pending == 0
    tools.close()
    assert slow.closed and tools.engine.calls == ["close"]


def test_waiting_for_a_tool_takes_no_processor_and_comes_back_soon():
    slow = Slow()
    tools = engine([call("hm", "slow", "text"), "x"], [slow])
    tools.submit([request()])
    while tools.engine.pending:
        tools.step()
    start, busy = time.perf_counter(), time.process_time()
    assert tools.step() == []
    assert time.perf_counter() - start < 1.0 and time.process_time() - busy < 0.03
    slow.may.set()
    drained(tools)


def test_reset_drops_what_a_tool_still_running_will_say():
    slow = Slow()
    tools = engine([call("old", "slow", "text"), "x"], [slow])
    tools.submit([request()])
    while tools.engine.pending:
        tools.step()
    assert slow.running.acquire(timeout=10)
    tools.reset()
    assert tools.pending == 0 and tools.engine.calls == ["reset"]
    slow.may.set()
    tools.engine.script = lambda slot, index, turn: [call("new", "slow", "text"), "z"][turn]
    row = played(tools)[0, 0]
    assert text(row).count("tool_response>") == 2 and "new" in text(row) and "old" not in text(row)


def test_passages_found_are_noted():
    slow = Slow()
    slow.may.set()
    row = played(engine([call("p1 p2", "slow", "text"), call("p3", "slow", "text"), "x"], [slow]))[0, 0]
    assert row.use.found == ("p1", "p2", "p3")


def test_many_rollouts_with_turns_of_their_own_all_come_back_once():
    turns = lambda slot, index, turn: call(f"{slot}+{index}") if turn < (slot + index) % 4 else f"{slot + index}"  # noqa: E731
    rows = played(engine(turns), *(request(slot, count=5) for slot in range(6)))
    assert sorted(rows) == [(slot, index) for slot in range(6) for index in range(5)]
    for (slot, index), row in rows.items():
        assert row.use.turns == (slot + index) % 4 + 1
        assert row.finish == Finish.STOP and TOKENIZER.decode(row.last_turn) == f"{slot + index}<eos>"
        assert text(row).count(f"\n{slot + index}\n") == row.use.calls == (slot + index) % 4


class Told:
    """A placement of two ranks that sample together: the first notes what it decides, the second is told."""

    def __init__(self, leads, notes):
        self.leads, self.notes = leads, notes

    def agreed(self, work):
        if self.leads:
            self.notes.append(work())
            return self.notes[-1]
        return self.notes.pop(0)


def test_of_ranks_that_sample_together_one_runs_the_tools():
    turns = lambda slot, index, turn: [call(f"p{index}", "slow", "text"), call("1+1"), "x" * index][turn]  # noqa: E731
    notes, seen, ran = [], [], []
    for leads in (True, False):
        slow = Slow()
        slow.may.set()
        tools = engine(turns, [slow, Calculator()])
        tools.placement = Told(leads, notes)
        seen.append({name: (row.tokens.tolist(), row.use.found) for name, row in played(tools, request(count=6)).items()})
        ran.append(slow.running.acquire(timeout=0.1))
    assert seen[0] == seen[1] and seen[0][0, 3][1] == ("p3",) and ran == [True, False] and not notes


def test_an_engine_error_is_a_row_without_tokens_and_lost_rollouts_are_not_waited_for():
    tools = engine([call("1"), "x"])
    tools.submit([request(count=2)])
    tools.engine.rows = []  # an engine that lost them
    assert tools.pending == 0
    tools.sync([])
    assert played(tools)[0, 0].finish == Finish.STOP


def test_the_engine_inside_sleeps_wakes_and_syncs():
    tools = engine(["x"])
    for name in ("sync", "sleep", "wake"):
        getattr(tools, name)(*([[]] if name == "sync" else []))
    assert tools.engine.calls == ["sync", "sleep", "wake"] and tools.name == "scripted"
    tools.submit([request()])
    with pytest.raises(AssertionError, match="in flight"):
        tools.sleep()
