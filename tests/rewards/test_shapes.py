"""Rewards written for TRL or verl are called as those call them; what can be called in no way is refused before it trains."""

import functools

import numpy as np
import pytest

from vipfast.config import Config
from vipfast.engine.base import Finished
from vipfast.errors import DataError, UsageError
from vipfast.rewards.base import Verdict
from vipfast.rewards.choose import choose_reward, given_reward
from vipfast.rewards.grader import Grader
from vipfast.rewards.shapes import shaped, shown
from vipfast.types import Finish, Prompt

MINE = """
seen = []

# TRL's own words: https://huggingface.co/docs/trl/grpo_trainer, "Using a custom reward function"
def accuracy(prompts, completions, answer, **kwargs):
    return [float(text.strip() == gold and prompt in ("p1", "p2")) for prompt, text, gold in zip(prompts, completions, answer)]

def levels(completions, level, solution, **kwargs):
    return [len(text) / one if gold == "7" else None for text, one, gold in zip(completions, level, solution)]

def ids(completions, completion_ids, **kwargs):
    return [float(sum(row)) for row in completion_ids]

def ids_alone(completion_ids, **kwargs):
    return [float(sum(row)) for row in completion_ids]

def anything(**kwargs):
    return [float(text == gold) for text, gold in zip(kwargs["completions"], kwargs["answer"])]

def stripped(completions, answer, **kwargs):
    return [float(text.strip() == gold) for text, gold in zip(completions, answer)]

def chat(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]

def state(completions, trainer_state, **kwargs):
    return [0.0] * len(completions)

# verl's: a call for each completion
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "arithmetic" and extra_info == {"level": 2}, (data_source, extra_info)
    return {"score": float(solution_str == ground_truth), "acc": 1.0}

def bare(solution_str, ground_truth, **kwargs):
    return float(kwargs["data_source"] == "arithmetic" and solution_str == ground_truth)

def no_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"accuracy": 1.0}

# vipfast's own, whatever the names are
def own(texts, golds, about):
    return [float(text == gold and one["level"] == 2) for text, gold, one in zip(texts, golds, about)]

def more(completions, answers, metadata, strict=False, **kwargs):
    assert not kwargs
    return own(completions, answers, metadata)

def rest(completions, answers, about, **kwargs):
    return own(completions, answers, about)

# wired wrongly
def two(completions, answers): return [0.0] * len(completions)
def three_named(prompts, outputs, targets): return [0.0] * len(outputs)
def wants_more(completions, answers, metadata, *, strict): return [0.0] * len(completions)
async def later(completions, answers, metadata): return [0.0] * len(completions)
def no_key(completions, answers, metadata): return [one["nothing"] for one in metadata]
def no_name(completions, answers, metadata): return [absent for one in metadata]
def no_column(completions, rubric, **kwargs): return [0.0] * len(completions)
def scalar(completions, answers, metadata): return 1.0
def too_many(completions, answers, metadata): return [1.0, 2.0]
def words(completions, answers, metadata): return ["right"]
def odd(completions, answers, metadata): raise ValueError("cannot read this one")

class Class:
    def __call__(self, completions, answers, metadata): return [0.0] * len(completions)
"""

SPACE: dict = {}
exec(compile(MINE, "mine.py", "exec"), SPACE)
PROMPTS = [Prompt(f"u{i}", f"<user>p{i}", np.array([1, 2]), "7", {"level": 2}, f"p{i}") for i in (1, 2)]


class Decoder:
    def batch_decode(self, tokens, skip_special_tokens):
        return ["".join(map(chr, row)) for row in tokens]


def graded(reward, *texts, prompts=PROMPTS):
    rows = [Finished(0, i, np.array(list(map(ord, t))), np.zeros(len(t), np.float32), Finish.STOP) for i, t in enumerate(texts)]
    grader = Grader(reward, Decoder(), max_errors=1)
    return grader.grade(prompts, rows).reward.tolist()


@pytest.fixture(params=["reward=", "--reward"])
def make(request, tmp_path, monkeypatch):
    """A reward of MINE by name, given in Python or named in the options."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    made = []

    def made_of(name):
        if request.param == "reward=":
            made.append(given_reward(Config(), SPACE[name]))
        else:
            made.append(choose_reward(Config(reward=(f"mine:{name}",), reward_workers=1, reward_timeout=5.0), "exact"))
        return made[-1]

    yield made_of
    for reward in made:
        reward.close()


@pytest.mark.parametrize(
    "name, whose, rewards",
    [
        ("accuracy", "TRL", [1.0, 0.0]),
        ("levels", "TRL", [0.5, 1.0]),
        ("ids", "TRL", [55.0, 112.0]),  # ord("7"), ord("8") + ord("8")
        ("ids_alone", "TRL", [55.0, 112.0]),
        ("anything", "TRL", [1.0, 0.0]),
        ("compute_score", "verl", [1.0, 0.0]),
        ("bare", "verl", [1.0, 0.0]),
        ("own", None, [1.0, 0.0]),
        ("more", None, [1.0, 0.0]),
        ("rest", None, [1.0, 0.0]),
    ],
)
def test_a_reward_is_called_as_its_parameters_say(make, name, whose, rewards):
    reward = make(name)
    assert graded(reward, "7", "88") == rewards
    assert (reward.note is None) == (whose is None) and (
        whose is None or reward.note.endswith(f"is called as {whose} calls it")
    )
    assert reward.check_golds(PROMPTS, 0) == []


def test_after_messages_a_completion_is_a_message_too(make):
    messages = [{"role": "user", "content": "p1"}]
    posed = [Prompt("u", "<user>p1", np.array([1]), "7", {}, "p1", messages=messages)]
    reward = make("chat")
    assert graded(reward, "seven", prompts=posed) == [5.0] and reward.check_golds(posed, 0) == []
    assert shown(("prompts",), posed, [""], [[]]) == {"prompts": [messages]}
    with pytest.raises(UsageError, match="as TRL calls it, with messages since the prompt is one of these.*AttributeError"):
        make("stripped").check_golds(posed, 0)
    begun = [*messages, {"role": "assistant", "content": "It is "}]
    assert graded(make("chat"), "seven", prompts=[Prompt("u", "p", np.array([1]), "7", {}, messages=begun)]) == [11.0]
    with pytest.raises(UsageError, match="as TRL calls it, with texts since the prompt is one.*TypeError"):
        make("chat").check_golds(PROMPTS, 0)


@pytest.mark.parametrize(
    "name, message",
    [
        ("two", r"two.*\(completions, answers\) do not fit \(too many positional arguments\); give a function of"),
        ("three_named", "a prompt is none of the three"),
        ("wants_more", "missing a required.* argument: 'strict'"),
        ("later", "coroutine"),
        ("Class", "it is a class; give an instance"),
        ("state", "'trainer_state'"),
        ("no_key", r"on the completion '7' of the prompt '<user>p1' \(metadata: level\) failed with KeyError: 'nothing'"),
        ("no_name", "NameError: name 'absent'"),
        ("no_column", "'rubric'"),
        ("no_score", "a dict without 'score', but with accuracy"),
        ("scalar", "returned a float"),
        ("too_many", "returned 2 values for 1 completion"),
        ("words", "returned 'right'"),
    ],
)
def test_what_is_wired_wrongly_is_refused_with_the_reason(make, name, message):
    with pytest.raises(UsageError, match=message) as error:
        make(name).check_golds(PROMPTS, 0)
    assert name in str(error.value)


def test_what_one_completion_may_be_to_blame_for_is_a_warning(make):
    (said,) = make("odd").check_golds(PROMPTS, 0)
    assert said.startswith("warning: ") and "ValueError: cannot read this one" in said and "unscored" in said


def test_a_trial_on_no_gold_text_is_on_an_empty_one():
    seen = []
    reward = given_reward(Config(), lambda texts, answers, metadata: seen.append((texts, answers)) or [None])
    assert reward.check_golds([Prompt("u", "p", np.array([1]), 3)], 0) == [] and seen == [([""], [3])]


def test_a_thought_that_the_prompt_opened_is_put_back_for_vipfasts_rewards_alone():
    prompts = [Prompt("u", "<user>p<think>\n", np.array([1]), "7", {}, "p")] * 2
    thought = "so 7</think>7"
    for name, begins in (("accuracy", "so"), ("compute_score", "so"), ("own", "<think>\nso")):
        texts = []
        reward = given_reward(Config(), SPACE[name])
        seen = lambda *args, texts=texts, **columns: texts.extend(columns.get("raw", args[0])) or [0.0]  # noqa: E731
        seen.wants = reward.wants
        graded(seen, thought, prompts=prompts)
        assert texts == [begins + " 7</think>7"]


def test_columns_go_by_their_own_names():
    seen = {}

    def reward(completions, **kwargs):
        seen.update(kwargs)
        return [0.0] * len(completions)

    call = shaped(reward, gold_names=("final",)).call
    call(["x", "y"], ["1", "2"], [{"a": 1}, {"b": 2}], prompts=["p", "q"], raw=["x", "y"])
    assert seen == {"prompts": ["p", "q"], "answer": ["1", "2"], "final": ["1", "2"], "a": [1, None], "b": [None, 2]}

    def by_source(data_source, solution_str, ground_truth, extra_info):
        seen.update(source=data_source, extra=extra_info)
        return 1

    about = {"source": "gsm8k", "extra_info": {"split": "train"}}
    assert shaped(by_source, task="t").call(["x"], ["1"], [about], raw=["x"]) == [1]
    assert (seen["source"], seen["extra"]) == ("gsm8k", {"split": "train"})


def test_wrappers_and_instances_are_read_through():
    def counted(reward):
        @functools.wraps(reward)
        def call(*args, **kwargs):
            return reward(*args, **kwargs)

        return call

    assert shaped(counted(SPACE["accuracy"])).whose == "TRL" and shaped(counted(SPACE["compute_score"])).whose == "verl"
    assert shaped(SPACE["Class"]()).whose is None and shaped(lambda *args: [0.0]).whose is None
    assert shaped(functools.partial(SPACE["wants_more"], strict=True)).whose is None


def test_a_reward_may_ask_for_columns_of_its_own_accord():
    def reward(completions, answers, metadata, prompts, ids):
        return [float(prompt == "p1") + len(row) for prompt, row in zip(prompts, ids)]

    reward.wants = ("prompts", "ids")
    assert graded(given_reward(Config(), reward), "a", "bc") == [2.0, 2.0]


def test_one_of_several_may_be_written_for_trl(make, tmp_path):
    both = choose_reward(Config(reward=("exact", "mine:accuracy"), reward_weights=(1.0, 0.5), reward_workers=1), "exact")
    assert both.wants == ("prompts", "raw") and graded(both, "7", "8") == [1.5, 0.0]
    both.close()


def test_what_a_function_promises_stays_promised():
    from vipfast.rewards.exact import reward

    given = given_reward(Config(), reward)
    assert given.has_answers and given.reward_range == reward.reward_range
    assert given(["7"], ["7"], [{}]) == [Verdict(1.0, "7")]


@pytest.mark.parametrize("value", ["maths", ["maths"], 3])
def test_what_is_no_function_is_refused(value):
    with pytest.raises(UsageError, match="no function; name maths, code and the like with --reward"):
        given_reward(Config(), value)


def test_options_and_python_name_one_reward_between_them():
    with pytest.raises(DataError, match="--reward maths: reward= was given in Python too"):
        given_reward(Config(reward=("maths",)), SPACE["own"])
    with pytest.raises(UsageError, match=r"--reward python: .*give it again: Trainer\(Config\(output_dir='r', …\), reward=…"):
        given_reward(Config(reward=("python",), output_dir="r"), None)
    for options in (dict(reward=("python", "maths")), dict(reward=("python",), reward_weights=(2.0,))):
        with pytest.raises(UsageError, match="given in Python is the only one"):
            choose_reward(Config(**options), "exact")
