"""Scores, levels and counts by hand; nulls where a score means nothing; strict JSON."""

import json

import numpy as np
import pytest
from rich.console import Console

from vipfast.engine.base import ToolUse
from vipfast.evaluation.command import parse
from vipfast.evaluation.pool import Pool, choose, level_of
from vipfast.evaluation.report import show
from vipfast.evaluation.results import results
from vipfast.evaluation.samples import Sample
from vipfast.policy import load_tokenizer
from vipfast.rewards.base import Verdict
from vipfast.tasks.base import Task
from vipfast.types import Prompt


def verdicts(completions, answers, metadata):
    return [Verdict(0.0) for _ in completions]


def pool(levels, name="made-up", has_answers=True):
    def reward(completions, answers, metadata):
        return verdicts(completions, answers, metadata)

    reward.has_answers = has_answers
    prompts = [Prompt(f"{name}-{i}", f"p{i}", np.array([1]), "1", {"level": level}) for i, level in enumerate(levels)]
    return Pool(name, Task(name, prompts, [], reward), prompts, "all", ("level",), ())


def right(answer="1", tokens=3):
    return Sample(1.0, answer, "stop", tokens)


def wrong(answer="2", tokens=5, finish="stop"):
    return Sample(0.0, answer, finish, tokens)


ROWS = [
    *(right(), right(), wrong(), wrong("3")),  # level 1, majority right
    *(wrong(), wrong(), right(), Sample(None, None, "error", 0)),  # level 1, majority wrong
    *(right(),) * 4,  # level 10
    *(wrong(None, 9, "length"),) * 4,  # level 2, no answers
]


@pytest.fixture
def found():
    asked = parse(["--samples", "4"])
    return results(asked, [pool([1, 1, 10, 2])], ROWS)


def value(score):
    return score["value"]


def test_scores_by_hand(found):
    scores = found["tasks"]["made-up"]["scores"]
    assert value(scores["mean@4"]) == pytest.approx((2 + 1 + 4 + 0) / 16)
    assert value(scores["pass@1"]) == value(scores["mean@4"])
    assert value(scores["pass@2"]) == pytest.approx((5 / 6 + 3 / 6 + 1 + 0) / 4)
    assert value(scores["pass@4"]) == 0.75
    assert value(scores["maj@4"]) == 0.5
    # Of six pairs: prompt 0 (1 1 2 3) 11 and four halves, 12 12 13 13; prompt 1 (2 2 1 none) 1-none and two halves, 21 21.
    assert value(scores["maj@2"]) == pytest.approx(((1 + 4 / 2) / 6 + (1 + 2 / 2) / 6 + 1 + 0) / 4)
    assert list(scores) == ["mean@4", "reward", "pass@1", "pass@2", "pass@4", "maj@1", "maj@2", "maj@4"]
    assert scores["pass@4"]["low"] < 0.75 <= scores["pass@4"]["high"]


def graded(*rewards):
    return [Sample(reward, None, "stop", 1) for reward in rewards]


PARTS = [*graded(0.6, 0.5, 0.4, None), *graded(None, None, None, None), *graded(1.0, 1.0, 1.0, 0.0)]


def test_what_reaches_the_threshold_is_right():
    for threshold, right_B, mean in (("0.5", [2, 0, 3], 5 / 12), ("0.6", [1, 0, 3], 4 / 12), ("1.0", [0, 0, 3], 3 / 12)):
        asked = parse(["--samples", "4", "--success-threshold", threshold])
        task = results(asked, [pool([1, 1, 2])], PARTS)["tasks"]["made-up"]
        assert [prompt["right"] for prompt in task["prompts"]] == right_B
        assert value(task["scores"]["mean@4"]) == pytest.approx(mean)


def shown(found):
    console = Console(record=True, width=140, file=open("/dev/null", "w"))
    show(found, "took", "out", console)
    return console.export_text()


def test_mean_reward_is_over_what_was_scored_and_told_where_it_is_not_the_share_of_right_samples():
    asked = parse(["--samples", "4"])
    found = results(asked, [pool([1, 1, 2])], PARTS)
    task = found["tasks"]["made-up"]
    assert value(task["scores"]["reward"]) == pytest.approx((0.5 + 0.75) / 2)
    assert task["scores"]["reward"]["low"] < 0.625 < task["scores"]["reward"]["high"]
    assert [value(level["reward"]) for level in task["by"]["level"].values()] == [0.5, 0.75]
    assert found["average"]["reward"] == task["scores"]["reward"]
    assert "made-up: mean@4 0.250 (0.000 – 0.750), reward 0.625 (0.500 – 0.750) over" in shown(found)
    assert "| level | prompts | mean@4 | 95 % | reward |" in " ".join(shown(found).split())
    binary = results(asked, [pool([1])], graded(1.0, 0.0, 0.0, 1.0))
    assert value(binary["average"]["reward"]) == 0.5 and "reward" not in shown(binary)


def test_mean_reward_is_null_where_nothing_was_scored():
    asked = parse(["--samples", "4", "--task", "a", "b"])
    found = results(asked, [pool([1], "a"), pool([1], "b")], graded(None, None, None, None, 1.0, 1.0, 1.0, 0.5))
    assert found["tasks"]["a"]["scores"]["reward"] is None and found["tasks"]["a"]["by"]["level"]["1"]["reward"] is None
    assert value(found["tasks"]["b"]["scores"]["reward"]) == 0.875 and found["average"]["reward"] is None
    assert value(found["average"]["mean@4"]) == 0.375 and "reward –" in shown(found)


def test_tools_are_told_as_training_logs_them():
    asked = parse(["--samples", "2", "--tools", "search", "--search-corpus", "x", "--search-k", "3"])
    prompts = [Prompt("a", "a", np.array([1]), "1", {"gold_ids": ["g", "h"]}), Prompt("b", "b", np.array([2]), "1", {})]
    one = pool([1, 1])
    own = Pool("made-up", one.task, prompts, "all", (), ())
    uses = [ToolUse(2, 1, 0, found=("g", "x")), ToolUse(3, 2, 1, found=("x",)), ToolUse(1), None]
    found = results(asked, [own], [Sample(1.0, None, "stop", 1, use) for use in uses])
    assert found["tasks"]["made-up"]["tools"] == {
        "turns_mean": 2.0, "calls_mean": 1.0, "errors_frac": pytest.approx(1 / 3), "precision@3": 0.25, "recall@3": 0.25,
        "f1@3": 0.25,
    }  # fmt: skip
    told = "tools: turns mean 2.000, calls mean 1.000, errors frac 0.333, precision@3 0.250, recall@3 0.250, f1@3 0.250"
    assert told in shown(found)
    lost = results(asked, [own], [Sample(None, None, "error", 0)] * 4)
    assert lost["tasks"]["made-up"]["tools"] is None and "tools" not in shown(lost)
    assert "tools" not in results(parse(["--samples", "2"]), [own], graded(1.0, 1.0, 1.0, 1.0))["tasks"]["made-up"]


def test_levels_by_hand_in_the_order_of_numbers(found):
    levels = found["tasks"]["made-up"]["by"]["level"]
    assert list(levels) == ["1", "2", "10"]
    assert [level["num_prompts"] for level in levels.values()] == [2, 1, 1]
    assert [value(level["mean@4"]) for level in levels.values()] == [3 / 8, 0, 1]
    assert [value(level["maj@4"]) for level in levels.values()] == [0.5, 0, 1]
    assert levels["2"]["mean@4"] == {"value": 0.0, "low": None, "high": None}


def test_counts_lengths_and_prompts(found):
    task = found["tasks"]["made-up"]
    assert (task["samples"], task["unscored"], task["truncated"], task["lost"]) == (16, 1, 4, 1)
    assert task["tokens"]["mean"] == np.mean([row.tokens for row in ROWS]) and task["tokens"]["max"] == 9
    assert [prompt["right"] for prompt in task["prompts"]] == [2, 1, 4, 0]
    assert task["prompts"][1] == {
        "uid": "made-up-1", "prompt": "p1", "level": 1, "right": 1, "unscored": 1, "truncated": 0, "tokens": 13,
    }  # fmt: skip


def test_majority_is_null_and_no_error_where_no_answers_are_extracted():
    asked = parse(["--samples", "4", "--task", "a", "b"])
    mixed = results(asked, [pool([1, 1, 10, 2], "a", has_answers=False), pool([1, 1, 10, 2], "b")], ROWS + ROWS)
    assert mixed["tasks"]["a"]["scores"]["maj@4"] is None and mixed["tasks"]["b"]["scores"]["maj@4"] is not None
    assert mixed["tasks"]["a"]["by"]["level"]["1"]["maj@4"] is None
    assert mixed["average"]["maj@4"] is None and value(mixed["average"]["pass@4"]) == 0.75
    show(mixed, "took", "out", Console(record=True, width=100, file=open("/dev/null", "w")))


def test_average_weighs_tasks_alike_whatever_their_size():
    asked = parse(["--samples", "4", "--task", "a", "b"])
    both = results(asked, [pool([1, 1, 10, 2], "a"), pool([1], "b")], ROWS + [right()] * 4)
    assert value(both["average"]["mean@4"]) == pytest.approx((7 / 16 + 1) / 2)


def test_results_are_strict_json_and_show_as_tables(found):
    text = json.dumps(found, allow_nan=False)
    assert json.loads(text) == found
    assert {"python", "torch", "transformers"} <= found["versions"].keys()
    assert found["config"]["samples"] == 4 and found["config"]["temperature"] == 1.0
    console = Console(record=True, width=112, file=open("/dev/null", "w"))
    show(found, "16 samples in 0:01 (16/s)", "out", console)
    shown = console.export_text()
    assert (
        "made-up: mean@4 0.438" in shown
        and "1 unscored (6.2 %), counted as wrong; 4 truncated" in shown
        and "4 truncated (25.0 %)" in shown
    )
    assert shown.index("| 2     |") < shown.index("| 10    |")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(parse([]).config)


def chosen(tokenizer, *argv):
    asked = parse(argv)
    return choose(asked, asked.config, tokenizer)


def own(folder):
    """A file of 40 prompts."""
    file = folder / "own.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"copy {i} =", "answer": str(i)}) + "\n" for i in range(40)))
    return str(file)


def test_a_tasks_own_heldout_pool_is_the_default(tokenizer):
    found = chosen(tokenizer)
    assert (found.split, len(found.prompts), found.keys) == ("heldout", 512, ("family", "size"))
    assert chosen(tokenizer, "--split", "all").prompts[-512:][0].uid == found.prompts[0].uid


def test_a_file_is_evaluated_whole_unless_the_heldout_tenth_is_asked_for(tokenizer, tmp_path):
    file = own(tmp_path)
    whole, heldout, rest = (chosen(tokenizer, "--task", file, "--split", split) for split in ("auto", "heldout", "train"))
    assert (whole.split, len(whole.prompts), len(heldout.prompts), len(rest.prompts)) == ("all", 40, 4, 36)
    assert {prompt.uid for prompt in whole.prompts} == {prompt.uid for prompt in heldout.prompts + rest.prompts}
    assert any("40 prompts, all there are" in note for note in whole.notes)


def test_fewer_prompts_are_a_seeded_choice_that_grows(tokenizer, tmp_path):
    few, more, other = (
        {prompt.uid for prompt in chosen(tokenizer, "--task", own(tmp_path), "--max-prompts", num, "--seed", seed).prompts}
        for num, seed in (("10", "0"), ("20", "0"), ("10", "1"))
    )
    assert len(few) == 10 and few < more and other != few


@pytest.mark.parametrize(("value", "level"), [(3, 3), (np.int64(3), 3), ("a", "a"), (float("nan"), None), ([1], None)], ids=str)
def test_levels_are_plain_values(value, level):
    assert level_of(Prompt("u", "t", np.array([1]), metadata={"level": value}), "level") == level


def test_the_split_that_was_read_is_told(tokenizer, tmp_path):
    for split, num in (("test", 3), ("train", 20)):
        rows = [json.dumps({"prompt": f"{split} {i} =", "answer": str(i)}) + "\n" for i in range(num)]
        (tmp_path / f"{split}.jsonl").write_text("".join(rows))
    for options, told, num in (
        ([], "3 prompts of --task-split test, all there are", 3),
        (["--task-split", "train"], "20 prompts of --task-split train, all there are", 20),
    ):
        found = chosen(tokenizer, "--task", str(tmp_path), *options)
        assert len(found.prompts) == num and any(told in note for note in found.notes), found.notes


def test_only_known_keys_are_told_apart_unless_named(tokenizer, tmp_path):
    file = tmp_path / "own.jsonl"
    rows = [
        {"prompt": f"p {i}", "answer": "1", "level": i % 2, "data_source": f"s{i % 3}", "year": 2000 + i % 2} for i in range(6)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert chosen(tokenizer, "--task", str(file)).keys == ("level", "source", "year")
    assert chosen(tokenizer, "--task", str(file), "--by", "year").keys == ("year",)


def test_what_a_scorer_keeps_of_each_problem_is_no_level(tokenizer):
    pytest.importorskip("reasoning_gym")
    found = chosen(tokenizer, "--task", "reasoning_gym:leg_counting", "--task-size", "12")
    assert "entry" in found.prompts[0].metadata and found.keys == ()
