"""vLLM's engine as far as vipfast calls it, with the same signatures, sampling from a copy of the model; records the calls.

What vLLM loses is lost here too: weights at sleep level 2, and prompts cached under old weights until the cache is reset.
"""

import copy
import functools
from types import SimpleNamespace

import numpy as np
import torch
from transformers import Qwen2ForCausalLM

from vipfast import streams
from vipfast.engine.base import Request, Sampling
from vipfast.engine.transformers import TransformersEngine
from vipfast.types import Finish


def sampling_params(**given):
    return SimpleNamespace(**given)


class FakeWorker:
    def __init__(self, model, calls):
        self.model, self.calls = model, calls

    def get_model(self):
        return self.model

    def reload_weights(self, weights_iterator=None):
        self.calls.append("reload_weights")
        self.model.load_weights(weights_iterator)


class FakeLLM:
    """``model`` gives shapes; the copy starts with dummy weights."""

    def __init__(self, model, calls, pad_id=0):
        self.calls, self.pad_id, self.asleep = calls, pad_id, set()
        self.model = copy.deepcopy(model)
        vars(self.model).pop("num_known_ids", None)  # vLLM reads the model's config alone
        methods = {"load_weights": _load, "forward": _forward, "compute_logits": _compute_logits}
        self.model.__class__ = type("Served", (type(model),), methods)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(1e-3)
        self.worker = FakeWorker(self.model, calls)
        self.given: list[SimpleNamespace] = []
        self.inner, self.asked, self.ended = None, {}, {}

    def add_request(self, request_id, prompt, params):
        self.given.append(params)
        if self.inner is None:
            sampling = Sampling(params.max_tokens, params.temperature, params.top_p, tuple(params.stop_token_ids))
            self.inner = TransformersEngine(self.model, sampling, self.pad_id)
        tokens = np.array(prompt["prompt_token_ids"])
        self.asked[request_id] = params.n
        self.inner.submit([Request(int(request_id), tokens, request_id, params.seed or 0, 0, params.n, streams.TRAIN)])

    def has_unfinished_requests(self):
        return bool(self.asked)

    def step(self):
        assert not self.asleep, f"asked to sample while {self.asleep} are asleep"
        if self.calls[-1] != "generate":
            self.calls.append("generate")
        outputs = []
        for row in self.inner.step():
            name = str(row.slot)
            self.ended.setdefault(name, []).append(row)
            if len(self.ended[name]) == self.asked[name]:
                del self.asked[name]
                outputs.append(SimpleNamespace(request_id=name, outputs=[_completion(row) for row in self.ended.pop(name)]))
        return outputs

    def abort_request(self, request_ids):
        self.calls.append(f"abort {len(request_ids)}")
        self.asked, self.ended = {}, {}
        self.inner.reset()

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")
        if self.inner is not None:
            self.inner.reset()
        return True

    def collective_rpc(self, method, args=()):
        return [method(self.worker, *args)]

    def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.asleep = {"weights", "kv_cache"}
        if level == 2:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.fill_(torch.nan)

    def wake_up(self, tags):
        self.calls.append(f"wake {' '.join(tags)}")
        self.asleep -= set(tags)


def _load(model, weights):
    own, loaded = dict(model.named_parameters(remove_duplicate=False)), set()
    with torch.no_grad():
        for name, tensor in weights:
            own[name].copy_(tensor)
            loaded.add(name)
    return loaded


@functools.wraps(Qwen2ForCausalLM.forward)
def _forward(model, **inputs):
    """As in vLLM, logits come from ``compute_logits``."""
    outputs = super(type(model), model).forward(**inputs)
    outputs.logits = model.compute_logits(outputs.logits)
    return outputs


def _compute_logits(model, logits):
    return logits


def _completion(row):
    assert row.finish != Finish.ERROR
    logprobs = SimpleNamespace(logprobs=row.logp.tolist())
    return SimpleNamespace(index=row.index, token_ids=row.tokens.tolist(), logprobs=logprobs)
