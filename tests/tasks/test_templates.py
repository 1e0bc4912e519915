"""Wording by name, system prompts, and exactly one bos whatever tokenizer and chat template do."""

import itertools

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from vipfast.config import Config
from vipfast.errors import DataError
from vipfast.tasks.base import Record, tokenize
from vipfast.tasks.load import load_task
from vipfast.tasks.templates import ASKED, Template

WORDS = ["<s>", "</s>", "[user]", "[system]", "[assistant]", "a", "b", "Question", "Answer", ":", "?"]
BOS, EOS, A = 0, 1, WORDS.index("a")
CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant]"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}" + CHAT


def tokenizer(*, adds_bos=False, adds_eos=False, chat=None):
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(WORDS[:5])
    if adds_bos or adds_eos:
        single = f"{'<s> ' if adds_bos else ''}$A{' </s>' if adds_eos else ''}"
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="?")
    made.chat_template = chat
    return made


def ids(made, prompt="a b", **options):
    template = Template(Config(**options), made)
    return template.tokens([template.text(prompt)])[0]


@pytest.mark.parametrize(
    ("adds_bos", "adds_eos", "chat", "template"),
    list(itertools.product([False, True], [False, True], [None, CHAT, "<s>" + CHAT], ["auto", "plain", "boxed"])),
)
def test_one_bos_where_anything_writes_one_and_no_eos(adds_bos, adds_eos, chat, template):
    row = ids(tokenizer(adds_bos=adds_bos, adds_eos=adds_eos, chat=chat), prompt_template=template)
    written = bool(chat) and chat.startswith("<s>") and template != "plain"
    assert row.count(BOS) == (1 if adds_bos or written else 0) == (row[0] == BOS)
    assert EOS not in row and A in row


def test_a_bos_in_the_text_is_not_doubled():
    assert ids(tokenizer(adds_bos=True), "<s> a") == [BOS, A] == ids(tokenizer(), "<s> <s> a")


def test_a_token_that_is_bos_or_eos_by_accident_is_kept():
    made = tokenizer()
    made.add_special_tokens({"eos_token": "a"})
    assert ids(made, "b a")[-1] == A


@pytest.mark.parametrize(
    ("template", "chat", "text"),
    [
        ("auto", None, "a"),
        ("auto", CHAT, "[user] a [assistant]"),
        ("chat", CHAT, "[user] a [assistant]"),
        ("plain", CHAT, "a"),
        ("qa", CHAT, "Question: a\nAnswer:"),
        ("boxed", None, "a\n\nPlease reason step by step, and put your final answer within \\boxed{}."),
        ("tags", CHAT, f"[user] a\n\n{ASKED['tags']} [assistant]"),
    ],
)  # fmt: skip
def test_templates_by_name(template, chat, text):
    assert Template(Config(prompt_template=template), tokenizer(chat=chat)).text("a") == text


@pytest.mark.parametrize(
    ("template", "prompt", "text", "replaced"),
    [
        ("auto", "a", "[system] S [user] a [assistant]", 0),
        ("plain", "a", "S\n\na", 0),
        ("qa", "a", "S\n\nQuestion: a\nAnswer:", 0),
        ("auto", [{"role": "system", "content": "T"}, {"role": "user", "content": "a"}], "[system] S [user] a [assistant]", 1),
    ],
)
def test_system_prompt_stands_first_and_goes_over_a_rows_own(template, prompt, text, replaced):
    made = Template(Config(prompt_template=template, system_prompt="S"), tokenizer(chat=CHAT))
    assert (made.text(prompt), made.num_replaced) == (text, replaced)


def test_a_rows_own_system_message_stays_without_the_option():
    prompt = [{"role": "system", "content": "T"}, {"role": "user", "content": "a"}]
    assert Template(Config(), tokenizer(chat=CHAT)).text(prompt) == "[system] T [user] a [assistant]"


def test_replaced_system_messages_are_told_and_leave_one_prompt_of_each_text():
    prompts = [{"prompt": [{"role": "system", "content": s}, {"role": "user", "content": "a"}]} for s in "TU"]
    task = load_task(Config(prompts_per_step=1, system_prompt="S"), tokenizer(chat=CHAT), prompts, reward=lambda c, a, m: [1.0])
    assert len(task.train) == 1 and "1 of 2 prompts are duplicates and were merged" in task.notes
    assert "--system-prompt goes over the system message that 2 prompts bring" in task.notes


def test_templates_that_cannot_be_used_say_why():
    with pytest.raises(DataError, match="--prompt-template chat: the tokenizer of --model starter has no chat template"):
        Template(Config(prompt_template="chat"), tokenizer())
    with pytest.raises(DataError, match="no system role here.*leave out --system-prompt"):
        Template(Config(system_prompt="S"), tokenizer(chat=NO_SYSTEM)).text("a")


def test_nothing_to_word_is_nothing_tokenised():
    assert tokenize("t", [], Template(Config(), tokenizer()), None, notes := []) == [] == notes
    assert tokenize("t", [Record("")], Template(Config(), tokenizer()), None, notes) == []
    assert "1 of 1 prompts dropped: empty" in notes[0]
