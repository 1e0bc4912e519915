"""The rule by which what tables hold becomes answers, prompts and metadata, from real files."""

import json
import uuid
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

import numpy as np
import pytest

from vipfast.config import Config
from vipfast.errors import DataError
from vipfast.tasks.base import prompt_uid
from vipfast.tasks.dataset import load_records
from vipfast.tasks.load import load_task
from vipfast.tasks.values import Unreadable, as_text, plain, plain_answer

INF = float("inf")
WHEN = datetime(2024, 2, 29, 12, 30, 5, tzinfo=UTC)

# value: its text as an answer, and its plain form in metadata
RULE = [
    (Decimal("1.50"), "1.50", 1.5),
    (Decimal("1E+2"), "100", 100),
    (Decimal("-0.001"), "-0.001", -0.001),
    (Decimal("1E-9"), "0.000000001", 1e-9),
    (Decimal("5.00"), "5.00", 5),
    (Decimal("0.1234567890123456789012345"), "0.1234567890123456789012345", "0.1234567890123456789012345"),
    (Decimal("123456789012345678901234567890"), "123456789012345678901234567890", 123456789012345678901234567890),
    (date(2024, 2, 29), "2024-02-29", "2024-02-29"),
    (WHEN, "2024-02-29T12:30:05+00:00", "2024-02-29T12:30:05+00:00"),
    (WHEN.replace(tzinfo=None), "2024-02-29T12:30:05", "2024-02-29T12:30:05"),
    (time(12, 30), "12:30:00", "12:30:00"),
    (timedelta(hours=1, milliseconds=500), "3600.5", 3600.5),
    (timedelta(minutes=2), "120", 120.0),
    (b"caf\xc3\xa9", "café", "café"),
    ([Decimal("1.50"), Decimal("2"), None], "[1.5, 2, null]", [1.5, 2, None]),
    ([date(2024, 2, 29)], '["2024-02-29"]', ["2024-02-29"]),
    ({"a": Decimal("2"), "b": b"x"}, '{"a": 2, "b": "x"}', {"a": 2, "b": "x"}),
    (INF, "Infinity", INF),
    (-INF, "-Infinity", -INF),
    (5.0, "5", 5.0),
    (True, "true", True),
    (7, "7", 7),
]
NOTHING = [None, float("nan"), np.float64("nan"), Decimal("NaN"), np.datetime64("NaT"), np.timedelta64("NaT"), ""]
NUMPY = [
    (np.int64(5), "5", 5),
    (np.float32(0.5), "0.5", 0.5),
    (np.float64(5), "5", 5.0),
    (np.bool_(True), "true", True),
    (np.str_("5.0"), "5.0", "5.0"),
    (np.array([1, 2]), "[1, 2]", [1, 2]),
    (np.array([[1.5], [2.0]]), "[[1.5], [2.0]]", [[1.5], [2.0]]),
    (np.datetime64("2024-02-29"), "2024-02-29", "2024-02-29"),
    (np.datetime64("2024-02-29T12:30:05.000000001"), "2024-02-29T12:30:05.000000001", "2024-02-29T12:30:05.000000001"),
    (np.timedelta64(1500, "ms"), "1.5", 1.5),
    (np.array(["2024-02-29"], "datetime64[ns]"), '["2024-02-29T00:00:00.000000000"]', ["2024-02-29T00:00:00.000000000"]),
    (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005", "00000000-0000-0000-0000-000000000005"),
    ((1, 2), "[1, 2]", [1, 2]),
]


def parquet(path, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return Config(task=str(path), prompts_per_step=1, metadata_fields=("about",))


@pytest.mark.parametrize(("value", "text", "kept"), RULE, ids=lambda value: repr(value)[:40])
def test_values_of_a_parquet_file(tmp_path, value, text, kept):
    config = parquet(tmp_path / "d.parquet", [{"prompt": "p", "answer": value, "about": value}])
    (record,) = load_records(config, [])[0]
    assert record.answer == text and record.metadata == {"about": kept} and type(record.metadata["about"]) is type(kept)
    (prompt,) = load_task(config, Bytes(), reward=lambda c, a, m: [1.0]).train
    assert prompt.answer == text and json.loads(json.dumps(prompt.metadata)) == {"about": kept}
    if not isinstance(value, list | dict):
        asked = load_records(parquet(tmp_path / "q.parquet", [{"prompt": value, "answer": "a", "about": 1}]), [])[0]
        assert asked[0].prompt == text


class Bytes:
    chat_template = None

    def __call__(self, texts, add_special_tokens=True):
        return type("Ids", (), {"input_ids": [list(text.encode()) for text in texts]})()


@pytest.mark.parametrize(("value", "text", "kept"), NUMPY, ids=lambda value: repr(value)[:40])
def test_values_of_numpy(value, text, kept):
    assert (as_text(value), plain_answer(value), plain(value)) == (text, text, kept)
    assert type(plain(value)) is type(kept)
    assert prompt_uid("t", "a", value, {"x": value}) == prompt_uid("t", "a", kept, {"x": kept})


@pytest.mark.parametrize("value", NOTHING, ids=repr)
def test_what_is_missing_is_no_answer(value):
    assert plain_answer(value) is None


def test_pandas_own_times_and_gaps():
    import pandas as pd

    assert plain(pd.Timestamp("2024-02-29T12:30:05")) == "2024-02-29T12:30:05" and plain(pd.NaT) is None
    assert plain(pd.Timedelta(minutes=2)) == 120.0


def test_rows_without_an_answer_in_tables_of_decimals_and_dates(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": value, "about": 1} for i, value in enumerate([Decimal("1.5"), None])]
    records, _ = load_records(parquet(tmp_path / "d.parquet", rows), notes := [])
    assert [record.answer for record in records] == ["1.5"] and "1 of 2 rows left out: no prompt or no answer" in notes


@pytest.mark.parametrize("column", ["prompt", "answer", "about"])
def test_bytes_that_are_no_text_are_refused_by_column_and_row(tmp_path, column):
    row = {"prompt": b"p", "answer": b"a", "about": b"x"}
    config = parquet(tmp_path / "d.parquet", [row, {**row, column: b"\xff"}])
    with pytest.raises(DataError, match=f"--task .*: row 2, column {column} holds bytes that are no UTF-8.*store text"):
        load_records(config, [])


def test_bytes_in_columns_that_nothing_asks_for_are_no_matter(tmp_path):
    rows = [{"prompt": "p", "answer": "4", "about": 1, "thumbnail": b"\xff", "source": b"\xff", "level": [1]}]
    (record,) = load_records(parquet(tmp_path / "d.parquet", rows), [])[0]
    assert record.metadata == {"about": 1}


def test_details_are_plain(tmp_path):
    rows = [{"prompt": "p", "answer": "4", "about": 1, "level": Decimal("3"), "year": date(2024, 1, 1)}]
    (record,) = load_records(parquet(tmp_path / "d.parquet", rows), [])[0]
    assert record.metadata == {"about": 1, "level": 3, "year": "2024-01-01"}


def test_times_that_python_has_no_form_for_are_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    seconds = pa.array([10**12], pa.timestamp("s"))
    pq.write_table(pa.table({"prompt": ["p"], "answer": seconds}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match="--task .*d.parquet: .*timestamp"):
        load_records(Config(task=str(tmp_path / "d.parquet")), [])


@pytest.mark.parametrize("value", [{1, 2}, len, object(), 1j], ids=repr)
def test_anything_else_is_refused(value):
    with pytest.raises(Unreadable, match="no plain value; give numbers, texts or lists"):
        plain([value])


def test_numbers_in_csv_and_json_stay_as_they_are_written(tmp_path):
    (tmp_path / "d.csv").write_text("prompt,answer\np,1.50\nq,1E+2\n")
    (tmp_path / "d.json").write_text('[{"prompt": "p", "answer": "1.50"}, {"prompt": "q", "answer": 1E+2}]')
    found = [[r.answer for r in load_records(Config(task=str(tmp_path / name)), [])[0]] for name in ("d.csv", "d.json")]
    assert found == [["1.50", "1E+2"], ["1.50", "100"]]
