"""No option is passed over: each is read by the run, refused, or named as one that this run does not read."""

import dataclasses
import sys
import typing
from collections import defaultdict

import pytest

from vipfast import cli, cores, idle
from vipfast.config import Config
from vipfast.config_file import HINTS, save_yaml
from vipfast.config_rules import flag
from vipfast.cores import counted, free_threads
from vipfast.errors import UsageError
from vipfast.resolve import resolve

CPU = {"device": "cpu", "threads": 1}
TINY = dict(**CPU, steps=2, prompts_per_step=4, rollouts_per_prompt=8, heldout_prompts=2, eval_samples=1, max_new_tokens=2)
ONLY_JUDGES = set("config_rules.py config_file.py resolve.py idle.py cli.py dry_run.py dataclasses.py".split())
"""Files that look at an option without doing what it says."""

OTHER = dict(
    task="openai/gsm8k", task_split="test", task_options="{max_terms: 3}", prompt_field="q", answer_field="a",
    system_prompt="Be brief.", metadata_fields=("level",), model="Qwen/Qwen2.5-0.5B", vllm_memory=0.4,
    rollouts_per_prompt=9.0, objective="dr_grpo", vigor_m0=1, vigor_alpha=0.25, vigor_gamma=3.0, max_prompt_tokens=99,
    temperature=0.5, top_p=0.5, stop=("=",), tools=("calculator",), max_tool_tokens=1, search_corpus="absent.jsonl",
    success_threshold=0.5, reward=("maths",), reward_weights=(2.0,), reward_timeout=5.0, learning_rate=0.5,
    output_dir="elsewhere", trackers=("tensorboard",), threads=2,
)  # fmt: skip
"""A value that is not the usual one, where the type does not tell any."""


def other(name):
    """A value of an option that is neither the default's nor TINY's."""
    if name in OTHER:
        return OTHER[name]
    usual, hint = getattr(Config(**TINY), name), HINTS[name]
    arms = (hint, *typing.get_args(hint))
    choices = [choice for arm in arms for choice in typing.get_args(arm) if isinstance(choice, int | str)]
    if choices:
        return next(choice for choice in choices if choice != usual)
    return not usual if isinstance(usual, bool) else (usual or 0) + 1


def reads_of_a_run(config, monkeypatch):
    """For each option the files of vipfast that read it in a run from start to end."""
    from vipfast.trainer import Trainer

    seen, usual = defaultdict(set), object.__getattribute__

    def watched(self, name):
        if name in Config.__dataclass_fields__:
            seen[name].add(sys._getframe(1).f_code.co_filename.rpartition("/")[2])
        return usual(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Config, "__getattribute__", watched)
        Trainer(config).run()
    return seen


@pytest.mark.filterwarnings("ignore:--allocator vigor. only 1")
@pytest.mark.parametrize("allocator", ["uniform", "vip", "vigor"])
def test_every_option_is_read_refused_or_named(allocator, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = Config(**TINY, allocator=allocator)
    seen = reads_of_a_run(dataclasses.replace(base, output_dir="r"), monkeypatch)
    passed_over = []
    seen["max_nonfinite"].add("learner.py, where a step is not finite")
    for name in Config.__dataclass_fields__:
        if seen[name] - ONLY_JUDGES:
            continue
        try:
            lines = resolve(dataclasses.replace(base, **{name: other(name)})).lines
        except UsageError:
            continue
        if not any(line.startswith(f"note: {flag(name)} ") for line in lines):
            passed_over.append(name)
    assert passed_over == []


@pytest.mark.parametrize("name", Config.__dataclass_fields__)
def test_the_other_value_is_another(name):
    assert other(name) != getattr(Config(**TINY), name)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (dict(allocator="uniform", vigor_m0=3), "--vigor-m0 3 has no effect with --allocator uniform"),
        (dict(vigor_num_rounds=1, vigor_alpha=0.2), "--vigor-alpha 0.2 has no effect with --vigor-num-rounds 1"),
        (
            dict(updates_per_step=100, prompts_per_step=16),
            "--updates-per-step 100 makes at most 16 mini-batches, one per prompt of --prompts-per-step 16",
        ),
        (dict(heldout_prompts=4000), "of --heldout-prompts 4000 there are 512, all that --task arithmetic has"),
        (dict(heldout_prompts=0, eval_samples=4), "--eval-samples 4 has no effect with --heldout-prompts 0"),
        (dict(reward=("maths",), code_timeout=1.0), "--code-timeout 1.0 has no effect with rewards that run no programs"),
        (dict(threads=64), "--threads 64 on 1 core makes threads wait for one another"),
    ],
    ids=str,
)
def test_what_has_no_effect_is_told(options, told, monkeypatch):
    monkeypatch.setattr(idle, "cores_allowed", lambda: 1)
    notes = [line for line in resolve(Config(**(CPU | options))).lines if line.startswith("note: ")]
    assert len(notes) == 1 and notes[0].startswith(f"note: {told}")
    usual = {name: getattr(Config(), name) for name in options if name != "threads"}
    assert not [line for line in resolve(Config(**CPU | usual | {"allocator": "vigor"})).lines if line.startswith("note: ")]


@pytest.mark.parametrize("name", ["task_split", "task_size"])
def test_a_single_file_has_no_splits_and_no_size(name, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "p", "answer": "1"}\n')
    notes = resolve(Config(**CPU, task=str(path), **{name: other(name)})).lines
    assert any(note.startswith(f"note: {flag(name)} {other(name)} has no effect with --task {path}") for note in notes)


def test_programs_of_a_dataset_may_be_graded_so_their_limits_are_read(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "p", "answer": "1"}\n')
    lines = resolve(Config(**CPU, task=str(path), code_timeout=1.0, sandbox="weak", reward_workers=3)).lines
    assert not [line for line in lines if line.startswith("note: ")]


def test_options_that_came_resolved_from_a_file_are_told_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = resolve(Config(**CPU, output_dir="new"), ask_torch=False).config
    save_yaml(config, "old.yaml")
    cli._prepare(["--config", "old.yaml", "--allocator", "uniform"])
    assert "note: --vigor-m0 2 has no effect with --allocator uniform" in capsys.readouterr().out


@pytest.mark.parametrize(("num", "told"), [(1, "1 core"), (2, "2 cores"), (1.5, "1.5 cores"), (1234567, "1234567 cores")])
def test_cores_are_counted_in_words_that_fit(num, told, monkeypatch):
    monkeypatch.setattr(cores, "cores_allowed", lambda: num)
    assert counted(num, "core") == told and free_threads(False)[1].startswith(f"{told} allowed, ")


def test_the_embedded_tasks_held_out_problems_are_as_many_as_said():
    from vipfast.tasks.arithmetic import load_pool

    assert len(load_pool("heldout")) == idle.ARITHMETIC_HELDOUT
