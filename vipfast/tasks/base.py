"""A Task: tokenised prompts to train on, held-out ones, and the reward that verifies completions."""

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vipfast.cores import counted
from vipfast.errors import DataError
from vipfast.rewards.base import Reward
from vipfast.tasks.templates import Template
from vipfast.tasks.values import plain
from vipfast.types import Prompt


@dataclass(frozen=True)
class Task:
    """``notes`` are sentences worth telling at the start (dropped, merged, conflicting prompts); ``own_heldout``: the held-out
    prompts are a pool of the task's own, not split off from those to train on."""

    name: str
    train: list[Prompt]
    heldout: list[Prompt]
    reward: Reward
    notes: list[str] = field(default_factory=list)
    own_heldout: bool = False


@dataclass(frozen=True)
class Record:
    """One row of a dataset before tokenisation; ``prompt`` is a text, or chat messages [{"role", "content"}, …]."""

    prompt: str | list[dict]
    answer: Any = None
    metadata: dict = field(default_factory=dict)


def prompt_uid(task: str, text: str, answer: Any, metadata: dict) -> str:
    """Hash of task, text and verifier data (answer, metadata): stable over epochs, resume and dataset order.

    Raises:
        DataError: answer or metadata is no plain value, so it has no spelling that the next process would find again.
    """
    try:
        payload = json.dumps([task, text, answer, metadata], sort_keys=True, default=plain, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"prompts: answer or metadata of {text!r} cannot be kept by value ({error}); use numbers, texts, lists and dicts "
            "with text keys, and look everything else up in the reward"
        ) from error
    return hashlib.blake2b(payload.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Merger:
    """Merges equal records before anything is made of them, so that copies cost nothing but the reading."""

    def __init__(self):
        self.num_rows = self.num_merged = 0

    def distinct(self, records: Iterable[Record]) -> list[Record]:
        """The first of each: equal in prompt, answer and metadata."""
        found: dict[str, Record] = {}
        for record in records:
            self.num_rows += 1
            uid = prompt_uid("", record.prompt, record.answer, record.metadata)
            self.num_merged += uid in found
            found.setdefault(uid, record)
        return list(found.values())

    def notes(self) -> list[str]:
        merged = f"{self.num_merged} of {self.num_rows} prompts are duplicates and were merged"
        return [merged] if self.num_merged else []


def tokenize(
    task: str, records: Iterable[Record], template: Template, max_prompt_tokens: int | None, notes: list[str]
) -> list[Prompt]:
    """Records -> distinct prompts; appends to ``notes`` how many were merged, conflicting or dropped.

    Duplicates (same text, answer and metadata) are one prompt with one budget. The same text with different answers stays as
    separate prompts and is reported. Prompts longer than ``max_prompt_tokens`` are dropped and counted. A prompt that ends with
    words of the assistant is one that the policy goes on with.
    """
    merger = Merger()
    records = merger.distinct(records)
    shown = [_worded(record.prompt, template) for record in records]
    if broken := [text for text in shown if text != text.encode("utf-8", "replace").decode()]:
        raise DataError(f"--task {task}: half a surrogate pair in {counted(len(broken), 'prompt')}, e.g. {broken[0]!r}")
    prompts: dict[str, Prompt] = {}
    answers_per_text: dict[str, int] = {}
    num_long = 0
    for record, text, tokens in zip(records, shown, template.tokens(shown)):
        if not tokens or (max_prompt_tokens is not None and len(tokens) > max_prompt_tokens):
            num_long += 1
            continue
        uid = prompt_uid(task, text, record.answer, record.metadata)
        if uid in prompts:  # told apart only by a system message that --system-prompt goes over
            merger.num_merged += 1
            continue
        chat = None if isinstance(record.prompt, str) else record.prompt
        ids, problem = np.asarray(tokens, np.int64), _problem(record.prompt)
        prompts[uid] = Prompt(uid, text, ids, record.answer, record.metadata, problem, chat)
        answers_per_text[text] = answers_per_text.get(text, 0) + 1
    if num_long:
        limit = f"--max-prompt-tokens {max_prompt_tokens}"
        notes.append(f"{num_long} of {len(records)} prompts dropped: empty, or longer than {limit}")
    notes += merger.notes()
    if begun := sum(_begun(record.prompt) for record in records):
        notes.append(f"{begun} of {len(records)} prompts end with words of the assistant, which the policy goes on with")
    if conflicts := [text for text, count in answers_per_text.items() if count > 1]:
        notes.append(f"{len(conflicts)} texts come with different answers, e.g. {conflicts[0]!r}")
    return list(prompts.values())


def split_heldout(pool: list[Prompt], num_heldout: int) -> tuple[list[Prompt], list[Prompt]]:
    """Split off up to ``num_heldout`` prompts, at most a tenth of the pool, by hash of the problem's own words: disjoint,
    order-free, and the same whatever template, system prompt or tools they are posed with.

    Problems that differ only in case or white space stay on one side.
    """
    texts = sorted({folded(prompt) for prompt in pool}, key=lambda text: prompt_uid("heldout", text, None, {}))
    chosen = set(texts[: min(num_heldout, len(texts) // 10)])
    train, held = ([p for p in pool if (folded(p) in chosen) == wanted] for wanted in (False, True))
    return train, for_evaluation(held)


def for_evaluation(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts as an evaluation poses them: those with hidden tests are graded by these (metadata ``use_hidden``)."""
    return [replace(p, metadata={**p.metadata, "use_hidden": True}) if p.metadata.get("hidden_tests") else p for p in prompts]


def _begun(prompt: str | list[dict]) -> bool:
    return not isinstance(prompt, str) and prompt[-1]["role"] == "assistant"


def _worded(prompt: str | list[dict], template: Template) -> str:
    """The text the policy sees: what the assistant has begun stands in the turn that is the policy's to end."""
    if not _begun(prompt):
        return template.text(prompt)
    return template.text(prompt[:-1]) + ("" if template.chat else "\n\n") + prompt[-1]["content"]


def _problem(prompt: str | list[dict]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(str(message["content"]) for message in prompt if message["role"] != "system")


def folded(prompt: Prompt) -> str:
    return " ".join(unicodedata.normalize("NFKC", prompt.problem or prompt.text).casefold().split())
