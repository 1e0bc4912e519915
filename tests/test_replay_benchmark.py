"""benchmarks/replay.py: what learns from the recorded rollouts is the policy that sampled them."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vipfast.config import Config

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("replay")
    for name in ("replay", "common"):
        sys.modules.pop(name, None)


def test_every_model_is_limited_to_the_tokenizer_that_sampled(bench, monkeypatch):
    import torch

    def learner(policy, config, pad_id, reference):
        made.append((policy, pad_id, reference))
        backend = "triton" if config.kernels == "required" else "torch"
        return SimpleNamespace(backend=backend, parameters=[torch.zeros(1)])

    made, tokenizer = [], SimpleNamespace(pad_token_id=7)
    monkeypatch.setattr("vipfast.policy.load_policy", lambda config, tokenizer=None: ("policy", tokenizer))
    monkeypatch.setattr("vipfast.policy.load_reference", lambda config, tokenizer=None: ("reference", tokenizer))
    monkeypatch.setattr("vipfast.learn.learner.Learner", learner)
    assert bench.replay(Config(), tokenizer, []) == ([], None)
    assert made == 3 * [(("policy", tokenizer), 7, ("reference", tokenizer))]
