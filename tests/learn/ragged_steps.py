"""Tiny models and steps of random rollouts, shared by the tests of this folder."""

import copy

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from vipfast.config import Config
from vipfast.types import Prompt, Rollouts, StepPlan

COUNTS = [4, 0, 3, 1, 6]


def tiny(seed=0, tied=True):
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=128, tie_word_embeddings=tied, initializer_range=0.3,
    ))  # fmt: skip


def exact(model):
    """The model wholly in float64: transformers' own norms compute in float32."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name.endswith("norm"):
                setattr(module, name, torch.nn.RMSNorm(16, child.variance_epsilon))
    return model.double()


def configured(**options):
    defaults = dict(
        learning_rate=1e-2, max_new_tokens=16, dtype="float64", device="cpu", prompts_per_step=5, rollouts_per_prompt=2.8
    )
    return Config(**(defaults | options))


def sampled(model, counts=COUNTS, seed=0, temperature=1.0, lengths=None, **columns):
    """A step with random texts and rewards, and sampler_logp from the model's own dense log-softmax in float64.

    What a float64 learner finds then differs by the rounding of sampler_logp to float32 alone, on any machine.
    """
    wide = copy.deepcopy(model).double()
    rng = np.random.default_rng(seed)
    R = sum(counts)
    lengths = rng.integers(1, 17, R) if lengths is None else np.array(lengths)
    prompt_lengths = rng.integers(1, 12, len(counts))
    offsets = lambda x: np.concatenate([[0], np.cumsum(x)]).astype(np.int64)  # noqa: E731 - four uses below
    P, G, T = offsets(prompt_lengths), offsets(counts), offsets(lengths)
    ids, tokens = rng.integers(0, 37, P[-1]), rng.integers(0, 37, T[-1])
    logp = np.zeros(T[-1], np.float32)
    for i in range(R):
        q = int(np.searchsorted(G, i, "right") - 1)
        row = np.concatenate([ids[P[q] : P[q + 1]], tokens[T[i] : T[i + 1]]])
        with torch.no_grad():
            z = wide(torch.from_numpy(row)[None]).logits[0] / temperature
        picked = torch.log_softmax(z, -1)[range(len(row) - 1), row[1:]]
        logp[T[i] : T[i + 1]] = picked[len(row) - 1 - lengths[i] :].float() if lengths[i] else []
    fields = dict(
        prompts=[Prompt(f"uid{q}", "", ids[P[q] : P[q + 1]]) for q in range(len(counts))], prompt_tokens=ids, prompt_offsets=P,
        group_offsets=G, token_offsets=T, tokens=tokens, loss_mask=np.ones(T[-1], bool), sampler_logp=logp,
        reward=rng.integers(0, 2, R).astype(np.float32), index=np.zeros(R, np.int64), round=np.zeros(R, np.int64),
        finish=np.zeros(R, np.uint8), plan=StepPlan.plain([np.array(counts)]),
    )  # fmt: skip
    return Rollouts(**(fields | columns))


def params(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def gradients(learner, step):
    """The gradient of one update, caught at the optimizer."""
    caught = {}

    def catch(*_):
        caught.update({name: p.grad.clone() for name, p in learner.policy.model.named_parameters() if p.grad is not None})

    handle = learner.optimizer.register_step_pre_hook(catch)
    metrics = learner.update(step, 0)
    handle.remove()
    return caught, metrics
