"""An engine whose turns are written down, and tools that wait to be told."""

import threading

import numpy as np

from vipfast.engine.base import Finished, Sampling
from vipfast.tools.base import Output
from vipfast.types import Finish


class Scripted:
    """Implements ``engine.base.Engine``: the k-th turn of every rollout says ``script(slot, index, k)``, a token a step.

    A turn ends with the tokenizer's eos unless it is marked by a final "…", which stands for a limit reached.
    """

    name = "scripted"

    def __init__(self, tokenizer, script, max_new_tokens=10_000):
        self.tokenizer, self.script, self.sampling = tokenizer, script, Sampling(max_new_tokens)
        self.requests, self.rows, self.turns, self.calls = [], [], {}, []

    @property
    def pending(self):
        return len(self.rows)

    def submit(self, requests):
        self.requests += requests
        for request in requests:
            for index in range(request.first_index, request.first_index + request.count):
                turn = self.turns.get((request.slot, index), 0) if request.made else 0
                self.turns[request.slot, index] = turn + 1
                text = self.script(request.slot, index, turn)
                ids = self.tokenizer.encode(text.removesuffix("…")) + [self.tokenizer.eos_token_id] * (not text.endswith("…"))
                assert request.made + len(ids) <= self.sampling.max_new_tokens
                self.rows.append([request.slot, index, ids, len(ids)])

    def step(self):
        for row in self.rows:
            row[3] -= 1
        ended, self.rows = [row for row in self.rows if row[3] <= 0], [row for row in self.rows if row[3] > 0]
        return [self._finished(*row) for row in ended]

    def _finished(self, slot, index, ids, _):
        finish = Finish.STOP if ids[-1] == self.tokenizer.eos_token_id else Finish.LENGTH
        return Finished(slot, index, np.array(ids, np.int64), np.full(len(ids), -0.5, np.float32), finish)

    def reset(self):
        self.rows = []
        self.calls.append("reset")

    def sync(self, weights):
        self.calls.append("sync")

    def sleep(self):
        self.calls.append("sleep")

    def wake(self):
        self.calls.append("wake")

    def close(self):
        self.calls.append("close")


class Slow:
    """Implements ``tools.base.Tool``: says its argument back once it may; ``open`` it first."""

    name, description, parameters, beside = "slow", "Says it back.", {"text": "What to say"}, True

    def __init__(self):
        self.may, self.running, self.closed = threading.Event(), threading.Semaphore(0), False

    def __call__(self, time_s, text):
        self.running.release()
        assert self.may.wait(20)
        return Output(text, error=text == "fail", found=tuple(text.split()) if text.startswith("p") else ())

    def close(self):
        self.closed = True
