"""An engine around an engine: a turn that calls tools is answered, and the rollout goes on.

A turn ends with a stop id. If it holds a call, the tools run, in threads beside generation where they take long; what they
give is put behind the tokens so far as ids that the policy did not sample, and all of it is the prompt of one more request to
the engine inside. The rollout is handed back once, whole, when a turn calls nothing or a limit is reached. Whoever asks for
rollouts need not know: there is one ``Finished`` for each.
"""

import os
import queue
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from vipfast.engine.base import Engine, Finished, Request, ToolUse
from vipfast.placement import HERE, Placement
from vipfast.tools.base import Output, Tool
from vipfast.tools.calls import Call, calls, run
from vipfast.tools.replies import Replies
from vipfast.types import Finish

WAIT_S = 0.05
"""How long ``step`` waits for a tool when no rollout is being decoded; whoever called may have other things to do."""


@dataclass
class _Rollout:
    """A rollout that is under way; ``made`` ids, in parts, come after the prompt of ``request``."""

    request: Request
    tokens: list[np.ndarray] = field(default_factory=list)
    logp: list[np.ndarray] = field(default_factory=list)
    sampled: list[np.ndarray] = field(default_factory=list)
    made: int = 0
    use: ToolUse = ToolUse()

    def add(self, tokens: np.ndarray, logp: np.ndarray, sampled: bool) -> None:
        self.tokens.append(tokens)
        self.logp.append(logp)
        self.sampled.append(np.full(len(tokens), sampled))
        self.made += len(tokens)


class ToolEngine:
    """Implements ``engine.base.Engine``.

    Args:
        engine: the one that samples.
        tools: what may be called.
        tokenizer: of the policy.
        max_new_tokens: all ids after the prompt at most, sampled or put in by tools.
        max_turns: turns of the policy in a rollout at most.
        max_tool_tokens: ids of one output at most.
        time_s: seconds a call may take.
        placement: of the ranks that sample the same rollouts together, one runs the tools and tells the others.

    A turn with calls that no limit leaves room to answer is the rollout's last, and the rollout counts as cut: finish LENGTH.
    """

    def __init__(
        self,
        engine: Engine,
        tools: Sequence[Tool],
        tokenizer: Any,
        *,
        max_new_tokens: int,
        max_turns: int,
        max_tool_tokens: int,
        time_s: float,
        placement: Placement = HERE,
    ):
        self.engine, self.tokenizer, self.name = engine, tokenizer, engine.name
        self.tools = {tool.name: tool for tool in tools}
        self.max_new_tokens, self.max_turns, self.time_s = max_new_tokens, max_turns, time_s
        self.placement = placement
        self.replies = Replies(tokenizer, max_tool_tokens)
        self._threads = ThreadPoolExecutor(max(4, os.cpu_count() or 1), "tools")
        self._forget()

    def _forget(self) -> None:
        self._rollouts: dict[tuple[int, int], _Rollout] = {}
        self._running = 0
        # A new one each time: what tools still running give goes to the old one, which nobody reads.
        self._done: queue.SimpleQueue = queue.SimpleQueue()

    @property
    def pending(self) -> int:
        return self.engine.pending + self._running

    def submit(self, requests: Sequence[Request]) -> None:
        # One by one, so that a tool need not wait for the other rollouts of its prompt.
        requests = [replace(request, one_by_one=True) for request in requests]
        self.engine.submit(requests)
        for request in requests:
            for index in range(request.first_index, request.first_index + request.count):
                self._rollouts[request.slot, index] = _Rollout(replace(request, first_index=index, count=1))

    def step(self) -> list[Finished]:
        finished = [row for turn in (self.engine.step() if self.engine.pending else []) for row in self._turned(turn)]
        if self._running:
            wait = not finished and not self.engine.pending
            answers = self.placement.agreed(partial(self._answers, wait))
            self._running -= len(answers)
            finished += [row for name, outputs, seconds in answers for row in self._answered(name, outputs, seconds)]
        return finished

    def _answers(self, wait: bool) -> list[tuple[tuple[int, int], list[Output], float]]:
        """What calls that have ended gave: of which rollout, and in how many seconds; ``wait`` a moment for at least one."""
        ended = []
        while not self._done.empty() or (wait and not ended):
            try:
                name, future = self._done.get(timeout=WAIT_S)
            except queue.Empty:
                break
            ended.append((name, *future.result()))
        return ended

    def _turned(self, turn: Finished) -> list[Finished]:
        """Take in a turn; returns the rollout if it was its last."""
        name = turn.slot, turn.index
        rollout = self._rollouts[name]
        if turn.finish == Finish.ERROR:
            del self._rollouts[name]
            return [turn]
        rollout.add(turn.tokens, turn.logp, sampled=True)
        rollout.use = replace(rollout.use, turns=rollout.use.turns + 1)
        asked = calls(self.tokenizer.decode(turn.tokens[:-1])) if turn.finish == Finish.STOP else []
        if not asked or rollout.use.turns == self.max_turns or rollout.made + 2 > self.max_new_tokens:
            return self._ended(name, Finish.LENGTH if asked else turn.finish)
        if any(self.tools[call.name].beside for call in asked if call.name in self.tools):
            self._running += 1
            if self.placement.leads:
                done = self._done
                self._threads.submit(self._run, asked).add_done_callback(lambda future: done.put((name, future)))
            return []
        return self._answered(name, *self._run(asked))

    def _run(self, asked: Sequence[Call]) -> tuple[list[Output], float]:
        start = time.perf_counter()
        return run(asked, self.tools, self.time_s), time.perf_counter() - start

    def _answered(self, name: tuple[int, int], outputs: Sequence[Output], seconds: float) -> list[Finished]:
        """Go on with a rollout after its tools; returns it if there is no room for an answer and one more id."""
        rollout = self._rollouts[name]
        use = rollout.use
        rollout.use = replace(
            use,
            calls=use.calls + len(outputs),
            errors=use.errors + sum(output.error for output in outputs),
            seconds=use.seconds + seconds,
            found=use.found + tuple(id for output in outputs for id in output.found),
        )
        ids = self.replies.tokens([output.text for output in outputs], int(rollout.tokens[-1][-1]))
        if rollout.made + len(ids) >= self.max_new_tokens:
            return self._ended(name, Finish.LENGTH)
        rollout.add(ids, np.zeros(len(ids), rollout.logp[-1].dtype), sampled=False)
        request = rollout.request
        tokens = np.concatenate([request.tokens, *rollout.tokens])
        self.engine.submit([replace(request, tokens=tokens, made=rollout.made)])
        return []

    def _ended(self, name: tuple[int, int], finish: Finish) -> list[Finished]:
        rollout = self._rollouts.pop(name)
        columns = (np.concatenate(part) for part in (rollout.tokens, rollout.logp))
        return [Finished(*name, *columns, finish, np.concatenate(rollout.sampled), rollout.use)]

    def reset(self) -> None:
        """Forget pending work, calls that are running included: what they give is dropped."""
        self._forget()
        self.engine.reset()

    def sync(self, weights: Iterable[tuple[str, Any]]) -> None:
        assert not self.pending, f"sync with {self.pending} rollouts in flight: they would mix two policies"
        self._forget()
        self.engine.sync(weights)

    def sleep(self) -> None:
        assert not self.pending, f"sleep with {self.pending} rollouts in flight"
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def close(self) -> None:
        """Wait for calls that are running, within their time; then nothing of them is left."""
        self._threads.shutdown(cancel_futures=True)
        for tool in self.tools.values():
            tool.close()
        self.engine.close()
