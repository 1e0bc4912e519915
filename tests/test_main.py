"""The command ``vipfast``: its commands and recipes, from a checkout and from a wheel alone."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from vipfast import __main__ as command
from vipfast import __version__, cli
from vipfast.config import Config
from vipfast.config_file import RECIPES, load_yaml
from vipfast.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(file.name.removesuffix(".yaml") for file in (ROOT / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A folder into which a built wheel, and nothing of the checkout, is installed."""
    built, installed = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", built, ROOT], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", installed, *built.glob("*.whl")], check=True)
    return installed


@pytest.mark.parametrize("name", ["train", "evaluate", "compare"])
@pytest.mark.parametrize("way", ["script", "module"])
def test_an_installed_command_knows_its_options_and_recipes(wheel, name, way, tmp_path):
    start = {"script": [sys.executable, wheel / "bin" / "vipfast"], "module": [sys.executable, "-m", "vipfast"]}[way]
    options = {"cwd": tmp_path, "env": {"PYTHONPATH": str(wheel)}, "capture_output": True, "text": True, "check": False}
    done = subprocess.run([*start, name, "--help"], **options)
    assert done.returncode == 0 and f"usage: vipfast {name}" in done.stdout
    wanted = {"train": "--allocator", "evaluate": "--samples", "compare": "--allocators"}[name]
    assert wanted in done.stdout
    if name == "train":
        done = subprocess.run([*start, name, "--config", "default", "--dry-run"], **options)
        assert done.returncode == 0 and "\nrounds of vigor\n" in done.stdout, done.stderr
        where = subprocess.run([sys.executable, "-c", "import vipfast; print(vipfast.__file__)"], **options)
        assert where.stdout.startswith(str(wheel))
        assert not list(tmp_path.iterdir())


def test_both_folders_of_recipes_are_one():
    assert RECIPES.is_symlink() and RECIPES.resolve() == ROOT / "recipes" and NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_found_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = load_yaml(ROOT / "recipes" / f"{name}.yaml")
    for spelling in (name, f"{name}.yaml", f"recipes/{name}.yaml"):
        assert cli.parse(["--config", spelling]).config == wanted


def test_a_file_goes_before_the_recipe_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "default").write_text("steps: 7\n")
    assert cli.parse(["--config", "default"]).config == Config(steps=7)


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("gsm8k-0.5b-2gpu", "did you mean gsm8k-0.5b-1gpu? "),
        ("mine.yaml", ""),
        ("elsewhere/default.yaml", "did you mean default? "),
    ],
)
def test_a_config_that_is_not_there_is_refused_with_the_recipes(name, guess, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as error:
        cli.parse(["--config", name])
    assert str(error.value) == f"--config {name}: cannot be read: no such file; {guess}the recipes are {', '.join(NAMES)}"


def test_the_page_names_every_command_and_loads_none_of_them():
    code = (
        "import sys; from vipfast.__main__ import main; main(['--help']); print({'tyro', 'yaml', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"\n  {name} " in done.stdout for name in command.COMMANDS) and done.stdout.endswith("set()\n")


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        ([], 0, "usage: vipfast COMMAND"),
        (["--version"], 0, f"vipfast {__version__}"),
        (["trian"], 2, "error: vipfast trian: no such command; did you mean train? there are train, evaluate, compare, merge"),
        (["--allocator", "vip"], 2, "error: vipfast --allocator: no such command; there are train"),
        (["merge", "gone", "out"], 2, "error: "),
        (["train", "--lr", "1"], 2, "error: --lr: no such option; did you mean --learning-rate?"),
        (["evaluate", "--lr-schedule", "linear"], 2, "error: --lr-schedule: is an option of training, which this command does"),
        (["evaluate", "--temp", "1"], 2, "error: --temp: no such option; did you mean --temperature?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_first_argument_chooses(argv, code, told, capsys):
    assert command.main(argv) == code
    out, err = capsys.readouterr()
    assert (err if code else out).startswith(told)


def test_a_run_that_fails_ends_the_comparison_with_its_message(tmp_path, capsys):
    folder = str(tmp_path / "runs")
    assert command.main(["compare", "--seeds", "0", "--output-dir", folder, "--", "--steps", "-1"]) == 2
    assert "--steps -1: must lie in" in capsys.readouterr().err


def test_ctrl_c_while_a_command_is_imported_speaks_of_no_run(monkeypatch, capsys):
    def interrupted(module):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert command.main(["train"]) == 130 and capsys.readouterr().err == "stopped; nothing was started yet\n"


@pytest.mark.parametrize(
    "command", [["--help"], ["--dry-run"], ["--steps", "1", "--allocator", "uniform", "--heldout-prompts", "8"]]
)
def test_a_reader_that_ends_first_neither_stops_a_run_nor_is_told(tmp_path, command):
    folder = tmp_path / "run"
    train = [sys.executable, "-m", "vipfast", "train", *command, "--output-dir", str(folder), "--device", "cpu"]
    with subprocess.Popen(train, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.readline()
        running.stdout.close()
        told = running.stderr.read()
    assert (running.returncode, told) == (0, "")
    assert (folder / "final").is_dir() == ("--steps" in command)
