"""Rewards in workers as a run has them: named in the options, graded beside generation, logged by part, gone at the end."""

import gc
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from vipfast import Config, Trainer, cli
from vipfast.errors import DataError, RewardError, UsageError
from vipfast.tasks.arithmetic import load_pool
from vipfast.telemetry.metrics import unknown

pytestmark = pytest.mark.filterwarnings("ignore:--allocator vigor")
ROOT = Path(__file__).resolve().parents[2]
MINE = """
import time
def few_ones(completions, answers, metadata):
    return [-text.count("1") / 10 for text in completions]
def slow(completions, answers, metadata):
    time.sleep(100)
"""


EMBEDDED = """
import sys
from vipfast.config import Config
from vipfast.tasks.load import load_task
class Bytes:
    chat_template = None
    def __call__(self, texts, add_special_tokens):
        return type("Ids", (), {"input_ids": [list(text.encode()) for text in texts]})()
load_task(Config(), Bytes())
assert not {f"vipfast.rewards.{name}" for name in ("pool", "worker", "maths", "equal", "own")} & set(sys.modules)
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """What the starter can do in GSM8K's layout, in a folder with a module of rewards."""
    rows = [{"question": p.text, "answer": f"We do it.\n#### {p.answer}"} for p in load_pool("train")[:400:5]]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return "sums.jsonl"


def small(task, name, **changes) -> Config:
    defaults = dict(
        task=task, steps=5, prompts_per_step=4, rollouts_per_prompt=8.0, vigor_num_rounds=2, heldout_prompts=4, eval_every=0,
        checkpoint_every=0, threads=1, device="cpu", reward_workers=2, output_dir=name,
    )  # fmt: skip
    return Config(**{**defaults, **changes})


def lines(folder):
    found = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/", "memory/"))} for line in found]


def workers():
    return [child for child in psutil.Process().children(recursive=True) if "worker.py" in " ".join(child.cmdline())]


def test_five_steps_by_a_verifier_and_a_further_reward_are_the_same_each_time(task):
    for name in ("a", "b"):
        run = Trainer(small(task, name, reward=("maths", "mine:few_ones"), reward_weights=(2.0, 1.0)))
        assert run.grader.beside and run.run() == 0 and not workers()
    assert lines("a") == lines("b")
    for line in lines("a")[1:]:
        assert not unknown(line) and line["reward/unscored"] == 0
        assert line["reward/verified"] == pytest.approx(line["reward/part/maths"])
        parts = 2 * line["reward/part/maths"] + line["reward/part/mine:few_ones"]
        assert line["reward/mean"] == pytest.approx(parts, abs=1e-6)
    assert any(line["reward/part/maths"] > 0 and line["reward/part/mine:few_ones"] < 0 for line in lines("a")[1:])
    assert all(line["eval/maj@8"] is not None for line in (lines("a")[0], lines("a")[-1]))


def test_a_reward_that_never_returns_costs_its_limit_and_stops_the_run_with_a_checkpoint(task):
    run = Trainer(small(task, "slow", reward=("mine:slow",), reward_timeout=0.1, max_reward_errors=3, heldout_prompts=0))
    with pytest.raises(RewardError, match="3 times in a row"):
        run.run()
    assert not workers() and (Path("slow") / "checkpoints" / "step-0").is_dir()


def test_the_embedded_task_starts_no_worker_and_imports_nothing_for_it():
    subprocess.run([sys.executable, "-c", EMBEDDED], check=True, cwd=ROOT)


def test_golds_that_are_no_answers_are_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    rows = [{"question": f"{i}?", "answer": f"We see at once that this holds, since {i} is what it is."} for i in range(40)]
    path = tmp_path / "prose.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr("vipfast.trainer.load_policy", lambda config: pytest.fail("a model was loaded"))
    with pytest.raises(DataError, match="--answer-field: .*cannot be graded against"):
        Trainer(small(str(path), str(tmp_path / "out"), reward=("maths",)))
    with pytest.raises(UsageError, match="--reward nowhere:f: cannot be used"):
        Trainer(small(str(path), str(tmp_path / "out"), reward=("nowhere:f",)))
    gc.collect()  # a trainer that was never built holds no worker
    assert not workers()


def test_prompts_from_python_may_be_graded_by_name_and_not_by_two_at_once(task):
    prompts = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(40)]
    run = Trainer(small("arithmetic", "named", steps=1, reward=("maths",)), prompts=prompts)
    assert type(run.task.reward).__name__ == "Maths" and run.run() == 0
    own = lambda completions, answers, metadata: [0.0] * len(completions)  # noqa: E731
    with pytest.raises(DataError, match="--reward maths: reward= was given in Python too"):
        Trainer(small("arithmetic", "two", reward=("maths",)), prompts=prompts, reward=own)
    with pytest.raises(DataError, match="without a reward"):
        Trainer(small("arithmetic", "none", reward=("task", "maths")), prompts=prompts)


def exactly(completions, answers, metadata):
    return [float(text.strip() == answer) for text, answer in zip(completions, answers)]


def test_a_reward_from_python_is_recorded_and_never_replaced_by_the_tasks(tmp_path, capsys):
    folder = str(tmp_path / "r")
    assert Trainer(small("arithmetic", folder, steps=2), reward=exactly).run() == 0
    assert f"Trainer(Config(output_dir={folder!r}, …), reward=…, resume=True).run()" in capsys.readouterr().out
    assert cli.main(["--resume", "--output-dir", folder]) == 2
    assert "give it again: Trainer(" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--reward python: the run's reward was a function given in Python.*give it again"):
        Trainer(small("arithmetic", folder), resume=True)
    with pytest.raises(UsageError, match="--reward is"):
        Trainer(small("arithmetic", folder, reward=("exact",)), resume=True)
    assert Trainer(small("arithmetic", folder, steps=3), reward=exactly, resume=True).run() == 0
    assert lines(folder)[-1]["step"] == 3


@pytest.mark.parametrize("reward, given", [(exactly, "prompts=…, reward=…"), (None, "prompts=…")])
def test_prompts_from_python_are_asked_for_again_with_what_came_beside_them(tmp_path, reward, given, capsys):
    folder, prompts = str(tmp_path / "r"), [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(40)]
    named = {} if reward else {"reward": ["exact"]}
    assert Trainer(small("arithmetic", folder, steps=1, **named), prompts=prompts, reward=reward).run() == 0
    told = f"Trainer(Config(output_dir={folder!r}, …), {given}, resume=True).run()"
    assert told in capsys.readouterr().out
    assert cli.main(["--resume", "--output-dir", folder]) == 2
    assert told in capsys.readouterr().err
    if reward:
        with pytest.raises(UsageError, match="give it again: Trainer"):
            Trainer(small("arithmetic", folder), prompts=prompts, resume=True)
    assert Trainer(small("arithmetic", folder, steps=2, **named), prompts=prompts, reward=reward, resume=True).run() == 0


def test_a_reward_from_python_that_breaks_names_the_way_to_go_on(tmp_path, capsys):
    def breaks(completions, answers, metadata):
        raise OSError("disk")

    with pytest.raises(RewardError, match=r"OSError: disk.*mend the reward and go on with Trainer\(Config\(.*reward=…, resume"):
        Trainer(small("arithmetic", str(tmp_path / "r")), reward=breaks).run()
    assert "warning: reward=breaks: a trial on the completion" in capsys.readouterr().out


def test_a_run_whose_reward_no_version_recorded_goes_on_with_the_one_given(tmp_path):
    folder = tmp_path / "r"
    Trainer(small("arithmetic", str(folder), steps=1), reward=exactly).run()
    config, state = folder / "config.yaml", folder / "checkpoints" / "step-1" / "state.json"
    marker = state.with_name("COMPLETE")
    for file, recorded, earlier in (
        (config, "reward:\n- python\n", "reward: []\n"),
        (state, '"reward": {"$tuple": ["python"]}', '"reward": {"$tuple": []}'),
    ):
        assert recorded in file.read_text()
        file.write_text(file.read_text().replace(recorded, earlier))
    complete = json.loads(marker.read_text())
    data = state.read_bytes()
    complete["files"]["state.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    marker.write_text(json.dumps(complete))
    resumed = Trainer(small("arithmetic", str(folder), steps=2), reward=exactly, resume=True)
    assert "reward = ('python',) (was ())" in resumed.notes and resumed.run() == 0


ORDERED = """
def accuracy(prompts, completions, answer, **kwargs):
    return [float(text.strip() == gold) for text, gold in zip(completions, answer)]
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str.strip() == ground_truth)}
"""


@pytest.mark.parametrize("name, whose", [("accuracy", "TRL"), ("compute_score", "verl")])
def test_rewards_of_others_train_as_the_same_reward_of_ones_own(task, name, whose, capsys):
    Path("theirs.py").write_text(ORDERED)
    space = {}
    exec(ORDERED, space)
    few = dict(steps=2, heldout_prompts=2)
    assert Trainer(small(task, "own", **few), reward=exactly).run() == 0
    assert Trainer(small(task, "given", **few), reward=space[name]).run() == 0
    assert f"reward {name} is called as {whose} calls it" in capsys.readouterr().out.splitlines()
    assert Trainer(small(task, "named", reward=[f"theirs:{name}"], **few)).run() == 0
    assert f"reward theirs:{name} is called as {whose} calls it" in capsys.readouterr().out.splitlines()
    assert lines("own") == lines("given") == lines("named")
    assert any(line["reward/mean"] > 0 for line in lines("own")[1:])


def test_prompts_given_as_chats_come_back_as_chats(tmp_path):
    seen = []

    def accuracy(prompts, completions, answer, **kwargs):
        seen.extend(zip(prompts, completions))
        return [float(completion[0]["content"].strip() == gold) for completion, gold in zip(completions, answer)]

    prompts = [{"prompt": [{"role": "user", "content": f"copy {i} ="}], "answer": str(i)} for i in range(40)]
    assert Trainer(small("arithmetic", str(tmp_path / "r"), steps=1), prompts=prompts, reward=accuracy).run() == 0
    assert all(prompt[0]["role"] == "user" and completion[0]["role"] == "assistant" for prompt, completion in seen)


WRONG = """
def two(completions, answers):
    return [0.0] * len(completions)
def no_key(completions, answers, metadata):
    return [one["nothing"] for one in metadata]
"""


def test_what_is_wired_wrongly_ends_before_a_model_is_loaded(task, monkeypatch, capsys):
    monkeypatch.setattr("vipfast.trainer.load_policy", lambda *args: pytest.fail("a model was loaded"))
    Path("theirs.py").write_text(WRONG)
    flags = "--reward-workers 1 --prompts-per-step 4 --vigor-num-rounds 2 --device cpu --threads 1".split()
    for names, message in (
        (["theirs:two"], "(completions, answers) do not fit (too many positional arguments)"),
        (["theirs:no_key"], "a trial on the completion"),
        (["maths", "theirs:no_key"], "failed with KeyError: 'nothing'"),
    ):
        assert cli.main(["--task", task, "--reward", *names, *flags]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(UsageError, match="reward=<lambda>: its parameters.*do not fit"):
        Trainer(small(task, "r"), reward=lambda texts: [0.0])
