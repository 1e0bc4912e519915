"""One call of a reward of one's own on a real prompt, before anything is loaded: what is wired wrongly shows at once and not
after an evaluation, or as a run that trains on nothing."""

import re
from collections.abc import Sequence

from vipfast.errors import UsageError
from vipfast.rewards.base import Verdict
from vipfast.types import Prompt

WIRED_WRONGLY = ("TypeError", "KeyError", "NameError", "UnboundLocalError")
"""Exceptions that speak of the call itself: a parameter, key or name that is not there. Any other may be due to this completion
alone, whose rollout would be unscored, and is a warning."""

_WRONG_FORM = re.compile(r"AttributeError: '(?:list|dict)' object")
"""A text was expected where a completion is a list of messages."""


def pick(prompts: Sequence[Prompt]) -> tuple[Prompt, str]:
    """The prompt of the trial and its completion: the gold answer where it is a text, else nothing."""
    prompt = prompts[0]
    return prompt, prompt.answer if isinstance(prompt.answer, str) else ""


def judge(name: str, whose: str | None, verdict: Verdict, prompt: Prompt, text: str, remedy: str) -> list[str]:
    """What a trial tells: a sentence where it failed in a way that may be due to its completion, nothing where it went well.

    Args:
        name: the option and the reward, as the user wrote them.
        whose: "TRL" or "verl" where it is called as they call theirs.
        verdict: what became of the call.
        prompt, text: what it was called on.
        remedy: what to do.

    Raises:
        UsageError: it failed in a way that every call would.
    """
    if verdict.error is None:
        return []
    called = f"called as {whose} calls it" if whose else "called with (completions, answers, metadata)"
    if whose == "TRL":  # whose rewards are often written for one form alone
        called += f", with {'messages' if prompt.messages else 'texts'} since the prompt is one of these"
    tried = f"on the completion {text[:80]!r} of the prompt {prompt.text[:80]!r}"
    if verdict.error.split(":")[0] in WIRED_WRONGLY or _WRONG_FORM.match(verdict.error):
        there = ", ".join(map(str, prompt.metadata)) or "nothing"
        raise UsageError(f"{name}: {called}, a trial {tried} (metadata: {there}) failed with {verdict.error}; {remedy}")
    return [f"warning: {name}: a trial {tried} failed with {verdict.error}; a rollout where it does so is left unscored"]
