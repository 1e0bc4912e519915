"""The README is held to the code: its file tree, options, metric table and commands."""

import dataclasses
import re
from pathlib import Path

from vipfast.config import Config
from vipfast.config_file import RESUMABLE
from vipfast.config_rules import flag
from vipfast.evaluation.options import Flags
from vipfast.telemetry.metrics import markdown

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_every_path_of_the_tree_exists_and_every_room_is_in_it():
    tree = re.search(r"## Where things are\n\n```\n(.*?)```", TEXT, re.S).group(1)
    folder, named = ROOT, set()
    for line in tree.splitlines():
        head = line.split()[0]
        folder = ROOT / head if not line.startswith(" ") else folder
        if not line.startswith(" "):
            assert (ROOT / head).exists(), head
            named.add(head)
        else:
            assert (folder / head).exists(), line
            named.add(str(Path(folder.name) / head))
        places = [folder, folder / head] if line.startswith(" ") else [ROOT / head]
        for file in re.findall(r"\b\w+\.py\b", line):
            assert any((place / file).exists() for place in places), line
    rooms = {
        path.name + "/" for path in ROOT.iterdir() if path.is_dir() and (list(path.glob("*.py")) or path.name == "recipes")
    }
    assert rooms <= named | {"build/"}, rooms - named
    for path in (ROOT / "vipfast").iterdir():
        if path.suffix == ".py" and path.name not in ("__init__.py",):
            assert path.name in tree, f"{path.name} is missing in the README's tree"
        if path.is_dir() and (path / "__init__.py").exists():
            assert f"{path.name}/" in tree, path.name


def test_options_named_exist():
    known = {flag(field.name) for options in (Config, Flags) for field in dataclasses.fields(options)} | {
        "--config",
        "--resume",
        "--dry-run",
        "--gpu-memory-gb",
        "--help",
        "--smoke",
    }
    for name in re.findall(r"`(--[a-z][a-z0-9-]*)", TEXT):
        assert name in known, name


def test_metric_table_is_the_codes_own():
    assert markdown() in TEXT


def test_changes_allowed_on_resume_are_named():
    sentence = re.search(r"Only (.*?) may change on resume", TEXT, re.S).group(1)
    for name in RESUMABLE - {"steps", "eval_every", "checkpoint_every", "output_dir"}:
        assert flag(name) in sentence, name


def test_two_commands_set_up_everything_themselves():
    for heading, end in (("## Train", "scripts/train.py --allocator vigor"), ("## Run the tests", "-m pytest")):
        command = re.search(rf"{heading}\n\n```\n(.*?)\n```", TEXT).group(1)
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -e ") and command.endswith(end)
