"""The task of a run, from wherever its prompts come, with the reward that grades them."""

from collections.abc import Sequence
from typing import Any

from vipfast.config import Config
from vipfast.cores import counted
from vipfast.errors import DataError
from vipfast.options.values import CUSTOM, REASONING_GYM
from vipfast.rewards.base import Reward
from vipfast.rewards.choose import choose_reward, default_workers, given_reward
from vipfast.run_folder import go_on
from vipfast.tasks.base import Record, Task, folded, split_heldout, tokenize
from vipfast.tasks.chat import NotShown, read_chat, split_reply
from vipfast.tasks.templates import Template
from vipfast.tasks.values import Unreadable


def load_task(
    config: Config, tokenizer, prompts: Sequence | None = None, reward: Reward | None = None, least: int | None = None
) -> Task:
    """The run's task.

    Args:
        config: ``task`` names it (see ``Config.task``); ``prompt_template``, ``system_prompt`` word its prompts.
        tokenizer: of the policy.
        prompts: instead of ``config.task``: texts, or dicts with "prompt", optionally "answer", and any metadata.
        reward: instead of the task's own reward and ``config.reward``; one of them is needed with ``prompts``.
        least: prompts that there must be to train on; --prompts-per-step unless given.

    Raises:
        DataError: nothing to train on, or a dataset that cannot be read; the message names the option.
    """
    heldout, notes = None, []
    reward = given_reward(config, reward)
    if prompts is not None:
        if isinstance(prompts, str):
            raise DataError(f"prompts: got the text {prompts!r}; give a list of texts or dicts")
        if reward is None and (not config.reward or "task" in config.reward):
            raise DataError("prompts were given without a reward; pass reward=callable(completions, answers, metadata)")
        name, train = CUSTOM, [_own_record(row) for row in prompts]
        reward = reward or choose_reward(config, "exact")
    elif config.task == CUSTOM:
        raise DataError(f"--task {CUSTOM}: its prompts come from Python, which no file holds; give them again: {go_on(config)}")
    elif config.task == "arithmetic":
        from vipfast.tasks import arithmetic

        name = "arithmetic"
        train, heldout = (
            [Record(p.text, p.answer, {"family": p.family, "size": p.size}) for p in arithmetic.load_pool(split)]
            for split in ("train", "heldout")
        )
        reward = reward or choose_reward(config, arithmetic.reward)
    elif config.task.startswith(REASONING_GYM):
        from vipfast.tasks import reasoning_gym

        name, train = config.task, reasoning_gym.load_records(config, notes)
        reward = reward or choose_reward(
            config, reasoning_gym.Scorer(config.reward_workers or default_workers(), config.reward_timeout)
        )
    else:
        from vipfast.tasks.dataset import load_records

        name, (train, verifier) = config.task, load_records(config, notes)
        reward = reward or choose_reward(config, verifier)
    template = Template(config, tokenizer)
    pool = tokenize(name, train, template, config.max_prompt_tokens, notes)
    if heldout is not None:
        held = tokenize(name, heldout, template, config.max_prompt_tokens, notes)[: config.heldout_prompts]
        taken = {folded(prompt) for prompt in held}
        pool = [prompt for prompt in pool if folded(prompt) not in taken]
    else:
        pool, held = split_heldout(pool, config.heldout_prompts)
    if template.num_replaced:
        notes.append(f"--system-prompt goes over the system message that {template.num_replaced} prompts bring")
    if not pool:
        raise DataError(f"--task {name}: no prompt is left to train on; {'; '.join(notes) or 'the dataset is empty'}")
    if len(pool) < (config.prompts_per_step if least is None else least):
        raise DataError(
            f"--prompts-per-step {config.prompts_per_step}: --task {name} holds {counted(len(pool), 'distinct prompt')} to "
            f"train on{''.join('; ' + note for note in notes)}; use at most {len(pool)}"
        )
    for part in getattr(reward, "rewards", (reward,)):
        notes += [part.note] if getattr(part, "note", None) else []
        if check_golds := getattr(part, "check_golds", None):
            notes += check_golds(pool + held, config.seed)
    if not held:
        notes.append("nothing is held out (a tenth of the pool, at most --heldout-prompts), so there is nothing to evaluate")
    return Task(name, pool, held, reward, notes, own_heldout=heldout is not None)


def _own_record(row: Any) -> Record:
    """A prompt handed over from Python; of ShareGPT's dialogues the last turn is the answer, unless there is one."""
    given = row if isinstance(row, dict) else {"prompt": row}
    prompt, reply = given.get("prompt"), None
    try:
        chat = read_chat(prompt)
    except (NotShown, Unreadable) as error:
        raise DataError(f"prompts: the key 'prompt' of {row!r:.300} {error}") from error
    if chat is not None:
        prompt, reply = split_reply(chat.messages) if chat.sharegpt else (chat.messages, None)
    elif not isinstance(prompt, str):
        raise DataError(
            f"prompts: got {row!r:.300}; give texts, or dicts with the key 'prompt' (a text, or messages with role and "
            "content) and optionally 'answer'"
        )
    return Record(prompt, given.get("answer", reply), {k: v for k, v in given.items() if k not in ("prompt", "answer")})
