"""The command line: what a run brings along, what goes over what, and every refusal with its remedy and exit code."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from vipfast.config import FACTS, Config
from vipfast.config_file import save_yaml
from vipfast.config_rules import flag
from vipfast.errors import UsageError
from vipfast.evaluation import command, model
from vipfast.evaluation.command import parse
from vipfast.evaluation.folder import open_folder
from vipfast.evaluation.options import FREE, GREEDY_TOP_P, TRAINING, Flags, short_name

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "evaluate.py"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_run(folder, parts=("final",), lora=False, **options):
    """A run's folder with models that are described but not there."""
    folder = Path(folder)
    folder.mkdir()
    save_yaml(Config(**options), folder / "config.yaml")
    (folder / "metrics.jsonl").touch()
    for part in parts:
        (folder / part).mkdir(parents=True)
        (folder / part / ("adapter_config.json" if lora else "config.json")).write_text("{}")
        if "step-" in part:
            (folder / part).parent.joinpath("COMPLETE").write_text(json.dumps({"step": 1, "files": {}}))
    return folder


def test_help_shows_what_an_evaluation_reads_and_imports_no_torch():
    code = (
        "import runpy, sys\n"
        "sys.argv = ['evaluate.py', '--help']\n"
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit as end: print(end.code, sorted({'torch', 'transformers', 'numpy', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    shown = {field.name for field in dataclasses.fields(Flags)} - TRAINING
    assert {"samples", "k", "split", "by", "temperature", "success_threshold", "engine"} <= shown
    for name in shown:
        assert f"│ {flag(name)} " in done.stdout, name
    for name in TRAINING:
        assert f"{flag(name)} " not in done.stdout, name


def test_what_an_evaluation_does_not_read_is_not_set_apart_for_it():
    assert not TRAINING & FREE
    assert all(FACTS[name].travels == "to_evaluation" for name in TRAINING)


@pytest.mark.parametrize(
    "argv", [["--allocator", "vip"], ["--learning-rate", "1"], ["--sample", "3"], ["--split", "test"]], ids=" ".join
)
def test_what_is_no_option_here_exits_2_and_is_named(argv, capsys):
    try:
        code = command.main(argv)
    except SystemExit as end:  # values are judged by the command-line library
        code = end.code
    assert code == 2 and argv[0] in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--task", "arithmetc"], "--task arithmetc: unknown; did you mean arithmetic?"),
        (["--task", "arithmetic", "no.jsonl"], "--task no.jsonl: no such file"),
        (["--task", "arithmetic", "arithmetic"], "--task arithmetic arithmetic: a task is named twice"),
        (["--model", "nope"], "--model nope: no such folder"),
        (["--samples", "0"], "--samples 0: must lie in [1, 4096]"),
        (["--samples", "8", "--k", "1", "16"], "--k 1 16: must lie in [1, 8], as far as --samples 8 reach"),
        (["--k", "0"], "--k 0: must lie in [1, 8]"),
        (["--max-prompts", "0"], "--max-prompts 0: must lie in"),
        (["--rows-at-once", "0"], "--rows-at-once 0: must lie in"),
        (["--temperature", "0"], "--temperature 0: takes the likeliest token always"),
        (["--temperature", "0", "--samples", "1", "--top-p", "0.9"], "--top-p 0.9: has no effect with --temperature 0"),
        (["--temperature", "-1"], "--temperature -1.0: must be above 0"),
        (["--by", "colour", "--max-prompts", "9"], "--by colour: --task arithmetic: no prompt has such a value; its prompts"),
        (["--split", "heldout", "--heldout-prompts", "0"], "--split heldout: --task arithmetic has no such prompts"),
        (["--config", "no.yaml"], "--config no.yaml: cannot be read"),
        (["--output-dir", "file"], "--output-dir file: is a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_bad_options_exit_2_with_one_message(argv, message, capsys):
    Path("file").touch()
    assert command.main(["--device", "cpu", "--threads", "1", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}") and err.count("\n") == 1
    assert not Path("evals").exists()


def test_k_defaults_to_powers_of_two_and_all_samples():
    assert parse(["--samples", "12"]).k == (1, 2, 4, 8, 12)
    assert parse(["--samples", "12", "--k", "4", "1", "4"]).k == (1, 4)


def test_greedy_is_the_smallest_nucleus_and_told_as_temperature_0():
    asked = parse(["--temperature", "0", "--samples", "1"])
    assert (asked.config.temperature, asked.config.top_p) == (1.0, GREEDY_TOP_P)
    assert (asked.decisive["temperature"], asked.decisive["top_p"]) == (0.0, 1.0)


def test_a_runs_model_brings_sampling_and_task_but_neither_machine_nor_training():
    options = dict(temperature=0.7, max_new_tokens=9, seed=5, success_threshold=0.5, allocator="vip", device="cuda", threads=7)
    run = make_run("run", task="own.jsonl", prompt_field="text", **options)
    asked = parse(["--model", str(run)])
    config = asked.config
    assert (config.temperature, config.max_new_tokens, config.seed, config.success_threshold) == (0.7, 9, 5, 0.5)
    assert (asked.tasks, config.prompt_field, config.model) == (("own.jsonl",), "text", "run/final")
    assert (config.steps, config.device, config.threads) == (Config().steps, None, None)
    assert "temperature 0.7" in asked.notes[-1] and asked.trained_on.task == "own.jsonl"
    other = parse(["--model", str(run), "--task", "arithmetic", "--temperature", "0.9"])
    assert (other.tasks, other.config.prompt_field, other.config.temperature) == (("arithmetic",), None, 0.9)


def test_a_run_graded_by_python_asks_what_grades_instead(capsys):
    make_run("own", reward=("python",))
    assert command.main(["--model", "own"]) == 2
    assert "--model own: its run was graded by a function given in Python" in capsys.readouterr().err
    assert command.parse(["--model", "own", "--reward", "task"]).config.reward == ("task",)
    make_run("both", reward=("python",), task="custom")
    assert command.main(["--model", "both"]) == 2
    assert "say with --task, and with --reward what grades" in capsys.readouterr().err


def test_flags_go_over_the_file_and_the_file_over_the_run():
    make_run("run", temperature=0.7, max_new_tokens=9, seed=5)
    Path("more.yaml").write_text("temperature: 0.8\nmax_new_tokens: 10\nallocator: vip\nlearning_rate: 1e-6\n")
    config = parse(["--model", "run", "--config", "more.yaml", "--max-new-tokens", "11"]).config
    assert (config.seed, config.temperature, config.max_new_tokens) == (5, 0.8, 11)


@pytest.mark.parametrize(
    ("parts", "given", "found"),
    [
        (("final", "best", "checkpoints/step-1/model"), "run", "run/final"),
        (("checkpoints/step-1/model", "checkpoints/step-12/model"), "run", "run/checkpoints/step-12/model"),
        (("final", "best"), "run/best", "run/best"),
        (("final", "checkpoints/step-1/model"), "run/checkpoints/step-1", "run/checkpoints/step-1/model"),
        (("final", "checkpoints/step-1/model"), "run/checkpoints/step-1/model", "run/checkpoints/step-1/model"),
    ],
    ids=str,
)
def test_parts_of_a_run_are_found(parts, given, found):
    make_run("run", parts)
    source = model.find(given)
    assert source.base == found and source.adapter is None
    assert source.run.resolve() == Path("run").resolve()


def test_a_run_without_a_model_is_refused():
    make_run("run", ())
    with pytest.raises(UsageError, match="--model run: this run has saved neither final/ nor a complete checkpoint yet"):
        model.find("run")


def test_adapters_of_a_run_lie_on_the_model_the_run_names():
    make_run("run", lora=True, model="owner/base", lora_rank=8)
    source = model.find("run")
    assert (source.base, str(source.adapter)) == ("owner/base", "run/final")


@pytest.mark.parametrize(
    "content", ["{}", "no json", '{"base_model_name_or_path": "/not/here"}', '{"base_model_name_or_path": 3}', "[]"]
)
def test_adapters_that_name_no_model_are_refused(content):
    Path("adapters").mkdir()
    Path("adapters/adapter_config.json").write_text(content)
    with pytest.raises(UsageError, match="--model adapters: its adapter_config.json"):
        model.find("adapters")


def test_adapters_of_others_lie_on_the_model_they_name():
    Path("adapters").mkdir()
    Path("adapters/adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    assert (model.find("adapters").base, model.find("adapters").run) == ("owner/base", None)


def test_a_weight_anywhere_changes_the_fingerprint(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    source, marks = model.Source("m", str(folder)), set()
    content = bytearray(500_000)  # files smaller than what is read of them are read whole
    for at in (None, 0, 250_001, 499_999):
        if at is not None:
            content[at] ^= 1
        (folder / "model.safetensors").write_bytes(content)
        marks.add(source.fingerprint())
    assert len(marks) == 4


def test_an_unreadable_evaluation_json_is_named(tmp_path):
    Path("out").mkdir()
    Path("out/evaluation.json").write_text("{")
    with pytest.raises(UsageError, match="--output-dir out: its evaluation.json cannot be read"):
        open_folder(parse(["--output-dir", "out"]), [])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("starter", "starter"),
        ("/a/b/run/final", "run-final"),
        ("openai/gsm8k", "openai-gsm8k"),
        ("own.jsonl", "own"),
        ("..", "x"),
    ],
)
def test_folders_are_named_after_model_and_tasks(text, name):
    assert short_name(text) == name


def folder_of(name, *files):
    """A folder with a problem in each file."""
    Path(name).mkdir()
    for file in files:
        path = Path(name, file)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"prompt": f"copy {file} =", "answer": file}) + "\n")
    return name


def test_a_folder_is_evaluated_on_its_test_split_where_it_has_one():
    both, train, none = (
        folder_of("both", "test-0.jsonl", "train-0.jsonl"),
        folder_of("train-only", "train.jsonl"),
        folder_of("none", "a.jsonl"),
    )
    asked = parse(["--task", both, train, none, f"{both}/train-0.jsonl", "arithmetic"])
    assert asked.task_splits == ("test", "train", "train", "train", "train")
    assert [config.task_split for config in asked.configs] == list(asked.task_splits)
    assert asked.config.task_split == "test" and asked.decisive["task_split"] == list(asked.task_splits)
    assert asked.notes[0] == "both: --task-split test, as it has one"
    assert asked.notes[1].startswith("train-only: --task-split train, as test cannot be read (")
    assert len(asked.notes) == 3
    given = parse(["--task", both, "--task-split", "train"])
    assert (given.task_splits, given.decisive["task_split"], given.notes) == (("train",), "train", ())


def test_a_runs_own_split_stays_unless_another_task_is_named():
    folder = folder_of("both", "test-0.jsonl", "train-0.jsonl")
    make_run("run", task=folder, task_split="train")
    assert parse(["--model", "run"]).task_splits == ("train",)
    assert parse(["--model", "run", "--task", folder]).task_splits == ("test",)


def test_a_hub_dataset_is_evaluated_on_its_test_split_where_it_has_one(monkeypatch):
    datasets = pytest.importorskip("datasets")
    there, seen = ["train", "test"], []

    def load(name, configuration, split):
        seen.append(split)
        if split not in there:
            raise ValueError(f"Unknown split {split!r}")
        return datasets.Dataset.from_list([{"question": "q", "answer": "a"}])

    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["main"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert parse(["--task", "owner/name"]).task_splits == ("test",) and seen == ["test"]
    there.remove("test")
    asked = parse(["--task", "owner/name"])
    assert asked.task_splits == ("train",) and "Unknown split" in asked.notes[0]


def test_options_that_change_no_sample_are_no_part_of_an_evaluation():
    plain, other = (parse(["--output-dir", "out", *more]) for more in ([], ["--reward-workers", "3", "--reward-timeout", "7"]))
    assert plain.decisive == other.decisive
    folder = open_folder(plain, [])
    record = json.loads((folder / "evaluation.json").read_text())
    record["options"] |= {"reward_workers": 5, "threads": 2}  # of a time when they were written down
    (folder / "evaluation.json").write_text(json.dumps(record))
    assert open_folder(other, []) == folder


def test_memory_that_runs_out_is_an_error_with_what_helps(tmp_path, monkeypatch, capsys):
    def runs_out(asked, ranks):
        raise MemoryError

    monkeypatch.setattr("vipfast.evaluation.run.run", runs_out)
    monkeypatch.chdir(tmp_path)
    assert command.main(["--device", "cpu", "--threads", "1"]) == 1
    assert "out of memory (MemoryError); what helps: a lower --rows-at-once, or a smaller model" in capsys.readouterr().err
