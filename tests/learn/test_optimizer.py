"""Moments in main memory change no bit; moments in 8 bits come from a library, and resume exactly."""

import types

import pytest
import torch
from ragged_steps import configured, params, same, sampled, tiny

from vipfast.config import Config
from vipfast.errors import UsageError
from vipfast.learn import optimizer
from vipfast.learn.learner import Learner
from vipfast.learn.optimizer import OffloadedAdamW, make_optimizer
from vipfast.state import load_state, save_state


def weights(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((37, 16), (16,), (64, 80), (3, 5), (1,))]


def stepped(kind, parameters, steps=range(4), skip=None, made=None, **options):
    """``steps`` of fixed random gradients; parameter ``skip`` gets one in odd steps alone."""
    made = made or make_optimizer(parameters, Config(learning_rate=1e-2, weight_decay=0.1, **kind, **options))
    for step in steps:
        torch.manual_seed(100 + step)
        for group in made.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        for i, p in enumerate(parameters):
            grad = torch.randn_like(p)
            p.grad = grad if i != skip or step % 2 else None
        made.step()
    return made


def states_equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
    return all(
        torch.equal(a["state"][i][name], b["state"][i][name]) and a["state"][i][name].dtype == b["state"][i][name].dtype
        for i in a["state"]
        for name in ("step", "exp_avg", "exp_avg_sq")
    )


@pytest.fixture
def fake_device(monkeypatch):
    """The device is a copy: what a step leaves there and does not bring back is lost."""
    moved = []
    monkeypatch.setattr(optimizer, "_on", lambda device, host: moved.append(host.numel()) or host.clone())
    return moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("piece", [16, 2**26])
@pytest.mark.parametrize("skip", [None, 2])
def test_offloaded_moments_change_no_bit(dtype, piece, skip, fake_device, monkeypatch):
    monkeypatch.setattr(optimizer, "PIECE", piece)
    plain, offloaded = weights(dtype), weights(dtype)
    a = stepped({}, plain, skip=skip)
    assert not fake_device
    b = stepped({"offload_optimizer": True}, offloaded, skip=skip)
    assert type(b) is OffloadedAdamW and max(fake_device) == min(piece, 64 * 80)
    assert all(torch.equal(p, q) for p, q in zip(plain, offloaded)) and states_equal(a, b)


@pytest.mark.parametrize("first", [{}, {"offload_optimizer": True}], ids=["plain", "offloaded"])
@pytest.mark.parametrize("then", [{}, {"offload_optimizer": True}], ids=["plain", "offloaded"])
def test_a_run_goes_on_with_and_without_offload(first, then, tmp_path, fake_device):
    straight, stopped = weights(), weights()
    expected = stepped({}, straight)
    save_state(tmp_path, stepped(first, stopped, range(2), skip=2).state_dict())
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in stopped]
    made = stepped(then, resumed, range(1))  # moments that the loaded ones must replace, and those of parameter 2 forget
    for p, q in zip(resumed, stopped):
        p.data.copy_(q)
    made.load_state_dict(load_state(tmp_path))
    again = stepped({}, stopped_again := weights(), range(2), skip=2)
    assert all(torch.equal(p, q) for p, q in zip(stopped, stopped_again)) and states_equal(again, made)
    stepped(None, resumed, range(2, 4), made=made)
    stepped(None, stopped_again, range(2, 4), made=again)
    assert all(torch.equal(p, q) for p, q in zip(resumed, stopped_again)) and states_equal(again, made)
    assert not torch.equal(resumed[2], straight[2]) and len(expected.state) == len(made.state) == 5


def test_only_moments_rest_in_main_memory_locked_as_one_block(monkeypatch):
    locked = []
    cudart = types.SimpleNamespace(cudaHostRegister=lambda *args: locked.append(args) or 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None if error == 0 else pytest.fail("not locked"))
    block = torch.zeros(2, 10)
    optimizer._page_lock(block)
    assert locked == [(block.data_ptr(), 80, 0)]
    made = OffloadedAdamW([{"params": weights()}], lr=1e-2, fused=True)
    storages = {moment.untyped_storage().data_ptr() for pair in made._moments.values() for moment in pair}
    assert len(storages) == 1 and not made.state


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("piece", [64, 2**26])
def test_on_a_gpu_moments_rest_in_locked_main_memory_and_change_no_bit(piece, monkeypatch):
    monkeypatch.setattr(optimizer, "PIECE", piece)
    plain, offloaded = ([torch.nn.Parameter(p.detach().cuda()) for p in weights()] for _ in range(2))
    a, b = stepped({}, plain), stepped({"offload_optimizer": True}, offloaded)
    assert all(torch.equal(p, q) for p, q in zip(plain, offloaded))
    for p, q in zip(plain, offloaded):
        for name in ("exp_avg", "exp_avg_sq"):
            moment = b.state[q][name]
            assert moment.device.type == "cpu" and moment.is_pinned() and torch.equal(moment, a.state[p][name].cpu())


def test_an_offloaded_learner_is_the_learner(fake_device):
    def trained(**options):
        model = tiny()
        learner = Learner(model, configured(**options), 0)
        metrics = [learner.update(sampled(model, seed=seed), seed) for seed in range(2)]
        return params(model), [{k: v for k, v in line.items() if not k.startswith("time/")} for line in metrics]

    (plain, told), (offloaded, told_too) = trained(), trained(offload_optimizer=True)
    assert same(plain, offloaded) and told == told_too and fake_device


def test_shards_are_refused_by_name(monkeypatch):
    import torch.distributed.tensor

    monkeypatch.setattr(torch.distributed.tensor, "DTensor", torch.nn.Parameter)
    for options, name in (({"offload_optimizer": True}, "--offload-optimizer"), ({"optimizer": "adamw8bit"}, "adamw8bit")):
        with pytest.raises(UsageError, match=f"{name}: the model is sharded"):
            make_optimizer(weights(), Config(learning_rate=1e-2, **options))
    assert make_optimizer(weights(), Config(learning_rate=1e-2))


def test_eight_bit_moments_train_and_resume_exactly(tmp_path):
    pytest.importorskip("bitsandbytes")
    kind = {"optimizer": "adamw8bit"}
    plain, straight, stopped = weights(), weights(), weights()
    stepped({}, plain)
    stepped(kind, straight)
    # 64 · 80 numbers are enough for 8 bits; smaller parameters keep float32 moments, which are AdamW's but for rounding
    far = [float((p - q).detach().abs().max()) for p, q in zip(plain, straight)]
    assert 1e-5 < far[2] < 2e-2 and max(far[:2] + far[3:]) < 1e-5
    save_state(tmp_path, stepped(kind, stopped, range(2)).state_dict())
    saved = load_state(tmp_path)
    codes = saved["state"][1]["__bnb_optimizer_quant_state__"]
    assert codes["state1"].dtype == codes["state2"].dtype == torch.uint8 and codes["absmax1"].numel() == 64 * 80 // 256
    made = make_optimizer(stopped, Config(learning_rate=1e-2, weight_decay=0.1, **kind))
    made.load_state_dict(saved)
    stepped(None, stopped, range(2, 4), made=made)
    assert all(torch.equal(p, q) for p, q in zip(straight, stopped))
    assert all(p.dtype == torch.float32 for p in straight)


def test_eight_bit_moments_follow_small_learning_rates():
    """Float32 masters of 0.02 move at 1e-6, which is less than half of what bfloat16 can tell there."""
    pytest.importorskip("bitsandbytes")
    weight = torch.nn.Parameter(torch.full((16, 512), 0.02))
    made = make_optimizer([weight], Config(learning_rate=1e-6, optimizer="adamw8bit"))
    torch.manual_seed(0)
    for _ in range(10):
        weight.grad = torch.randn_like(weight)
        made.step()
    moved = weight.detach() - 0.02
    assert float((moved != 0).float().mean()) > 0.99 and 1e-6 < float(moved.abs().max()) < 1e-5
    assert bool((weight.detach().bfloat16() == torch.tensor(0.02).bfloat16()).all())
