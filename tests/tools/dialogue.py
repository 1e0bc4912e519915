"""What the tools' tests share: tokenizers with and without a chat template, and calls as a policy writes them."""

import json

from vipfast.policy import model_path, read_tokenizer

CONTROL = ["<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

QWEN_SHAPE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Tool outputs of a turn together in one user message, each in tags, as Qwen2.5's template has them."""


def plain_tokenizer():
    """The starter's: a token a byte, <eos> and <pad>, no chat template."""
    return read_tokenizer(model_path("starter"))


def chat_tokenizer(template=QWEN_SHAPE):
    """The same with ChatML's control tokens, tags that are single tokens but not special, and a chat template."""
    tokenizer = plain_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL})
    tokenizer.add_tokens(TAGS)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template
    return tokenizer


def call(expression, name="calculator", parameter="expression"):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {parameter: expression}})}</tool_call>"
