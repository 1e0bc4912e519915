"""LoRA merged for the sampler: exact, without touching the base, a bucket at a time, whatever gathers the weights."""

import pytest
import torch
from decoding import FLOAT32, PROMPTS, log_probs, qwen2
from peft import LoraConfig, get_peft_model

from vipfast.engine.merge import PlainWeights
from vipfast.errors import UsageError
from vipfast.frozen import keep_in_bfloat16


def with_lora(tied=True, **options):
    torch.manual_seed(2)
    model = get_peft_model(qwen2(tied), LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or name.endswith("bias"):
                parameter.normal_(0, 0.2)
    return model.eval()


def loaded(weights, tied=True):
    """A fresh model without LoRA that holds ``weights``."""
    model = qwen2(tied)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights:
            own.pop(name).copy_(tensor)
    assert not own
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "down_proj"]}], ids=str)
def test_merged_weights_are_the_wrapped_models(tied, options):
    policy = with_lora(tied, **options)
    plain = PlainWeights(policy)
    weights = list(plain(policy.named_parameters()))
    names = dict(qwen2(tied).named_parameters())
    assert plain.names == {name for name, _ in weights} == set(names)
    assert plain.tied == ({"model.embed_tokens.weight": ["lm_head.weight"]} if tied else {})
    ours, theirs = (log_probs(model, PROMPTS[0], [3, 1, 4]) for model in (loaded(weights, tied), policy))
    assert abs(ours - theirs).max() < FLOAT32
    assert abs(log_probs(qwen2(tied), PROMPTS[0], [3, 1, 4]) - theirs).max() > 0.1


def test_over_a_bfloat16_base_sums_are_taken_and_handed_on_in_float32():
    policy, plain = with_lora(), with_lora()
    for name, parameter in plain.named_parameters():
        if name.endswith("base_layer.weight"):
            parameter.data = parameter.data.bfloat16().float()
    keep_in_bfloat16(policy)
    ours, theirs = (dict(PlainWeights(model)(model.named_parameters())) for model in (policy, plain))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}


def test_a_hundred_cycles_leave_every_weight_bit_identical():
    policy = with_lora()
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    plain = PlainWeights(policy)
    first = {name: tensor.clone() for name, tensor in plain(policy.named_parameters())}
    for _ in range(99):
        last = dict(plain(policy.named_parameters()))
    assert all(torch.equal(before[name], p) for name, p in policy.named_parameters())
    assert all(torch.equal(first[name], last[name]) for name in first)


def test_new_adapters_show_at_once_and_nothing_handed_over_aliases_an_adapted_weight():
    policy = with_lora()
    plain = PlainWeights(policy)
    old = dict(plain(policy.named_parameters()))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.mul_(100)
    new = dict(plain(policy.named_parameters()))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(old[name], new[name])
    own = {p.data_ptr() for p in policy.parameters()}
    assert new[name].data_ptr() not in own and new["model.norm.weight"].data_ptr() in own


def test_a_bucket_bounds_what_is_merged_ahead():
    policy = with_lora()
    size = 4 * 32 * 32  # q_proj, the smallest of a layer beside k_proj and v_proj
    for bucket_bytes, ahead in ((1, 1), (size, 2)):
        read, most = [0], 0

        def counted(read=read):
            for name, tensor in policy.named_parameters():
                read[0] += "lora_B" in name
                yield name, tensor

        given = 0
        for name, _ in PlainWeights(policy, bucket_bytes)(counted()):
            given += "proj" in name and name.endswith("weight")
            most = max(most, read[0] - given + 1)
        assert given == 14 and most <= ahead + 1, (bucket_bytes, most)


def test_without_lora_weights_pass_through_as_they_are():
    policy = qwen2(False)
    weights = list(PlainWeights(policy)(policy.named_parameters()))
    assert [(name, tensor.data_ptr()) for name, tensor in weights] == [(n, p.data_ptr()) for n, p in policy.named_parameters()]


@pytest.mark.parametrize("options", [{"use_dora": True}, {"target_modules": ["embed_tokens"]}, {"lora_bias": True}], ids=str)
def test_adapters_that_no_product_describes_are_refused(options):
    with pytest.raises(UsageError, match="LoRA on .*--engine transformers"):
        PlainWeights(with_lora(**options))
