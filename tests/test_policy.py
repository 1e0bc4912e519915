"""Models and tokenizers are what their files say, and what cannot be loaded is named with its remedy."""

import shutil
from pathlib import Path

import pytest

from vipfast.config import Config
from vipfast.errors import UsageError
from vipfast.policy import load_policy, load_reference, load_tokenizer, model_path, read_tokenizer


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(model_path("starter"), tmp_path / "model"))


def config(folder, **changes):
    return Config(model=str(folder), device="cpu", dtype="float32", **changes)


def test_the_tokenizers_own_file_decides_whatever_the_model_type(folder):
    tokenizer = read_tokenizer(str(folder))
    for text in ("e\u0301 is not \u00e9", " a  b\n", "😀 ½"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text and len(tokenizer(text).input_ids) == len(text.encode())
    again = folder / "again"
    tokenizer.save_pretrained(again)
    assert read_tokenizer(str(again)).decode(tokenizer("e\u0301").input_ids) == "e\u0301"


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_missing_file_names_the_option_and_the_remedy(folder, name):
    (folder / name).unlink()
    load = load_tokenizer if name == "tokenizer.json" else load_policy
    with pytest.raises(UsageError, match=r"--model .*model: no (tokenizer|model) could be loaded .*give"):
        load(config(folder))


def test_a_truncated_weight_file_is_named(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UsageError, match="--model .*no model could be loaded"):
        load_policy(config(folder))


def test_a_tokenizer_without_pad_or_eos(folder):
    settings = folder / "tokenizer_config.json"
    text = settings.read_text()
    settings.write_text(text.replace('"pad_token": "<pad>"', '"pad_token": null'))
    assert load_tokenizer(config(folder)).pad_token_id == 256
    settings.write_text(text.replace('"eos_token": "<eos>"', '"eos_token": null'))
    with pytest.raises(UsageError, match="no eos token"):
        load_tokenizer(config(folder))


def test_no_reference_model_is_loaded_at_beta_0(folder):
    assert load_reference(config(folder)) is None
    reference = load_reference(config(folder, beta=0.1))
    assert not any(parameter.requires_grad for parameter in reference.parameters())
