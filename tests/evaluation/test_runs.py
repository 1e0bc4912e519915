"""Evaluations as a user meets them: killed and gone on with, equal to training's own, on two ranks, greedy, refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_vllm import FakeLLM, sampling_params

from vipfast import Config, Trainer
from vipfast.engine import vllm_launch
from vipfast.evaluation import command
from vipfast.evaluation.samples import Samples
from vipfast.policy import load_policy
from vipfast.tools import engine as tools_engine
from vipfast.tools.calls import Call

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--device", "cpu", "--threads", "1"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
FILES = ("samples.jsonl", "results.json", "evaluation.json")
MOMENTS = ("json:1", "torn:2", "append:4")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory):
    """Two files; the embedded task would be tokenised anew in every test."""
    files = []
    for family in ("copy", "sort"):
        files.append(tmp_path_factory.mktemp("data") / f"{family}.jsonl")
        rows = [{"prompt": f"{family} {' '.join(str(i))} =", "answer": str(i), "level": i % 3} for i in range(123, 133)]
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(map(str, files))


def evaluate(*argv):
    return command.main([*QUICK, *map(str, argv)])


def results(folder):
    return json.loads((Path(folder) / "results.json").read_text())


def value(found, task, name):
    return found["tasks"][task]["scores"][name]["value"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps, and one of adapters; both evaluate at their end."""
    folder = tmp_path_factory.mktemp("trained")
    for name, rank, learning_rate in (("full", 0, 2e-3), ("lora", 4, 0.05)):
        config = Config(
            allocator="uniform", steps=2, prompts_per_step=16, rollouts_per_prompt=4, heldout_prompts=40, eval_samples=4,
            eval_every=0, learning_rate=learning_rate, temperature=0.9, seed=3, lora_rank=rank, device="cpu", threads=1,
            output_dir=str(folder / name),
        )  # fmt: skip
        assert Trainer(config).run() == 0
    return folder


@pytest.mark.parametrize("part", ["full", "full/final", "full/checkpoints/step-2", "lora", "lora/checkpoints/step-2/model"])
def test_a_runs_model_gets_the_scores_that_training_logged_last(trained, part):
    assert evaluate("--model", trained / part, "--samples", 4, "--output-dir", "out") == 0
    first, last = (
        {name.removeprefix("eval/"): score for name, score in json.loads(line).items() if name.startswith("eval/")}
        for line in (trained / part.split("/")[0] / "metrics.jsonl").read_text().splitlines()[::2]
    )
    assert first != last
    assert {name: value(results("out"), "arithmetic", name) for name in last} == last
    assert results("out")["config"]["temperature"] == 0.9 and results("out")["tasks"]["arithmetic"]["num_prompts"] == 40


@pytest.fixture(scope="module")
def killed(tmp_path_factory, own_tasks):
    folder = tmp_path_factory.mktemp("killed")
    script = Path(__file__).with_name("killed_evaluations.py")
    done = subprocess.run(
        [sys.executable, script, folder, *own_tasks, *MOMENTS], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_was_killed_and_started_again_equals_what_was_not(killed, moment):
    assert sorted(path.name for path in (killed / moment).iterdir()) == sorted(FILES)
    for name in FILES:
        assert (killed / moment / name).read_bytes() == (killed / "straight" / name).read_bytes(), name


def test_two_tasks_have_tables_of_their_own_and_an_average(killed, own_tasks):
    found = results(killed / "straight")
    assert {name: task["num_prompts"] for name, task in found["tasks"].items()} == dict.fromkeys(own_tasks, 9)
    rows = [json.loads(line) for line in (killed / "straight" / "samples.jsonl").read_text().splitlines()]
    assert [(row["task"], row["index"]) for row in rows] == [
        (task, i) for task in own_tasks for _ in range(9) for i in range(3)
    ]
    scores = [np.mean([row["reward"] for row in rows if row["task"] == task]) for task in own_tasks]
    assert [value(found, task, "mean@3") for task in own_tasks] == pytest.approx(scores)
    assert scores[0] > 0.5 and found["average"]["mean@3"]["value"] == pytest.approx(np.mean(scores))


def test_two_ranks_share_the_prompts_and_write_what_one_writes(own_tasks):
    options = ["--task", *own_tasks, "--samples", 2, "--max-prompts", 9, "--dtype", "float64", "--rows-at-once", 4]
    assert evaluate(*options, "--output-dir", "one") == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", ROOT / "scripts" / "evaluate.py"]
    command_line = [*map(str, (*torchrun, *QUICK, *options)), "--output-dir", "two"]
    done = subprocess.run(command_line, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("36 samples in") == 1
    for name in FILES:
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes(), name


def test_the_same_command_again_samples_nothing_and_says_the_same(monkeypatch, capsys, own_tasks):
    options = ["--task", own_tasks[0], "--samples", 2, "--max-prompts", 6]
    assert evaluate(*options) == 0
    (folder,) = Path("evals").iterdir()
    assert folder.name.startswith("starter-")
    before, shown = [(folder / name).read_bytes() for name in FILES], capsys.readouterr().out
    monkeypatch.setattr("vipfast.policy.load_policy", None)  # a model is not needed any more
    assert evaluate(*options) == 0
    assert [(folder / name).read_bytes() for name in FILES] == before
    again = capsys.readouterr().out
    assert "all 12 samples were there already" in again and again.splitlines()[4:-1] == shown.splitlines()[4:-1]
    # other tables of the same samples
    assert evaluate(*options, "--k", 2) == 0
    assert results(folder)["config"]["k"] == [2] and "maj@1" not in results(folder)["average"]
    assert len(list(Path("evals").iterdir())) == 1


def test_greedy_takes_the_likeliest_token_with_either_engine(monkeypatch):
    options = ["--temperature", 0, "--samples", 1, "--max-prompts", 8, "--rows-at-once", 3]
    assert evaluate(*options, "--output-dir", "plain") == 0
    fakes = []

    def launch(folder, sampling, **given):
        fakes.append(FakeLLM(load_policy(Config(device="cpu", dtype="float32")), []))
        fakes[0].engine_core = SimpleNamespace(shutdown=lambda: fakes[0].calls.append("shutdown"))
        return fakes[0], sampling_params

    monkeypatch.setattr(vllm_launch, "launch", launch)
    monkeypatch.setitem(sys.modules, "vllm", object())
    assert evaluate(*options, "--engine", "vllm", "--output-dir", "vllm") == 0
    assert fakes[0].calls.count("reload_weights") == 1 and fakes[0].calls[-1] == "shutdown"
    plain, vllm = (
        [json.loads(line) for line in Path(out, "samples.jsonl").read_text().splitlines()] for out in ("plain", "vllm")
    )
    assert plain == vllm and results("plain")["config"]["temperature"] == 0
    model = load_policy(Config(device="cpu", dtype="float32"))
    from vipfast.policy import load_tokenizer

    tokenizer = load_tokenizer(Config())
    for row, prompt in zip(plain, results("plain")["tasks"]["arithmetic"]["prompts"], strict=True):
        ids = torch.tensor([tokenizer(prompt["prompt"]).input_ids])
        done = model.generate(ids, do_sample=False, max_new_tokens=16, pad_token_id=tokenizer.pad_token_id)
        assert tokenizer.decode(done[0, ids.shape[1] :], skip_special_tokens=True) == row["text"]


def test_sigterm_keeps_the_chunk_and_exits_with_3(monkeypatch, capsys, own_tasks):
    append = Samples.append

    def asks_to_stop(self, rows):
        append(self, rows)
        os.kill(os.getpid(), signal.SIGTERM)

    options = ["--task", own_tasks[0], "--samples", 2, "--max-prompts", 6, "--rows-at-once", 4, "--output-dir", "out"]
    with monkeypatch.context() as patch:
        patch.setattr(Samples, "append", asks_to_stop)
        assert evaluate(*options) == 3
    assert "stopped by SIGTERM after 4 of 12 samples" in capsys.readouterr().out
    assert not Path("out/results.json").exists()
    assert evaluate(*options) == 0
    assert "8 samples in" in capsys.readouterr().out


def test_a_folder_that_holds_another_evaluation_is_refused_by_what_differs(capsys, own_tasks, trained):
    options = {"--task": own_tasks[0], "--samples": 1, "--max-prompts": 3, "--output-dir": "out"}

    def asked(changed):
        return [part for option in (options | changed).items() for part in option]

    assert evaluate(*asked({})) == 0
    for changed, told in (
        ({"--samples": 2, "--temperature": 0.5}, "--samples is 2, there 1; --temperature is 0.5, there 1.0"),
        ({"--task": own_tasks[1]}, f"--task is ['{own_tasks[1]}'], there ['{own_tasks[0]}']"),
        ({"--model": trained / "full"}, "--model is"),
    ):
        assert evaluate(*asked(changed)) == 2
        assert f"--output-dir out: holds another evaluation: {told}" in capsys.readouterr().err


def test_weights_or_prompts_that_changed_in_their_place_are_refused(capsys, trained, tmp_path):
    model, file = tmp_path / "model", tmp_path / "task.jsonl"
    file.write_text(json.dumps({"prompt": "copy 1 2 =", "answer": "12"}) + "\n")
    from shutil import copytree

    copytree(trained / "full/checkpoints/step-0/model", model)
    options = ["--model", model, "--task", file, "--samples", 1, "--output-dir", "out"]
    assert evaluate(*options) == 0
    copytree(trained / "full/final", model, dirs_exist_ok=True)
    assert evaluate(*options) == 2
    assert "the weights of --model are no longer those it began with" in capsys.readouterr().err
    copytree(trained / "full/checkpoints/step-0/model", model, dirs_exist_ok=True)
    file.write_text(json.dumps({"prompt": "copy 1 3 =", "answer": "13"}) + "\n")
    assert evaluate(*options) == 2
    assert f"the prompts of --task {file} are no longer those it began with" in capsys.readouterr().err


def test_a_training_runs_folder_is_not_written_into(capsys, trained):
    assert evaluate("--samples", 1, "--max-prompts", 1, "--output-dir", trained / "full") == 2
    assert "already holds something else (config.yaml, metrics.jsonl)" in capsys.readouterr().err


def own_reward(body):
    """A module mine with ``body`` in its reward, in a package whose own file must not be run here."""
    Path("pack").mkdir(exist_ok=True)
    Path("pack/__init__.py").write_text("import sys\nassert 'vipfast.evaluation.run' not in sys.modules\n")
    Path("pack/mine.py").write_text(f"def reward(completions, answers, metadata):\n    {body}\n")


def test_a_reward_that_changed_in_its_place_is_refused(capsys, own_tasks):
    own_reward("return [0.25]")
    options = ["--task", own_tasks[0], "--samples", 1, "--max-prompts", 3, "--reward", "pack.mine:reward"]
    assert evaluate(*options, "--output-dir", "out") == 0
    assert results("out")["average"]["reward"]["value"] == 0.25
    assert evaluate(*options, "--output-dir", "out", "--reward-workers", 1, "--reward-timeout", 20) == 0
    own_reward("return [0.75]")
    assert evaluate(*options, "--output-dir", "out") == 2
    told = "holds another evaluation: the file of --reward pack.mine:reward is no longer the one it began with. Give another"
    assert told in capsys.readouterr().err


def test_a_reward_that_fails_is_mended_and_started_again(capsys, own_tasks):
    own_reward("raise ValueError('no')")
    options = ["--task", own_tasks[0], "--samples", 1, "--max-prompts", 3, "--reward", "pack.mine:reward"]
    assert evaluate(*options, "--max-reward-errors", 2) == 1
    assert capsys.readouterr().err.endswith("; mend the reward and start again\n")
    own_reward("return [1.0]")
    assert evaluate(*options) == 0
    (finished,) = Path("evals").glob("*/results.json")
    assert results(finished.parent)["tasks"][own_tasks[0]]["unscored"] == 0


def test_what_rollouts_did_with_tools_is_written_down_and_told(monkeypatch, capsys, own_tasks):
    """Every turn that ends by itself asks the calculator, as far as there is room."""
    asks = Call("calculator", {"expression": "1 + 1"})
    monkeypatch.setattr(tools_engine, "calls", lambda text: [asks])
    options = ["--task", own_tasks[0], "--samples", 2, "--max-prompts", 4, "--tools", "calculator", "--max-turns", 2]
    options += ["--max-new-tokens", 120, "--max-tool-tokens", 60, "--output-dir", "out"]
    assert evaluate(*options) == 0
    uses = [json.loads(line)["tools"] for line in Path("out/samples.jsonl").read_text().splitlines()]
    assert all(use.keys() == {"turns", "calls", "errors", "found"} for use in uses)
    tools = results("out")["tasks"][own_tasks[0]]["tools"]
    assert tools["calls_mean"] == np.mean([use["calls"] for use in uses]) > 0
    assert tools["turns_mean"] == np.mean([use["turns"] for use in uses]) > 1 and tools["errors_frac"] == 0
    before = Path("out/results.json").read_bytes()
    assert "tools: turns mean" in capsys.readouterr().out
    assert evaluate(*options) == 0 and Path("out/results.json").read_bytes() == before
