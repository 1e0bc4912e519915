"""Every documented layout loads from its sample, says so, and gives the answers written here by hand."""

import csv
import json
from datetime import datetime
from pathlib import Path

import pytest

from vipfast.config import Config
from vipfast.errors import DataError
from vipfast.tasks.dataset import SAMPLE, load_records
from vipfast.tasks.layouts import recognise

SAMPLES = Path(__file__).parent.parent / "data" / "datasets"
HALF, FIVE_SIXTHS = r"\frac{1}{4}", r"\frac{5}{6}"

# file: layout, verifier, answers, metadata of the last record
EXPECTED = {
    "dapo_math.jsonl": ("DAPO-Math", "maths", ["6", "5", "2", "6", "-50"], {"subject": "MATH", "source": "math_dapo"}),
    "dapo_math_text.jsonl": ("DAPO-Math", "maths", ["6", "5", "2"], {"subject": "MATH", "source": "math_dapo"}),
    "math.jsonl": ("MATH or Minerva", "maths", [FIVE_SIXTHS, "3", "6"], {"level": 3, "subject": "Counting & Probability"}),
    "math500.jsonl": ("MATH-500", "maths", ["4", HALF, "(-2,2)"], {"level": 4, "subject": "Intermediate Algebra"}),
    "gsm8k.jsonl": ("GSM8K", "maths", ["14", "1,200", "8", "0.25"], {}),
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


def test_gsm8k_is_graded_as_exact_where_the_maths_library_is_missing(monkeypatch):
    monkeypatch.setattr("vipfast.tasks.layouts.find_spec", lambda name: None)
    _, verifier, notes = load(SAMPLES / "gsm8k.jsonl")
    remedy = " (as maths once math-verify is installed: pip install 'vipfast[tasks]')"
    assert verifier == "exact" and notes[0] == "layout: GSM8K (question, answer), graded as exact" + remedy


@pytest.mark.parametrize("box", [r"\boxed{5}", r"\boxed 5", r"$\boxed 5$.", r"\fbox{5}"])
def test_a_box_counts_with_and_without_braces(tmp_path, box):
    path = write(tmp_path / "d.jsonl", *({"problem": f"p{i}", "solution": f"so {box}"} for i in range(2)))
    assert [record.answer for record in load(path)[0]] == ["5", "5"]


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
        "level": "easy", "source": "atcoder", "contest_date": "2024-01-01T00:00:00", "kind": "stdin",
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
        ({"question": "q", "answer": "x^2"}, "qwen/gaokao2023en/test.jsonl", "maths problem and answer"),
        ({"question": "q", "answer": "x^2"}, "qwen/minervamath/data/test-00000-of-00001.parquet", "maths problem and answer"),
        (
            {"question": "q", "answer": "x^2"},
            f"datasets--x--aime/snapshots/{'ab12' * 10}/train.csv",
            "maths problem and answer",
        ),
        ({"question": "q", "answer": "x^2"}, "math-ai/minervamath:default", "maths problem and answer"),
        ({"question": "q", "answer": "x^2"}, "math/trivia/test.jsonl", None),
        ({"question": "q", "answer": "x^2"}, "test.jsonl", None),
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


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_is_known_by_its_folder_even_from_inside(tmp_path, monkeypatch):
    (tmp_path / "gaokao2023en").mkdir()
    write(tmp_path / "gaokao2023en" / "test.jsonl", {"question": "q", "answer": "x"})
    monkeypatch.chdir(tmp_path / "gaokao2023en")
    assert load("test.jsonl")[1] == "maths"


def test_formulas_that_would_be_compared_by_letters_are_said(tmp_path):
    answers = [r"\frac{1}{2}", "$x+1$", "12", "C:/tmp", r"a \d digit", "5 $ and 6 $ more", None, ""]
    path = write(tmp_path / "d.jsonl", *({"question": f"q{i}", "answer": answer} for i, answer in enumerate(answers)))
    note = r"2 of the first 6 answers look like formulas, e.g. '\\frac{1}{2}', and are graded as exact"
    assert any(found.startswith(note) and found.endswith("use --reward maths") for found in load(path)[2])
    assert not any("formulas" in found for found in load(path, reward=("maths",))[2])
    plain = write(tmp_path / "p.jsonl", {"question": "q", "answer": "12"})
    gsm8k = write(tmp_path / "g.jsonl", {"question": "q", "answer": r"\frac{1}{2} is half #### 4"})
    assert not any("formulas" in found for path in (plain, gsm8k) for found in load(path)[2])


def test_the_context_of_a_problem_comes_before_its_question(tmp_path):
    """OlympiadBench's later parts stand on what the context defines."""
    rows = [
        {"question": f"Find f({i}).", "final_answer": ["4"], "context": c} for i, c in enumerate(["Let f(x)=2x.", None, " "])
    ]
    records = load(write(tmp_path / "d.jsonl", *rows))[0]
    assert [record.prompt for record in records] == ["Let f(x)=2x.\n\nFind f(0).", "Find f(1).", "Find f(2)."]
    chats = [{**row, "question": [{"role": "user", "content": row["question"]}]} for row in rows]
    asked = load(write(tmp_path / "e.jsonl", *chats))[0]
    assert [record.prompt[0]["content"] for record in asked] == [record.prompt for record in records]


PICTURES = [
    {"image_1": {"bytes": None, "path": "a.png"}},
    {"images": ["a.png"]},
    {"image": "a.png"},
    {"modality": "Multimodal"},
]
NO_PICTURES = [{"image_1": None}, {"images": []}, {"image": ""}, {"modality": "Text-only"}, {"image_id": 5}]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "final_answer": ["4"]},
        {"prompt": [{"role": "user", "content": "<image>q"}], "reward_model": {"ground_truth": "4"}},
        {"problem": "q", "solution": r"\boxed{4}"},
    ],
    ids=["OlympiadBench", "verl", "MATH"],
)
def test_problems_with_pictures_are_left_out_and_counted(tmp_path, row):
    path = write(tmp_path / "d.jsonl", *({**row, "year": i, **more} for i, more in enumerate(PICTURES + NO_PICTURES)))
    records, _, notes = load(path)
    assert [record.metadata["year"] for record in records] == [4, 5, 6, 7, 8]
    assert "4 of 9 rows left out: they come with pictures, which are not shown" in notes and len(notes) == 2
    with pytest.raises(DataError, match=r"no row has both .*, without pictures \(1 have some\)"):
        load(write(path, {**row, "images": ["a.png"]}))


VERL = {"prompt": "p", "ability": "math", "reward_model": {"style": "rule", "ground_truth": "4"}}
TESTS = {"inputs": ["3"], "outputs": ["6"]}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"ability": "code", "reward_model": {"ground_truth": "assert f(1) == 2"}}, "the ability 'code'"),
        ({"ability": "Coding"}, "the ability 'code'"),
        ({"reward_model": {"ground_truth": json.dumps(TESTS)}}, "a JSON object"),
        ({"reward_model": {"ground_truth": TESTS}}, "a JSON object"),
        ({"reward_model": {"ground_truth": json.dumps([{"input": "3", "output": "6"}])}}, "a JSON object"),
        ({"reward_model": json.dumps({"ground_truth": {"target": 98, "numbers": [44, 19, 35]}})}, "a JSON object"),
    ],
    ids=str,
)
def test_what_is_no_mathematics_in_verls_form_is_refused(tmp_path, changes, what):
    num_before = SAMPLE + 1 if what == "a JSON object" else 1  # seen in every row; an ability in the first ones
    rows = [{**VERL, "prompt": f"p{i}"} for i in range(num_before)]
    path = write(tmp_path / "d.jsonl", *rows, {**VERL, **changes})
    with pytest.raises(DataError, match=f"--task .*d.jsonl: a row in verl's form has {what}.*--reward module:function"):
        load(path)
    named = load(path, prompt_field="prompt", answer_field="reward_model.ground_truth", reward=("mine:grade",))
    assert len(named[0]) == num_before + 1 and named[1] == "exact"


@pytest.mark.parametrize("gold", ["{1, 2}", "[0, 1)", "[1, 2]", r"\{1\}", "{}", "{", [1, 2], 7], ids=str)
def test_sets_and_intervals_are_mathematics_in_verls_form(tmp_path, gold):
    records, verifier, _ = load(write(tmp_path / "d.jsonl", {**VERL, "reward_model": {"ground_truth": gold}}))
    assert (records[0].answer, verifier) == (gold if isinstance(gold, str) else json.dumps(gold), "maths")


def test_nested_columns_kept_as_json_text_are_read(tmp_path):
    """A .csv file of verl's rows, and a table whose messages are text."""
    rows = [json.loads(line) for line in (SAMPLES / "dapo_math.jsonl").read_text().splitlines()]
    texts = [{name: x if isinstance(x, str) else json.dumps(x) for name, x in row.items()} for row in rows]
    with (tmp_path / "d.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, texts[0])
        table.writeheader()
        table.writerows(texts)
    for path in (tmp_path / "d.csv", write(tmp_path / "d.jsonl", *texts)):
        assert load(path)[:2] == load(SAMPLES / "dapo_math.jsonl")[:2]


def test_a_text_that_begins_with_a_bracket_stays_a_text(tmp_path):
    texts = ["[1, 2] + [3] = ?", "[", "[]", '[{"role": "user"}]']
    path = write(tmp_path / "d.jsonl", *({"prompt": text, "answer": "1"} for text in texts))
    assert [record.prompt for record in load(path)[0]] == texts


def test_a_contest_date_that_a_table_keeps_as_a_date_is_text(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in (SAMPLES / "livecodebench.jsonl").read_text().splitlines()]
    rows = [row | {"contest_date": datetime.fromisoformat(row["contest_date"])} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    assert load(tmp_path / "d.parquet")[:2] == load(SAMPLES / "livecodebench.jsonl")[:2]
