import numpy as np
import pytest
import torch
from ragged_steps import configured, gradients, sampled
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
from vipfast.learn.batch import StepTensors, upload
from vipfast.learn.learner import Learner
from vipfast.learn.pack import MicroBatch, blank
from vipfast.learn.policy import Policy
from vipfast.learn.trainable import Trainable

CPU = torch.device("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

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
    columns = np.array([1, 2, 3, 4, 7]), np.array([7, 8, 9, 10, 14]), np.arange(5), np.array([0, 4, 5])
    (batch,) = upload([MicroBatch(np.arange(2), ids, *columns, 2)], CPU)
    return batch


def packed():
    """The same two rows, one behind the other."""
    ids = np.array([[5, 6, 7, 8, 9, 11, 12, 13]])
    columns = np.array([1, 2, 3, 4, 7]), np.array([7, 8, 9, 10, 14]), np.arange(5), np.array([0, 4, 5])
    (batch,) = upload([MicroBatch(np.arange(2), ids, *columns, 0, row_offsets=np.array([0, 5, 8]))], CPU)
    return batch


def dense(model, temperature):
    def logp(*row):
        z = model(torch.tensor([row])).logits[0].double() / temperature
        return torch.log_softmax(z, -1)[range(len(row) - 1), row[1:]]

    with torch.no_grad():
        return torch.cat([logp(5, 6, 7, 8, 9, 10)[1:], logp(11, 12, 13, 14)[2:]])


@pytest.mark.parametrize("make", [qwen2, gemma2, cohere, granite])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("packing", ["rectangles", "masked"])
def test_log_probs_are_the_models_own(make, temperature, packing):
    torch.manual_seed(0)
    model = make().eval()
    policy = Policy(model, "float32", "cpu", temperature, train=True, packing=packing)
    found = policy(packed() if packing == "masked" else rectangle())
    assert torch.allclose(found.double(), dense(model, temperature), rtol=0, atol=1e-4)


def test_dropout_is_off():
    torch.manual_seed(0)
    model = qwen2(attention_dropout=0.5).train()
    policy = Policy(model, "float64", "cpu", 1.0, train=True)
    found = policy.train()(rectangle())
    assert torch.allclose(found, dense(model.eval(), 1.0), rtol=0, atol=1e-6)


def test_a_reference_is_frozen():
    assert not any(p.requires_grad for p in Policy(qwen2(), "float32", "cpu", 1.0, train=False).model.parameters())


def test_a_policy_to_be_sharded_stays_where_it_is():
    policy = Policy(qwen2(), "float64", "meta", 1.0, train=True, placed=False)
    assert {(p.device.type, p.dtype) for p in policy.parameters()} == {("cpu", torch.float64)}


def test_another_transform_of_the_logits_is_refused():
    model = qwen2()
    model.lm_head.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(UsageError, match="log-probs would be wrong"):
        Policy(model, "float32", "cpu", 1.0, train=True)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "adapters",
    [dict(target_modules=["q_proj", "lm_head"]), dict(target_modules=["q_proj"], modules_to_save=["lm_head"])],
    ids=["lora", "saved"],
)
def test_adapters_on_the_head_are_refused(tied, adapters):
    import peft

    model = peft.get_peft_model(qwen2(tie_word_embeddings=tied), peft.LoraConfig(r=2, **adapters))
    with pytest.raises(UsageError, match="leave the head out of LoRA's target modules and of modules_to_save"):
        Policy(model, "float32", "cpu", 1.0, train=True)


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_on_all_linear_layers_leave_the_head_out(tied):
    import peft

    model = peft.get_peft_model(qwen2(tie_word_embeddings=tied), peft.LoraConfig(r=2, target_modules="all-linear"))
    policy = Policy(model, "float32", "cpu", 1.0, train=True)
    names = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert type(policy.lm_head) is torch.nn.Linear and not policy.lm_head.weight.requires_grad
    assert len(names) == 2 * 7 * 2 and all("lora_" in name and "lm_head" not in name for name in names)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_pass_without_rows_has_a_loss_of_zero_and_gradients_of_zero(backend, tied):
    policy = Policy(qwen2(tie_word_embeddings=tied), "float64", DEVICE, 1.0, train=True, backend=backend)
    (batch,) = upload([blank(36)], policy.device)
    step = sampled(qwen2())
    tensors = StepTensors.of(Trainable.of(step, configured()), policy.device)
    weight_R = torch.ones(step.num_rollouts, dtype=torch.float64, device=policy.device)
    result = policy(batch, tensors.loss_arguments(batch, weight_R, configured()))
    assert result.loss.item() == 0 and result.sums["tokens"].item() == 0
    result.loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_the_policy_holds_each_weight_under_one_name():
    policy = Policy(qwen2(tie_word_embeddings=False), "float32", "cpu", 1.0, train=True)
    own = {f"model.{name}" for name, _ in policy.model.named_parameters()}
    assert {name for name, _ in policy.named_parameters()} == set(policy.state_dict()) == own


def test_bfloat16_states_reach_the_head_over_float32_weights(monkeypatch):
    from vipfast.learn import policy as module

    seen = []

    def watched(hidden_TD, weight_VD, *args, **kwargs):
        seen.append((hidden_TD.dtype, weight_VD.dtype))
        return original(hidden_TD, weight_VD, *args, **kwargs)

    original = module.token_logprob
    monkeypatch.setattr(module, "token_logprob", watched)
    torch.manual_seed(0)
    model = qwen2()
    logp = Policy(model, "bfloat16", "cpu", 1.0, train=True)(rectangle())
    assert seen == [(torch.bfloat16, torch.float32)] and logp.dtype == torch.float32
    assert torch.allclose(logp.double(), dense(model, 1.0), rtol=0, atol=0.2)


def padded(tied):
    """A model of 37 ids padded to 45 rows, whose logits are above all others, and the same model without them."""
    torch.manual_seed(0)
    plain, model = qwen2(tie_word_embeddings=tied), qwen2(tie_word_embeddings=tied, vocab_size=45)
    weights = plain.state_dict()
    for name, parameter in model.state_dict().items():
        parameter[: len(weights[name])] = weights[name]
    model.lm_head.bias = torch.nn.Parameter(torch.where(torch.arange(45) < 37, 0.0, 50.0))
    plain.lm_head.bias = torch.nn.Parameter(torch.zeros(37))
    model.num_known_ids = 37
    return model.eval(), plain.eval()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("tied", [True, False])
def test_padding_takes_no_probability_and_no_gradient(backend, tied):
    model, plain = padded(tied)
    expected = dense(plain, 0.7)
    policy = Policy(model, "float32", DEVICE, 0.7, train=True, backend=backend)
    assert torch.allclose(policy(rectangle()).double(), expected, rtol=0, atol=1e-4)
    model, plain = padded(tied)
    step = sampled(plain)  # its log-probs are those over the ids that are known
    options = dict(kernels="required" if backend == "triton" else "off", device=DEVICE)
    learner = Learner(model, configured(**options), 0)
    assert learner.sync_gap(step) < 1e-6
    found, metrics = gradients(learner, step)
    assert 0 < metrics["policy/entropy"] <= np.log(37)
    wanted, theirs = gradients(Learner(plain, configured(**options), 0), step)
    assert metrics["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-9)
    for name, gradient in found.items():
        assert torch.allclose(gradient[: len(wanted[name])], wanted[name], rtol=1e-9, atol=1e-12)
        assert not gradient[len(wanted[name]) :].any()
