"""LoRA's frozen layers in bfloat16: what they compute, what stays float32, and whole runs over them."""

import copy
import json
import sys

import peft
import pytest
import torch
from torch import nn

from vipfast import Config, Trainer, cli, memory
from vipfast.errors import UsageError
from vipfast.evaluation.command import main as evaluate
from vipfast.frozen import FrozenLinear, keep_in_bfloat16, round_to_bfloat16
from vipfast.model_facts import read_facts
from vipfast.policy import load_policy, load_reference
from vipfast.resolve import resolve


def layers(bias=True):
    """A layer, a frozen copy of it, and a plain one that has the frozen one's numbers."""
    torch.manual_seed(0)
    layer = nn.Linear(33, 17, bias)
    rounded = copy.deepcopy(layer)
    rounded.weight.data = rounded.weight.data.bfloat16().float()
    return layer, FrozenLinear(copy.deepcopy(layer)), rounded


def output_and_gradient(layer, dtype):
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    out = layer(x)
    (out * torch.arange(17)).sum().backward()
    return out, x.grad


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_computes_as_a_plain_layer_of_the_rounded_numbers(bias, dtype):
    _, frozen, rounded = layers(bias)
    ours, theirs = (output_and_gradient(layer.to(dtype), dtype) for layer in (frozen, rounded))
    assert frozen.weight.dtype == torch.bfloat16 and not any(p.requires_grad for p in frozen.parameters())
    assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(ours, theirs))


def test_under_autocast_it_computes_as_the_layer_it_stands_in_for():
    layer, frozen, _ = layers()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (output_and_gradient(each, torch.float32) for each in (frozen, layer))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs)) and ours[0].dtype == torch.bfloat16


def test_it_stays_what_it_is_wherever_the_model_goes():
    _, frozen, _ = layers()
    held = frozen.weight.detach().clone()
    for moved in (frozen.float(), frozen.double(), frozen.to("cpu", torch.float32), copy.deepcopy(frozen).half()):
        assert type(moved) is FrozenLinear and moved.weight.dtype == torch.bfloat16 and torch.equal(moved.weight, held)
    tied = nn.ModuleList([frozen, frozen]).to(torch.float64)
    assert tied[0].weight is tied[1].weight


def test_no_wide_copy_is_kept_for_the_backward_pass():
    _, frozen, rounded = layers(bias=False)
    kept = {}
    for name, layer in (("frozen", frozen), ("plain", rounded.requires_grad_(False))):
        found = kept.setdefault(name, [])
        with torch.autograd.graph.saved_tensors_hooks(lambda x, found=found: found.append(x) or x, lambda x: x):
            layer(torch.randn(2, 33, requires_grad=True))
    assert [x.dtype for x in kept["frozen"]] == [torch.bfloat16]
    assert torch.float32 in [x.dtype for x in kept["plain"]]


def config(**changes):
    given = dict(device="cpu", dtype="float32", threads=1, lora_rank=2, base_dtype="bfloat16", output_dir="-", steps=1)
    return Config(**given | changes)


def test_what_is_frozen_is_bfloat16_and_the_estimate_counts_it():
    model, facts = load_policy(config()), read_facts("starter")
    frozen = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    assert len(frozen) == 3 * 7 and all(name.endswith("proj.base_layer.weight") for name in frozen)
    assert model.dtype == torch.float32  # the sampler's masks are of this type
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    parts = memory.training_state(config(), facts)
    held = sum(p.nbytes for p in model.parameters())
    assert parts["weights (float32)"] + parts["frozen layers (bfloat16)"] == held
    wide = memory.training_state(config(base_dtype="float32"), facts)
    assert "frozen layers (bfloat16)" not in wide
    assert wide["weights (float32)"] == sum(p.nbytes for p in load_policy(config(base_dtype="float32")).parameters())


def test_adapters_start_alike_over_either_base():
    ours, theirs = (dict(load_policy(config(base_dtype=dtype)).named_parameters()) for dtype in ("bfloat16", "float32"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs if "lora_" in name)


def test_the_reference_is_the_policy_without_its_adapters():
    policy, reference = load_policy(config()), load_reference(config(beta=0.1))
    ids = torch.arange(40)[None]
    with torch.no_grad(), policy.disable_adapter():
        assert torch.equal(policy(ids).logits, reference(ids).logits)
    assert sum(p.nbytes for p in reference.parameters()) < sum(
        p.nbytes for p in load_reference(config(beta=0.1, base_dtype="float32")).parameters()
    )


def test_rounding_in_place_gives_the_same_numbers():
    kept = keep_in_bfloat16(load_policy(config(lora_rank=0)).requires_grad_(False))
    rounded = load_policy(config(lora_rank=0))
    round_to_bfloat16(rounded)
    own = dict(rounded.named_parameters())
    assert all(torch.equal(p.float(), own[name]) for name, p in kept.named_parameters())
    assert {p.dtype for p in own.values()} == {torch.float32}


def run(folder, resume=False, **changes):
    given = dict(
        steps=2, prompts_per_step=8, rollouts_per_prompt=6.0, allocator="uniform", heldout_prompts=8, eval_every=0,
        checkpoint_every=0, threads=1, device="cpu", lora_rank=2, learning_rate=0.01, output_dir=str(folder),
    )  # fmt: skip
    assert Trainer(Config(**given | changes), resume=resume).run() == 0
    return rows(folder)


def rows(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "speed/", "memory/"))} for row in found]


def test_a_run_computed_in_bfloat16_is_the_same_over_either_base(tmp_path):
    wide, narrow = (run(tmp_path / dtype, dtype="bfloat16", base_dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert wide == narrow and any(row.get("train/grad_norm") for row in wide)


def test_a_run_over_a_bfloat16_base_learns_goes_on_bit_for_bit_and_is_evaluated_as_it_was_trained(tmp_path, capsys):
    options = dict(base_dtype="bfloat16", beta=0.05)
    straight = run(tmp_path / "straight", **options)
    gaps = [row["policy/sync_gap"] for row in straight if row.get("policy/sync_gap") is not None]
    assert gaps and max(gaps) < 1e-4 and straight[1]["policy/kl"] == pytest.approx(0, abs=1e-7)
    assert straight[2]["policy/kl"] > 1e-6  # adapters have moved
    run(tmp_path / "cut", **options, steps=1)
    assert run(tmp_path / "cut", **options, resume=True)[2] == straight[2]
    files = [tmp_path / name / "final" / "adapter_model.safetensors" for name in ("straight", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()

    out = tmp_path / "evaluated"
    told = ["--model", str(tmp_path / "straight"), "--samples", "2", "--device", "cpu", "--threads", "1"]
    assert evaluate([*told, "--max-prompts", "8", "--output-dir", str(out)]) == 0
    assert "base_dtype bfloat16" in capsys.readouterr().out


def test_auto_follows_the_compute_dtype():
    for device, dtype, found in (("cuda", None, "bfloat16"), ("cpu", None, "float32"), ("cpu", "bfloat16", "bfloat16")):
        plain = config(device=device, dtype=dtype, base_dtype="auto")
        run = resolve(plain, ask_torch=False, gpu_bytes=80e9 if device == "cuda" else None)
        chosen, lines = run.config, run.lines
        assert chosen.base_dtype == found and any(line.startswith(f"base_dtype = {found} (LoRA") for line in lines)
        assert resolve(chosen, ask_torch=False).config == chosen
    note = "note: --base-dtype bfloat16 has no effect with --lora-rank 0, which freezes nothing"
    assert note in resolve(Config(base_dtype="bfloat16", device="cpu", threads=1)).lines


def test_a_run_saved_before_the_option_goes_on_over_float32(tmp_path, monkeypatch):
    straight = run(tmp_path / "straight", dtype="bfloat16", base_dtype="float32")
    whole = Trainer._state
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_state", lambda self: without(whole(self)))
        run(tmp_path / "old", dtype="bfloat16", base_dtype="float32", steps=1)
    saved = tmp_path / "old" / "config.yaml"
    saved.write_text("".join(line for line in saved.read_text().splitlines(True) if not line.startswith("base_dtype")))
    made = []
    monkeypatch.setattr("vipfast.trainer.load_policy", lambda *given: made.append(load_policy(*given)) or made[-1])
    assert cli.main(["--resume", "--output-dir", str(tmp_path / "old"), "--steps", "2"]) == 0
    assert len(made) == 1 and not any(isinstance(module, FrozenLinear) for module in made[0].modules())
    assert rows(tmp_path / "old")[2] == straight[2]


def without(state):
    del state["config"]["base_dtype"]
    return state


def test_a_missing_peft_names_the_extra_that_has_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match=r"--lora-rank 2: needs the peft library; pip install 'vipfast\[lora\]'"):
        load_policy(config())


def test_adapters_on_every_frozen_layer_take_gradients_through_it():
    model = load_policy(config())
    model(torch.arange(20)[None], labels=torch.arange(20)[None]).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert isinstance(model, peft.PeftModel) and all(grad is not None for grad in grads.values())
    assert all(grad.abs().max() > 0 for name, grad in grads.items() if "lora_B" in name)
