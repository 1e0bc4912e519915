"""Thinking is never graded, whoever opens the thought, and whether its tags are special tokens or not."""

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from vipfast.engine.base import Finished
from vipfast.rewards import exact, retrieval
from vipfast.rewards.code import program
from vipfast.rewards.grader import Grader
from vipfast.rewards.maths import Maths
from vipfast.rewards.thinking import PAIRS, Decoder, opened_by, outside_thinking
from vipfast.types import Finish, Prompt

WORDS = ["so", "3", "4", "\\boxed{3}", "\\boxed{4}", "?"]


def tokenizer_with(*special, ordinary=()):
    """Words of one token each; ``special`` ones are control tokens."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="?")), eos_token="<eos>", unk_token="?"
    )
    tokenizer.add_tokens([AddedToken(tag, special=True) for tag in special] + [AddedToken(tag) for tag in ordinary])
    return tokenizer


def ids(tokenizer, *words):
    return np.array(tokenizer.convert_tokens_to_ids(list(words)), np.int64)


@pytest.mark.parametrize("opening, closing", PAIRS)
def test_what_follows_the_last_thought_counts(opening, closing):
    assert outside_thinking(f"{opening}a{closing}b") == "b"
    assert outside_thinking(f"a{closing}b") == "b", "the prompt opened it"
    assert outside_thinking(f"{opening}a") is None
    assert outside_thinking(f"{opening}a{closing}b{opening}c") is None
    assert outside_thinking("a") == "a"
    assert outside_thinking(f"{opening.upper()}a") is None


@pytest.mark.parametrize("opening", dict.fromkeys(opening for opening, _ in PAIRS))
def test_a_prompt_that_ends_in_a_thought_opens_it(opening):
    assert opened_by(f"<|user|>Go<|assistant|>{opening}\n") == f"{opening}\n"
    assert opened_by(f"Think between {opening} tags.") == ""


def test_a_closed_thought_at_the_end_of_a_prompt_opens_nothing():
    assert opened_by("<|assistant|><think>\n\n</think>\n\n") == "" and opened_by("") == ""


@pytest.mark.parametrize("opening, closing", [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
@pytest.mark.parametrize("kind", ["special", "ordinary"])
def test_tags_outlive_decoding_and_other_special_tokens_do_not(opening, closing, kind):
    tags = (opening, closing)
    tokenizer = tokenizer_with("<|end|>", *tags) if kind == "special" else tokenizer_with("<|end|>", ordinary=tags)
    rows = [ids(tokenizer, opening, "so", "\\boxed{4}"), ids(tokenizer, opening, "so", closing, "3", "<|end|>", "<eos>")]
    first, second = Decoder(tokenizer)(rows)
    assert outside_thinking(first) is None and outside_thinking(second).strip() == "3"
    assert "<eos>" not in second and "<|end|>" not in second


def test_without_such_tags_decoding_is_the_tokenizers_own():
    tokenizer = tokenizer_with("<|end|>")
    row = ids(tokenizer, "so", "3", "<|end|>", "<eos>")
    assert Decoder(tokenizer)([row]) == tokenizer.batch_decode([row], skip_special_tokens=True) == ["so 3"]


def graded(reward, tokenizer, prompt_text, *words, sampled=None):
    row = ids(tokenizer, *words)
    finished = Finished(0, 0, row, np.zeros(len(row), np.float32), Finish.STOP, None if sampled is None else np.array(sampled))
    prompt = Prompt("uid", prompt_text, np.array([1]), "3", {})
    return Grader(reward, tokenizer).grade([prompt], [finished]).reward[0]


@pytest.fixture(scope="module")
def maths():
    reward = Maths(workers=1, timeout_s=30)
    yield reward
    reward.close()


@pytest.mark.parametrize("name", ["maths", "exact", "retrieval"])
def test_a_draft_in_a_thought_that_the_prompt_opened_is_not_paid(name, maths):
    reward = {"maths": maths, "exact": exact.reward, "retrieval": retrieval.em}[name]
    tokenizer = tokenizer_with("<think>", "</think>")
    assert graded(reward, tokenizer, "3?<assistant><think>\n", "so", "\\boxed{3}") == 0
    assert graded(reward, tokenizer, "3?<assistant><think>\n", "so", "\\boxed{4}", "</think>", "\\boxed{3}") == 1
    assert graded(reward, tokenizer, "3?<assistant>", "so", "\\boxed{3}") == 1
    assert graded(reward, tokenizer, "3?<assistant><think></think>", "so", "\\boxed{3}") == 1


def test_of_a_rollout_with_tools_what_comes_before_its_last_turn_says_whether_it_thinks():
    tokenizer = tokenizer_with(ordinary=["<think>", "</think>"])
    turns = ("so", "</think>", "?", "<think>", "so", "\\boxed{3}")
    assert graded(exact.reward, tokenizer, "<think>", *turns, sampled=[1, 1, 0, 0, 1, 1]) == 0
    turns = ("so", "</think>", "?", "so", "\\boxed{3}")
    assert graded(exact.reward, tokenizer, "<think>", *turns, sampled=[1, 1, 0, 1, 1]) == 1


def test_programs_in_thoughts_are_not_run():
    block = "```python\nprint(1)\n```"
    assert program(f"<think>\n{block}") is None and program(f"{block}\n<thinking>\n") is None
    assert program(f"<think>\n</think>\n{block}") == "print(1)"
