"""The loop as a user meets it: the README's lines, determinism, clean stops, failing rewards, poisoned steps, flat memory."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from vipfast import Config, Trainer
from vipfast.errors import CheckpointError, NonFiniteError, RewardError, SyncError, UsageError
from vipfast.telemetry.metrics import unknown

README = Path(__file__).resolve().parents[1] / "README.md"


def small(folder, **changes) -> Config:
    defaults = dict(
        steps=3, prompts_per_step=8, rollouts_per_prompt=6.0, vigor_num_rounds=3, heldout_prompts=16, eval_every=0,
        checkpoint_every=0, threads=1, device="cpu", output_dir=str(folder),
    )  # fmt: skip
    return Config(**{**defaults, **changes})


def lines(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def still(folder):
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/", "memory/"))} for line in lines(folder)]


def test_the_readmes_python_lines_run(tmp_path, monkeypatch):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.S).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 6
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert list(tmp_path.rglob("final/model.safetensors"))


@pytest.mark.parametrize("allocator", ["uniform", "vip", "vigor"])
def test_same_seed_same_run_and_another_seed_another(tmp_path, allocator):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert Trainer(small(tmp_path / name, allocator=allocator, seed=seed)).run() == 0
    assert still(tmp_path / "a") == still(tmp_path / "b") != still(tmp_path / "c")
    for line in lines(tmp_path / "a"):
        assert not unknown(line)
        if line["step"]:
            assert line["budget/rollouts"] == 48 and (line["policy/sync_gap"] or 0.0) < 1e-4


def test_uniform_spends_a_budget_that_does_not_divide(tmp_path):
    Trainer(small(tmp_path / "r", allocator="uniform", rollouts_per_prompt=7.5, steps=1)).run()
    last = lines(tmp_path / "r")[-1]
    assert last["budget/rollouts"] == 60 and (last["alloc/counts_min"], last["alloc/counts_max"]) == (7, 8)


def test_kth_rollout_of_a_prompt_is_the_same_under_every_allocator(tmp_path):
    texts = {}
    for allocator in ("uniform", "vip", "vigor"):
        trainer = Trainer(small(tmp_path / allocator, allocator=allocator))
        _, rollouts = trainer.train_step(1)
        for row in range(rollouts.num_rollouts):
            key = rollouts.prompts[rollouts.group_R[row]].uid, int(rollouts.index[row])
            text = rollouts.tokens[rollouts.token_offsets[row] : rollouts.token_offsets[row + 1]].tolist()
            assert texts.setdefault(key, text) == text
    assert len(texts) > 48


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_resumes_to_the_same_end(tmp_path, number):
    Trainer(small(tmp_path / "straight")).run()
    trainer = Trainer(small(tmp_path / "stopped"))
    whole_step = trainer.train_step

    def interrupted(step):
        if step == 2:
            os.kill(os.getpid(), number)
        return whole_step(step)

    trainer.train_step = interrupted
    assert trainer.run() == 3
    assert lines(tmp_path / "stopped")[-1]["step"] == 2
    assert Trainer(small(tmp_path / "stopped"), resume=True).run() == 0
    assert still(tmp_path / "stopped") == still(tmp_path / "straight")
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def test_a_reward_that_breaks_loses_nothing_and_the_mended_run_goes_on(tmp_path):
    prompts = [{"prompt": f"copy {i} =", "answer": str(i)} for i in range(40)]

    def right(completions, answers, metadata):
        return [float(c.strip() == a) for c, a in zip(completions, answers)]

    seen = 0

    def breaks_later(completions, answers, metadata):
        nonlocal seen
        seen += len(completions)
        # the start's evaluation takes 32, a step 48: this breaks within step 2
        return right(completions, answers, metadata) if seen <= 100 else [1.0] * (len(completions) + 1)

    Trainer(small(tmp_path / "whole"), prompts=prompts, reward=right).run()
    with pytest.raises(RewardError, match="values for"):
        Trainer(small(tmp_path / "broken"), prompts=prompts, reward=breaks_later).run()
    assert lines(tmp_path / "broken")[-1]["step"] == 1
    assert Trainer(small(tmp_path / "broken"), prompts=prompts, reward=right, resume=True).run() == 0
    assert still(tmp_path / "broken") == still(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore")
def test_a_pool_that_grew_is_gone_on_with_and_said_to_have_changed(tmp_path):
    prompts = [{"prompt": f"copy {i} =", "answer": str(i)} for i in range(60)]

    def right(completions, answers, metadata):
        return [float(c.strip() == a) for c, a in zip(completions, answers)]

    run = dict(reward=right)
    Trainer(small(tmp_path / "r", allocator="vip", predictor="beta", steps=2), prompts=prompts[:40], **run).run()
    changed = small(tmp_path / "r", allocator="vip", predictor="beta")
    with pytest.warns(UserWarning) as said:
        assert Trainer(changed, prompts=prompts[::-1], resume=True, **run).run() == 0
    said = [str(warning.message) for warning in said]
    assert any("--resume: the task's prompts are not those of the checkpoint" in text for text in said)
    assert any("start at the prior" in text for text in said)
    assert lines(tmp_path / "r")[-1]["step"] == 3


def test_all_unscored_steps_are_logged_and_move_nothing(tmp_path):
    trainer = Trainer(small(tmp_path / "r"), prompts=[f"p{i}" for i in range(20)], reward=lambda c, a, m: [None] * len(c))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert trainer.run() == 0
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    for line in lines(tmp_path / "r")[1:]:
        assert line["reward/mean"] is None and line["reward/unscored"] == 48 and line["signal/frac_wasted_rollouts"] == 1.0


def test_a_non_finite_gradient_never_reaches_the_weights_and_too_many_stop_the_run(tmp_path, monkeypatch):
    trainer = Trainer(small(tmp_path / "r", max_nonfinite=2, steps=9))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: torch.tensor(float("nan")))
    with pytest.raises(NonFiniteError, match="--max-nonfinite"):
        trainer.run()
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    assert trainer.learner.num_skipped == 2


def test_a_weight_the_engine_does_not_have_stops_the_run_before_it_trains(tmp_path):
    trainer = Trainer(small(tmp_path / "r"))
    score = trainer.learner.sync_gap
    # what a stale engine looks like: its log-probs are another policy's
    trainer.learner.sync_gap = lambda rollouts: score(
        dataclasses.replace(rollouts, sampler_logp=rollouts.sampler_logp - np.float32(0.01))
    )
    with pytest.raises(SyncError, match="sync_gap"):
        trainer.run()


def test_another_run_in_the_folder_is_refused_and_nothing_to_resume_is_an_error(tmp_path):
    Trainer(small(tmp_path / "r", steps=1)).run()
    with pytest.raises(UsageError, match="--output-dir.*--resume"):
        Trainer(small(tmp_path / "r"))
    with pytest.raises(UsageError, match="--resume.*no such folder"):
        Trainer(small(tmp_path / "empty"), resume=True)
    with pytest.raises(UsageError, match="--steps 0: the run is already at step 1"):
        Trainer(small(tmp_path / "r", steps=0), resume=True)
    assert Trainer(small(tmp_path / "r", steps=1), resume=True).run() == 0


def test_a_checkpoint_of_another_config_is_refused_by_name(tmp_path):
    Trainer(small(tmp_path / "a", steps=1)).run()
    Trainer(small(tmp_path / "b", steps=1, seed=5, temperature=0.5)).run()
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    shutil.copytree(tmp_path / "b" / "checkpoints", tmp_path / "a" / "checkpoints")
    with pytest.raises(UsageError, match="--temperature is 1.0, the run has 0.5; --seed is 0, the run has 5"):
        Trainer(small(tmp_path / "a", steps=2), resume=True).run()


def test_two_runs_that_want_one_folder(tmp_path):
    first, second = Trainer(small(tmp_path / "r", steps=0)), Trainer(small(tmp_path / "r", steps=0))
    first.run()
    with pytest.raises(UsageError, match="another run has just taken it"):
        second.run()


def test_a_full_disk_at_a_metrics_line_says_so(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    trainer = Trainer(small(tmp_path / "r"))
    monkeypatch.setattr("vipfast.telemetry.telemetry.write_samples", full)
    with pytest.raises(CheckpointError, match="disk is full, so the line of step 1 was not saved.*step-0 is intact"):
        trainer.run()
    monkeypatch.undo()
    assert Trainer(small(tmp_path / "r"), resume=True).run() == 0
    assert [line["step"] for line in lines(tmp_path / "r")] == [0, 1, 2, 3]


def test_a_full_disk_during_a_save_says_so_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    trainer = Trainer(small(tmp_path / "r", checkpoint_every=1))
    from vipfast import checkpoint

    write, saves = checkpoint.save_state, []

    def full_at_the_third(folder, state):
        saves.append(folder)
        if len(saves) == 3:
            raise OSError(28, "No space left on device")
        write(folder, state)

    monkeypatch.setattr(checkpoint, "save_state", full_at_the_third)
    with pytest.raises(CheckpointError, match="disk is full.*step-1 is intact"):
        trainer.run()
    monkeypatch.undo()
    assert Trainer(small(tmp_path / "r", checkpoint_every=1), resume=True).run() == 0
    assert [line["step"] for line in lines(tmp_path / "r")] == [0, 1, 2, 3]


def test_memory_handles_and_children_stay_flat(tmp_path):
    trainer = Trainer(small(tmp_path / "r", steps=50, sample_rollouts=0))
    process, seen = psutil.Process(), {}
    whole_step = trainer.train_step

    def watched(step):
        seen[step] = process.memory_info().rss, process.num_fds(), len(process.children())
        return whole_step(step)

    trainer.train_step = watched
    trainer.run()
    assert seen[50][0] <= 1.05 * seen[10][0] and seen[50][1] <= seen[10][1] and seen[50][2] == seen[10][2]


def test_required_kernels_run_and_are_named_in_every_line(tmp_path):
    def trained(name, **changes):
        sizes = dict(steps=2, prompts_per_step=4, rollouts_per_prompt=4.0, heldout_prompts=1)
        trainer = Trainer(small(tmp_path / name, **sizes, **changes))
        trainer._check_sync = lambda: None  # 64 more prompts
        assert trainer.run() == 0
        return lines(tmp_path / name), {name: p.detach() for name, p in trainer.model.named_parameters()}

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shared = dict(allocator="uniform", max_new_tokens=4, dtype="float64", device=device)
    (fused, weights), (plain, others) = (trained(kernels, kernels=kernels, **shared) for kernels in ("required", "off"))
    assert {line["backend"] for line in fused} == {f"transformers+triton on {device}"}
    assert {line["backend"] for line in plain} == {f"transformers+torch on {device}"}
    assert any(line["train/grad_norm"] for line in plain[1:])
    for ours, theirs in zip(fused[1:], plain[1:], strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-12)
        assert ours["reward/mean"] == theirs["reward/mean"]
    assert all(torch.allclose(weights[name], others[name], rtol=0, atol=1e-9) for name in others)


def test_a_resumed_run_tells_anew_what_runs(tmp_path):
    trainer = Trainer(small(tmp_path / "r", steps=0, packing="varlen"))
    told = [note for note in trainer.notes if note.startswith("packing: masked")]
    trainer.run()
    again = Trainer(small(tmp_path / "r", steps=1, packing="varlen"), resume=True)
    assert len(told) == 1 and [note for note in again.notes if note.startswith("packing")] == told


def test_a_step_runs_without_the_packages_of_the_command_line_and_the_extras(tmp_path):
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('tyro', 'rich', 'pyarrow', 'peft', 'datasets', 'pandas', 'sentence_transformers'))\n"
        "from vipfast import Config, Trainer\n"
        f"config = Config(device='cpu', threads=1, prompts_per_step=4, vigor_num_rounds=2, output_dir={str(tmp_path)!r})\n"
        "trainer = Trainer(config)\n"
        "print(trainer.train_step(1)[0]['budget/rollouts'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split()[-1:] == ["32"], done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"updates_per_step": 2, "epochs": 2},
        {"estimator": "grpo", "weighting": "rollout", "length_term": "sequence"},
        {"estimator": "dr_grpo", "weighting": "token", "allocator": "vip"},
        {"beta": 0.05},
        {"truncated": "mask", "max_new_tokens": 5},
        {"update_on": "final", "score": "posterior"},
        {"predictor": "vip", "allocator": "vip", "objective": "dr_grpo"},
        {"temperature": 0.7, "top_p": 0.9},
        {"lora_rank": 4},
        {"lora_rank": 4, "gradient_checkpointing": True},
        {"packing": "varlen", "micro_batch_tokens": 512},
        {"dtype": "float64"},
        {"dtype": "bfloat16"},
    ],
    ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()),
)
def test_every_way_to_train_moves_finite_weights(tmp_path, changes):
    trainer = Trainer(small(tmp_path / "r", steps=2, learning_rate=1e-3, **changes))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert trainer.run() == 0
    after = dict(trainer.model.named_parameters())
    assert all(torch.isfinite(p).all() for p in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert (lines(tmp_path / "r")[-1]["policy/kl"] is not None) == ("beta" in changes)


@pytest.mark.parametrize("shape, mean", [("raw", 0.75), ("binary", 1.0)])
def test_the_shape_of_the_reward_reaches_loss_metrics_and_evaluation(tmp_path, shape, mean):
    config = small(tmp_path / "r", steps=1, reward_shape=shape, success_threshold=0.7)
    prompts = [f"problem {i}" for i in range(40)]
    assert Trainer(config, prompts=prompts, reward=lambda texts, answers, metadata: [0.75] * len(texts)).run() == 0
    before, after = lines(tmp_path / "r")
    assert after["reward/mean"] == after["reward/verified"] == mean and after["signal/frac_all_one"] == 1
    assert before["eval/mean@8"] == 1
