"""Chats in every form that files keep them in read alike, or are refused by column, row and remedy; none becomes JSON text."""

import csv
import json

import numpy as np
import pytest

from vipfast.config import Config
from vipfast.errors import DataError
from vipfast.tasks.base import Record, prompt_uid, tokenize
from vipfast.tasks.dataset import load_records
from vipfast.tasks.load import load_task
from vipfast.tasks.templates import Template

USER = [{"role": "user", "content": "2+2?"}]
SYSTEM = [{"role": "system", "content": "Think."}]


class Bytes:
    """Tokenizes to bytes and words messages as [role]content, with the assistant's header at the end."""

    chat_template = "there is one"

    def __call__(self, texts, add_special_tokens=True):
        return type("Ids", (), {"input_ids": [list(text.encode()) for text in texts]})()

    def apply_chat_template(self, messages, **options):
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def load(path, **changes):
    notes = []
    records, verifier = load_records(Config(task=str(path), prompts_per_step=1, **changes), notes)
    return records, verifier, notes


FORMS = {
    "plain": USER,
    "parts": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}],
    "parts beside nulls": [{"role": "user", "content": [{"type": "text", "text": "2+2?", "image": None, "image_url": None}]}],
    "a part without a type": [{"role": "user", "content": [{"text": "2+2?"}]}],
    "input_text": [{"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]}],
    "nulls": [{"role": "user", "content": "2+2?", "tool_calls": None, "name": None}],
    "empty calls": [{"role": "user", "content": "2+2?", "tool_calls": []}],
    "sharegpt": [{"from": "human", "value": "2+2?"}],
    "sharegpt by user": [{"from": "user", "value": "2+2?", "role": None, "content": None}],
    "sharegpt in capitals": [{"from": "Human", "value": "2+2?"}],
}


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_reads_as_the_plain_one(tmp_path, form, suffix):
    message = FORMS[form]
    path = write(tmp_path / f"d.{suffix}", [{"prompt": message, "answer": "4"}])
    (record,) = load(path)[0]
    assert {m["role"]: m["content"] for m in record.prompt} == {"user": "2+2?"} and record.answer == "4"
    texts = load(write(tmp_path / "t.jsonl", [{"prompt": json.dumps(message), "answer": "4"}]))[0]
    assert texts[0].prompt[0]["content"] == "2+2?"
    for row in ({"prompt": message}, {"prompt": json.dumps(message)}, json.dumps(message)):
        (own,) = load_task(Config(prompts_per_step=1), Bytes(), [row], score).train
        assert own.text == "[user]2+2?[assistant]" and own.problem == "2+2?"


def test_text_parts_are_joined_by_line_breaks():
    parts = [{"type": "text", "text": "Solve."}, "Be brief.", {"type": "text", "text": "2+2?"}]
    (own,) = load_task(Config(prompts_per_step=1), Bytes(), [{"prompt": [{"role": "user", "content": parts}]}], score).train
    assert own.problem == "Solve.\nBe brief.\n2+2?"


def score(completions, answers, metadata):
    return [1.0] * len(completions)


def test_arrays_of_messages_read_as_lists(tmp_path):
    """As pandas hands a parquet file's rows over."""
    import pandas as pd

    rows = [{"prompt": FORMS["parts beside nulls"], "answer": "4"}]
    table = pd.read_parquet(write(tmp_path / "d.parquet", rows))
    handed = table.to_dict("records")
    assert isinstance(handed[0]["prompt"], np.ndarray) and isinstance(handed[0]["prompt"][0]["content"], np.ndarray)
    (own,) = load_task(Config(prompts_per_step=1), Bytes(), handed, score).train
    assert own.text == "[user]2+2?[assistant]" and own.answer == "4"


CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
BAD = {
    "a dict": ({"text": "2+2?"}, "a dict that is no chat"),
    "a list of numbers": ([1, 2], "a list that is no chat"),
    "a list of texts": (["2+2?"], "a list that is no chat"),
    "other keys": ([{"speaker": "a", "text": "b"}], "a list that is no chat"),
    "null": ([*USER, {"role": "assistant", "content": None}, *USER], "a message whose 'content' is null"),
    "a tool call": ([*USER, CALL], "a message with tool_calls.*leave such rows out"),
    "a call beside words": ([*USER, {**CALL, "content": "I call"}], "a message with tool_calls"),
    "a call without content": ([*USER, {"role": "assistant", "tool_calls": [{"name": "f"}]}], "a message with tool_calls"),
    "no content": ([*USER, {"role": "assistant"}], "a message whose 'content' is null"),
    "an older call": ([*USER, {"role": "assistant", "content": "", "function_call": {"name": "f"}}], "with function_call"),
    "content that is a number": ([{"role": "user", "content": 5}], "a message whose 'content' is 5"),
    "content that is a dict": ([{"role": "user", "content": {"a": 1}}], "a message whose 'content' is {'a': 1}"),
    "an unknown part": ([{"role": "user", "content": [{"type": "file", "file": "x"}]}], "the part {'type': 'file'"),
    "an unknown speaker": ([{"from": "observation", "value": "5"}], "whose 'from' is 'observation'; known are system, human"),
    "a role of no text": ([{"role": 5, "content": "a"}], "whose 'role' is 5"),
    "null in ShareGPT": ([{"from": "human", "value": None}], "whose 'value' is null"),
    "the assistant alone": ([{"role": "assistant", "content": "4"}], "turns of the assistant alone"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_read_is_refused_by_column_row_and_remedy(tmp_path, kind):
    value, message = BAD[kind]
    path = write(tmp_path / "d.jsonl", [{"prompt": "fine", "answer": "4"}, {"prompt": value, "answer": "4"}])
    with pytest.raises(DataError, match=f"--task .*d.jsonl: row 2, column prompt holds .*{message}.*(give|leave|name)"):
        load(path)
    with pytest.raises(DataError, match=f"key 'prompt' of .* holds .*{message}"):
        load_task(Config(prompts_per_step=1), Bytes(), [{"prompt": value}], score)


@pytest.mark.parametrize("kind", [kind for kind, (value, message) in BAD.items() if "that is no chat" not in message])
def test_chats_that_cannot_be_read_are_refused_as_json_text_too(tmp_path, kind):
    value, message = BAD[kind]
    with pytest.raises(DataError, match=f"row 1, column prompt holds .*{message}"):
        load(write(tmp_path / "d.jsonl", [{"prompt": json.dumps(value), "answer": "4"}]))


def test_a_chat_that_python_printed_into_a_table_is_refused(tmp_path):
    path = write(tmp_path / "d.csv", [{"prompt": str(USER), "answer": "4"}])
    with pytest.raises(DataError, match="row 1, column prompt holds a chat as Python prints it.*json.dumps"):
        load(path)


@pytest.mark.parametrize("text", ["[1, 2] + [3] = ?", "[", "[]", '[{"a": 1}]', "{'role': 'user'}", "[{x} : x > 0]"])
def test_texts_that_only_look_like_lists_stay_texts(tmp_path, text):
    assert load(write(tmp_path / "d.jsonl", [{"prompt": text, "answer": "1"}]))[0][0].prompt == text


SHOWN = {
    "image": {"type": "image", "image": {"bytes": b"\x89PNG\xff", "path": None}},
    "image_url": {"type": "image_url", "image_url": {"url": "http://a/b.png"}},
    "untyped": {"image": "a.png"},
    "audio": {"type": "input_audio", "input_audio": {"data": "AAAA"}},
    "video": {"type": "video", "video": "a.mp4"},
}


@pytest.mark.parametrize("kind", SHOWN)
def test_rows_whose_messages_have_pictures_are_left_out_and_counted(tmp_path, kind):
    shown = [{"role": "user", "content": [SHOWN[kind], {"type": "text", "text": "What is this?"}]}]
    rows = [{"prompt": shown, "answer": "a"}, {"prompt": FORMS["parts"], "answer": "4"}]
    records, _, notes = load(write(tmp_path / "d.parquet", rows))
    assert [record.prompt[0]["content"] for record in records] == ["2+2?"]
    assert "1 of 2 rows left out: they come with pictures, which are not shown" in notes
    with pytest.raises(DataError, match="key 'prompt' .*holds a message with a part of type"):
        load_task(Config(prompts_per_step=1), Bytes(), [{"prompt": shown}], score)


DIALOGUE = [("system", "Think."), ("human", "2+2?"), ("gpt", "So 4."), ("human", "3+3?"), ("gpt", r"It is \boxed{6}.")]


def as_sharegpt(turns):
    return [{"from": speaker, "value": said} for speaker, said in turns]


def as_messages(turns):
    return [{"role": {"human": "user", "gpt": "assistant"}.get(s, s), "content": said} for s, said in turns]


@pytest.mark.parametrize(
    ("column", "form"), [("conversations", as_sharegpt), ("conversation", as_sharegpt), ("messages", as_messages)]
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_dialogue_without_an_answer_column_is_asked_up_to_its_last_turn(tmp_path, column, form, suffix):
    records, verifier, notes = load(write(tmp_path / f"d.{suffix}", [{column: form(DIALOGUE)}]))
    assert records == [Record(as_messages(DIALOGUE[:-1]), "6")] and verifier == "maths"
    assert notes == [f"layout: dialogues ({column}, last turn of the assistant), graded as maths"]


@pytest.mark.parametrize(
    ("reply", "answer", "verifier"),
    [("a #### 6", "6", "maths"), ("six", "six", "exact"), ("6", "6", "exact")],
    ids=["hashes", "words", "number"],
)
def test_the_last_turn_is_graded_by_what_it_holds(tmp_path, reply, answer, verifier):
    rows = [{"messages": as_messages([("human", "3+3?"), ("gpt", reply)])}]
    records, wanted, _ = load(write(tmp_path / "d.jsonl", rows))
    assert ([record.answer for record in records], wanted) == ([answer], verifier)


@pytest.mark.parametrize("form", [as_sharegpt, as_messages])
def test_beside_an_answer_column_the_last_turn_is_no_part_of_the_prompt(tmp_path, form):
    column = "conversations" if form is as_sharegpt else "messages"
    records, _, _ = load(write(tmp_path / "d.jsonl", [{column: form(DIALOGUE), "answer": "six"}]))
    assert records == [Record(as_messages(DIALOGUE[:-1]), "six")]
    path = write(tmp_path / "e.jsonl", [{"talk": form(DIALOGUE), "gold": "six"}])
    assert load(path, prompt_field="talk", answer_field="gold")[0] == records


def test_several_last_turns_are_all_taken_off_and_rows_without_one_left_out(tmp_path):
    turns = as_messages([("human", "2+2?"), ("gpt", "Well."), ("gpt", "4")])
    records, _, notes = load(write(tmp_path / "d.jsonl", [{"messages": turns}, {"messages": turns[:1]}]))
    assert records == [Record(USER, "4")]
    assert "1 of 2 rows left out: no messages or no last turn of the assistant" in notes


def test_the_answer_may_be_a_chat_too(tmp_path):
    rows = [{"prompt": USER, "completion": [{"role": "assistant", "content": "4"}]}]
    assert load(write(tmp_path / "d.jsonl", rows), answer_field="completion")[0] == [Record(USER, "4")]


def test_a_prompt_that_the_assistant_has_begun_is_gone_on_with(tmp_path):
    begun = [*USER, {"role": "assistant", "content": "Let me see"}]
    path = write(tmp_path / "d.jsonl", [{"prompt": begun, "answer": "4"}])
    task = load_task(Config(task=str(path), prompts_per_step=1, prompt_template="boxed"), Bytes())
    (prompt,) = task.train
    assert prompt.text.endswith("within \\boxed{}.[assistant]Let me see") and prompt.text.startswith("[user]2+2?")
    assert "1 of 1 prompts end with words of the assistant, which the policy goes on with" in task.notes
    (own,) = load_task(Config(prompts_per_step=1), Bytes(), [{"prompt": begun}], score).train
    assert own.text == "[user]2+2?[assistant]Let me see"
    (plain,) = tokenize("t", [Record(begun, "4")], Template(Config(prompt_template="plain"), Bytes()), None, [])
    assert plain.text == "2+2?\n\nLet me see"


def test_shares_of_a_dialogue_handed_over_from_python_never_show_its_solution():
    for answer, wanted in (({}, r"It is \boxed{6}."), ({"answer": "6"}, "6"), ({"answer": None}, None)):
        rows = [{"prompt": as_sharegpt(DIALOGUE), **answer}]
        (own,) = load_task(Config(prompts_per_step=1), Bytes(), rows, score).train
        assert own.answer == wanted and own.text.endswith("[user]3+3?[assistant]")


def test_keys_that_a_template_may_know_stay(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "2+2?", "name": "Ada"}], "answer": "4"}]
    assert load(write(tmp_path / "d.jsonl", rows))[0][0].prompt == [{"role": "user", "content": "2+2?", "name": "Ada"}]


def test_plain_messages_keep_their_uid():
    (plain,), (parts,) = (
        load_task(Config(prompts_per_step=1), Bytes(), [{"prompt": FORMS[form], "answer": "4"}], score).train
        for form in ("plain", "parts")
    )
    assert plain.uid == parts.uid == prompt_uid("custom", "[user]2+2?[assistant]", "4", {})
