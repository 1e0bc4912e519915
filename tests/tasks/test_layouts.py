"""Every documented layout loads from its sample, says so, and gives the answers written here by hand."""

import json
from pathlib import Path

import pytest

from vipfast.config import Config
from vipfast.tasks.dataset import load_records
from vipfast.tasks.layouts import recognise

SAMPLES = Path(__file__).parent.parent / "data" / "datasets"
HALF, FIVE_SIXTHS = r"\frac{1}{4}", r"\frac{5}{6}"

# file: layout, verifier, answers, metadata of the last record
EXPECTED = {
    "dapo_math.jsonl": ("DAPO-Math", "maths", ["6", "5", "2", "6", "-50"], {"subject": "MATH", "source": "math_dapo"}),
    "dapo_math_text.jsonl": ("DAPO-Math", "maths", ["6", "5", "2"], {"subject": "MATH", "source": "math_dapo"}),
    "math.jsonl": ("MATH or Minerva", "maths", [FIVE_SIXTHS, "3", "6"], {"level": 3, "subject": "Counting & Probability"}),
    "math500.jsonl": ("MATH-500", "maths", ["4", HALF, "(-2,2)"], {"level": 4, "subject": "Intermediate Algebra"}),
    "gsm8k.jsonl": ("GSM8K", "exact", ["14", "1,200", "8", "0.25"], {}),
    "aime24.jsonl": ("AIME or AMC", "maths", ["78", "3", "25"], {}),
    "aime25.jsonl": ("AIME or AMC", "maths", ["8", "880", "970"], {}),
    "aime_years.csv": ("AIME or AMC", "maths", ["4", "3", "012"], {"year": "2001"}),
    "amc.json": ("AIME or AMC", "maths", ["6", "2.5", "12"], {}),
    "minerva.jsonl": ("MATH or Minerva", "maths", ["2", "1"], {"subject": "Physics"}),
    "minerva_answers.jsonl": ("maths problem and answer", "maths", [r"\frac{1}{8}", "3.2e-19"], {}),
    "olympiad.jsonl": ("OlympiadBench", "maths", ["2, 3", "$7$"], {"level": "Competition", "subject": "Number Theory"}),
}


def load(path, **changes):
    notes = []
    records, verifier = load_records(Config(task=str(path), **changes), notes)
    return records, verifier, notes


@pytest.mark.parametrize("name", EXPECTED)
def test_sample_loads_as_its_layout(name):
    layout, verifier, answers, metadata = EXPECTED[name]
    records, wanted, notes = load(SAMPLES / name)
    assert notes[0].startswith(f"layout: {layout} (") and wanted == verifier
    assert [record.answer for record in records] == answers
    assert records[-1].metadata == metadata and all(record.prompt for record in records)


def test_every_sample_is_expected():
    assert {path.name for path in SAMPLES.iterdir()} == {*EXPECTED, "livecodebench.jsonl"}


@pytest.mark.parametrize("name", [name for name in [*EXPECTED, "livecodebench.jsonl"] if name.endswith(".jsonl")])
def test_parquet_gives_the_same_records(name, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in (SAMPLES / name).read_text().splitlines()]
    path = tmp_path / name.replace(".jsonl", ".parquet")
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert load(path)[:2] == load(SAMPLES / name)[:2]


def test_dapo_keeps_its_messages_and_merges_its_copies():
    records, _, notes = load(SAMPLES / "dapo_math.jsonl")
    assert records[0].prompt[0]["role"] == "user" and "positive divisors" in records[0].prompt[0]["content"]
    assert "2 of 7 prompts are duplicates and were merged" in notes


@pytest.mark.parametrize(("name", "count"), [("math.jsonl", "1 of 4"), ("olympiad.jsonl", "1 of 3")])
def test_a_proof_has_no_answer_and_is_counted(name, count):
    assert any(note.startswith(f"{count} rows left out") for note in load(SAMPLES / name)[2])


def test_code_has_public_tests_to_train_and_private_ones_to_evaluate():
    records, verifier, notes = load(SAMPLES / "livecodebench.jsonl")
    double, pairs, lines = records
    assert verifier == "code" and notes[0].startswith("layout: LiveCodeBench (question_content, ")
    assert double.metadata == {
        "level": "easy", "source": "atcoder", "kind": "stdin",
        "tests": [{"input": "3\n", "output": "6\n"}, {"input": "0\n", "output": "0\n"}],
        "hidden_tests": [{"input": "-4\n", "output": "-8\n"}, {"input": "1000000\n", "output": "2000000\n"}],
    }  # fmt: skip
    assert pairs.metadata["kind"] == "call" and pairs.metadata["function"] == "pairSum"
    assert pairs.metadata["tests"] == [{"input": [[1, 2, 3], 5], "output": [1, 2]}]
    assert "class Solution:" in pairs.prompt and "standard input" in double.prompt
    # private tests only: the 1st and 3rd train
    assert [test["output"] for test in lines.metadata["tests"]] == ["3\n", "2\n"]
    assert [test["output"] for test in lines.metadata["hidden_tests"]] == ["0\n"]
    assert "1 rows have private tests only: every second one trains, the others evaluate" in notes


def test_named_fields_go_over_the_layout():
    records, verifier, notes = load(SAMPLES / "math.jsonl", prompt_field="problem", answer_field="type")
    assert (records[0].answer, verifier) == ("Prealgebra", "exact") and notes[0].startswith(
        "layout: own fields (problem, type)"
    )


@pytest.mark.parametrize(
    ("row", "task", "layout"),
    [
        ({"question": "q", "answer": "word"}, "trivia.jsonl", None),
        ({"question": "q", "answer": "word"}, "math/trivia.jsonl", None),  # a folder's name says nothing of its files
        ({"question": "q", "answer": "x^2"}, "opencompass/AIME2025", "maths problem and answer"),
        ({"question": "q", "answer": "5", "id": 1}, "d.jsonl", "AIME or AMC"),
        ({"question": "q", "answer": "word", "id": 1}, "d.jsonl", None),
        ({"problem": "p", "solution": "no box"}, "d.jsonl", None),
        ({"problem": "p", "solution": "so", "answer": "x"}, "d.jsonl", "maths problem and answer"),
        ({"prompt": "p", "reward_model": {"style": "rule"}}, "d.jsonl", None),
    ],
)
def test_a_layout_is_told_by_its_columns(row, task, layout):
    found = recognise([row], task)
    assert (found and found.name) == layout
