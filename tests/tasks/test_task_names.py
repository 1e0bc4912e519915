"""What --task may say: refused early with help, planned by a dry run, and the folder a run gets from it."""

from datetime import datetime
from pathlib import Path

import pytest

from vipfast.config import Config
from vipfast.config_file import load_yaml, save_yaml
from vipfast.dry_run import read_pool
from vipfast.errors import UsageError
from vipfast.resolve import check_task, resolve
from vipfast.run_folder import default_name

SAMPLES = Path(__file__).parent.parent / "data" / "datasets"
NOW = datetime(2030, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("task", ["arithmetic", "openai/gsm8k", "opencompass/AIME2025:AIME2025-I", "reasoning_gym:gcd*2+ab"])
def test_spellings_that_pass(task):
    check_task(task)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("reasoning-gym:gcd", "did you mean reasoning_gym:?"),
        ("arithmetics", "did you mean arithmetic?"),
        ("reasoning_gym:gcd*x", "'gcd\\*x' is no NAME or NAME\\*WEIGHT"),
        ("absent.json", "no such file; give arithmetic, a .parquet/.jsonl/.json/.csv file, a folder"),
        ("absent-folder", "unknown; give .* or reasoning_gym:NAME"),
        (__file__, "unknown; give"),
    ],
)
def test_spellings_that_are_refused(task, message):
    with pytest.raises(UsageError, match=f"--task .*{message}"):
        check_task(task)


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("arithmetic", "arithmetic"),
        ("openai/gsm8k", "openai-gsm8k"),
        ("opencompass/AIME2025:AIME2025-I", "opencompass-AIME2025-AIME2025-I"),
        ("data/my problems.v2.jsonl", "my-problems.v2"),
        (str(SAMPLES) + "/", "datasets"),
        ("reasoning_gym:chain_sum*0.5+gcd", "reasoning_gym-chain_sum-0.5-gcd"),
        ("reasoning_gym:" + "+".join(f"dataset_{i}" for i in range(100)), None),
    ],
)
def test_a_runs_folder_is_named_after_its_task(task, name):
    folder = default_name(Config(task=task), NOW)
    assert folder == f"runs/{name}-vigor-s0-20300102-030405" if name else len(folder) < 130


def test_a_dry_run_counts_a_layouts_prompts_and_generates_few_of_a_procedural_task():
    pool = read_pool(Config(task=str(SAMPLES / "math.jsonl"), prompts_per_step=2))
    assert (pool.num_train, pool.num_heldout) == (3, 0) and "layout: MATH or Minerva" in pool.note
    pytest.importorskip("reasoning_gym")
    pool = read_pool(Config(task="reasoning_gym:chain_sum", task_size=1000, heldout_prompts=50))
    assert (pool.num_train, pool.num_heldout) == (950, 50) and 40 < pool.prompt_tokens < 150
    assert "as long as 32 generated on trial" in pool.note
    with pytest.raises(UsageError, match="reasoning-gym has no 'gcdd'; did you mean gcd"):
        read_pool(Config(task="reasoning_gym:gcdd"))


def test_options_of_another_kind_of_task_are_said_to_be_idle():
    def idle(**options):
        lines = resolve(Config(device="cpu", threads=1, output_dir="mine", **options), ask_torch=False).lines
        return [line.split()[1] for line in lines if line.startswith("note: ")]

    assert idle(task="openai/gsm8k", task_options="{a: 1}", task_size=5) == ["--task-size", "--task-options"]
    assert idle(task="reasoning_gym:gcd", prompt_field="a", task_size=5) == ["--prompt-field"]


def test_options_of_tasks_survive_config_yaml(tmp_path):
    config = Config(task="reasoning_gym:gcd", task_options="{a: 'ü\\n'}", system_prompt="Be\nbrief.", prompt_template="tags")
    save_yaml(config, tmp_path / "config.yaml")
    assert load_yaml(tmp_path / "config.yaml") == config
