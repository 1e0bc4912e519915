"""Files, folders and the hub; whatever stands in a file, it loads or ends in one error that names the option."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vipfast.config import Config
from vipfast.errors import DataError
from vipfast.tasks.dataset import load_records
from vipfast.tasks.load import load_task
from vipfast.tasks.reading import rows_of
from vipfast.tasks.values import as_json


class Bytes:
    chat_template = None

    def __call__(self, texts, add_special_tokens=True):
        return type("Ids", (), {"input_ids": [list(text.encode()) for text in texts]})()


def rows(path, notes=None, **changes):
    return list(rows_of(Config(task=str(path), **changes), [] if notes is None else notes))


def write(folder, **files):
    for name, found in files.items():
        name, _, suffix = name.rpartition("_")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.{suffix}").write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder


def test_a_folder_is_its_files_by_name_and_a_split_those_named_after_it(tmp_path):
    write(tmp_path, b_jsonl=[{"x": 2}], a_jsonl=[{"x": 1}])
    assert rows(tmp_path) == [{"x": 1}, {"x": 2}]
    write(tmp_path, **{"train-0_jsonl": [{"x": 3}], "test-0_jsonl": [{"x": 4}], "data/train-1_jsonl": [{"x": 5}]})
    (tmp_path / "README.md").write_text("no data")
    assert rows(tmp_path, notes := []) == [{"x": 5}, {"x": 3}]
    assert notes == ["2 of 5 files read: those named after 'train' (--task-split)"]
    assert rows(tmp_path, task_split="test") == [{"x": 4}]
    with pytest.raises(DataError, match="--task-split dev: no file of .* is named after it, nor .* there are a.jsonl, b"):
        rows(tmp_path, task_split="dev")


# files of train, of test, and of others
SPLIT_FILES = {
    "MATH": (["train/algebra/1", "train/geometry/2"], ["test/algebra/1"], []),
    "configurations": (["main/train-0", "socratic/train-0"], ["main/test-0"], ["main/validation-0"]),
    "last words": (["math_train"], ["math_test"], ["math-dev", "math"]),
    "other words": (["Training/a"], ["TEST"], ["Validation/a"]),
    "both": (["test_tubes/train-0"], ["train/sub/test-0"], []),
}


@pytest.mark.parametrize("kind", SPLIT_FILES)
def test_a_split_never_reads_the_files_of_another(tmp_path, kind):
    names = sum(SPLIT_FILES[kind], [])
    write(tmp_path, **{f"{name}_jsonl": [{"of": name}] for name in names})
    for split, wanted in zip(("train", "test"), SPLIT_FILES[kind]):
        assert rows(tmp_path, notes := [], task_split=split) == [{"of": name} for name in wanted]
        assert notes == [f"{len(wanted)} of {len(names)} files read: those named after {split!r} (--task-split)"]


@pytest.mark.parametrize("name", ["test-0", "data/validation/x", "gsm8k_test", "dev/1", "Test.en"])
def test_a_folder_of_other_splits_is_no_training_data(tmp_path, name):
    write(tmp_path, **{f"{name}_jsonl": [{"x": 1}], "extra_jsonl": [{"x": 2}]})
    with pytest.raises(DataError, match=f"--task-split train: no file of .* is named after it.* there are .*{name}.jsonl"):
        rows(tmp_path)


@pytest.mark.parametrize("name", ["latest", "contest_of_2024", "protest/x", "devices", "evaluated"])
def test_a_word_that_holds_a_splits_name_is_none(tmp_path, name):
    assert rows(write(tmp_path, **{f"{name}_jsonl": [{"x": 1}]})) == [{"x": 1}]


def test_folders_without_one_format_are_refused(tmp_path):
    with pytest.raises(DataError, match="the folder holds no .parquet, .jsonl, .json, .csv file"):
        rows(tmp_path)
    write(tmp_path, a_jsonl=[{}], b_csv=[])
    with pytest.raises(DataError, match=r"several formats \(.csv, .jsonl\)"):
        rows(tmp_path)
    (tmp_path / "b.csv").unlink()
    (tmp_path / "dataset_info.json").write_text("{}")
    assert rows(tmp_path) == [{}]


@pytest.mark.parametrize(
    "text", ['[{"x": 1}, {"x": 2}]', '{"data": [{"x": 1}, {"x": 2}], "version": 3}', '{"x": 1}\n{"x": 2}\n'], ids=str
)
def test_json_spellings(tmp_path, text):
    (tmp_path / "d.json").write_text(text)
    assert rows(tmp_path / "d.json") == [{"x": 1}, {"x": 2}]


@pytest.mark.parametrize("text", ["", "[1]", '"text"', "[[{}]]", "9" * 5000, "[" * 100_000])
def test_json_of_no_rows_is_refused(tmp_path, text):
    for name in ("d.json", "d.jsonl"):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=f"--task .*{name}: "):
            load_records(Config(task=str(tmp_path / name)), [])


def test_a_broken_parquet_file_is_named(tmp_path):
    (tmp_path / "d.parquet").write_bytes(b"PAR1" * 10)
    with pytest.raises(DataError, match="--task .*d.parquet: is not a parquet file that can be read"):
        rows(tmp_path / "d.parquet")


def test_hub_datasets_come_through_the_datasets_library(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(name, config, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_list([{"question": "q", "answer": "a #### 5"}])

    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["extra", "main"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert rows("some/set", notes := [], task_split="test") == [{"question": "q", "answer": "a #### 5"}]
    assert rows("some/set:extra") and asked == [("some/set", "main", "test"), ("some/set", "extra", "train")]
    assert notes == ["configuration main of some/set; the others are extra (--task some/set:CONFIG)"]
    with pytest.raises(DataError, match="no configuration 'other'; some/set has extra, main"):
        rows("some/set:other")
    for error in (ValueError("Unknown split"), ConnectionError("offline"), datasets.exceptions.DatasetNotFoundError("gone")):
        monkeypatch.setattr(datasets, "load_dataset", lambda *a, error=error, **k: (_ for _ in ()).throw(error))
        with pytest.raises(DataError, match=rf"--task some/set: .*split 'train' \({error}\)"):
            rows("some/set")


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES | st.sampled_from(["#### 4", "\\boxed{4}", "[]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
PARTS = st.lists(st.fixed_dictionaries({}, optional={"type": st.sampled_from(["text", "image"]), "text": VALUES}), max_size=2)
SAID = {"role": st.sampled_from(["user", "assistant"]) | VALUES, "content": VALUES | PARTS}
SAID |= {"from": st.sampled_from(["human", "gpt"]) | VALUES, "value": VALUES}
MESSAGES = st.lists(st.fixed_dictionaries({}, optional=SAID), max_size=2)
COLUMNS = (
    "messages conversations prompt question problem answer solution final_answer question_content public_test_cases "
    "private_test_cases starter_code metadata level type subject data_source year id unique_id context image images modality "
    "ability contest_date"
).split()
ROW = st.dictionaries(st.sampled_from(COLUMNS), VALUES | MESSAGES, max_size=6) | st.fixed_dictionaries(
    {"prompt": VALUES | MESSAGES, "reward_model": VALUES | st.fixed_dictionaries({"ground_truth": VALUES})}
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(rows=st.lists(ROW, max_size=4), field=st.sampled_from([None, "prompt", "a.b", "reward_model.ground_truth"]))
def test_any_values_load_or_end_in_one_error_that_names_an_option(tmp_path, rows, field):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(task=str(path), answer_field=field, prompts_per_step=1)
    try:
        task = load_task(config, Bytes())
    except DataError as error:
        assert "--task" in str(error) or "-field" in str(error)
    else:
        assert all(len(prompt.tokens) and prompt.text for prompt in task.train)
        written = json.dumps(rows, ensure_ascii=False)
        for prompt in task.train:  # what is JSON was a text in the file
            assert not isinstance(as_json(prompt.text), list | dict) or json.dumps(prompt.text, ensure_ascii=False) in written


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=60), suffix=st.sampled_from(["jsonl", "json", "csv", "parquet"]))
def test_any_bytes_load_or_end_in_one_error(tmp_path, data, suffix):
    path = tmp_path / f"d.{suffix}"
    path.write_bytes(data)
    try:
        load_records(Config(task=str(path)), [])
    except DataError as error:
        assert "--" in str(error)
