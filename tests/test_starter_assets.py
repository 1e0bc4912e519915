import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vipfast.starter import pool, recipe, sft
from vipfast.starter.build import load
from vipfast.starter.model import make_model, make_tokenizer, sensitise
from vipfast.tasks.arithmetic import ASSETS, Problem, load_pool

FOLDER = ASSETS / "starter"
NASTY = [
    "",
    " ",
    "  leading and trailing  ",
    "\n\n\tx\r\n",
    "sort 8 3 7 1 =",
    " don't , really ?  it 's",
    "naïve – “quotes” – 数学 – 😀👩‍👩‍👧‍👦",
    "\x00\x01\x7f\u0085\u200b\ufeff",
    "e\u0301 is not \u00e9",
    "\\(x^2\\) <|im_start|> </s> <unk>",
]


@pytest.fixture(scope="module")
def starter():
    return load(ASSETS)


@pytest.mark.parametrize("text", NASTY, ids=ascii)
def test_tokenizer_round_trip(starter, text):
    tokenizer, _ = starter
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer.encode(text, add_special_tokens=False) and len(ids) == len(text.encode())


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_tokenizer_round_trip_of_any_text(text):
    # A text that spells a special token is that token; everything else is its bytes.
    if "<eos>" not in text and "<pad>" not in text:
        tokenizer = TOKENIZER
        assert tokenizer.decode(tokenizer.encode(text)) == text


TOKENIZER = make_tokenizer()


def test_text_that_spells_eos_still_decodes_to_itself(starter):
    tokenizer, _ = starter
    assert tokenizer.decode(tokenizer.encode("a <eos> b")) == "a <eos> b"


def test_tokenizer_special_tokens(starter):
    tokenizer, _ = starter
    assert len(tokenizer) == 258
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<eos>", "<pad>", None)
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer.chat_template is None
    assert not tokenizer.clean_up_tokenization_spaces
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()


def test_model_is_small_and_plain(starter):
    _, model = starter
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert sum(parameter.numel() for parameter in model.parameters()) <= 1_000_000
    assert (FOLDER / "model.safetensors").stat().st_size < 4.2e6
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert model.config.vocab_size == 258 and model.config.tie_word_embeddings
    assert model.config.attention_dropout == 0 and not model.config.use_sliding_window


def test_model_takes_4096_positions(starter):
    _, model = starter
    assert model.config.max_position_embeddings == 4096
    with torch.no_grad():
        logits = model(torch.full((1, 4096), 65), logits_to_keep=1).logits
    assert logits.isfinite().all()


def test_generation_config_holds_no_sampling_surprises(starter):
    tokenizer, model = starter
    written = json.loads((FOLDER / "generation_config.json").read_text())
    assert set(written) <= {"_from_model_config", "eos_token_id", "pad_token_id", "transformers_version"}
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_shipped_pass_rates_hold_when_measured_afresh(starter):
    tokenizer, model = starter
    problems = load_pool("heldout")[:128]
    shipped = np.array([problem.pass_rate for problem in problems])
    fresh = pool.measure(model, tokenizer, problems, samples=16, seed=99)
    # A rate from 16 samples has a standard deviation of at most 1/8, their mean over 128 problems of .011.
    assert abs(fresh.mean() - shipped.mean()) < 0.05
    assert np.corrcoef(fresh, shipped)[0, 1] > 0.95


def test_starter_saw_no_pool_problem():
    for split in ("train", "heldout"):
        assert {recipe.home(problem.text) for problem in load_pool(split)} == {split}


def test_lessons_are_seeded_and_of_the_right_shape():
    first, again = ([recipe.lesson(random.Random(seed), clean=False) for seed in range(100)] for _ in range(2))
    assert first == again
    for lesson in first:
        assert recipe.home(lesson.text) == "sft"
        assert len(lesson.seen) == len(lesson.answer) and 0 <= lesson.trust <= 1


def test_blurred_target_has_the_rate_of_its_cell():
    rng = random.Random(0)
    for lesson in (recipe.lesson(rng, clean=False) for _ in range(200)):
        family, count = lesson.text.split()[0], len(lesson.answer)
        assert any(rate == pytest.approx(lesson.trust**count) for (name, _), rate in recipe.RATES.items() if name == family)


def test_pack_by_hand():
    lesson = recipe.Lesson(text="ab", seen="19", answer="12", trust=0.5)
    ids, targets, trust = sft.pack([lesson, recipe.Lesson("a", "3", "3", 1.0)], TOKENIZER)
    byte = {char: TOKENIZER.encode(char)[0] for char in "ab1239"}
    assert ids.tolist() == [[byte["a"], byte["b"], byte["1"], byte["9"], 256], [byte["a"], byte["3"], 256, 257, 257]]
    assert targets.tolist() == [[-100, byte["1"], byte["2"], 256], [byte["3"], 256, -100, -100]]
    assert trust.tolist() == [[1, 0.5, 0.5, 1], [1, 1, 1, 1]]


def test_orthogonalise_moves_singular_values_to_one():
    torch.manual_seed(0)
    for shape in ((3, 20, 20), (2, 10, 40), (2, 40, 10)):
        before = torch.randn(shape)
        values = torch.linalg.svdvals(sft.orthogonalise(before))
        assert values.shape[-1] == min(shape[1:])
        # The quintic oscillates about 1 by design and lags on the very smallest values.
        assert 0.5 < values.median() < 1.3 and values.max() < 1.3


def test_one_step_of_training_lowers_the_loss_on_its_batch():
    model = make_model(seed=0)
    batch = next(sft.batches(TOKENIZER, random.Random(0), clean=True))
    digits = torch.tensor(TOKENIZER.encode("0123456789"))
    before = sft.loss_of(model, batch, digits)
    before.backward()
    optimizer = sft.Muon((p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name), lr=0.02)
    optimizer.step()
    assert sft.loss_of(model, batch, digits) < before


def test_sensitise_changes_no_output():
    model, ids = make_model(seed=0), torch.arange(40)[None]
    with torch.no_grad():
        before = model(ids).logits
        sensitise(model)
        assert torch.allclose(model(ids).logits, before, atol=1e-5)
    assert model.model.layers[0].input_layernorm.weight.eq(3).all()


def test_compose_keeps_its_shares():
    rng = np.random.default_rng(0)
    problems = [Problem(f"copy {i} =", str(i), "copy", 1) for i in range(3000)]
    rates = np.concatenate([np.zeros(1000), np.ones(1000), rng.integers(1, 16, 1000) / 16])
    chosen = pool.compose(problems, rates, 1000, seed=0)
    picked = rates[[int(problem.answer) for problem in chosen]]
    assert len({problem.text for problem in chosen}) == 1000
    assert ((picked == 0).sum(), (picked == 1).sum()) == (460, 130)
    with pytest.raises(ValueError, match="460 problems are to be never-solved, but only 0"):
        pool.compose(problems[1000:], rates[1000:], 1000, seed=0)
