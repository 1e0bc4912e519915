"""Search: what is found and in which order, whatever the query holds; the index is made once; every layout of a corpus."""

import json
import threading
import warnings
from pathlib import Path

import psutil
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from vipfast.errors import DataError, UsageError
from vipfast.tools import search as search_module
from vipfast.tools.search import Search

CORPUS = Path(__file__).parents[1] / "data" / "corpus.jsonl"


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    search = Search(str(CORPUS), 3, tmp_path_factory.mktemp("index"))
    yield search
    search.close()


def ids(output):
    return list(output.found)


def test_the_passage_asked_for_comes_first(search):
    output = search(5.0, query="When was the lighthouse of Varnholm built?")
    assert ids(output)[0] == "lighthouse" and not output.error
    assert output.text.startswith("[1] Lighthouse of Varnholm\nThe lighthouse of Varnholm was built in 1871")
    assert ids(search(5.0, query="herring"))[0] == "tolsund"


def test_k_bounds_what_is_found_and_equal_passages_keep_their_order(search):
    assert ids(search(5.0, query="heron reeds")) == ["6", "7"]
    assert len(ids(search(5.0, query="of the in a"))) == 3


def test_an_id_is_made_where_none_is_given(search):
    assert ids(search(5.0, query="bells")) == ["corpus.jsonl:8"]


def test_words_of_the_query_language_are_words(search):
    assert ids(search(5.0, query="NOT AND"))[0] == "corpus.jsonl:8"
    for query in (
        '"heron" OR',
        "NEAR(heron, 2)",
        "title:heron*",
        "heron)",
        "^heron",
        "-heron",
        "a\0b",
        "'; DROP TABLE passages",
    ):
        assert not search(5.0, query=query).error, query
    assert ids(search(5.0, query="heron"))[:2] == ["6", "7"]


def test_nothing_found_is_no_error_and_no_words_is_one(search):
    assert search(5.0, query="zebra").text == "nothing found"
    assert search(5.0, query="?! …").error


@settings(max_examples=200, deadline=None)
@given(query=st.text(max_size=80) | st.text(alphabet='"*^()-:+ANDORTE _\0', max_size=40))
def test_no_query_raises(search, query):
    first, second = search(5.0, query=query), search(5.0, query=query)
    assert first == second


def test_a_search_that_takes_too_long_is_given_up(tmp_path):
    path = tmp_path / "many.txt"
    path.write_text("\n\n".join(f"word{i} common text of all" for i in range(20_000)))
    search = Search(str(path), 3, tmp_path)
    output = search(0.0, query="common text of all " + " ".join(f"word{i}" for i in range(60)))
    assert output.error and "took more than 0 s" in output.text
    assert search(5.0, query="word777").found == ("many.txt:778",)  # the same connection goes on
    search.close()


def test_the_index_is_made_once_for_a_content(tmp_path, monkeypatch):
    made = []
    fill = search_module._fill
    monkeypatch.setattr(search_module, "_fill", lambda *given: made.append(1) or fill(*given))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(CORPUS.read_bytes())
    for _ in range(2):
        Search(str(corpus), 3, tmp_path / "index").close()
    assert len(made) == 1
    corpus.write_text(json.dumps({"text": "Something else."}))
    search = Search(str(corpus), 3, tmp_path / "index")
    assert len(made) == 2 and search(5.0, query="something").found == ("corpus.jsonl:1",)
    search.close()
    assert len(list((tmp_path / "index").iterdir())) == 2


def test_every_layout_and_a_folder_of_them(tmp_path):
    (tmp_path / "a.txt").write_text("First paragraph\nof apples.\n\n\nSecond one, of pears.\n")
    (tmp_path / "b.jsonl").write_text('{"contents": "Plums are purple."}\n\n{"id": "q", "passage": "Quinces are hard."}\n')
    parquet.write_table(pyarrow.table({"id": [5], "title": ["T"], "text": ["Raisins are dry."]}), tmp_path / "c.parquet")
    (tmp_path / "notes.md").write_text("apples, not a passage")
    search = Search(str(tmp_path), 5, tmp_path / "index")
    found = {word: ids(search(5.0, query=word)) for word in ("apples", "pears", "plums", "quinces", "raisins")}
    assert found == {"apples": ["a.txt:1"], "pears": ["a.txt:2"], "plums": ["b.jsonl:1"], "quinces": ["q"], "raisins": ["5"]}
    search.close()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{', "line 2 is not JSON"),
        ("a.jsonl", b'{"title": "x"}', "row 1 has no text"),
        ("a.jsonl", b"[1]", "row 1 has no text"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "a\\ud800"}', "a.jsonl: row 2 holds half a surrogate pair"),
        ("a.jsonl", b'{"text": "x", "title": "\\udc00"}', "a.jsonl: row 1 holds half a surrogate pair"),
        ("a.jsonl", b'{"text": "x", "id": "\\udc00"}', "a.jsonl: row 1 holds half a surrogate pair"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "x", "id": ' + b"9" * 5000 + b"}", "a.jsonl: line 2 is not JSON"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl: line 1 is not JSON"),
        ("a.jsonl", b'{"text": "x", "id": ' + b"[" * 900 + b"]" * 900 + b"}", "a.jsonl: (row|line) 1 (has a list|is not JSON)"),
        ("a.jsonl", b'{"text": "x", "title": {"en": "t"}}', "a.jsonl: row 1 has a list or an object as id or title"),
        ("a.txt", b"\xff\xfe", "is not UTF-8"),
        ("a.parquet", b"nothing", "is not a parquet file"),
        ("a.csv", b"text\nx", "no file with passages"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"--search-corpus .*{message}"):
        Search(str(tmp_path / name), 3, tmp_path / "index")
    assert not list((tmp_path / "index").glob("*"))  # nothing half made


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=60), suffix=st.sampled_from(["jsonl", "txt", "parquet"]))
def test_any_bytes_are_a_corpus_or_end_in_one_error(tmp_path, data, suffix):
    path = tmp_path / f"c.{suffix}"
    path.write_bytes(data)
    try:
        Search(str(path), 3, tmp_path / "index").close()
    except DataError as error:
        assert f"--search-corpus {path}: " in str(error)


def test_a_parquet_file_that_breaks_off_is_named(tmp_path):
    path = tmp_path / "c.parquet"
    parquet.write_table(pyarrow.table({"text": [f"text {i} " * 50 for i in range(500)]}), path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:20] + bytes(400) + whole[420:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="--search-corpus .*c.parquet: is not a parquet file"):
            Search(str(path), 3, tmp_path / "index")


def test_ids_that_come_twice_are_said_each_time(tmp_path):
    rows = [{"id": 5, "text": "plums"}, {"id": "5", "text": "pears"}, {"id": 5, "text": "figs"}, {"text": "quinces"}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for _ in range(2):  # the second finds the index made
        with pytest.warns(UserWarning, match="--search-corpus .*c.jsonl: 2 passages have an id that an earlier one has"):
            Search(str(tmp_path / "c.jsonl"), 3, tmp_path / "index").close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Search(str(CORPUS), 3, tmp_path / "index").close()


def test_a_folder_that_cannot_hold_the_index_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--search-corpus .*XDG_CACHE_HOME"):
        Search(str(CORPUS), 3, tmp_path / "file" / "index")


def test_threads_search_at_once_and_handles_are_given_back(tmp_path):
    before = psutil.Process().num_fds()
    search = Search(str(CORPUS), 3, tmp_path)
    found = []
    threads = [threading.Thread(target=lambda: found.append(search(5.0, query="lighthouse").found)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1
    search.close()
    assert psutil.Process().num_fds() == before
