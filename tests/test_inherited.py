"""A run that goes on from another one's model: what it takes over, what it says, and which folders it refuses."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vipfast import cli
from vipfast.config import Config
from vipfast.config_file import save_yaml
from vipfast.errors import UsageError
from vipfast.inherited import SAMPLING
from vipfast.model_facts import STARTER
from vipfast.resolve import resolve

UNUSUAL = dict(
    temperature=0.7, top_p=0.9, stop=("=",), max_new_tokens=24, prompt_template="qa", system_prompt="Be brief.",
    learning_rate=3e-5,
)  # fmt: skip


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def make_run(folder="runs/old", parts=("final", "best", "checkpoints/step-4/model"), adapters=False, **options):
    """A run's folder whose models are the starter, or adapters of it."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    save_yaml(Config(**UNUSUAL, **options), folder / "config.yaml")
    (folder / "metrics.jsonl").touch()
    for part in parts:
        if adapters:
            (folder / part).mkdir(parents=True)
            (folder / part / "adapter_config.json").write_text("{}")
        else:
            shutil.copytree(STARTER, folder / part)
        if "step-" in part:
            (folder / part).parent.joinpath("COMPLETE").write_text(json.dumps({"step": 4, "files": {}}))
    return folder


@pytest.mark.parametrize(
    ("part", "model"),
    [
        ("", "final"),
        ("/final", "final"),
        ("/best", "best"),
        ("/checkpoints/step-4", "checkpoints/step-4/model"),
        ("/checkpoints/step-4/model", "checkpoints/step-4/model"),
    ],
)
def test_a_run_or_a_part_of_it_brings_its_sampling_and_learning_rate(part, model):
    make_run()
    command = cli.parse(["--model", f"runs/old{part}", "--device", "cpu", "--threads", "1"])
    assert command.config == Config(**UNUSUAL, model=f"runs/old/{model}", device="cpu", threads=1)
    brought = "prompt_template qa, system_prompt Be brief., max_new_tokens 24, temperature 0.7, top_p 0.9, stop ="
    assert f"runs/old/config.yaml: {brought}" in command.notes[-1]
    assert (f"model: runs/old/{model}" in command.notes) == (f"/{model}" != part)
    assert resolve(command.config).config.learning_rate == 3e-5


def test_a_run_that_has_not_ended_gives_its_newest_checkpoint():
    make_run(parts=("checkpoints/step-4/model",))
    assert cli.parse(["--model", "runs/old"]).config.model == "runs/old/checkpoints/step-4/model"


def test_flags_go_over_the_file_and_the_file_over_the_run():
    make_run()
    Path("run.yaml").write_text("temperature: 0.8\ntop_p: 0.5\nlearning_rate: null\n")
    command = cli.parse(["--model", "runs/old", "--config", "run.yaml", "--top-p", "1"])
    assert (command.config.temperature, command.config.top_p, command.config.max_new_tokens) == (0.8, 1.0, 24)
    assert "max_new_tokens 24" in command.notes[-1] and "temperature" not in command.notes[-1]
    run = resolve(command.config, ask_torch=False)
    config, lines = run.config, run.lines
    assert config.learning_rate == 3e-5 and f"learning_rate = 3e-5 (as in {Path('runs/old').absolute()})" in lines


@pytest.mark.parametrize(("before", "now", "rate"), [(0, 0, 3e-5), (8, 16, 3e-5), (0, 8, 1e-5), (8, 0, 1e-6)])
def test_a_learning_rate_of_adapters_is_none_of_whole_weights(before, now, rate):
    make_run(lora_rank=before)
    command = cli.parse(["--model", "runs/old", "--lora-rank", str(now), "--device", "cpu"])
    assert resolve(command.config).config.learning_rate == rate


def test_from_python_the_run_settles_what_is_none():
    make_run()
    run = resolve(Config(model="runs/old", device="cpu", threads=1))
    config, lines = run.config, run.lines
    assert (config.model, config.learning_rate, config.max_new_tokens) == ("runs/old/final", 3e-5, 24)
    assert config.temperature == 1.0  # given, as far as can be told
    assert "max_new_tokens = 24 (as in runs/old)" in lines and "model: runs/old/final" in lines
    again = resolve(config)
    assert again.config == config


def test_a_run_may_be_named_again_on_resume():
    make_run("runs/old")
    new = make_run("runs/new", model="runs/old/final", output_dir="runs/new", threads=1)
    command = cli.parse(["--resume", "--output-dir", str(new), "--model", "runs/old"])
    assert command.config.model == "runs/old/final"
    with pytest.raises(UsageError, match="--model is runs/old/best, the run has runs/old/final"):
        cli.parse(["--resume", "--output-dir", str(new), "--model", "runs/old/best"])


@pytest.mark.parametrize("part", ["", "/final", "/checkpoints/step-4"])
def test_adapters_are_refused_with_the_way_to_merge_them(part):
    make_run(adapters=True, lora_rank=8)
    wanted = "holds LoRA adapters on starter.*python -m vipfast.merge .*runs/old OUT, then give --model OUT"
    with pytest.raises(UsageError, match=wanted):
        cli.parse(["--model", f"runs/old{part}"])
    with pytest.raises(UsageError, match=wanted):
        resolve(Config(model=f"runs/old{part}"))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("runs/odl", r"--model runs/odl: no such folder in runs; did you mean runs/old\?"),
        ("runs/zzz", "--model runs/zzz: no such folder in runs; give starter"),
        ("./odl", "--model ./odl: no such folder"),
        ("../odl", "--model ../odl: no such folder"),
        ("~/odl", "--model ~/odl: no such folder"),
        ("/odl", "--model /odl: no such folder"),
        ("runs/old/fnial", "--model runs/old/fnial: no such folder"),
        ("nowhere/at/all", "--model nowhere/at/all: no such folder"),
        ("odl", "--model odl: no such folder"),
    ],
)
def test_a_name_that_looks_like_a_path_is_never_asked_of_a_hub(model, message):
    make_run()
    for ask in (lambda: resolve(Config(model=model), ask_torch=False), lambda: cli._prepare(["--model", model, "--dry-run"])):
        with pytest.raises(UsageError, match=message):
            ask()


def test_a_hub_id_in_the_cache_stays_one_beside_a_folder_of_its_owners_name():
    Path("Qwen").mkdir()
    snapshot = Path("hub/models--Qwen--Tiny/snapshots/abc")
    shutil.copytree(STARTER, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("abc")
    assert resolve(Config(model="Qwen/Tiny"), ask_torch=False).config.model == "Qwen/Tiny"
    assert resolve(Config(model="Other/Tiny"), ask_torch=False).config.model == "Other/Tiny"  # to be asked of the hub
    with pytest.raises(UsageError, match="no such folder in Qwen"):
        resolve(Config(model="Qwen/Other"), ask_torch=False)


def test_every_name_of_sampling_is_a_field():
    assert set(SAMPLING) <= set(Config.__dataclass_fields__)


def test_an_absent_folder_costs_no_network_and_no_torch(tmp_path):
    Path("runs").mkdir()
    code = (
        "import sys; from vipfast.cli import main; code = main(['--model', 'runs/gone', '--device', 'cpu'])\n"
        "print(code, sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "2 []\n" and done.stderr.startswith("error: --model runs/gone: no such folder in runs")
