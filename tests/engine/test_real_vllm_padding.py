"""vLLM itself never samples rows of a padded head, and its log-probs leave them out, raw or processed."""

import importlib.util

import numpy as np
import pytest
import torch
from decoding import log_probs, request, run

from vipfast.config import Config
from vipfast.engine import make_engine
from vipfast.engine.base import Sampling
from vipfast.policy import load_policy, load_tokenizer, model_path, read_tokenizer
from vipfast.resolve import resolve

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; .ci/run has an environment"),
]

KNOWN, ROWS, PROMPT = 258, 320, [50, 43, 51, 61]


@pytest.mark.parametrize("top_p", [1.0, 0.9], ids=["processed", "raw"])
def test_padding_is_never_sampled_and_takes_no_probability(tmp_path, top_p):
    plain = load_policy(Config(device="cpu", dtype="float32"))
    padded = load_policy(Config(device="cpu", dtype="float32"))
    padded.resize_token_embeddings(ROWS, mean_resizing=False)
    with torch.no_grad():
        rows = padded.get_output_embeddings().weight
        rows[KNOWN:] = -rows[torch.arange(KNOWN, ROWS) % 10 + ord("0")]
        assert padded(torch.tensor([PROMPT])).logits[0, -1].argmax() >= KNOWN
    padded.save_pretrained(tmp_path)
    read_tokenizer(model_path("starter")).save_pretrained(tmp_path)
    config = resolve(Config(engine="vllm", model=str(tmp_path), device="cpu", threads=1, max_new_tokens=16)).config
    policy = load_policy(config, load_tokenizer(config))
    engine = make_engine(config, policy, Sampling(4, top_p=top_p), 257)
    for _ in range(2):
        engine.sync(policy.named_parameters())
        results = run(engine, [request(0, PROMPT, count=128)])
        assert sum(len(row.tokens) for row in results.values()) == 512
        for row in results.values():
            assert row.tokens.max() < KNOWN
            np.testing.assert_allclose(row.logp, log_probs(plain, PROMPT, row.tokens.tolist()), atol=1e-4, rtol=0)
        engine.reset()
    engine.close()
