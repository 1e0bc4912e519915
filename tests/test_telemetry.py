"""What a run reports: strict JSON without duplicate steps, readable texts, a view that draws, boards that continue."""

import io
import json
import re
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from vipfast import checkpoint
from vipfast.config import Config
from vipfast.errors import UsageError
from vipfast.telemetry.history import History, change, clock, printable, trend
from vipfast.telemetry.live import histogram
from vipfast.telemetry.samples import COLUMNS
from vipfast.telemetry.telemetry import Telemetry, read_metrics

STEP = {
    "budget/rollouts": 512,
    "reward/mean": 0.25,
    "reward/std_within": 0.21,
    "signal/frac_wasted_rollouts": 0.5,
    "alloc/counts_min": 2,
    "alloc/counts_mean": 8.0,
    "alloc/counts_max": 30,
    "speed/tokens_per_s": 1940.3,
    "time/generate_s": 0.75,
    "time/update_s": 0.25,
    "time/step_s": 1.0,
}
VIGOR = np.repeat([2, 6, 14, 30], [32, 16, 8, 8])
ROW = dict(zip(COLUMNS, ("u1", "sort 3 1 =", "1 3", "1 3", 1.0, 0, 0, "stop", 1, 0.5, 3, 2, "{}"), strict=True))


def screen(terminal: bool, width: int = 110) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, height=40, color_system=None, legacy_windows=False)


def report(run: Path, console: Console | None = None, **options) -> Telemetry:
    return Telemetry(run, Config(**options), total_steps=60, console=console or screen(terminal=False))


def strict(line: str) -> dict:
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_lines_are_strict_json_with_plain_numbers(tmp_path):
    import torch

    values = {
        "train/loss": float("nan"),
        "train/grad_norm": np.float32("inf"),
        "reward/mean": np.float32(0.25),
        "alloc/counts_max": np.int64(30),
        "policy/entropy": torch.tensor(0.5),
        "eval/maj@8": None,
        "backend": "transformers cpu ü",
        "train/skipped": np.bool_(True),
    }
    with report(tmp_path) as telemetry:
        telemetry.log(1, values)
        assert (tmp_path / "metrics.jsonl").read_text().endswith("}\n"), "a line is on disk as soon as it is logged"
    line = strict((tmp_path / "metrics.jsonl").read_text())
    wanted = dict(zip(values, (None, None, 0.25, 30, 0.5, None, "transformers cpu ü", True)))
    assert line == {"step": 1, **wanted} and next(iter(line)) == "step"
    assert type(line["alloc/counts_max"]) is int and line["train/skipped"] is True


def test_what_is_no_number_is_refused_by_name(tmp_path):
    with report(tmp_path) as telemetry, pytest.raises(TypeError, match="reward/mean is a list"):
        telemetry.log(1, {"reward/mean": [1.0]})


def test_each_line_is_one_write(tmp_path, monkeypatch):
    import os

    sizes, write = [], os.write
    with report(tmp_path) as telemetry:
        monkeypatch.setattr(os, "write", lambda descriptor, data: sizes.append(len(data)) or write(descriptor, data))
        telemetry.log(1, STEP)
        telemetry.log(2, STEP)
        monkeypatch.undo()
    assert sizes == [len(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)]


def test_steps_rise_and_never_repeat_over_resume(tmp_path):
    with report(tmp_path) as telemetry:
        for step in (0, 1, 2, 3):
            telemetry.log(step, STEP)
        with pytest.raises(ValueError, match="step 3: .*already ends with step 3"):
            telemetry.log(3, STEP)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rewa')
    checkpoint.trim_run(tmp_path, 2)
    with report(tmp_path) as telemetry:
        assert telemetry.last_step == 2
        with pytest.raises(ValueError):
            telemetry.log(2, STEP)
        telemetry.log(3, STEP)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]


def test_a_torn_end_is_cut_when_lines_are_read_back(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    with report(tmp_path) as telemetry:
        telemetry.log(2, {})
    assert [strict(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_live_view_shows_what_matters(tmp_path):
    console = screen(terminal=True)
    with report(tmp_path, console) as telemetry:
        telemetry.log(0, {"eval/mean@8": 0.27, "eval/pass@8": 0.5, "eval/maj@8": None})
        telemetry.log(1, STEP, VIGOR, [{**ROW, "completion": "1 3\x1b[31m\n"}])
        telemetry.log(20, {**STEP, "eval/mean@8": 0.41, "eval/pass@8": 0.5, "eval/maj@8": None})
        telemetry.say("checkpoint saved at step 20")
    shown = console.file.getvalue()
    last = shown[shown.rindex("learning") :]
    for text in ("0.250", "0.210", "50 % (50 % of the run)", "2 min  8.0 mean  30 max", "1,940 tokens/s", "generate 0.75"):
        assert text in last, text
    assert "step 20/60" in shown and " left" in shown and "checkpoint saved at step 20" in shown
    assert re.search(r"held-out mean@8\s+0\.270 → 0\.410 \(\+0\.140\)\s+▁█", last) and "maj@8" not in last
    for count, prompts, percent in ((2, 32, 12), (6, 16, 19), (14, 8, 22), (30, 8, 47)):
        assert re.search(rf" {count} × {prompts} .*{percent} %", last)
    assert "reward 1.00  sort 3 1 = ▸ 1 3·[31m⏎" in last, "control bytes of a sampled text never reach the terminal"
    assert shown.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


def test_live_view_fits_a_narrow_terminal(tmp_path):
    console = screen(terminal=True, width=60)
    with report(tmp_path, console) as telemetry:
        telemetry.log(1, STEP, VIGOR, [ROW])
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()).replace("\r", "\n").splitlines()
    assert len(lines) > 10 and max(map(len, lines)) <= 60


def test_terminal_is_given_back_when_a_step_raises(tmp_path):
    console = screen(terminal=True)
    with pytest.raises(RuntimeError, match="boom"), report(tmp_path, console):
        raise RuntimeError("boom")
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")


def test_drawing_a_frame_takes_little_time(tmp_path):
    telemetry = report(tmp_path, screen(terminal=True))
    with telemetry:
        telemetry.log(1, {**STEP, "eval/mean@8": 0.2}, VIGOR, [ROW])
        start = time.process_time()
        for _ in range(20):
            telemetry._view._draw()
        assert (time.process_time() - start) / 20 < 0.02  # 0.003 to 0.005 on an idle core


def test_plain_lines_without_a_terminal(tmp_path):
    console = screen(terminal=False)
    with report(tmp_path, console) as telemetry:
        telemetry.log(0, {"eval/mean@8": 0.27})
        for step in range(1, 42):
            telemetry.log(step, STEP, VIGOR, [ROW])
        telemetry.log(42, {**STEP, "eval/mean@8": 0.37})
        telemetry.say("saved")
    lines = console.file.getvalue().splitlines()
    assert "\x1b" not in console.file.getvalue()
    headers = [i for i, line in enumerate(lines) if line.lstrip().startswith("step ")]
    assert [b - a for a, b in zip(headers, headers[1:])] == [21, 21]
    rows = [
        line for line in lines if re.match(r"\s+\d+\s+0\.250\s+0\.210\s+50 %\s+2/8\.0/30\s+1,940\s+0\.75\s+0\.25\s+1\.00", line)
    ]
    assert len(rows) == 42 and len({len(line) for line in rows}) == 1 and len(rows[0]) == len(lines[headers[0]])
    assert lines[-2].split() == "eval after step 42: mean@8 0.270 → 0.370 (+0.100) since start".split() and lines[-1] == "saved"


def test_plain_lines_survive_an_ascii_stream(tmp_path):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with report(tmp_path, Console(file=stream, force_terminal=False)) as telemetry:
        telemetry.log(1, {"eval/mean@8": 0.27})
        telemetry.log(2, {"eval/mean@8": 0.37})
    assert b"mean@8 0.270 ? 0.370" in stream.buffer.getvalue()


def test_summary_spans_the_whole_run(tmp_path):
    with report(tmp_path) as telemetry:
        telemetry.log(0, {"eval/mean@8": 0.27, "time/eval_s": 2.0})
        telemetry.log(1, STEP)
    console = screen(terminal=False)
    with report(tmp_path, console) as telemetry:
        telemetry.log(2, {**STEP, "signal/frac_wasted_rollouts": 0.25, "eval/mean@8": 0.41, "time/eval_s": 3.0})
        telemetry.close({"continue": "python scripts/train.py --resume"})
    shown = [re.sub(r"\s+", " ", line) for line in console.file.getvalue().splitlines()]
    assert shown[-5:] == [
        "held-out mean@8 0.270 → 0.410 (+0.140)",
        "rollouts 1024 in 2 steps, 38 % in groups without signal",
        "time 7.0 s",
        f"folder {tmp_path}",
        "continue python scripts/train.py --resume",
    ]


def test_one_of_a_thing_is_told_as_one(tmp_path):
    console = screen(terminal=False)
    with report(tmp_path, console, prompts_per_step=1, rollouts_per_prompt=1.0, allocator="uniform") as telemetry:
        telemetry.log(1, {**STEP, "budget/rollouts": 1})
        telemetry.close({})
    shown = re.sub(r" +", " ", console.file.getvalue())
    assert "1 × 1 = 1 rollout a step" in shown and "rollouts 1 in 1 step," in shown


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_missing_board_is_named_with_its_remedy(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=rf'--trackers {name}: .*pip install "vipfast\[trackers\]"'):
        report(tmp_path, trackers=(name,))


def test_tensorboard_is_purged_from_the_step_after_the_checkpoint(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with report(tmp_path, trackers=("tensorboard",)) as telemetry:
        for step in (0, 1, 2, 3):
            telemetry.log(step, {"reward/mean": 0.1 * step, "train/loss": float("nan"), "allocator": "vip"})
    checkpoint.trim_run(tmp_path, 1)
    time.sleep(1.1)  # event files are ordered by the second in their names
    with report(tmp_path, trackers=("tensorboard",)) as telemetry:
        telemetry.log(2, {"reward/mean": 0.9})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(event.step, round(event.value, 3)) for event in events.Scalars("reward/mean")]
    assert points == [(0, 0.0), (1, 0.1), (2, 0.9)] and events.Tags()["scalars"] == ["reward/mean"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_board_continues_the_same_run(tmp_path, monkeypatch, name):
    opened, logged, closed = [], [], []
    run = types.SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: closed.append(1))
    module = types.ModuleType(name)
    module.init = lambda **settings: opened.append(settings) or run
    monkeypatch.setitem(sys.modules, name, module)
    for step in (1, 2):
        with report(tmp_path, trackers=(name,)) as telemetry:
            telemetry.log(step, {"reward/mean": 0.5, "backend": "cpu", "train/loss": None})
    key = {"wandb": "id", "trackio": "name"}[name]
    assert opened[0][key] == opened[1][key] and opened[0]["config"]["allocator"] == "vigor"
    assert logged == [(1, {"reward/mean": 0.5}), (2, {"reward/mean": 0.5})] and len(closed) == 2
    assert list(json.loads((tmp_path / "trackers.json").read_text())) == [name]


def test_small_helpers():
    assert trend([0, 0.5, 1], 3) == "▁▅█" and trend([], 3) == "" and trend([0.5, 0.501], 9) == "▁▁"
    assert trend([0, 0, 1, 1], 2) == "▁█" and len(trend(list(range(1000)), 24)) == 24
    assert [clock(seconds) for seconds in (None, 0, 75, 3700)] == ["–", "0:00", "1:15", "1:01:40"]
    assert change([]) == "–" and change([0.5]) == "0.500" and change([0.5, 0.25]) == "0.500 → 0.250 (-0.250)"
    assert printable("a\nb\x07é", 9) == "a⏎b·é" and printable("abcdef", 4) == "abc…"


def test_histogram_of_counts():
    assert histogram(VIGOR) == [("2", 32, 64), ("6", 16, 96), ("14", 8, 112), ("30", 8, 240)]
    assert histogram(np.array([], int)) == []
    bins = histogram(np.arange(1, 13))
    assert [label for label, *_ in bins] == ["1–2", "3–4", "5–6", "7–8", "9–10", "11–12"]
    assert sum(rollouts for *_, rollouts in bins) == 78 and sum(prompts for _, prompts, _ in bins) == 12


def test_time_left_follows_the_last_steps(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    history = History(total_steps=10)
    history.restart_clock()
    now[0] += 50.0  # the evaluation before the first step tells nothing about steps
    history.tick(trained=False)
    assert history.left_s is None
    for step in (1, 2):
        now[0] += 3.0
        history.add({"step": step})
        history.tick()
    assert history.left_s == pytest.approx(24.0) and history.elapsed_s == pytest.approx(56.0)
