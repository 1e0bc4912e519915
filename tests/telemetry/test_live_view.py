"""The live view at any size of terminal and in any phase: what moves, what fits, what goes first."""

import io
import re
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from vipfast.config import Config
from vipfast.telemetry import live
from vipfast.telemetry.activity import NOW, Activity
from vipfast.telemetry.live import shortened
from vipfast.telemetry.samples import COLUMNS
from vipfast.telemetry.telemetry import Telemetry
from vipfast.telemetry.ticker import Ticker

STEP = {
    "budget/rollouts": 512, "reward/mean": 0.25, "reward/std_within": 0.21, "signal/frac_wasted_rollouts": 0.5,
    "alloc/counts_min": 2, "alloc/counts_mean": 8.0, "alloc/counts_max": 30, "speed/tokens_per_s": 1940.3,
    "time/generate_s": 0.75, "time/update_s": 0.25, "time/step_s": 1.0,
    "eval/mean@8": 0.41, "eval/pass@8": 0.5, "eval/maj@8": 0.4,
}  # fmt: skip
VIGOR = np.repeat([2, 6, 14, 30, 31, 32, 33], [32, 16, 8, 8, 1, 1, 1])
ROW = dict(zip(COLUMNS, ("u1", "sort 3 1 =", "1 3", "1 3", 1.0, 0, 0, "stop")))
SIZES = ((60, 16), (80, 24), (110, 35))


@pytest.fixture(autouse=True)
def activity(monkeypatch):
    """What is going on, as the view sees it; the process's own stays as it was."""
    own = Activity()
    monkeypatch.setattr(live, "NOW", own)
    return own


def screen(width: int, height: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None, legacy_windows=False)


def view(tmp_path, width: int, height: int, **options) -> live.LiveView:
    """The view of a run after its first step and evaluation, not yet started."""
    telemetry = Telemetry(tmp_path, Config(**options), total_steps=60, console=screen(width, height))
    shown = telemetry._view
    shown._history.add({"step": 1, **STEP})
    shown._metrics, shown._counts, shown._sample = {"step": 1, **STEP}, VIGOR, [ROW]
    return shown


def generating(own: Activity) -> None:
    own.begin("step 2")
    own.enter("generate", 512, "rollouts", SimpleNamespace(left_s=4.0))
    own.round, own.done = 2, 311


def updating(own: Activity) -> None:
    own.begin("step 2")
    units = own.each("update", range(16))
    for _ in range(4):
        next(units)


def evaluating(own: Activity) -> None:
    own.begin("the evaluation")
    own.enter("generate", 4096, "samples", SimpleNamespace(left_s=75.0))


PHASES = {
    generating: "step 2 · generate, round 2 · 311/512 rollouts, 0:04 left · 0:00",
    updating: "step 2 · update · 3/16 micro-batches · 0:00",
    evaluating: "the evaluation · generate · 0/4096 samples, 1:15 left · 0:00",
}


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_every_phase_is_told_at_every_size(tmp_path, activity, phase, size):
    phase(activity)
    lines = [line.plain for line in view(tmp_path, *size).frame(size[0], size[1] - 1)]
    told = PHASES[phase] if len(PHASES[phase]) <= size[0] else re.sub(r", \d+:\d\d left", "", PHASES[phase])
    assert told in lines and len(told) <= size[0] and len(lines) <= size[1] - 1
    text = "\n".join(lines)
    for kept in ("vipfast", "step 1/60", "reward  ", "held-out mean@8", "generate 0.75  update 0.25", "of 1.00 s", "▸ 1 3"):
        assert kept in text, kept
    assert ("budget" in text) == (size != (60, 16)), "bars go first"


@pytest.mark.parametrize("width", [1, 2, 7, 20, 40, 59, 99, 100, 101, 300])
@pytest.mark.parametrize("height", [1, 2, 3, 5, 8, 12, 60])
def test_a_frame_fits_any_terminal(tmp_path, activity, width, height):
    generating(activity)
    shown = view(tmp_path, width, height, model="Qwen/" + 20 * "Long", task="some/where/" + 9 * "deep/" + "pool.jsonl")
    shown.start()
    shown.tick()
    shown.close()
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown._console.file.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, drawn)) <= width
    lines = shown.frame(width, height)
    assert len(lines[-1].plain) <= max(width - 2, 1), "the ^C of Ctrl-C fits behind it"
    assert len(lines) <= height
    assert width < 20 or lines[0].plain.startswith("step 1/60" if height < 5 else "vipfast")


def test_without_a_step_there_is_nothing_but_where_it_is(tmp_path, activity):
    activity.begin("the start", "sync")
    telemetry = Telemetry(tmp_path, Config(), total_steps=60, console=screen(80, 24))
    lines = [line.plain for line in telemetry._view.frame(80, 23)]
    assert lines[1].startswith("step 0/60") and lines[2] == "the start · sync · 0:00" and "budget" not in "".join(lines)


def test_the_clock_moves_while_the_main_thread_waits(tmp_path, activity):
    activity.begin("step 1", "update")
    shown = view(tmp_path, 80, 24)
    shown._ticker = Ticker(shown.tick, every_s=0.02)
    shown.start()
    drawn = len(shown._console.file.getvalue())
    deadline = time.monotonic() + 30
    activity.since -= 3600
    while "1:00:00" not in shown._console.file.getvalue()[drawn:] and time.monotonic() < deadline:
        time.sleep(0.02)
    shown.close()
    assert "step 1 · update · 1:00:00" in shown._console.file.getvalue()[drawn:]


def test_long_titles_are_shortened_from_their_paths_on():
    parts = ["vipfast", "vigor", "/data/tasks/maths.jsonl", "Qwen/Qwen2.5-0.5B-Instruct", "runs/maths-vigor-s0-20260101-000000"]
    whole = "  ".join(parts)
    assert shortened(parts, len(whole)) == whole
    assert shortened(parts, len(whole) - 1) == "  ".join(part.split("/")[-1] for part in parts)
    assert shortened(parts, 65) == "vipfast  vigor  maths.jsonl  Qwen2.5-0.5B-In…  maths-vigor-s0-…"
    assert shortened(parts, 10) == shortened(parts, 50) == "vipfast  vigor  maths.jso…  Qwen2.5-0…  maths-vig…"


def test_what_is_said_is_never_broken(tmp_path):
    shown = view(tmp_path, 40, 16)
    command = f"{sys.executable} scripts/train.py --resume --output-dir runs/{'x' * 60} --steps 120"
    shown.start()
    shown.say(command)
    shown.close()
    assert command in shown._console.file.getvalue()


def test_nobody_watching_is_told_all_the_same():
    NOW.begin("step 7")
    assert list(NOW.each("update", [1, 2])) == [1, 2] and NOW.done == 2
    since = NOW.since
    NOW.begin("step 7", "save")
    assert NOW.since == since and NOW.text().startswith("step 7 · save · ")


def test_what_was_under_way_is_gone_from_the_last_frame(tmp_path, activity):
    evaluating(activity)
    last = view(tmp_path, 80, 24)
    last.close()
    assert not any("evaluation" in line.plain for line in last.frame(80, 23))


def test_words_stay_whole_and_a_command_on_one_line(tmp_path, activity):
    shown = view(tmp_path, 60, 16)
    command = "continue  python scripts/train.py --resume --output-dir " + "a" * 60
    shown.say(f"rollouts  30720 in 60 steps, 42 % in groups without signal\n{command}")
    lines = shown._console.file.getvalue().splitlines()
    assert command in lines and any(line.strip().startswith("signal") or line.endswith("without signal") for line in lines)
