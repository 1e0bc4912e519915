"""The command that a run ends with is one that a shell takes as it stands."""

import shlex
import sys

import pytest

from vipfast.config import Config
from vipfast.options.values import CUSTOM, PYTHON
from vipfast.run_folder import go_on


@pytest.mark.parametrize(
    ("started", "program"),
    [
        ("scripts/train.py", ["scripts/train.py"]),
        ("/a place/train.py", ["/a place/train.py"]),
        ("/env/bin/vipfast", ["-m", "vipfast", "train"]),
        ("", ["-m", "vipfast", "train"]),
    ],
)
@pytest.mark.parametrize("folder", ["runs/one", "my runs/it's $one", "läufe/1;2"])
def test_the_line_holds_the_interpreter_and_what_was_started_and_survives_a_shell(monkeypatch, started, program, folder):
    monkeypatch.setattr(sys, "executable", "/opt/a python/bin/python")
    monkeypatch.setattr(sys, "argv", [started, "--steps", "3"])
    line = go_on(Config(output_dir=folder), steps=120)
    assert "\n" not in line
    assert shlex.split(line) == [sys.executable, *program, "--resume", "--output-dir", folder, "--steps", "120"]
    assert shlex.split(go_on(Config(output_dir=folder))) == shlex.split(line)[:-2]


def test_a_run_of_several_processes_is_gone_on_with_by_as_many(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/train.py"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    words = shlex.split(go_on(Config(output_dir="r")))
    assert words[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node=4", "scripts/train.py"]


@pytest.mark.parametrize(
    ("options", "given"), [(dict(task=CUSTOM, reward=(PYTHON,)), "prompts=…, reward=…"), (dict(reward=(PYTHON,)), "reward=…")]
)
def test_what_came_from_python_is_handed_over_there_again(options, given):
    line = go_on(Config(output_dir="r", **options), steps=120)
    assert line == f"Trainer(Config(output_dir='r', …), {given}, resume=True).run()"
