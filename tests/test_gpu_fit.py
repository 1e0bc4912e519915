"""Whether a run fits its GPU: Qwen2.5's shapes, sums worked by hand, refusals that name what helps, all before any loading."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from qwen_shapes import SHAPES, folder

import vipfast.resolve
from vipfast import choices, cli, gpu_fit, main_memory, memory
from vipfast.config import Config
from vipfast.errors import UsageError
from vipfast.model_facts import read_facts
from vipfast.resolve import resolve

GPU = dict(device="cuda", dtype="bfloat16", max_prompt_tokens=512, max_new_tokens=1024)


def with_vllm(monkeypatch, installed):
    def answer(config, device):
        auto = "vllm" if installed else "transformers"
        return choices.Choice(auto if config.engine == "auto" else config.engine, "")

    monkeypatch.setattr(vipfast.resolve, "choose_engine", answer)


def torchrun(monkeypatch, size):
    for module in (choices, gpu_fit):
        monkeypatch.setattr(module, "join", lambda: SimpleNamespace(size=size))


@pytest.fixture(autouse=True)
def no_vllm_and_no_torchrun(monkeypatch):
    torchrun(monkeypatch, 1)
    with_vllm(monkeypatch, installed=False)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    return {name: read_facts(folder(path, name)) for name in SHAPES}


def gigabytes(parts):
    return {name: round(size / 1e9, 2) for name, size in parts.items()}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_checkpoint_and_take_16_bytes_each(facts, name):
    assert facts[name].num_parameters == SHAPES[name][1]
    config = Config(**GPU, engine="vllm")
    state = memory.training_state(config, facts[name])
    assert sum(state.values()) == 16 * SHAPES[name][1]
    for shards in (2, 8):
        shared = memory.training_state(config, facts[name], shards)
        assert sum(shared.values()) == 16 * SHAPES[name][1] / shards
        # transformers cannot sample from shards
        copied = memory.training_state(Config(**GPU), facts[name], shards)
        assert sum(copied.values()) == 16 * SHAPES[name][1] / shards + 4 * SHAPES[name][1]


def test_what_each_option_leaves_of_7b(facts):
    def state(**options):
        return gigabytes(memory.training_state(Config(**GPU, **options), facts["7B"]))

    assert state() == {"weights (float32)": 30.46, "gradients": 30.46, "Adam state": 60.92}
    assert state(offload_optimizer=True) == {"weights (float32)": 30.46, "gradients": 30.46}
    # two bytes and two float32 scales for 256 numbers
    assert state(optimizer="adamw8bit") == {"weights (float32)": 30.46, "gradients": 30.46, "Adam state (8 bits)": 15.47}
    # 28 · 32 · (2·7168 + 2·(3584 + 512) + 3·(3584 + 18944)) = 80,740,352 numbers in adapters
    assert facts["7B"].lora_parameters(32) == 80_740_352
    assert state(lora_rank=32) == {"weights (float32)": 30.79, "gradients": 0.32, "Adam state": 0.65}
    # 28 · (2·3584·(3584 + 512) + 3·3584·18944) = 6,525,288,448 weights in linear layers, and 1,090,328,064 beside them
    frozen = state(lora_rank=32, base_dtype="bfloat16")
    assert frozen == {
        "weights (float32)": 4.68, "frozen layers (bfloat16)": 13.05, "gradients": 0.32, "Adam state": 0.65
    }  # fmt: skip
    assert memory.offloaded_bytes(Config(**GPU, offload_optimizer=True), facts["7B"]) == 8 * SHAPES["7B"][1]
    assert memory.offloaded_bytes(Config(**GPU), facts["7B"]) == 0


def test_7b_is_refused_on_one_gpu_with_what_helps(facts):
    config = Config(**GPU, model="Qwen/Qwen2.5-7B")
    with pytest.raises(UsageError) as told:
        gpu_fit.check_training(config, facts["7B"], 80e9)
    assert str(told.value) == (
        "--model Qwen/Qwen2.5-7B: training its 7.62 billion parameters takes 121.8 GB (weights (float32) 30.5 GB, gradients "
        "30.5 GB, Adam state 60.9 GB) before any activation (16 bytes a parameter), and the GPU has 80.0 GB; what helps: "
        "--lora-rank 32 (18.7 GB), --offload-optimizer (60.9 GB), --optimizer adamw8bit (76.4 GB), 3 GPUs (torchrun) that "
        "share it (71.1 GB)"
    )
    with pytest.raises(UsageError, match=r"2 GPUs \(torchrun\) that share it \(60\.9 GB\)$"):
        gpu_fit.check_training(dataclasses.replace(config, engine="vllm"), facts["7B"], 80e9)
    gpu_fit.check_training(config, facts["7B"], 141e9)
    gpu_fit.check_training(config, facts["7B"], 80e9, shards=3)
    for options in ({"lora_rank": 32}, {"offload_optimizer": True}, {"optimizer": "adamw8bit"}):
        gpu_fit.check_training(dataclasses.replace(config, **options), facts["7B"], 80e9)


def test_only_what_is_enough_is_proposed(facts):
    def refusal(gpu_bytes, **options):
        with pytest.raises(UsageError) as told:
            gpu_fit.check_training(Config(**GPU, **options), facts["7B"], gpu_bytes)
        return str(told.value)

    assert refusal(48e9).endswith("what helps: --lora-rank 32 (18.7 GB), 7 GPUs (torchrun) that share it (47.9 GB)")
    assert refusal(48e9, optimizer="adamw8bit").endswith("--lora-rank 32 (18.2 GB), 7 GPUs (torchrun) that share it (47.9 GB)")
    wide = dict(lora_rank=32, base_dtype="float32")
    narrow = "what helps: --base-dtype bfloat16 (18.7 GB)"
    assert refusal(24e9, **wide, engine="vllm").endswith(f"{narrow}, 2 GPUs (torchrun) that share it (15.9 GB)")
    assert refusal(24e9, **wide).endswith(narrow)
    assert refusal(16e9, lora_rank=32, base_dtype="bfloat16").endswith("GPU has 16.0 GB; a smaller model, or a larger GPU")


def test_a_sharded_run_that_is_still_too_large_is_refused(facts):
    with pytest.raises(UsageError, match=r"60\.9 GB .*16 bytes a parameter over 2 GPUs.* 3 GPUs .*\(40\.6 GB\)") as told:
        gpu_fit.check_training(Config(**GPU, engine="vllm"), facts["7B"], 48e9, shards=2)
    # their moments cannot follow shards
    assert "--offload-optimizer" not in str(told.value) and "adamw8bit" not in str(told.value)


def test_torchruns_processes_share_where_one_gpu_is_too_small(facts, monkeypatch):
    config = Config(**GPU, micro_batch_tokens=4096, gradient_checkpointing=True)

    def shards(size, gpu_bytes, config=config):
        parallel = choices.choose_parallel(config, facts[size], gpu_bytes).value
        return gpu_fit.num_shards(dataclasses.replace(config, parallel=parallel))

    assert gpu_fit.max_shards(config) == shards("7B", 80e9) == 1
    torchrun(monkeypatch, 4)
    assert gpu_fit.max_shards(config) == shards("7B", 80e9) == 4
    assert shards("1.5B", 80e9) == shards("7B", 244e9) == shards("7B", None) == 1
    asked = dataclasses.replace(config, parallel="fsdp")
    assert shards("0.5B", 80e9, asked) == shards("0.5B", None, asked) == 4
    for options in ({"offload_optimizer": True}, {"optimizer": "adamw8bit"}):
        assert gpu_fit.max_shards(dataclasses.replace(config, **options)) == 1


def test_shards_gather_two_layers_and_the_head(facts):
    config = Config(**GPU, engine="vllm")
    whole, shared = (memory.estimate(config, facts["7B"], 0, {}, shards) for shards in (1, 8))
    layer = 2 * 3584 * (3584 + 512) + 3 * 3584 * 18944
    rest = 7_615_616_512 - 28 * layer
    assert shared["update"]["weights of two layers and the head, gathered"] == 4 * (2 * layer + rest)
    assert shared["load"]["a part of the model before it is cut"] == 4 * (2 * layer + rest)
    assert shared["sync"]["a bucket of gathered weights, and what is handed on of it"] == 2 * 4 * 152064 * 3584
    assert not any("gathered" in part or "cut" in part for parts in whole.values() for part in parts)
    assert shared["always"]["Adam state"] * 8 == whole["always"]["Adam state"]
    assert shared["update"]["gradients"] * 8 == whole["update"]["gradients"]


def test_vllms_share_is_what_the_rollouts_can_use_or_training_leaves(facts):
    config = Config(**GPU, engine="vllm")
    # 2·1.5437 + 4 GB, and keys and values of 28,672 bytes for 64·512 + 512·1024 tokens: 23.06 GB
    share, why = gpu_fit.vllm_share(config, facts["1.5B"], 80e9)
    assert share == 0.29 and why == "of 80.0 GB: 23.1 GB hold a step's rollouts at full length"
    # 30.46 GB of weights stay, 4 GB are left free: 45.5 GB of 80
    many = dataclasses.replace(config, offload_optimizer=True, prompts_per_step=256)
    share, why = gpu_fit.vllm_share(many, facts["7B"], 80e9)
    assert share == 0.56 and why == "of 80.0 GB: training keeps 30.5 GB while vLLM is awake, 4.0 GB stay free"
    gpu_fit.check_share(dataclasses.replace(many, vllm_memory=share), facts["7B"], 80e9)


def test_a_share_beside_training_that_is_more_than_the_gpu_is_refused(facts):
    config = Config(**GPU, engine="vllm", vllm_memory=0.9)
    with pytest.raises(UsageError) as told:
        gpu_fit.check_share(config, facts["1.5B"], 80e9)
    assert str(told.value) == (
        "--vllm-memory 0.9: that fraction of the whole GPU is 72.0 GB of 80.0 GB, and training keeps 18.5 GB (weights "
        "(float32) 6.2 GB, Adam state 12.3 GB) while vLLM is awake; use --vllm-memory 0.29; what helps: --lora-rank 32 "
        "(4.0 GB), --offload-optimizer (6.2 GB), 3 GPUs (torchrun) that share it (6.2 GB)"
    )
    gpu_fit.check_share(dataclasses.replace(config, offload_optimizer=True), facts["1.5B"], 80e9)
    gpu_fit.check_share(config, facts["1.5B"], 80e9, shards=3)
    gpu_fit.check_share(dataclasses.replace(config, vllm_memory=0.76), facts["1.5B"], 80e9)
    with pytest.raises(UsageError, match="--vllm-memory 0.77"):
        gpu_fit.check_share(dataclasses.replace(config, vllm_memory=0.77), facts["1.5B"], 80e9)


def test_a_share_too_small_for_vllms_weights_is_refused(facts):
    config = Config(**GPU, engine="vllm", lora_rank=8, vllm_memory=0.2)
    with pytest.raises(
        UsageError, match=r"16\.0 GB of 80\.0 GB, and vLLM's weights, its work space and one rollout take 19\.3 GB"
    ):
        gpu_fit.check_share(config, facts["7B"], 80e9)
    gpu_fit.check_share(dataclasses.replace(config, vllm_memory=0.25), facts["7B"], 80e9)


def test_vllm_that_never_sleeps_stays_beside_the_gradients_too(facts):
    config = Config(**GPU, engine="vllm", vllm_memory=0.7)
    gpu_fit.check_share(config, facts["1.5B"], 80e9)
    awake = dataclasses.replace(config, sleep_level=0)
    with pytest.raises(UsageError, match=r"training keeps 53\.7 GB .*activations 26\.8 GB.*; what helps: --sleep-level 2"):
        gpu_fit.check_share(awake, facts["1.5B"], 80e9)
    sleeps, stays = (memory.estimate(c, facts["1.5B"], 0, {"generate": 1}, gpu_bytes=80e9)["update"] for c in (config, awake))
    assert stays.pop("vLLM") == 56e9 and stays == sleeps


def test_tensor_parallel_ranks_share_vllms_weights_and_keys(facts):
    config = Config(**GPU, engine="vllm")
    split = dataclasses.replace(config, tensor_parallel_size=2)
    assert memory.vllm_weights(split, facts["7B"]) == SHAPES["7B"][1]
    (_, all_one), (_, all_two) = (gpu_fit._needs(c, facts["7B"], 64, 512) for c in (config, split))
    assert all_one - memory.VLLM_WORKSPACE_BYTES == 2 * (all_two - memory.VLLM_WORKSPACE_BYTES)


def test_no_room_for_vllm_is_refused(facts):
    with pytest.raises(
        UsageError, match=r"take 19\.3 GB, and of the GPU's 80\.0 GB training keeps 91\.4 GB .*--lora-rank 32"
    ) as told:
        gpu_fit.vllm_share(Config(**GPU, engine="vllm"), facts["7B"], 80e9)
    assert "--offload-optimizer (30.5 GB)" in str(told.value) and str(told.value).endswith("or --engine transformers")


def on_a_gpu(monkeypatch, total_memory):
    import types

    import torch

    from vipfast.kernels import launch

    monkeypatch.setattr(launch, "INTERPRETED", False)
    size = types.SimpleNamespace(total_memory=total_memory)
    for name, answer in (
        ("is_available", True), ("get_device_name", "a GPU"), ("get_device_capability", (9, 0)), ("current_device", 0),
        ("get_device_properties", size),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)


def test_a_run_asks_its_gpu_before_it_loads_anything(tmp_path, monkeypatch):
    on_a_gpu(monkeypatch, 80e9)
    model = folder(tmp_path, "7B")  # there are no weights to load
    with pytest.raises(UsageError, match="takes 121.8 GB"):
        resolve(Config(model=model, threads=1))
    torchrun(monkeypatch, 4)
    assert resolve(Config(model=model, threads=1)).config.vllm_memory is None
    torchrun(monkeypatch, 1)
    monkeypatch.setattr(main_memory, "total_bytes", lambda: 4096 * 10**7)
    with pytest.raises(UsageError, match="--offload-optimizer: AdamW's moments take 60.9 GB, and this machine has 41.0 GB"):
        resolve(Config(model=model, threads=1, offload_optimizer=True))
    monkeypatch.setattr(main_memory, "total_bytes", lambda: 4096 * 10**8)
    run = resolve(Config(model=model, threads=1, offload_optimizer=True, engine="vllm"))
    config, lines = run.config, run.lines
    assert config.vllm_memory == 0.56
    assert "vllm_memory = 0.56 (of 80.0 GB: training keeps 30.5 GB while vLLM is awake, 4.0 GB stay free)" in lines
    again = resolve(config)
    assert again.config == config
    with pytest.raises(UsageError, match="--vllm-memory 0.9: that fraction"):
        resolve(dataclasses.replace(config, vllm_memory=0.9))


def test_engine_auto_takes_a_share_only_where_vllm_is(monkeypatch):
    on_a_gpu(monkeypatch, 80e9)
    run = resolve(Config(threads=1))
    config, lines = run.config, run.lines
    assert config.vllm_memory is None and not [line for line in lines if "vllm" in line]
    with_vllm(monkeypatch, installed=True)
    assert resolve(Config(threads=1)).config.vllm_memory == pytest.approx(0.06)
    assert resolve(Config(threads=1, engine="transformers")).config.vllm_memory is None
    with_vllm(monkeypatch, installed=False)
    note = "note: --vllm-memory 0.4 has no effect with --engine transformers"
    assert note in resolve(Config(threads=1, engine="transformers", vllm_memory=0.4)).lines
    config = resolve(Config(threads=1, device="cpu", engine="vllm")).config
    assert config.vllm_memory == gpu_fit.UNKNOWN_SHARE


def test_options_that_would_do_nothing_or_cannot_work_are_refused(monkeypatch):
    with pytest.raises(UsageError, match="--offload-optimizer: with --device cpu"):
        resolve(Config(device="cpu", threads=1, offload_optimizer=True))
    with pytest.raises(UsageError, match="--offload-optimizer: .*adamw8bit"):
        Config(optimizer="adamw8bit", offload_optimizer=True)
    with pytest.raises(UsageError, match="--optimizer adamw8bit: .*float64"):
        Config(optimizer="adamw8bit", dtype="float64")
    monkeypatch.setattr("vipfast.resolve.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs the bitsandbytes library; pip install 'vipfast\[adamw8bit\]'"):
        resolve(Config(device="cpu", threads=1, optimizer="adamw8bit"))
    resolve(Config(device="cuda", threads=1, optimizer="adamw8bit"), ask_torch=False)


def dry_run(capsys, *options):
    code = cli.main(["--task", "openai/gsm8k", "--dry-run", *options])
    out, err = capsys.readouterr()
    return code, out + err


def test_a_dry_run_plans_for_a_gpu_that_is_not_here(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    code, told = dry_run(capsys, "--model", "Qwen/Qwen2.5-7B", "--gpu-memory-gb", "80")
    assert code == 2 and "takes 112.0 GB" in told and "(16 bytes a parameter), and the GPU has 80.0 GB" in told
    code, told = dry_run(capsys, "--model", "Qwen/Qwen2.5-1.5B", "--gpu-memory-gb", "80", "--engine", "vllm")
    assert code == 0 and "device = cuda (--gpu-memory-gb)" in told
    assert re.search(r"vllm_memory = 0\.\d+ \(of 80\.0 GB: ", told) and "80.0 GB of GPU memory: most is taken in update" in told
    for phase in ("load", "generate", "update", "sync", "evaluate"):
        assert re.search(rf"^  {phase} +vLLM|^  {phase} +=", told, re.M)
    code, told = dry_run(capsys, "--model", "Qwen/Qwen2.5-1.5B", "--device", "cuda")
    assert code == 0 and "--gpu-memory-gb" in told.splitlines()[-1]


def test_gpu_memory_gb_stands_with_a_dry_run_of_a_gpu_alone(capsys):
    for options, why in (
        (["--gpu-memory-gb", "80"], "a run asks its GPU"),
        (["--gpu-memory-gb", "80", "--dry-run", "--device", "cpu"], "--device cpu plans for no GPU"),
        (["--gpu-memory-gb", "-1", "--dry-run"], "must lie in"),
    ):
        assert cli.main(options) == 2
        assert why in capsys.readouterr().err


def test_vllm_on_a_cpu_keeps_a_fixed_cache(facts):
    config = Config(engine="vllm", device="cpu", dtype="float32", max_new_tokens=16)
    phases = memory.estimate(config, facts["0.5B"], 512, {"generate": 128})
    assert phases["generate"] == {"vLLM's weights": 4 * SHAPES["0.5B"][1], "KV cache": 2**30}


def test_a_phase_too_large_is_told_with_what_lowers_it(facts):
    config = Config(**GPU)
    phases = memory.estimate(config, facts["1.5B"], 512, {"generate": 128, "evaluate": 512})
    line = gpu_fit.verdict(config, phases, 50e9)
    assert line.startswith("50.0 GB of GPU memory: most is taken in update, ")
    assert line.endswith(
        "what helps: a lower --micro-batch-tokens (8192), --gradient-checkpointing, --lora-rank 32, --offload-optimizer"
    )
    recomputed = dataclasses.replace(config, gradient_checkpointing=True)
    assert "--gradient-checkpointing" not in gpu_fit.verdict(recomputed, phases, 50e9)
    assert "too much" not in gpu_fit.verdict(config, phases, 141e9)
    many = memory.estimate(config, facts["0.5B"], 512, {"generate": 8192})
    assert "--engine vllm" in gpu_fit.verdict(config, many, 80e9)


def test_the_readmes_table_is_the_dry_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    text = (Path(__file__).parents[1] / "README.md").read_text()
    command = re.search(
        r"^python scripts/train\.py (--dry-run --gpu-memory-gb 80 .*) --model Qwen/Qwen2\.5-7B", text, re.M
    ).group(1)
    table = re.findall(r"^\| Qwen2\.5-([\d.]+B) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", text, re.M)
    assert len(table) == 12
    for model, options, kept, update, share in table:
        given = [*command.split(), "--model", f"Qwen/Qwen2.5-{model}", *options.strip("`").split()]
        code = cli.main(given)
        out, err = capsys.readouterr()
        if code:
            assert kept == "refused" and f"takes {update.split(' in ')[0]} " in err and share == ""
            continue
        totals = dict(re.findall(r"^  (\w+) += in all.*? ([\d.]+ \wB)$", out, re.M))
        assert (kept, update.removesuffix(", too much")) == (totals["always"], totals["update"]), (model, options)
        assert f"vllm_memory = {share} (" in out and ("too much" in update) == ("too much" in out)


def test_an_evaluation_keeps_the_weights_alone_and_trains_nothing(facts):
    config = Config(**GPU, engine="vllm")
    share, why = gpu_fit.evaluation_share(config, facts["1.5B"], 80e9, prompts=512, rollouts=4096)
    weights = 4 * facts["1.5B"].num_parameters
    longest = 2 * facts["1.5B"].num_parameters + memory.VLLM_WORKSPACE_BYTES
    assert longest < share * 80e9 <= 80e9 - weights - gpu_fit.RESERVE_BYTES and "the policy's own weights keep" in why
    one, why = gpu_fit.evaluation_share(config, facts["1.5B"], 80e9, prompts=1, rollouts=1)
    assert longest <= one * 80e9 < longest + 1.6e9 and "hold 1 sample at full length" in why
    with pytest.raises(UsageError, match=r"vLLM's weights, .* the policy's own weights keep 30\.5 GB .* --engine transformers"):
        gpu_fit.evaluation_share(config, facts["7B"], 48e9, prompts=1, rollouts=1)
    for given in (0.05, 0.95):
        with pytest.raises(UsageError, match=rf"--vllm-memory {given:g}: is .*leave it out"):
            gpu_fit.evaluation_share(dataclasses.replace(config, vllm_memory=given), facts["1.5B"], 80e9, 1, 1)
    given = dataclasses.replace(config, vllm_memory=0.5)
    assert gpu_fit.evaluation_share(given, facts["1.5B"], 80e9, 1, 1) == (0.5, "given")
