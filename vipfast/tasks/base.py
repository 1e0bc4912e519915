"""A Task: tokenised prompts to train on, held-out ones, and the reward that verifies completions."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vipfast.config import CUSTOM, Config
from vipfast.errors import DataError
from vipfast.rewards.grader import Reward
from vipfast.types import Prompt


@dataclass(frozen=True)
class Task:
    """``notes`` are sentences worth telling at the start (dropped, merged, conflicting prompts)."""

    name: str
    train: list[Prompt]
    heldout: list[Prompt]
    reward: Reward
    extract: Callable[[str], str | None] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Record:
    """One row of a dataset before tokenisation; ``prompt`` is a text, or chat messages [{"role", "content"}, …]."""

    prompt: str | list[dict]
    answer: Any = None
    metadata: dict = field(default_factory=dict)


def load_task(config: Config, tokenizer, prompts: Sequence | None = None, reward: Reward | None = None) -> Task:
    """The run's task.

    Args:
        config: ``task`` names it: "arithmetic", a .jsonl/.parquet/.csv file, or a hub dataset id.
        tokenizer: of the policy; its chat template is used where it has one.
        prompts: instead of ``config.task``: texts, or dicts with "prompt", optionally "answer", and any metadata.
        reward: instead of the task's own reward; needed with ``prompts``.

    Raises:
        DataError: nothing to train on, or a dataset that cannot be read; the message names the option.
    """
    extract, heldout, notes = None, None, []
    if prompts is not None:
        if isinstance(prompts, str):
            raise DataError(f"prompts: got the text {prompts!r}; give a list of texts or dicts")
        if reward is None:
            raise DataError("prompts were given without a reward; pass reward=callable(completions, answers, metadata)")
        name, train = CUSTOM, [_own_record(row) for row in prompts]
    elif config.task == CUSTOM:
        raise DataError(f"--task {CUSTOM}: its prompts come from Python; continue it with Trainer(config, prompts=…, reward=…)")
    elif config.task == "arithmetic":
        from vipfast.tasks import arithmetic

        name = "arithmetic"
        train, heldout = (
            [Record(p.text, p.answer, {"family": p.family, "size": p.size}) for p in arithmetic.load_pool(split)]
            for split in ("train", "heldout")
        )
        reward, extract = reward or arithmetic.reward, str.strip
    else:
        from vipfast.rewards import exact
        from vipfast.tasks.dataset import load_records

        name, train = config.task, load_records(config, notes)
        reward, extract = reward or exact.reward, exact.final_answer
    pool = tokenize(name, train, tokenizer, config.max_prompt_tokens, notes)
    if heldout is not None:
        held = tokenize(name, heldout, tokenizer, config.max_prompt_tokens, notes)[: config.heldout_prompts]
        taken = {prompt.text for prompt in held}
        pool = [prompt for prompt in pool if prompt.text not in taken]
    else:
        pool, held = split_heldout(pool, config.heldout_prompts)
    if not pool:
        raise DataError(f"--task {name}: no prompt is left to train on; {'; '.join(notes) or 'the dataset is empty'}")
    if len(pool) < config.prompts_per_step:
        raise DataError(
            f"--prompts-per-step {config.prompts_per_step}: --task {name} holds {len(pool)} distinct prompts to train on"
            f"{''.join('; ' + note for note in notes)}; use at most {len(pool)}"
        )
    if not held:
        notes.append("nothing is held out (a tenth of the pool, at most --heldout-prompts), so there is nothing to evaluate")
    return Task(name, pool, held, reward, extract, notes)


def _own_record(row) -> Record:
    if isinstance(row, str):
        return Record(row)
    prompt = row.get("prompt") if isinstance(row, dict) else None
    chat = isinstance(prompt, list) and all(isinstance(part, dict) and {"role", "content"} <= part.keys() for part in prompt)
    if not isinstance(prompt, str) and not chat:
        raise DataError(
            f"prompts: got {row!r}; give texts, or dicts with the key 'prompt' (a text, or messages with role and content) and "
            "optionally 'answer'"
        )
    return Record(row["prompt"], row.get("answer"), {k: v for k, v in row.items() if k not in ("prompt", "answer")})


def prompt_uid(task: str, text: str, answer: Any, metadata: dict) -> str:
    """Hash of task, text and verifier data (answer, metadata): stable over epochs, resume and dataset order.

    Raises:
        DataError: answer or metadata is no plain value, so it has no spelling that the next process would find again.
    """
    try:
        payload = json.dumps([task, text, answer, metadata], sort_keys=True, default=_plain, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"prompts: answer or metadata of {text!r} cannot be kept by value ({error}); use numbers, texts, lists and dicts "
            "with text keys, and look everything else up in the reward"
        ) from error
    return hashlib.blake2b(payload.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """NumPy's scalars and arrays as Python's own."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no plain value")


def tokenize(task: str, records: Iterable[Record], tokenizer, max_prompt_tokens: int | None, notes: list[str]) -> list[Prompt]:
    """Records -> distinct prompts; appends to ``notes`` how many were merged, conflicting or dropped.

    Duplicates (same text, answer and metadata) are one prompt with one budget. The same text with different answers stays as
    separate prompts and is reported. Prompts longer than ``max_prompt_tokens`` are dropped and counted.
    """
    records = list(records)
    shown = [_text(record.prompt, tokenizer) for record in records]
    if broken := [text for text in shown if text != text.encode("utf-8", "replace").decode()]:
        raise DataError(f"--task {task}: {len(broken)} prompts hold half a surrogate pair, e.g. {broken[0]!r}")
    # A chat template writes its own special tokens; a second bos would be one too many.
    special = not getattr(tokenizer, "chat_template", None)
    ids = tokenizer(shown, add_special_tokens=special).input_ids if shown else []
    prompts: dict[str, Prompt] = {}
    answers_per_text: dict[str, int] = {}
    num_long = 0
    for record, text, tokens in zip(records, shown, ids):
        uid = prompt_uid(task, text, record.answer, record.metadata)
        if uid in prompts:
            continue
        if not tokens or (max_prompt_tokens is not None and len(tokens) > max_prompt_tokens):
            num_long += 1
            continue
        prompts[uid] = Prompt(uid, text, np.asarray(tokens, np.int64), record.answer, record.metadata)
        answers_per_text[text] = answers_per_text.get(text, 0) + 1
    num_rows = len(records)
    if num_long:
        limit = f"--max-prompt-tokens {max_prompt_tokens}"
        notes.append(f"{num_long} of {num_rows} prompts dropped: empty, or longer than {limit}")
    if num_merged := num_rows - num_long - len(prompts):
        notes.append(f"{num_merged} of {num_rows} prompts are duplicates and were merged")
    if conflicts := [text for text, count in answers_per_text.items() if count > 1]:
        notes.append(f"{len(conflicts)} texts come with different answers, e.g. {conflicts[0]!r}")
    return list(prompts.values())


def split_heldout(pool: list[Prompt], num_heldout: int) -> tuple[list[Prompt], list[Prompt]]:
    """Split off up to ``num_heldout`` prompts, at most a tenth of the pool, by hash of the text: disjoint and order-free."""
    texts = sorted({prompt.text for prompt in pool}, key=lambda text: prompt_uid("heldout", text, None, {}))
    chosen = set(texts[: min(num_heldout, len(texts) // 10)])
    return [p for p in pool if p.text not in chosen], [p for p in pool if p.text in chosen]


def _text(prompt: str | list[dict], tokenizer) -> str:
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return prompt if isinstance(prompt, str) else "\n\n".join(str(message["content"]) for message in prompt)
