"""What the engine's tests share: small models whose texts depend on their context, and plain forward passes to compare with."""

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from vipfast import streams
from vipfast.engine.base import Request

V, PAD = 23, 22
SHAPE = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SHAPE |= dict(max_position_embeddings=64, pad_token_id=None, bos_token_id=None, eos_token_id=None)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [4], [7, 7, 1], [3, 9, 20, 5, 5, 2]]


def sharpened(model):
    """Random weights give flat logits; larger ones make the texts depend on the context."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.3)
    return model.eval()


def qwen2(tied=True, **kwargs):
    torch.manual_seed(1)
    config = {**SHAPE, "num_key_value_heads": 2, "tie_word_embeddings": tied, **kwargs}
    return sharpened(Qwen2ForCausalLM(Qwen2Config(**config)))


def request(slot, tokens, count=2, first=0, step=0, stream=streams.TRAIN):
    return Request(slot, np.array(tokens), f"uid{slot}", step, first, count, stream)


def drain(engine):
    finished = []
    while engine.pending:
        finished += engine.step()
    return finished


def run(engine, requests):
    engine.submit(requests)
    return {(f.slot, f.index): f for f in drain(engine)}


def texts(results):
    return {key: f.tokens.tolist() for key, f in results.items()}


def log_probs(model, prompt, tokens, temperature=1.0):
    """log_softmax of one plain forward pass over prompt + tokens, at the positions that predict the tokens."""
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
    model.train(training)
    logp = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)
    return logp.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


FLOAT32 = 1e-4
"""How far log-probs of these models may lie apart where passes of other shapes, libraries or processors made them in float32.

Rounding of the head's sum alone may reach gamma_32 sum |h w| = 32 eps 6 = 2.3e-5 (tests/kernels/rounding.py), and two layers of
several such sums stand before it. A wrong mask, position, temperature or cached key moves a log-prob by 0.01 and more.
"""


def assert_aligned(model, results, prompts=PROMPTS, temperature=1.0, atol=FLOAT32):
    """Log-probs of finished rollouts are those of a plain forward pass of the model over each of them."""
    assert results
    for (slot, _), f in results.items():
        assert len(f.tokens) == len(f.logp) > 0
        np.testing.assert_allclose(f.logp, log_probs(model, prompts[slot], f.tokens.tolist(), temperature), atol=atol, rtol=0)


def count_forwards(model):
    """A list that gets (rows, tokens per row) of every forward pass from now on."""
    seen = []
    body = model.get_input_embeddings()
    body.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    return seen
