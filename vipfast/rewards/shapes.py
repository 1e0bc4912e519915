"""How a reward of one's own wants to be called: as vipfast calls rewards, or as TRL or verl call theirs; told by the names of
its parameters, so that rewards written for either work here unchanged."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vipfast.rewards.thinking import opened_by
from vipfast.types import Prompt

REMEDY = (
    "give a function of (completions, answers, metadata), of TRL's keywords (prompts, completions, answer, **kwargs) or of "
    "verl's (data_source, solution_str, ground_truth, extra_info)"
)
_GOLD = ("solution", "ground_truth")
"""Parameters by which rewards for TRL commonly take the gold answer, besides ``answer``."""


@dataclass(frozen=True)
class Shaped:
    """A reward that is called (completions, answers, metadata, **columns), whatever its own parameters are.

    Attributes: ``call``; ``wants``, names of the columns (``rewards.base.Reward``); ``whose``, "TRL" or "verl" where it is
    called in their way, else None.
    """

    call: Callable[..., Any]
    wants: tuple[str, ...] = ()
    whose: str | None = None


def shown(wants: Sequence[str], prompts: Sequence[Prompt], texts: Sequence[str], rows: Sequence[Any]) -> dict[str, list]:
    """The columns that a reward wants to be called with, plain values all.

    Args:
        wants: their names.
        prompts: of each completion.
        texts: the completions as they are graded.
        rows: the token ids of each.
    """
    columns = {
        "prompts": lambda: [prompt.messages or prompt.problem or prompt.text for prompt in prompts],
        "raw": lambda: [text.removeprefix(opened_by(prompt.text)) for prompt, text in zip(prompts, texts)],
        "ids": lambda: [[int(id) for id in row] for row in rows],
    }
    return {name: columns[name]() for name in wants}


def shaped(reward: Any, *, gold_names: Sequence[str] = (), task: str = "") -> Shaped:
    """Find out how a reward is to be called.

    Args:
        reward: the user's function, or an instance that can be called.
        gold_names: further names that the gold answer has, such as the dataset's column.
        task: verl's ``data_source`` of prompts whose metadata names no source.

    Raises:
        TypeError: it cannot be called in any of the three ways; the message says why and what would do.
    """
    if inspect.isclass(reward):
        raise TypeError("it is a class; give an instance of it, or a function")
    if not callable(reward):
        raise TypeError(f"it is a {type(reward).__name__}, no function; name maths, code and the like with --reward")
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        raise TypeError(f"it is a coroutine (async def), which nobody awaits; {REMEDY}")
    if wants := tuple(getattr(reward, "wants", ())):
        return Shaped(reward, wants)
    try:
        signature = inspect.signature(reward)
    except ValueError:  # something written in C, which tells no signature
        return Shaped(reward)
    parameters = signature.parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    rest = any(p.kind == p.VAR_KEYWORD for p in parameters)
    if "solution_str" in named:
        return _verl(reward, None if rest else named, task)
    three = _why_not_three(signature)
    # A dataset's column is hardly called answers, and vipfast's own parameter is.
    if "completions" in named and "answers" not in named and (rest or three or named & {"prompts", "completion_ids"}):
        return _trl(reward, named, rest, gold_names)
    if rest and "answers" not in named and (not named or named & {"prompts", "completion_ids"}):
        return _trl(reward, named, rest, gold_names)
    first = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:3]
    if not three and {"prompt", "prompts"} & set(first):
        three = "a prompt is none of the three"
    if three:
        raise TypeError(f"its parameters {signature} do not fit ({three}); {REMEDY}")
    return Shaped(reward)


def _why_not_three(signature: inspect.Signature) -> str | None:
    """Why three positional values cannot be given to a function; None where they can."""
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        return str(error)
    return None


def _trl(reward: Callable, named: set[str], rest: bool, gold_names: Sequence[str]) -> Shaped:
    """TRL: one call by keyword for the batch, every column of the dataset a list; after chat messages a completion is a
    message too, else a text. ``trainer_state`` and what else only TRL's own trainer has is not given."""

    def call(completions: list, answers: list, metadata: list[dict], *, prompts: list, raw: list, ids: list | None = None):
        columns = {key: [row.get(key) for row in metadata] for key in dict.fromkeys(key for row in metadata for key in row)}
        for name in (*gold_names, *(name for name in _GOLD if name in named)):
            columns.setdefault(name, answers)
        asked, replies = zip(*(_exchange(*pair) for pair in zip(prompts, raw)))
        columns |= {"prompts": list(asked), "completions": list(replies), "answer": answers}
        columns |= {"completion_ids": ids} if ids is not None else {}
        return reward(**{name: column for name, column in columns.items() if rest or name in named})

    return Shaped(call, ("prompts", "raw", *(("ids",) if "completion_ids" in named else ())), "TRL")


def _exchange(prompt: str | list[dict], text: str) -> tuple[str, str] | tuple[list[dict], list[dict]]:
    """Prompt and completion of one rollout; what the assistant had begun in the prompt is part of the completion."""
    if isinstance(prompt, str):
        return prompt, text
    begun = prompt[-1]["role"] == "assistant"
    return prompt[: len(prompt) - begun], [{"role": "assistant", "content": prompt[-1]["content"] * begun + text}]


def _verl(reward: Callable, named: set[str] | None, task: str) -> Shaped:
    """verl: a call by keyword for each completion, which gives a number, or a dict whose "score" it is. A column extra_info of
    the dataset is verl's, else all of the metadata is. ``named``: the parameters it has; None: it takes any."""

    def call(completions: list, answers: list, metadata: list[dict], *, raw: list) -> list:
        scores = []
        for text, answer, about in zip(raw, answers, metadata):
            given = {
                "data_source": about.get("data_source", about.get("source", task)),
                "solution_str": text,
                "ground_truth": answer,
                "extra_info": about.get("extra_info", about),
            }
            scores.append(_score(reward(**{name: v for name, v in given.items() if named is None or name in named})))
        return scores

    return Shaped(call, ("raw",), "verl")


def _score(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "score" not in value:
        raise TypeError(f"it returned a dict without 'score', but with {', '.join(map(str, value)) or 'nothing'}")
    return value["score"]
