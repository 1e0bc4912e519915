"""``python -m vipfast.merge``: the merged model gives the logits of base and adapters; what cannot be merged is named."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GenerationConfig

from vipfast import Config, Trainer
from vipfast.frozen import round_to_bfloat16
from vipfast.merge import main, merge
from vipfast.policy import model_path, read_tokenizer

IDS = torch.arange(60)[None] % 250


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of adapters on a model of its own folder, whose layers were kept in bfloat16."""
    folder = tmp_path_factory.mktemp("merge")
    base = Path(shutil.copytree(model_path("starter"), folder / "base"))
    GenerationConfig(eos_token_id=[256, 7]).save_pretrained(base)
    config = Config(
        model=str(base), steps=2, prompts_per_step=8, rollouts_per_prompt=6.0, allocator="uniform", heldout_prompts=16,
        eval_every=0, lora_rank=4, base_dtype="bfloat16", learning_rate=0.05, max_new_tokens=8, device="cpu", threads=1,
        output_dir=str(folder / "run"),
    )  # fmt: skip
    Trainer(config).run()
    return folder / "run"


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


def trained(run, part="final", rounded=True):
    base = AutoModelForCausalLM.from_pretrained(run.parent / "base", dtype=torch.float32)
    if rounded:
        round_to_bfloat16(base)
    return logits(base), logits(PeftModel.from_pretrained(base, run / part))


@pytest.mark.parametrize("part", [".", "final", "best", "checkpoints/step-2", "checkpoints/step-2/model"])
def test_the_merged_model_has_the_logits_of_base_and_adapters(run, part, tmp_path, capsys):
    assert main([str(run / part), str(tmp_path / "out")]) == 0
    assert f"wrote {tmp_path / 'out'}" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert {p.dtype for p in merged.parameters()} == {torch.float32}  # the base's own
    base, theirs = trained(run, "final" if part == "." else "checkpoints/step-2/model" if "step" in part else part)
    assert (logits(merged) - theirs).abs().max() < 1e-4 < 0.01 < (theirs - base).abs().max() + (part == "best")
    assert merged.generation_config.eos_token_id == [256, 7]
    assert read_tokenizer(str(tmp_path / "out"))("1 + 2").input_ids == read_tokenizer(model_path("starter"))("1 + 2").input_ids
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_adapters_without_a_run_lie_on_the_base_they_name_as_it_is(run, tmp_path):
    adapters = Path(shutil.copytree(run / "final", tmp_path / "adapters"))
    merged = AutoModelForCausalLM.from_pretrained(merge(str(adapters), tmp_path / "out"), dtype="auto")
    assert (logits(merged) - trained(run, rounded=False)[1]).abs().max() < 1e-4
    assert (logits(merged) - trained(run)[1]).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_once_summed(run, tmp_path, dtype):
    assert main([str(run), str(tmp_path / "out"), "--dtype", dtype]) == 0
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").named_parameters())
    whole = AutoModelForCausalLM.from_pretrained(merge(str(run), tmp_path / "whole"), dtype=torch.float32)
    for name, weight in whole.named_parameters():
        assert torch.equal(saved[name], weight.to(getattr(torch, dtype))), name


def test_a_base_saved_in_bfloat16_stays_one(run, tmp_path):
    moved = Path(shutil.copytree(run.parent, tmp_path / "moved"))
    AutoModelForCausalLM.from_pretrained(moved / "base", dtype=torch.bfloat16).save_pretrained(moved / "base")
    config = moved / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(run.parent / "base"), str(moved / "base")))
    merged = AutoModelForCausalLM.from_pretrained(merge(str(moved / "run"), tmp_path / "out"), dtype="auto")
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}


def refused(capsys, *argv):
    assert main(list(map(str, argv))) == 2
    return capsys.readouterr().err


def test_what_cannot_be_merged_is_named_and_nothing_is_written(run, tmp_path, capsys):
    out = tmp_path / "out"
    (tmp_path / "there").mkdir()
    assert "there: exists already; name a folder that does not" in refused(capsys, run, tmp_path / "there")
    for whole in ("starter", run.parent / "base"):
        assert f"RUN {whole}: holds no LoRA adapters" in refused(capsys, whole, out)
    assert "holds no LoRA adapters" in refused(capsys, tmp_path / "nowhere", out)
    alone = Path(shutil.copytree(run / "final", tmp_path / "alone"))
    described = json.loads((alone / "adapter_config.json").read_text())
    for base, told in ((str(tmp_path / "gone"), "which is not here"), ("not/here/at/all", "no such folder")):
        (alone / "adapter_config.json").write_text(json.dumps(described | {"base_model_name_or_path": base}))
        error = refused(capsys, alone, out)
        assert base in error and told in error
    shutil.copytree(run, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(run.parent / "base"), str(tmp_path / "gone")))
    assert "no such folder" in refused(capsys, tmp_path / "run", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "run", "there"]


def test_adapters_of_another_model_do_not_fit(run, tmp_path, capsys):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=300, **sizes)).save_pretrained(tmp_path / "other")
    read_tokenizer(model_path("starter")).save_pretrained(tmp_path / "other")
    adapters = Path(shutil.copytree(run / "final", tmp_path / "adapters"))
    described = json.loads((adapters / "adapter_config.json").read_text())
    described["base_model_name_or_path"] = str(tmp_path / "other")
    (adapters / "adapter_config.json").write_text(json.dumps(described))
    told = refused(capsys, adapters, tmp_path / "out")
    assert f"RUN {adapters}: its adapters do not fit" in told and "--model" not in told and not (tmp_path / "out").exists()


def test_what_cannot_be_found_is_told_as_run_not_as_an_option_of_training(run, tmp_path, capsys):
    assert main([str(run / "fnial"), str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "RUN" in told and "--model" not in told
    empty = tmp_path / "empty"
    empty.mkdir()
    moved = shutil.copytree(run / "final", tmp_path / "moved")
    described = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps(described | {"base_model_name_or_path": str(empty)}))
    assert main([str(moved), str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert f"RUN {moved}: its adapters are for another model; {empty}" in told and "--model" not in told
    torn = shutil.copytree(run.parent / "base", tmp_path / "torn")
    (torn / "model.safetensors").write_bytes(b"")
    (moved / "adapter_config.json").write_text(json.dumps(described | {"base_model_name_or_path": str(torn)}))
    assert main([str(moved), str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert (
        f"RUN {moved}: its adapters are for another model; {torn}: no model could be loaded" in told and "--model" not in told
    )
    assert not (tmp_path / "out").exists()


def test_a_run_that_has_saved_nothing_yet_is_told_as_run(run, tmp_path, capsys):
    begun = tmp_path / "begun"
    (begun / "checkpoints").mkdir(parents=True)
    shutil.copy(run / "config.yaml", begun)
    assert f"RUN {begun}: this run has saved neither" in refused(capsys, begun, tmp_path / "out")


def test_a_reader_that_has_gone_is_not_told_of(run, tmp_path):
    command = [sys.executable, "-m", "vipfast.merge", str(run), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.close()
        told = running.stderr.read()
    assert running.returncode == 0 and "Broken" not in told and (tmp_path / "out" / "config.json").is_file()
