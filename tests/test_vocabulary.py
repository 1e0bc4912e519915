"""A model whose head is padded beyond its tokenizer's ids, from its folder through training, evaluation and resume."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from vipfast import Config, Trainer
from vipfast.errors import UsageError
from vipfast.evaluation.command import main as evaluate_main
from vipfast.policy import load_policy, load_reference, load_tokenizer, model_path, read_tokenizer
from vipfast.vocabulary import limit_to_tokenizer, num_known_ids

KNOWN, ROWS = 258, 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The starter with rows of logits above all others behind those its tokenizer knows."""
    folder = tmp_path_factory.mktemp("padded")
    model = load_policy(Config(device="cpu", dtype="float32"))
    model.resize_token_embeddings(ROWS, mean_resizing=False)
    with torch.no_grad():
        rows = model.get_output_embeddings().weight
        rows[KNOWN:] = -rows[torch.arange(KNOWN, ROWS) % 10 + ord("0")]
        assert model(torch.tensor([[50, 43, 51, 61]])).logits[0, -1].argmax() >= KNOWN
    model.save_pretrained(folder)
    read_tokenizer(model_path("starter")).save_pretrained(folder)
    return folder


def options(folder, out, **changes):
    small = dict(
        prompts_per_step=8, max_new_tokens=16, rollouts_per_prompt=4, heldout_prompts=8, eval_every=1, threads=1, device="cpu"
    )
    return Config(**(small | dict(steps=2, model=str(folder), output_dir=str(out), learning_rate=1e-3, beta=0.1) | changes))


def lines(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def test_a_run_samples_trains_and_resumes_without_the_padding(folder, tmp_path):
    trainer = Trainer(options(folder, tmp_path / "whole"))
    before = trainer.model.get_output_embeddings().weight.detach()[KNOWN:].clone()
    seen, submit = [], trainer.engine.step
    trainer.engine.step = lambda: [seen.append(row.tokens) or row for row in submit()]
    assert trainer.run() == 0
    assert len(seen) > 64 and np.concatenate(seen).max() < KNOWN
    found = lines(tmp_path / "whole")
    assert all(line["policy/sync_gap"] < 1e-4 and 0 < line["policy/entropy"] <= np.log(KNOWN) for line in found[1:])
    assert torch.equal(trainer.model.get_output_embeddings().weight[KNOWN:], before)
    Trainer(options(folder, tmp_path / "parts", steps=1)).run()
    resumed = Trainer(options(folder, tmp_path / "parts"), resume=True)
    assert num_known_ids(resumed.model) == num_known_ids(resumed.learner.reference.model) == KNOWN
    assert resumed.run() == 0
    timeless = lambda line: {k: v for k, v in line.items() if not k.startswith(("time/", "speed/", "memory/"))}  # noqa: E731
    assert list(map(timeless, lines(tmp_path / "parts"))) == list(map(timeless, found))


def test_numbers_are_those_of_the_model_without_padding(folder, tmp_path):
    for name, model in (("padded", folder), ("plain", "starter")):
        assert Trainer(options(model, tmp_path / name)).run() == 0
    for ours, theirs in zip(lines(tmp_path / "padded"), lines(tmp_path / "plain"), strict=True):
        keys = ("policy/entropy", "policy/kl", "train/loss", "train/grad_norm", "reward/mean")
        mine, plain = ({key: line[key] for key in keys if line.get(key) is not None} for line in (ours, theirs))
        assert mine == pytest.approx(plain, rel=1e-3, abs=1e-6)
    assert len(plain) == 5


def test_an_evaluation_leaves_the_padding_out(folder, tmp_path):
    for name, model in (("padded", folder), ("plain", "starter")):
        given = ["--model", model, "--device", "cpu", "--threads", 1, "--samples", 2, "--max-prompts", 4]
        assert evaluate_main([*map(str, given), "--output-dir", str(tmp_path / name)]) == 0
    rows = [(tmp_path / name / "samples.jsonl").read_text().splitlines() for name in ("padded", "plain")]
    assert [json.loads(row)["text"] for row in rows[0]] == [json.loads(row)["text"] for row in rows[1]]


def test_without_padding_there_is_no_limit():
    config = Config(device="cpu", dtype="float32", beta=0.1)
    assert num_known_ids(load_policy(config, load_tokenizer(config))) is None
    assert num_known_ids(load_reference(config, load_tokenizer(config))) is None


def model_of(rows):
    shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=rows, **shape))


@pytest.mark.parametrize(
    ("ids", "rows", "limit"),
    [(range(30), 37, 30), ([*range(20), 34], 37, 35), (range(37), 37, None)],
    ids=["padded", "holes below the highest id", "none"],
)
def test_the_limit_is_one_above_the_highest_id(ids, rows, limit):
    model = model_of(rows)
    limit_to_tokenizer(model, SimpleNamespace(get_vocab=lambda: {str(i): i for i in ids}), "m")
    assert num_known_ids(model) == limit


def test_added_tokens_count(folder):
    tokenizer = read_tokenizer(str(folder))
    tokenizer.add_tokens(["<new>"])
    model = model_of(ROWS)
    limit_to_tokenizer(model, tokenizer, "m")
    assert num_known_ids(model) == KNOWN + 1


def test_more_ids_than_rows_is_an_error_that_names_the_remedy(tmp_path, folder):
    model_of(100).save_pretrained(tmp_path)
    read_tokenizer(str(folder)).save_pretrained(tmp_path)
    config = Config(model=str(tmp_path), device="cpu", dtype="float32")
    with pytest.raises(UsageError, match=r"--model .*ids up to 257, and the model has 100 .*resize_token_embeddings\(258\)"):
        load_policy(config, load_tokenizer(config))
