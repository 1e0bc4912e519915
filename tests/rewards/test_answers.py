"""Verdicts on answers as models word them: tests/data/answers.jsonl, and every gold of the datasets' samples in usual ways."""

import json
from pathlib import Path

import pytest

from vipfast.config import Config
from vipfast.rewards import exact
from vipfast.rewards.maths import Maths
from vipfast.tasks.dataset import load_records

DATA = Path(__file__).parents[1] / "data"
LINES = [json.loads(line) for line in (DATA / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
KINDS = list(dict.fromkeys(line["kind"] for line in LINES))
WAYS = (
    r"So \boxed{«»}.",
    r"so $\boxed{«»}$",
    r"$\fbox{«»}$",
    r"<think>maybe \boxed{17}</think>The answer is \boxed{«»}",
    "<answer>«»</answer>",
    "<answer> $«»$ </answer>.",
    "The answer is therefore $«»$.",
    "Final Answer: The final answer is $«»$. I hope it is correct.",
    "**Final Answer:** $«»$",
    "The final answer is:\n\\[\n«»\n\\]",
    "The final answer is\n\n$$«»$$\n\nwhich is what was asked.",
    "#### «»",
    r"\boxed{«»}, that is \boxed{ «» }",
    r"\boxed{\text{The answer is }«»}",
    r"\boxed{\color{red}{«»}}",
)


@pytest.fixture(scope="module")
def graders():
    maths = Maths(workers=1, timeout_s=30)
    maths.pool.facts()
    yield {"maths": maths, "exact": exact.reward}
    maths.close()


@pytest.mark.parametrize("kind", KINDS)
def test_verdicts(graders, kind):
    for line in (line for line in LINES if line["kind"] == kind):
        [verdict] = graders[line["reward"]]([line["completion"]], [line["answer"]], [{}])
        assert verdict.reward == line["want"] and verdict.error is None, (line, verdict)


def golds(file):
    records, verifier = load_records(Config(task=str(DATA / "datasets" / file)), [])
    return [] if verifier == "code" else [record.answer for record in records]


FILES = sorted(file.name for file in (DATA / "datasets").iterdir())


@pytest.mark.parametrize("file", FILES)
def test_every_gold_of_a_dataset_is_right_however_it_is_worded(graders, file):
    for gold in golds(file):
        bare = gold.strip().strip("$")
        texts = [way.replace("«»", bare) for way in WAYS]
        verdicts = graders["maths"](texts, [gold] * len(texts), [{}] * len(texts))
        assert [way for way, verdict in zip(WAYS, verdicts) if verdict.reward != 1] == [], gold
        assert len({verdict.answer for verdict in verdicts}) == 1, "all of them are one vote"


@pytest.mark.parametrize("file", FILES)
def test_another_answer_is_wrong_however_it_is_worded(graders, file):
    for gold in golds(file):
        texts = [way.replace("«»", rf"{gold.strip().strip('$')}+913") for way in WAYS]
        verdicts = graders["maths"](texts, [gold] * len(texts), [{}] * len(texts))
        assert {verdict.reward for verdict in verdicts} == {0.0}, (gold, verdicts)
