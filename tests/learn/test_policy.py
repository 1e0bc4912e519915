import numpy as np
import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from vipfast.errors import UsageError
from vipfast.learn.pack import Rectangle
from vipfast.learn.policy import Policy

SIZES = dict(
    vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=128, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def qwen2(**options):
    return Qwen2ForCausalLM(Qwen2Config(**(SIZES | options)))


def gemma2():
    return Gemma2ForCausalLM(Gemma2Config(head_dim=8, final_logit_softcapping=3.0, attn_implementation="eager", **SIZES))


def cohere():
    return CohereForCausalLM(CohereConfig(logit_scale=0.0625, **SIZES))


def granite():
    return GraniteForCausalLM(GraniteConfig(logits_scaling=8.0, **SIZES))


def rectangle():
    """Row 0: prompt of 2, completion of 4; row 1: prompt of 3, completion of 1, then padding."""
    ids = np.array([[5, 6, 7, 8, 9], [11, 12, 13, 36, 36]])
    return Rectangle(
        np.arange(2), ids, np.array([1, 2, 3, 4, 7]), np.array([7, 8, 9, 10, 14]), np.arange(5), np.array([0, 4, 5]), 2
    )


def dense(model, temperature):
    def logp(*row):
        z = model(torch.tensor([row])).logits[0].double() / temperature
        return torch.log_softmax(z, -1)[range(len(row) - 1), row[1:]]

    with torch.no_grad():
        return torch.cat([logp(5, 6, 7, 8, 9, 10)[1:], logp(11, 12, 13, 14)[2:]])


@pytest.mark.parametrize("make", [qwen2, gemma2, cohere, granite])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_the_models_own(make, temperature):
    torch.manual_seed(0)
    model = make().eval()
    found = Policy(model, "float32", "cpu", temperature, train=True).logprob(rectangle())
    assert torch.allclose(found.double(), dense(model, temperature), rtol=0, atol=1e-5)


def test_dropout_is_off():
    torch.manual_seed(0)
    model = qwen2(attention_dropout=0.5).train()
    found = Policy(model, "float64", "cpu", 1.0, train=True).logprob(rectangle())
    assert torch.allclose(found, dense(model.eval(), 1.0), rtol=0, atol=1e-6)


def test_a_reference_is_frozen():
    assert not any(p.requires_grad for p in Policy(qwen2(), "float32", "cpu", 1.0, train=False).model.parameters())


def test_another_transform_of_the_logits_is_refused():
    model = qwen2()
    model.lm_head.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(UsageError, match="log-probs would be wrong"):
        Policy(model, "float32", "cpu", 1.0, train=True)


def test_lora_on_the_head_is_refused():
    import peft

    model = peft.get_peft_model(qwen2(), peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(UsageError, match="leave the head out"):
        Policy(model, "float32", "cpu", 1.0, train=True)
