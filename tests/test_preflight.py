"""A start that fails: before torch is imported where it can, with one message, and without a folder left behind."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vipfast import cli
from vipfast.config import Config
from vipfast.errors import UsageError
from vipfast.model_facts import STARTER
from vipfast.resolve import resolve

FILES = {
    "empty.jsonl": "", "columns.jsonl": '{"text": "2+2?", "label": 4}\n', "broken.jsonl": "{", "holder/README": "", "file": "x",
    "run/config.yaml": "", "typo.yaml": "learnin_rate: 1\n", "bad.yaml": "a: [", "wide.csv": "question,answer\n2+2?,\n",
}  # fmt: skip
REFUSED = [
    (["--trackers", "trackio"], "--trackers trackio: its package is missing; install it with: pip install 'vipfast[trackers]'"),
    (["--task", "gone.jsonl"], "--task gone.jsonl: no such file"),
    (["--task", "arithmetik"], "--task arithmetik: unknown; did you mean arithmetic?"),
    (["--task", "empty.jsonl"], "--task empty.jsonl: holds no rows"),
    (["--task", "columns.jsonl"], "--prompt-field: none of prompt, question"),
    (["--task", "broken.jsonl"], "--task broken.jsonl: line 1 is not JSON"),
    (["--task", "holder"], "--task holder: the folder holds no .parquet"),
    (["--task", "wide.csv"], "--answer-field: answer is a column but empty"),
    (["--config", "gone.yaml"], "--config gone.yaml: cannot be read: no such file"),
    (["--config", "typo.yaml"], "typo.yaml: unknown key 'learnin_rate': did you mean 'learning_rate'?"),
    (["--config", "bad.yaml"], "bad.yaml: is not valid YAML"),
    (["--model", "./gone"], "--model ./gone: no such folder"),
    (["--model", "holder"], "--model holder: holder has no config.json"),
    (["--output-dir", "run"], "--output-dir run: already holds a run"),
    (["--output-dir", "file/deep"], "file is a file; give a folder"),
    (["--resume", "--output-dir", "gone"], "--resume --output-dir gone: no such folder"),
    (["--tools", "search", "--search-corpus", "gone"], "--search-corpus gone: no such file or folder"),
    (["--prompt-template", "chat"], "--prompt-template chat: the tokenizer of --model starter has no chat template"),
    (["--stop", "12"], "--stop '12': is 2 tokens of this tokenizer"),
    (["--steps", "-1"], "--steps -1: must lie in"),
    (["--reward", "mths"], "--reward mths: unknown"),
    (["--update-per-step", "3"], "--update-per-step: no such option; did you mean --updates-per-step?"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_needs_no_torch_is_refused_without_it_and_leaves_nothing(folder):
    # One process for all of them: an import by any would show in those after it, and so would a folder.
    code = (
        "import json, sys\nfrom vipfast.cli import main\nfrom contextlib import redirect_stderr\nfrom io import StringIO\n"
        "found = []\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    with redirect_stderr(StringIO()) as err: code = main(argv)\n"
        "    found.append((code, err.getvalue(), sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))))\n"
        "print(json.dumps(found))"
    )
    before = sorted(folder.rglob("*"))
    argvs = [argv for argv, _ in REFUSED]
    done = subprocess.run([sys.executable, "-c", code, json.dumps(argvs)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for (argv, message), (exit_code, told, imported) in zip(REFUSED, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert exit_code == 2 and message in told and told.startswith("error: "), (argv, told)
        assert "Traceback" not in told
        assert not imported, argv
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(("argv", "message"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_dry_run_refuses_what_the_run_would(argv, message, folder, capsys):
    assert cli.main([*argv, "--dry-run"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to_is_refused(folder):
    (folder / "holder").chmod(0o500)
    with pytest.raises(UsageError, match="--output-dir holder/run: .*holder may not be written to"):
        resolve(Config(output_dir="holder/run"), ask_torch=False)


def test_a_missing_library_of_the_optimizer_is_refused_in_a_dry_run_but_for_a_gpu_that_may_be_elsewhere(monkeypatch):
    monkeypatch.setattr("vipfast.resolve.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--optimizer adamw8bit: needs the bitsandbytes library"):
        resolve(Config(optimizer="adamw8bit", device="cpu"), ask_torch=False)
    assert resolve(Config(optimizer="adamw8bit"), ask_torch=False, gpu_bytes=80e9).config.device == "cuda"


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_chat_template_is_found_wherever_a_tokenizer_keeps_it(where, tmp_path):
    model = shutil.copytree(STARTER, tmp_path / "model")
    config = Config(model=str(model), prompt_template="chat")
    with pytest.raises(UsageError, match="has no chat template"):
        resolve(config, ask_torch=False)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    text = json.dumps(settings | {"chat_template": "{{ messages }}"}) if where.endswith("config.json") else "{{ messages }}"
    (Path(model) / where).write_text(text)
    assert resolve(config, ask_torch=False).config.prompt_template == "chat"
