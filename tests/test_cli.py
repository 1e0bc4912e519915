"""The command line: flags over YAML, resume, exit codes, and a help page that is there at once."""

import dataclasses
import json
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest

from vipfast import cli, errors
from vipfast.config import Config
from vipfast.config_file import save_yaml
from vipfast.config_rules import flag
from vipfast.errors import UsageError
from vipfast.names import ELSEWHERE, nearest

SCRIPT = Path(__file__).parent.parent / "scripts" / "train.py"
QUICK = ["--device", "cpu", "--threads", "1"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Runs are looked for under ./runs, so every test starts in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trainer(monkeypatch):
    """A trainer that records what it was given and ends as told."""
    told = types.SimpleNamespace(config=None, resume=None, ending=0)

    class Trainer:
        def __init__(self, run):
            told.config, told.resume = run.run.config, run.restored is not None

        def run(self):
            if isinstance(told.ending, Exception):
                raise told.ending
            return told.ending

    monkeypatch.setitem(sys.modules, "vipfast.trainer", types.SimpleNamespace(Trainer=Trainer))
    return told


def make_run(folder, step=20, complete=True, **options):
    """A run's folder with one checkpoint."""
    checkpoint = Path(folder) / "checkpoints" / f"step-{step}"
    checkpoint.mkdir(parents=True)
    config = Config(**{"learning_rate": 1e-4, "threads": 1, "output_dir": "elsewhere", **options})
    save_yaml(config, Path(folder) / "config.yaml")
    if complete:
        (checkpoint / "COMPLETE").write_text(json.dumps({"step": step, "files": {}}))
    return config


def test_help_of_the_script_shows_every_option_and_imports_no_torch():
    code = (
        "import runpy, sys\n"
        "sys.argv = ['train.py', '--help']\n"
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit as end: print(end.code, sorted({'torch', 'transformers', 'numpy', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    for name in [field.name for field in dataclasses.fields(Config)] + ["config", "resume", "dry_run"]:
        assert f"│ {flag(name)} " in done.stdout
    assert "--no-resume" not in done.stdout
    assert "How a step's rollout budget is spent over its" in done.stdout


@pytest.mark.parametrize(
    ("argv", "told"),
    [(["--allocator", "vpi"], "vigor"), (["--steps", "x"], "--steps"), (["stray"], "stray")],
    ids=" ".join,
)
def test_a_value_of_the_wrong_kind_exits_2_and_names_the_option(argv, told, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--learnin-rate", "1e-6"], "--learnin-rate: no such option; did you mean --learning-rate?"),
        (["--lr=1e-6"], "--lr: no such option; did you mean --learning-rate?"),
        (["--batch_size", "8"], "--batch_size: no such option; did you mean --prompts-per-step?"),
        (["--num-generations", "8"], "--num-generations: no such option; did you mean --rollouts-per-prompt?"),
        (["--max-completion-length", "8"], "--max-completion-length: no such option; did you mean --max-new-tokens?"),
        (["--kl-coef", "0"], "--kl-coef: no such option; did you mean --beta?"),
        (["--num-epochs", "2"], "--num-epochs: no such option; did you mean --epochs?"),
        (["--resme"], "--resme: no such option; did you mean --resume?"),
        (["--qqq"], "--qqq: no such option; see --help for all options"),
        (["--no-model"], "--no-model: no such option; did you mean --model?"),
        (["--steps", "3", "--steps", "4"], "--steps: given twice; give it once"),
        (["--steps=3", "--seed", "1", "--steps=3"], "--steps: given twice"),
        (["--max_new_tokens", "3", "--max-new-tokens", "4"], "--max_new_tokens and --max-new-tokens: given twice"),
        (["--stop", "a", "--stop", "b"], "--stop: given twice; give it once, with all its values behind it"),
        (["--stop-when-dead", "--no-stop-when-dead"], "--stop-when-dead and --no-stop-when-dead: given twice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_do_not_exist_or_come_twice_are_refused_in_one_line(argv, message, capsys):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1


def test_what_other_trainers_call_an_option_is_no_name_of_ours():
    ours = {field.name for field in dataclasses.fields(cli._Flags)}
    assert set(ELSEWHERE) <= ours
    theirs = [name for names in ELSEWHERE.values() for name in names]
    assert not ours & set(theirs) and len(theirs) == len(set(theirs))
    for own, names in ELSEWHERE.items():
        assert {nearest(name, ours) for name in (own, *names)} == {own}


def test_flags_go_over_the_file():
    Path("run.yaml").write_text("steps: 3\nseed: 5\nlearning_rate: 1e-6\ntrackers: [wandb]\nallocator: uniform\n")
    command = cli.parse(["--config", "run.yaml", "--seed", "7", "--stop", "a", "b", "--dry-run"])
    assert command.config == Config(
        steps=3, seed=7, learning_rate=1e-6, trackers=("wandb",), allocator="uniform", stop=("a", "b")
    )
    assert command.dry_run and not command.resume


@pytest.mark.parametrize(("given", "taken"), [("all", "all"), ("0", 0), ("7", 7)])
def test_rollouts_kept_are_a_number_or_all(given, taken, capsys):
    Path("run.yaml").write_text(f"sample_rollouts: {given}\n")
    for argv in (["--sample-rollouts", given], ["--config", "run.yaml"]):
        assert cli.parse(argv).config.sample_rollouts == taken
    Path("run.yaml").write_text("sample_rollouts: some\n")
    with pytest.raises(UsageError, match="--sample-rollouts 'some': must be one of all, a whole number"):
        cli.parse(["--config", "run.yaml"])
    with pytest.raises(UsageError, match="--sample-rollouts -1: must lie in"):
        cli.parse(["--sample-rollouts", "-1"])


def test_file_and_flags_are_judged_together():
    # 4 * 7.5 is whole, 3 * 7.5 (the file alone) is not.
    Path("run.yaml").write_text("prompts_per_step: 3\nrollouts_per_prompt: 7.5\n")
    assert cli.parse(["--config", "run.yaml", "--prompts-per-step", "4"]).config.budget == 30
    with pytest.raises(UsageError, match="--rollouts-per-prompt 7.5"):
        cli.parse(["--config", "run.yaml"])


@pytest.mark.parametrize(
    "text", ["learnin_rate: 1e-6", "training:\n  learning_rate: 1e-6", "optimizer:\n  learning_rate: 1e-6"]
)
def test_typo_in_a_file_exits_2_with_one_message(text, capsys):
    Path("run.yaml").write_text(text)
    assert cli.main(["--config", "run.yaml"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(("error: run.yaml: unknown key", "error: run.yaml: section 'optimizer'"))
    assert "learning_rate" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--temperature", "0"], "--temperature 0.0: must be above 0"),
        (["--config", "absent.yaml"], "--config absent.yaml: cannot be read"),
        (["--allocator", "vip", "--min-rollouts", "9"], "--min-rollouts 8"),
        (["--rollouts-per-prompt", "16", "--vigor-m0", "2"], "--vigor-m0 4"),
        (["--model", "strater"], "--model strater: no such folder"),
        (["--task", "arithmetics"], "did you mean arithmetic?"),
        (["--resume"], "--resume: nothing to continue under runs/ (there is no run)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_exits_2_before_anything_is_loaded(argv, message, capsys):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert message in err and err.startswith("error: ") and "Traceback" not in err and out == ""


def test_config_reaches_the_trainer_resolved_and_its_exit_code_the_shell(trainer, capsys):
    trainer.ending = 3
    assert cli.main([*QUICK, "--seed", "4"]) == 3
    assert not trainer.resume
    config = trainer.config
    assert (config.seed, config.learning_rate, config.dtype) == (4, 1e-4, "float32")
    assert config.output_dir.startswith("runs/arithmetic-vigor-s4-")
    assert "learning_rate = 1e-4 (starter)" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("RewardError", 1),
        ("DeadRunError", 1),
        ("SyncError", 1),
        ("NonFiniteError", 1),
        ("CheckpointError", 1),
        ("DataError", 2),
        ("BudgetError", 2),
    ],
)
def test_errors_of_a_run_are_one_message_and_an_exit_code(trainer, capsys, error, code):
    trainer.ending = getattr(errors, error)("what and why")
    assert cli.main(QUICK) == code
    assert capsys.readouterr().err == "error: what and why\n"


def test_other_errors_are_not_swallowed(trainer):
    trainer.ending = KeyError("a mistake of ours")
    with pytest.raises(KeyError):
        cli.main(QUICK)


def test_warnings_come_without_a_source_line(trainer, capsys, monkeypatch):
    usual = warnings.formatwarning
    with cli._plain_warnings():
        text = warnings.formatwarning(UserWarning("few prompts"), UserWarning, "file.py", 3)
    assert text == "warning: few prompts\n" and warnings.formatwarning is usual


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_folder_of_another_run_is_refused(name, capsys):
    Path("mine").mkdir()
    (Path("mine") / name).write_text("")
    assert cli.main([*QUICK, "--output-dir", "mine"]) == 2
    err = capsys.readouterr().err
    assert "--output-dir mine: already holds a run" in err and "--resume" in err and "another folder" in err


def test_empty_folder_is_fine(trainer):
    Path("mine").mkdir()
    assert cli.main([*QUICK, "--output-dir", "mine"]) == 0


def test_resume_goes_on_with_the_saved_options_and_permitted_changes():
    saved = make_run("mine", seed=9, beta=0.1)
    command = cli.parse(["--resume", "--output-dir", "mine", "--steps", "90", "--threads", "2", "--keep", "2"])
    assert command.config == dataclasses.replace(saved, steps=90, threads=2, output_dir="mine")
    assert command.resume
    assert command.notes[:3] == ("continuing mine", "threads = 2 (was 1)", "steps = 90 (was 60)")
    assert len(command.notes) == 4 and "another --threads" in command.notes[3]


def test_what_a_file_or_the_saved_run_sets_can_be_taken_back():
    Path("run.yaml").write_text("gradient_checkpointing: true\n")
    assert cli.parse(["--config", "run.yaml"]).config.gradient_checkpointing
    assert cli.parse(["--config", "run.yaml", "--no-gradient-checkpointing"]).config == Config()
    make_run("mine", stop_when_dead=True)
    assert cli.parse(["--resume", "--output-dir", "mine"]).config.stop_when_dead
    assert not cli.parse(["--resume", "--output-dir", "mine", "--no-stop-when-dead"]).config.stop_when_dead
    make_run("other")
    assert cli.parse(["--resume", "--output-dir", "other", "--stop-when-dead"]).notes[1] == "stop_when_dead = True (was False)"


def test_resume_refuses_other_changes_by_name_with_both_values():
    make_run("mine", seed=9)
    with pytest.raises(UsageError) as error:
        cli.parse(["--resume", "--output-dir", "mine", "--seed", "1", "--temperature", "0.5", "--steps", "90"])
    assert "--temperature is 0.5, the run has 1.0; --seed is 1, the run has 9" in str(error.value)
    assert "--steps is" not in str(error.value)


def test_resume_with_the_recipe_it_was_started_from():
    # What the recipe leaves to the model (null) stays as it was resolved.
    Path("run.yaml").write_text("seed: 9\nlearning_rate: null\noutput_dir: mine\n")
    saved = make_run("mine", seed=9)
    assert cli.parse(["--config", "run.yaml", "--resume"]).config == dataclasses.replace(saved, output_dir="mine")


def test_resume_takes_the_run_that_saved_last_and_passes_over_incomplete_ones():
    import os

    for age, (name, complete) in enumerate([("c", False), ("a", True), ("b", True)]):
        make_run(f"runs/{name}", complete=complete, seed=age)
        os.utime(f"runs/{name}/checkpoints", ns=(10**18 - age * 10**9,) * 2)
    with pytest.warns(UserWarning, match="damaged"):
        assert cli.parse(["--resume"]).config.output_dir == "runs/a"


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda: None, "no such folder"),
        (lambda: Path("mine").mkdir(), "no config.yaml"),
        (lambda: (make_run("mine"), (Path("mine/checkpoints/step-20/COMPLETE")).unlink()), "no complete checkpoint"),
    ],
    ids=["absent", "no-run", "half-written"],
)
@pytest.mark.filterwarnings("ignore:checkpoint step-20 is damaged")
def test_resume_with_nothing_usable_says_why(prepare, message, capsys):
    prepare()
    assert cli.main(["--resume", "--output-dir", "mine"]) == 2
    assert message in capsys.readouterr().err


def test_a_terminal_without_our_signs_gets_a_plan_all_the_same(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = subprocess.run([sys.executable, SCRIPT, "--dry-run"], capture_output=True, text=True, check=True)
    assert "evaluation, at most (?4)" in done.stdout


def test_a_dry_run_refuses_what_a_resume_would():
    make_run("mine", step=20)
    for dry in ([], ["--dry-run"]):
        with pytest.raises(UsageError, match="--steps 3: the run is already at step 20"):
            cli._prepare(["--resume", "--output-dir", "mine", "--steps", "3", *dry])
