"""Tools around vLLM itself, on a CPU: turns of its own continue where they were, and their log-probs are the policy's."""

import importlib.util

import numpy as np
import pytest
import torch
from decoding import request
from dialogue import call, plain_tokenizer

from vipfast.config import Config
from vipfast.engine import make_engine
from vipfast.engine.base import Sampling
from vipfast.policy import load_policy
from vipfast.resolve import resolve
from vipfast.tools import calls as calls_module
from vipfast.tools import engine as engine_module
from vipfast.tools.calculator import Calculator
from vipfast.tools.engine import ToolEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; .ci/run has an environment"),
]

TOKENIZER = plain_tokenizer()
PROMPTS = [TOKENIZER.encode(text) for text in ("3 + 4 = ", "sort 8 3 1 = ", "reverse 1 2 3 = ")]


def test_rollouts_with_calls_are_the_policys_and_the_same_in_any_rounds(monkeypatch):
    # The starter writes no calls, so every turn of even length counts as one.
    asked = lambda text: calls_module.calls(call(f"{len(text)} * 2")) if len(text) % 2 == 0 else []  # noqa: E731
    monkeypatch.setattr(engine_module, "calls", asked)
    config = resolve(Config(engine="vllm", device="cpu", threads=1, output_dir="unused", max_new_tokens=120)).config
    policy = load_policy(config).eval()
    inner = make_engine(config, policy, Sampling(120, temperature=1.0, stop_ids=(256,), seed=5), 257)
    engine = ToolEngine(inner, [Calculator()], TOKENIZER, max_new_tokens=120, max_turns=3, max_tool_tokens=20, time_s=5.0)
    engine.sync(policy.named_parameters())

    def rollouts(*rounds):
        rows = {}
        for first, count in rounds:
            engine.submit([request(slot, prompt, count, first) for slot, prompt in enumerate(PROMPTS)])
            while engine.pending:
                rows |= {(row.slot, row.index): row for row in engine.step()}
        return rows

    found = rollouts((0, 6))
    turns = [row.use.turns for row in found.values()]
    assert len(found) == 18 and max(turns) >= 2
    for (slot, _), row in found.items():
        with torch.no_grad():
            logits = policy(torch.tensor([[*PROMPTS[slot], *row.tokens]])).logits[0, len(PROMPTS[slot]) - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(row.tokens)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(row.logp[row.sampled], logp[row.sampled], atol=1e-4)
        assert (row.logp[~row.sampled] == 0).all() and ("<tool_response>" in TOKENIZER.decode(row.tokens)) == (
            row.use.calls > 0
        )
    split = rollouts((0, 2), (2, 4))
    assert {name: row.tokens.tolist() for name, row in split.items()} == {n: row.tokens.tolist() for n, row in found.items()}
