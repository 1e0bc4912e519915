"""Prompts offer tools by their template where it can, else in words, once, and with every tool's schema."""

import json

import numpy as np
from dialogue import QWEN_SHAPE, chat_tokenizer, plain_tokenizer

from vipfast.config import Config
from vipfast.tasks.base import Record, tokenize
from vipfast.tasks.templates import Template
from vipfast.tools import TOOLS, describe

TOLD = ("calculator", "search")
SCHEMAS = describe(TOLD)


def template(tokenizer, tools=TOLD):
    return Template(Config(tools=tools, search_corpus="corpus.jsonl"), tokenizer)


def test_schemas_are_those_of_functions_with_text_arguments():
    assert [schema["function"]["name"] for schema in describe(list(TOOLS))] == ["calculator", "python", "search"]
    function = SCHEMAS[0]["function"]
    assert function["parameters"]["required"] == ["expression"]
    assert function["parameters"]["properties"]["expression"]["type"] == "string"


def offers(text):
    return text.count(json.dumps(SCHEMAS[0]["function"]["description"])[1:-1])


def test_a_template_that_knows_tools_shows_them():
    tokenizer = chat_tokenizer()
    text = template(tokenizer).text("What is 2+2?")
    messages = [{"role": "user", "content": "What is 2+2?"}]
    assert text == tokenizer.apply_chat_template(messages, tools=SCHEMAS, tokenize=False, add_generation_prompt=True)
    assert offers(text) == 1


def test_a_template_that_ignores_tools_gets_words_in_the_first_message():
    tokenizer = chat_tokenizer(QWEN_SHAPE.replace("if tools", "if false"))
    text = template(tokenizer).text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}])
    assert text.startswith("<|im_start|>system\nYou may call tools.") and offers(text) == 1
    assert text.endswith("Be brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_with_calls_in_another_form_gets_words():
    for form in ('[CALL]{"name": ..., "arguments": ...}[/CALL]', "<tool_call><function=...></function></tool_call>"):
        tokenizer = chat_tokenizer(QWEN_SHAPE.replace('<tool_call>{"name": ..., "arguments": ...}</tool_call>', form))
        assert "write <tool_call>" in template(tokenizer).text("2+2?"), form


def test_without_a_template_words_stand_in_front():
    text = template(plain_tokenizer()).text("2+2?")
    assert text.startswith("You may call tools.") and text.endswith("\n\n2+2?") and offers(text) == 1
    assert template(plain_tokenizer()).text([{"role": "user", "content": "2+2?"}]) == text


def test_a_tasks_prompts_offer_tools_only_if_there_are_any():
    records, tokenizer = [Record("2+2?", "4")], plain_tokenizer()
    [plain] = tokenize("t", records, template(tokenizer, ()), None, [])
    [offering] = tokenize("t", records, template(tokenizer), None, [])
    assert plain.text == "2+2?" and offering.text == template(tokenizer).text("2+2?")
    np.testing.assert_array_equal(offering.tokens, tokenizer.encode(offering.text))
