"""Scores, levels and counts by hand; nulls where a score means nothing; strict JSON."""

import json

import numpy as np
import pytest
from rich.console import Console

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
    assert list(scores) == ["mean@4", "pass@1", "pass@2", "pass@4", "maj@1", "maj@2", "maj@4"]
    assert scores["pass@4"]["low"] < 0.75 <= scores["pass@4"]["high"]


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
    assert "made-up: mean@4 0.438" in shown and "1 unscored (6.2 %)" in shown and "4 truncated (25.0 %)" in shown
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
