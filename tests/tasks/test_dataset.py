"""Files in the usual layouts, duplicates, conflicts, long prompts and every way a dataset can be unusable."""

import dataclasses
import json

import numpy as np
import pytest

from vipfast.config import Config
from vipfast.errors import DataError
from vipfast.tasks.base import Record, prompt_uid, split_heldout, tokenize
from vipfast.tasks.dataset import load_records
from vipfast.tasks.load import load_task
from vipfast.tasks.templates import Template


class Bytes:
    """Tokenizes to bytes; ``chat_template`` None as in the starter."""

    chat_template = None

    def __call__(self, texts, add_special_tokens=True):
        return type("Ids", (), {"input_ids": [list(text.encode()) for text in texts]})()


WORDED = Template(Config(), Bytes())


def write(path, rows):
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return small(path)


def small(path, **changes):
    return Config(task=str(path), prompts_per_step=1, **changes)


LAYOUTS = {
    "gsm8k": {"question": "2+2?", "answer": "… #### 4"},
    "math": {"problem": "2+2?", "solution": r"\boxed{4}"},
    "dapo": {
        "prompt": [{"role": "user", "content": "2+2?"}],
        "reward_model": {"ground_truth": "4"},
        "extra_info": {"index": "a"},
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_recognised(tmp_path, layout):
    config = write(tmp_path / "d.jsonl", [LAYOUTS[layout]] * 2 + [{**LAYOUTS[layout], "x": 1}])
    task = load_task(config, Bytes())
    assert [prompt.text for prompt in task.train] == ["2+2?"]
    assert task.reward(["I say 4"], [task.train[0].answer], [{}])[0].reward == 1.0
    assert any("2 of 3 prompts are duplicates" in note for note in task.notes)


def test_parquet_and_csv_read_alike(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"question": ["a", "b"], "answer": ["1", "2"]}), tmp_path / "d.parquet")
    (tmp_path / "d.csv").write_text("question,answer\na,1\nb,2\n")
    records = [load_records(small(tmp_path / name), [])[0] for name in ("d.parquet", "d.csv")]
    assert [[(r.prompt, r.answer) for r in rs] for rs in records] == [[("a", "1"), ("b", "2")]] * 2


def test_mixed_answers_follow_one_rule(tmp_path):
    config = write(
        tmp_path / "d.jsonl", [{"prompt": f"p{i}", "answer": a} for i, a in enumerate([5, "5", None, "1/2", [1, 2]])]
    )
    records, verifier = load_records(config, notes := [])
    assert [record.answer for record in records] == ["5", "5", "1/2", "[1, 2]"] and verifier == "exact"
    assert notes == [
        "layout: own fields (prompt, answer), graded as exact",
        "1 of 5 rows left out: no prompt or no answer",
    ]


def test_line_separators_inside_a_string_do_not_split_a_row(tmp_path):
    config = write(tmp_path / "d.jsonl", [{"prompt": "a\u2028b\x85c", "answer": "1"}])
    assert load_records(config, [])[0][0].prompt == "a\u2028b\x85c"


@pytest.mark.parametrize(
    "content,message",
    [
        ("", "holds no rows"),
        ('{"prompt": "p"}', "--answer-field"),
        ('{"answer": "p"}', "--prompt-field"),
        ("not json", "line 1 is not JSON"),
        ("[1]", "line 1 is not a JSON object"),
        ('{"text": "p", "label": 1}', "--prompt-field: none of prompt, question, problem, messages.*name one of label, text"),
    ],
)
def test_unusable_files_say_why(tmp_path, content, message):
    path = tmp_path / "d.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        load_records(small(path), [])


@pytest.mark.parametrize(("asked", "told"), [(3, True), (2, False), (512, False)])
def test_more_held_out_prompts_than_there_are_is_told_where_they_were_asked_for(asked, told, tmp_path):
    config = write(tmp_path / "d.jsonl", [{"prompt": f"p{i}", "answer": "1"} for i in range(20)])
    load_records(dataclasses.replace(config, heldout_prompts=asked), notes := [])
    assert (f"of --heldout-prompts {asked} there are 2, a tenth of the problems" in notes) == told


EMPTY = "is a column but empty in all 2 rows"


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"question": "2+2?", "answer": None}, {}, f"--answer-field: answer {EMPTY}; there is no other column"),
        ({"question": "2+2?", "answer": "", "x": 1}, {}, f"--answer-field: answer {EMPTY}; name one of x with"),
        ({"question": "2+2?", "answer": float("nan")}, {}, f"--answer-field: answer {EMPTY}"),
        ({"prompt": None, "answer": "4", "text": "2+2?"}, {}, f"--prompt-field: prompt {EMPTY}; name one of answer, text with"),
        ({"prompt": "2+2?", "a": None, "x": 1}, {"answer_field": "a"}, f"--answer-field a: {EMPTY}; name one of x with"),
        ({"prompt": "2+2?", "m": {"gold": None}}, {"answer_field": "m.gold"}, f"--answer-field m.gold: {EMPTY}"),
        ({"prompt": "2+2?", "m": '{"gold": null}'}, {"answer_field": "m.gold"}, f"--answer-field m.gold: {EMPTY}"),
        ({"prompt": "2+2?", "reward_model": {"ground_truth": None}}, {}, f"--answer-field: reward_model.ground_truth {EMPTY}"),
        (
            {"question": "2+2?", "label": "4"},
            {},
            "--answer-field: none of .* of the dataset; name one of label with",
        ),
        ({"question": "2+2?"}, {}, "--answer-field: none of .* dataset; there is no other column with anything in it"),
        ({"question": "2+2?", "label": "4"}, {"answer_field": "lable"}, "no row has such a column; did you mean label[?]"),
        ({"problem": "2+2?", "answer": None, "solution": None}, {}, "answer.? is a column but empty"),
    ],
    ids=str,
)
def test_an_empty_column_is_told_from_an_absent_one_and_no_column_is_proposed_twice(tmp_path, row, options, message):
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join([json.dumps(row)] * 2))
    with pytest.raises(DataError, match=message):
        load_records(small(path, **options), [])


@pytest.mark.parametrize("name", ["missing.jsonl", "arithmetik", "data.xlsx"])
def test_unknown_tasks_name_the_option(name):
    with pytest.raises(DataError, match=f"--task {name}"):
        load_records(Config(task=name), [])


def test_same_text_with_different_answers_is_reported_and_kept(tmp_path):
    config = write(tmp_path / "d.jsonl", [{"prompt": "p", "answer": "1"}, {"prompt": "p", "answer": "2"}])
    task = load_task(config, Bytes())
    assert len(task.train) == 2 and any("different answers" in note for note in task.notes)


def test_long_prompts_are_dropped_with_a_count_and_all_too_long_is_an_error(tmp_path):
    rows = [{"prompt": "x" * n, "answer": "1"} for n in (4, 5, 6)]
    config = write(tmp_path / "d.jsonl", rows)
    notes = []
    assert len(tokenize("t", load_records(config, [])[0], WORDED, 5, notes)) == 2 and "1 of 3 prompts dropped" in notes[0]
    with pytest.raises(DataError, match="no prompt is left to train on; .*3 of 3 prompts dropped.*--max-prompt-tokens 3"):
        load_task(small(config.task, max_prompt_tokens=3), Bytes())


def test_heldout_split_is_disjoint_and_independent_of_order():
    pool = tokenize("t", [Record(f"p{i}", "1") for i in range(100)], WORDED, None, [])
    train, held = split_heldout(pool, 512)
    assert len(held) == 10 and not {p.text for p in train} & {p.text for p in held}
    assert {p.uid for p in split_heldout(pool[::-1], 512)[1]} == {p.uid for p in held}
    assert len(split_heldout(pool, 3)[1]) == 3


@pytest.mark.parametrize(
    "wording",
    [
        {"prompt_template": "qa"}, {"prompt_template": "boxed"}, {"system_prompt": "Be brief."}, {"tools": ("calculator",)},
        {"prompt_template": "plain", "system_prompt": "Think.", "tools": ("calculator",)},
    ],
)  # fmt: skip
def test_the_same_problems_are_held_out_however_they_are_worded(tmp_path, wording):
    config = write(tmp_path / "d.jsonl", [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(100)])
    plain, worded = (load_task(small(config.task, **options), Bytes()) for options in ({}, wording))
    assert [p.answer for p in plain.heldout] == [p.answer for p in worded.heldout]
    assert plain.heldout[0].text != worded.heldout[0].text and plain.heldout[0].problem == worded.heldout[0].problem


def test_columns_that_a_reward_asks_for_are_in_the_metadata(tmp_path):
    rows = [
        {"question": f"q{i}", "answer": "1", "gold_ids": [f"d{i}"], "extra": {"rule": i, "junk": i}, "copy": i}
        for i in range(3)
    ]
    config = write(tmp_path / "d.jsonl", rows)
    plain, asked = (load_task(small(config.task, **options), Bytes()) for options in ({}, {"metadata_fields": ("extra.rule",)}))
    assert [p.metadata for p in plain.train] == [{"gold_ids": [f"d{i}"]} for i in range(3)]
    assert [p.metadata for p in asked.train] == [{"gold_ids": [f"d{i}"], "rule": i} for i in range(3)]
    with pytest.raises(DataError, match="--metadata-fields rules: no row has such a column; the columns are .*extra"):
        load_task(small(config.task, metadata_fields=("rules",)), Bytes())


def test_uid_hashes_task_text_and_verifier_data():
    uids = {
        prompt_uid(*args)
        for args in [
            ("t", "a", "1", {}),
            ("t", "a", "2", {}),
            ("t", "b", "1", {}),
            ("s", "a", "1", {}),
            ("t", "a", 1, {}),
            ("t", "a", "1", {"tests": 2}),
        ]
    }
    assert len(uids) == 6 and prompt_uid("t", "a", {"x": 1, "y": 2}, {}) == prompt_uid("t", "a", {"y": 2, "x": 1}, {})


def test_own_prompts_need_a_reward_and_a_prompt():
    with pytest.raises(DataError, match="without a reward"):
        load_task(Config(), Bytes(), prompts=["a"])
    for prompts in (
        [{"text": "a"}],
        [{"prompt": 5}],
        [{"prompt": None}],
        [{"prompt": [{"role": "user"}]}],
        [{"prompt": []}],
        [5],
    ):
        with pytest.raises(DataError, match="key 'prompt'"):
            load_task(Config(), Bytes(), prompts=prompts, reward=lambda c, a, m: [1.0])
    with pytest.raises(DataError, match="give a list"):
        load_task(Config(), Bytes(), prompts="hello", reward=lambda c, a, m: [1.0])
    with pytest.raises(DataError, match="dataset is empty"):
        load_task(Config(), Bytes(), prompts=[], reward=lambda c, a, m: [1.0])
    with pytest.raises(DataError, match="--prompts-per-step 64.*holds 1 distinct.*at most 1"):
        load_task(Config(), Bytes(), prompts=["a"], reward=lambda c, a, m: [1.0])
    task = load_task(
        Config(prompts_per_step=2),
        Bytes(),
        prompts=["a", {"prompt": "b", "answer": 3, "level": 2}],
        reward=lambda c, a, m: [1.0],
    )
    assert task.train[1].answer == 3 and task.train[1].metadata == {"level": 2}


def test_spreadsheet_exports_read_like_others(tmp_path):
    """A byte-order mark, a long field, and a first row without an answer."""
    (tmp_path / "d.csv").write_text(f"prompt,answer\n{'x' * 200_000},1\n", encoding="utf-8-sig")
    write(tmp_path / "e.jsonl", [{"prompt": "a", "answer": None}, {"prompt": "b", "answer": "2"}])
    assert len(load_records(small(tmp_path / "d.csv"), [])[0][0].prompt) == 200_000
    assert [record.prompt for record in load_records(small(tmp_path / "e.jsonl"), [])[0]] == ["b"]


@pytest.mark.parametrize("name", ["d.jsonl", "d.csv"])
def test_text_that_is_not_utf8_names_the_file_and_the_remedy(tmp_path, name):
    (tmp_path / name).write_bytes('{"prompt": "é", "answer": "1"}'.encode("latin-1"))
    with pytest.raises(DataError, match=f"--task .*{name}: is not UTF-8.*convert"):
        load_records(small(tmp_path / name), [])


def test_half_a_surrogate_pair_is_refused(tmp_path):
    config = write(tmp_path / "d.jsonl", [])
    (tmp_path / "d.jsonl").write_text('{"prompt": "a \\ud800", "answer": "1"}')
    with pytest.raises(DataError, match="half a surrogate pair in 1 prompt,"):
        load_task(config, Bytes())


def test_nan_is_no_answer_and_a_run_without_heldout_prompts_says_so(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"question": ["a", "b"], "answer": [1.5, float("nan")]}), tmp_path / "d.parquet")
    task = load_task(small(tmp_path / "d.parquet"), Bytes())
    assert [prompt.answer for prompt in task.train] == ["1.5"] and task.heldout == []
    assert any("nothing is held out" in note for note in task.notes)


@pytest.mark.parametrize("metadata", [{1: 2, "b": 3}, {(1, 2): 3}, {"check": len}, {"tags": {1, 2}}], ids=str)
def test_metadata_without_a_stable_spelling_is_refused(metadata):
    with pytest.raises(DataError, match="cannot be kept by value.*look everything else up in the reward"):
        prompt_uid("t", "a", None, metadata)
    assert prompt_uid("t", "a", np.int64(3), {"x": np.array([1, 2])}) == prompt_uid("t", "a", 3, {"x": [1, 2]})


RULE = [(5, "5"), (5.0, "5"), (0.5, "0.5"), (1e300, "1e+300"), ("5.0", "5.0"), (True, "true"), ([1, "x"], '[1, "x"]')]


@pytest.mark.parametrize(("answer", "text"), [*RULE, ({"a": 1}, '{"a": 1}')])
def test_the_rule_by_which_answers_become_text(tmp_path, answer, text):
    config = write(tmp_path / "d.jsonl", [{"prompt": "p", "answer": answer}])
    assert [record.answer for record in load_records(config, [])[0]] == [text]


def test_a_hundred_copies_of_a_dataset_are_tokenised_once(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": str(i)} for i in range(50)]
    config = write(tmp_path / "d.jsonl", rows * 100)
    texts = []

    class Counting(Bytes):
        def __call__(self, asked, add_special_tokens=True):
            texts.extend(asked)
            return super().__call__(asked, add_special_tokens)

    task = load_task(config, Counting())
    assert len(task.train + task.heldout) == 50 and len(set(texts)) == 51 and len(texts) <= 52  # and "a", which is looked at
    assert "4950 of 5000 prompts are duplicates and were merged" in task.notes


def test_near_copies_stay_on_one_side_of_the_split():
    spellings = ["What is {} plus 1?", "what is  {} plus 1? ", "WHAT IS\n{} PLUS 1?", "What is\u00a0{} plus 1?"]
    pool = tokenize("t", [Record(s.format(i), "1") for i in range(50) for s in spellings], WORDED, None, [])
    train, held = split_heldout(pool, 512)
    numbers = [{int("".join(filter(str.isdigit, p.text))) // 10 for p in side} for side in (train, held)]
    assert len(held) == 4 * 5 and len(train) == 4 * 45 and not numbers[0] & numbers[1]


def test_heldout_programs_are_graded_by_their_hidden_tests():
    test = {"input": "1", "output": "2"}
    records = [Record(f"p{i}", None, {"tests": [test], "hidden_tests": [test] if i % 2 else []}) for i in range(100)]
    train, held = split_heldout(tokenize("t", records, WORDED, None, []), 10)
    assert not any("use_hidden" in prompt.metadata for prompt in train)
    assert len(held) == 10 and all(("use_hidden" in p.metadata) == bool(p.metadata["hidden_tests"]) for p in held)
    uids = {prompt.uid for prompt in tokenize("t", records, WORDED, None, [])}
    assert {prompt.uid for prompt in train + held} == uids
