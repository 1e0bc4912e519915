"""How a prompt is worded for the policy, and its tokens: template, system prompt, and exactly one bos."""

from collections.abc import Sequence
from functools import partial

from vipfast.config import Config
from vipfast.errors import DataError
from vipfast.tools import describe
from vipfast.tools.prompt import in_chat, in_words

ASKED = {
    "boxed": "Please reason step by step, and put your final answer within \\boxed{}.",
    "tags": "Please reason step by step, and put your final answer between <answer> and </answer>.",
}
"""Sentences that templates add to the problem."""


class Template:
    """Words prompts as ``--prompt-template`` and ``--system-prompt`` say; each offers what ``--tools`` names.

    Args:
        config: the three options.
        tokenizer: its chat template is used where it has one.

    Raises:
        DataError: ``--prompt-template chat`` without a chat template.
    """

    def __init__(self, config: Config, tokenizer):
        self.name, self.system, self.tokenizer = config.prompt_template, config.system_prompt, tokenizer
        has_chat = bool(getattr(tokenizer, "chat_template", None))
        if self.name == "chat" and not has_chat:
            raise DataError(
                f"--prompt-template chat: the tokenizer of --model {config.model} has no chat template; use plain, qa or auto"
            )
        self.chat = has_chat and self.name not in ("plain", "qa")
        self.tools = describe(config.tools)
        self.num_replaced = 0

    def text(self, prompt: str | list[dict]) -> str:
        """The text the policy sees; counts in ``num_replaced`` the rows whose own system message --system-prompt goes over.

        Raises:
            DataError: the chat template refuses the messages.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.system is not None:
            self.num_replaced += any(message["role"] == "system" for message in messages)
            messages = [message for message in messages if message["role"] != "system"]
            messages.insert(0, {"role": "system", "content": self.system})
        if (asked := ASKED.get(self.name)) and messages:
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{asked}"}
        if self.chat:
            return self._chat(messages)
        if self.name == "qa":
            *before, last = messages
            messages = [*before, {**last, "content": f"Question: {last['content']}\nAnswer:"}]
        text = "\n\n".join(str(message["content"]) for message in messages)
        return in_words(self.tools, text) if self.tools else text

    def _chat(self, messages: list[dict]) -> str:
        # Where a tokenizer has a template, it is there.
        import jinja2

        show = partial(self.tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
        try:
            return in_chat(self.tools, messages, show) if self.tools else show(messages)
        except jinja2.TemplateError as error:
            remedy = (
                "leave out --system-prompt, or use --prompt-template plain" if self.system else "use --prompt-template plain"
            )
            raise DataError(f"the model's chat template refuses a prompt ({error}): {messages!r:.300}; {remedy}") from error

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of worded prompts.

        A prompt begins with one bos where the tokenizer puts one before texts or its chat template wrote one, however often
        they did; it never ends with an eos that the tokenizer would add.
        """
        if not texts:
            return []
        # A chat template writes its own special tokens.
        rows = self.tokenizer(list(texts), add_special_tokens=not self.chat).input_ids
        bos, eos = (getattr(self.tokenizer, f"{name}_token_id", None) for name in ("bos", "eos"))
        bare, around = (self.tokenizer(["a"], add_special_tokens=added).input_ids[0] for added in (False, True))
        adds_bos = bos is not None and around[:1] == [bos] != bare[:1]
        adds_eos = eos is not None and not self.chat and around[-1:] == [eos] != bare[-1:]
        return [_begun(row[:-1] if adds_eos else row, bos, adds_bos) for row in rows]


def _begun(row: list[int], bos: int | None, adds_bos: bool) -> list[int]:
    start = 0
    while bos is not None and row[start : start + 1] == [bos]:
        start += 1
    return [bos, *row[start:]] if start or adds_bos else row
