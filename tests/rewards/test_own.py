"""A reward of one's own by name: what it may do wrong is named, unscored and counted, and no hang outlasts its limit."""

import time

import numpy as np
import pytest

from vipfast.config import Config
from vipfast.engine.base import Finished
from vipfast.errors import RewardError, UsageError
from vipfast.resolve import resolve
from vipfast.rewards import exact
from vipfast.rewards.base import Verdict
from vipfast.rewards.choose import choose_reward
from vipfast.rewards.combined import Combined
from vipfast.rewards.given import Given
from vipfast.rewards.grader import Grader
from vipfast.types import Finish, Prompt, RewardRange

MINE = """
import time
from vipfast.rewards.base import Verdict
from vipfast.types import RewardRange
NUMBER = 3

def reward(completions, answers, metadata):
    text = completions[0]
    if text == "hang":
        while True:
            pass
    if text == "raise":
        raise OSError("disk")
    if text == "two":
        return [1.0, 2.0]
    if text == "none at all":
        return None
    if text == "bare":
        return 1.0
    if text == "text":
        return ["right"]
    special = {"nan": float("nan"), "inf": float("inf"), "none": None, "int": 1, "bool": True}
    return [special[text]] if text in special else [metadata[0]["completions"] * len(text) / len(answers[0])]

def length(completions, answers, metadata):
    return [None if text == "unknown" else float(len(text)) for text in completions]

length.reward_range = RewardRange(0, 100)

def judged(completions, answers, metadata):
    return [Verdict(float(text == answer), answer=text.upper()) for text, answer in zip(completions, answers)]

judged.has_answers = True
"""


class Decoder:
    def batch_decode(self, tokens, skip_special_tokens):
        return ["".join(map(chr, row)) for row in tokens]


def graded(grader, *texts, answer="abcd", finish=Finish.STOP):
    rows = [Finished(0, i, np.array(list(map(ord, t))), np.zeros(len(t), np.float32), finish) for i, t in enumerate(texts)]
    # A column named like one of the function's arguments is metadata as any other.
    return grader.grade([Prompt("u", "p", np.array([1]), answer, {"completions": 2.0})] * len(rows), rows)


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("import no_such_library")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def choose(here):
    chosen = []

    def choice(*names, wanted="exact", **options):
        options = {"reward_workers": 1, "reward_timeout": 1.0, **options}
        chosen.append(choose_reward(Config(reward=names, **options), wanted))
        return chosen[-1]

    yield choice
    for reward in chosen:
        if close := getattr(reward, "close", None):
            close()


def test_what_can_go_wrong_is_named_unscored_and_counted(choose):
    reward = choose("mine:reward")
    texts = ["fine", "hang", "raise", "two", "none at all", "bare", "text", "nan", "inf", "none", "int", "bool"]
    start = time.perf_counter()
    verdicts = reward(texts, ["abcd"] * 12, [{"completions": 2.0}] * 12)
    assert time.perf_counter() - start < 15
    assert [verdict.reward for verdict in verdicts] == [2.0] + [None] * 9 + [1.0, 1.0]
    errors = [
        "longer than --reward-timeout 1 s",
        "OSError: disk",
        "2 values for 1 completion",
        "a NoneType",
        "a float",
        "'right'",
    ]
    for verdict, message in zip([*verdicts[1:7], verdicts[8]], [*errors, "a number beyond ±3.4e38"]):
        assert message in verdict.error
    assert verdicts[1].timed_out and verdicts[7] == verdicts[9] == Verdict(None), "NaN is None, and no error"
    grader = Grader(reward, Decoder())
    values = graded(grader, "fine", "raise", "two", "none", "abcdefgh").reward
    assert np.array_equal(values, [2, np.nan, np.nan, np.nan, 4], equal_nan=True) and grader.num_errors == 2 and grader.beside


def test_nan_and_none_are_unscored_and_no_error_wherever_the_reward_comes_from(choose):
    for value in (np.nan, None, Verdict(np.nan)):
        grader = Grader(Given(lambda completions, answers, metadata, value=value: [value] * len(completions)), Decoder())
        assert np.isnan(graded(grader, "a", "b").reward).all() and grader.num_errors == 0
    grader = Grader(choose("mine:reward"), Decoder())
    assert np.isnan(graded(grader, "nan", "none").reward).all() and grader.num_errors == 0


def test_slow_calls_in_a_row_stop_the_run_with_the_remedy(choose):
    grader = Grader(choose("mine:reward", reward_timeout=0.2), Decoder(), max_errors=3)
    with pytest.raises(
        RewardError, match=r"3 times in a row \(--max-reward-errors\), last with a call longer than --reward-timeout"
    ):
        graded(grader, "hang", "hang", "hang", "fine")
    assert grader.num_timeouts == grader.num_errors == 3


def test_a_promised_range_is_known_to_the_trainer(choose):
    assert choose("mine:length").reward_range == RewardRange(0, 100) and choose("mine:reward").reward_range is None


@pytest.mark.parametrize(
    "name,message",
    [
        ("nothing:f", "--reward nothing:f: cannot be used .*No module named 'nothing'"),
        ("mine:absent", "--reward mine:absent: .*no attribute 'absent'"),
        ("mine:NUMBER", "--reward mine:NUMBER: .*it is a int, no function"),
        ("broken:f", "--reward broken:f: .*no_such_library"),
    ],
)
def test_a_reward_that_is_not_there_is_refused_before_anything_is_loaded(choose, name, message):
    with pytest.raises(UsageError, match=message):
        choose(name)


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(reward=("math",)), "--reward math: unknown; give task, maths, code, exact, or a function"),
        (dict(reward=("maths", "maths")), "--reward maths maths: names one twice"),
        (dict(reward_weights=(1.0,)), "--reward-weights 1.0: 1 weights for 0 rewards"),
        (dict(reward=("maths", "a:b"), reward_weights=(1.0,)), "--reward-weights 1.0: 1 weights for 2 rewards"),
        (dict(reward=("maths", "a:b"), reward_weights=(0.0, 1.0)), "--reward-weights 0.0 1.0: .*above 0 for the first"),
        (dict(reward=("maths",), reward_weights=(float("inf"),)), "--reward-weights inf: must be finite"),
        (dict(reward_timeout=0.0), "--reward-timeout 0.0: must lie in"),
        (dict(reward_workers=0), "--reward-workers 0: must lie in"),
    ],
)
def test_names_and_weights_that_cannot_be_meant(options, message):
    with pytest.raises(UsageError, match=message):
        resolve(Config(**options), ask_torch=False)


def test_a_single_reward_is_itself_and_the_task_is_asked_by_default():
    own = lambda completions, answers, metadata: []  # noqa: E731
    assert choose_reward(Config(), own) is own and choose_reward(Config(reward=("task",)), "exact") is exact.reward
    assert choose_reward(Config(reward=("exact",)), own) is exact.reward


def test_the_loss_sees_the_weighted_sum_and_all_else_the_verifiers_part(choose):
    reward = choose("exact", "mine:length", reward_weights=(2.0, -0.25))
    grader = Grader(reward, Decoder())
    assert grader.has_answers and grader.beside and grader.reward_range == exact.reward.reward_range
    grades = graded(grader, "7", "77", "unknown", answer="7")
    assert np.array_equal(grades.reward, [2 - 0.25, -0.5, np.nan], equal_nan=True)
    assert np.array_equal(grades.verified, [1, 0, np.nan], equal_nan=True) and grades.answer == ["7", "77", "unknown"]
    assert grader.part_sums().tolist() == [[1, 2], [3, 2]] and grader.names == ("exact", "mine:length")
    grader.start_count()
    assert grader.part_sums().tolist() == [[0, 0], [0, 0]]


def test_shape_applies_to_the_verifier_alone_and_zeroed_rollouts_to_all():
    half = lambda completions, answers, metadata: [Verdict(0.5)] * len(completions)  # noqa: E731
    joined = Combined([("half", half, 2.0), ("also", half, 1.0)])
    assert graded(Grader(joined, Decoder(), binary_at=0.5), "a").reward.tolist() == [2.5]
    assert graded(Grader(joined, Decoder()), "a").reward.tolist() == [1.5]
    assert graded(Grader(joined, Decoder(), truncated="zero"), "a", finish=Finish.LENGTH).reward.tolist() == [0.0]
    failing = lambda completions, answers, metadata: [Verdict(None, error="gone")] * len(completions)  # noqa: E731
    grader = Grader(Combined([("half", half, 1.0), ("failing", failing, 1.0)]), Decoder(), max_errors=2)
    assert np.isnan(graded(grader, "a").verified).all() and grader.num_errors == 1
    with pytest.raises(RewardError, match="failing: gone"):
        graded(grader, "a")
    assert np.isnan(graded(Grader(joined, Decoder()), "a", finish=Finish.ERROR).reward).all()


def test_a_reward_may_give_verdicts_and_their_answers_vote(choose):
    reward = choose("mine:judged")
    assert reward.has_answers and not choose("mine:length").has_answers
    assert reward(["x", "y"], ["x", "x"], [{}] * 2) == [Verdict(1.0, "X"), Verdict(0.0, "Y")]


@pytest.mark.parametrize("name, rewards", [("em", [1.0, 0.0]), ("f1", [1.0, 0.5]), ("precision", [1.0, 0.5])])
def test_retrieval_rewards_are_chosen_by_name(choose, name, rewards):
    reward = choose(f"vipfast.rewards.retrieval:{name}")
    verdicts = reward(["Answer: The Eiffel Tower", "Answer: Eiffel bridge"], ["Eiffel tower"] * 2, [{}] * 2)
    assert [verdict.reward for verdict in verdicts] == rewards and verdicts[0].answer == "eiffel tower"
    assert reward.has_answers and reward.reward_range.holds(1.0)
