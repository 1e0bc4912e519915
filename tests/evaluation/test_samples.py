"""samples.jsonl: what is whole is gone on with, what is torn is cut, what is damaged is one error that names the line."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vipfast.engine.base import ToolUse
from vipfast.errors import CheckpointError, UsageError
from vipfast.evaluation.samples import Sample, Samples

CHUNKS = [[("t", "p0"), ("t", "p1")], [("t", "p2")], [("u", "p0"), ("u", "p3")]]
NUM = 2
USED = {"turns": 2, "calls": 1, "errors": 0, "found": ["g", "ü"]}
TEXTS = ["", "plain", "ünï\u2028code\n", "half a pair \ud800", "\x00\x1b[2J"]


def line(task, uid, index, **changes):
    text = TEXTS[index]
    return {
        "task": task, "uid": uid, "index": index, "reward": [1.0, None][index], "answer": [text, None][index],
        "finish": "stop", "tokens": 3, "text": text, **changes,
    }  # fmt: skip


def lines(chunk):
    return [line(task, uid, index) for task, uid in chunk for index in range(NUM)]


def opened(path, chunks=CHUNKS):
    store = Samples(path, chunks, NUM)
    store.close()
    return store


def written(path):
    store = Samples(path, CHUNKS, NUM)
    for chunk in CHUNKS[store.num_chunks :]:
        store.append(lines(chunk))
    store.close()
    return path.read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "samples.jsonl"


def test_what_was_appended_is_read_again_text_for_text(path):
    whole = written(path)
    store = opened(path)
    assert store.num_chunks == 3 and len(store.rows) == 10
    assert store.rows[:2] == [Sample(1.0, "", "stop", 3), Sample(None, None, "stop", 3)]
    assert path.read_bytes() == whole
    assert [json.loads(row)["text"] for row in whole.splitlines()[:2]] == TEXTS[:2]


def test_what_a_rollout_did_with_tools_is_read_again(path):
    store = Samples(path, CHUNKS, NUM)
    store.append([*lines(CHUNKS[0])[:3], line("t", "p1", 1, tools=USED)])
    assert store.rows[3].use == ToolUse(2, 1, 0, found=("g", "ü"))
    store.close()
    assert opened(path).rows == store.rows


def test_every_length_of_a_torn_file_is_cut_to_whole_chunks_and_goes_on(path):
    whole = written(path)
    ends = [0]
    for num in (4, 2, 4):
        ends.append(ends[-1] + sum(len(row) for row in whole[ends[-1] :].splitlines(keepends=True)[:num]))
    near = {end + step for end in ends for step in (-1, 0, 1) if 0 <= end + step <= len(whole)}
    for length in sorted(near | set(range(0, len(whole), 13))):
        path.write_bytes(whole[:length])
        store = opened(path)
        assert store.num_chunks == sum(end <= length for end in ends[1:]), length
        assert path.stat().st_size == max(end for end in ends if end <= length), length
    path.write_bytes(whole[: len(whole) // 2])
    assert written(path) == whole


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict(uid="p9"), "sample 0 of prompt p1 of t belongs there"),
        (dict(index=1), "sample 0 of prompt p1"),
        (dict(index=False), "sample 0 of prompt p1"),
        (dict(task="u"), "of t belongs there"),
        (dict(reward="1"), "wrong kind"),
        (dict(reward=True), "wrong kind"),
        (dict(reward=10**30), "wrong kind"),
        (dict(reward=float("inf")), "no JSON"),
        (dict(answer=3), "wrong kind"),
        (dict(finish="ended"), "wrong kind"),
        (dict(finish=["stop"]), "wrong kind"),
        (dict(tokens=-1), "wrong kind"),
        (dict(tokens=1.0), "wrong kind"),
        (dict(text=None), "wrong kind"),
        (dict(more=1), "keys"),
        (dict(reward=float("nan")), "no JSON"),
        (dict(tools=None), "wrong kind"),
        (dict(tools=USED | {"calls": -1}), "wrong kind"),
        (dict(tools=USED | {"turns": True}), "wrong kind"),
        (dict(tools=USED | {"found": "g"}), "wrong kind"),
        (dict(tools=USED | {"found": [1]}), "wrong kind"),
        (dict(tools=USED | {"seconds": 1.0}), "wrong kind"),
    ],
    ids=str,
)
def test_a_line_that_does_not_belong_is_an_error_with_its_number(path, change, told):
    rows = written(path).splitlines(keepends=True)
    rows[2] = json.dumps(json.loads(rows[2]) | change).encode() + b"\n"
    path.write_bytes(b"".join(rows))
    with pytest.raises(UsageError, match=r"line 3 of samples.jsonl is damaged") as error:
        opened(path)
    assert told in str(error.value)
    assert path.read_bytes() == b"".join(rows), "what is refused is left as it was"


@pytest.mark.parametrize("bad", [b"\n", b"[" * 100_000 + b"\n", b"\xff\xfe\n", b"{}\n", b"null\n", b"0\n", b"{\n"])
def test_a_line_that_is_no_sample_is_an_error_with_its_number(path, bad):
    rows = written(path).splitlines(keepends=True)
    path.write_bytes(b"".join([*rows[:4], bad, *rows[5:]]))
    with pytest.raises(UsageError, match="line 5 of samples.jsonl is damaged"):
        opened(path)


def test_more_lines_than_belong_there_are_an_error(path):
    whole = written(path)
    path.write_bytes(whole + whole.splitlines(keepends=True)[0])
    with pytest.raises(UsageError, match="line 11 .* nothing more belongs"):
        opened(path)
    path.write_bytes(whole + b'{"task"')
    assert opened(path).num_chunks == 3 and path.read_bytes() == whole


def test_two_evaluations_in_one_folder_are_told_apart(path):
    first = Samples(path, CHUNKS, NUM)
    with pytest.raises(UsageError, match="another evaluation is writing there"):
        Samples(path, CHUNKS, NUM)
    first.close()
    opened(path)


def test_a_full_disk_is_named_and_what_was_there_goes_on(path, monkeypatch):
    whole = written(path)
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:4]))
    store = Samples(path, CHUNKS, NUM)
    write = os.write

    def full(file, data):
        write(file, data[:7])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(CheckpointError, match="the disk is full"):
            store.append(lines(CHUNKS[1]))
    store.close()
    assert written(path) == whole


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_damage_goes_on_or_is_one_clear_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "samples.jsonl"
    content = bytearray(written(path))
    whole = bytes(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        new = data.draw(st.binary(max_size=6) | st.sampled_from([b"\n", b"{}\n", whole[:150], b"\0" * 64]))
        content[at : at + data.draw(st.integers(0, 200))] = new
    path.write_bytes(content)
    try:
        store = opened(path)
    except UsageError as error:
        assert "samples.jsonl is damaged" in str(error) and path.read_bytes() == bytes(content)
        return
    assert 0 <= store.num_chunks <= 3 and len(store.rows) == (0, 4, 6, 10)[store.num_chunks]
    written(path)
    assert opened(path).num_chunks == 3
