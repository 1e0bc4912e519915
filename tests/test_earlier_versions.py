"""What version 0.1.0 of the 30th of November 2026 left behind is read as it stands.

``data/earlier`` holds config.yaml and the state.json of checkpoint step-2 that this wrote (tensors are not kept; a run of now,
with the same options and a learning rate of 0, lends its own):

    python scripts/train.py --allocator vip --device cpu --threads 1 --steps 2 --prompts-per-step 8 --rollouts-per-prompt 8
        --heldout-prompts 8 --eval-samples 2 --checkpoint-every 1 --learning-rate 0 --output-dir earlier
"""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from vipfast import Trainer, cli
from vipfast.checkpoint import MARKER, _fingerprint
from vipfast.config import Config
from vipfast.config_file import continued, load_yaml

EARLIER = Path(__file__).parent / "data" / "earlier"
NEW = {"stop_when_dead", "base_dtype"}
"""Options that came since; an earlier run goes on with what they are where nobody says anything."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The earlier run's folder, its weights and moments lent by one of now."""
    monkeypatch.chdir(tmp_path)
    Trainer(load_yaml(EARLIER / "config.yaml")).run()
    run, step = tmp_path / "earlier", tmp_path / "earlier" / "checkpoints" / "step-2"
    shutil.copy(EARLIER / "config.yaml", run)
    shutil.copy(EARLIER / "state.json", step)
    marked = json.loads((step / MARKER).read_text())
    marked["files"]["state.json"] = _fingerprint(step / "state.json")
    (step / MARKER).write_text(json.dumps(marked))
    return run


def test_options_are_what_they_were_and_new_ones_as_usual():
    saved, usual = load_yaml(EARLIER / "config.yaml"), Config()
    written = {line.partition(":")[0] for line in (EARLIER / "config.yaml").read_text().splitlines() if line[0] not in " -"}
    missing = set(Config.__dataclass_fields__) - written
    assert missing <= NEW and written <= set(Config.__dataclass_fields__)
    assert all(getattr(saved, name) == getattr(usual, name) for name in missing)
    state = json.loads((EARLIER / "state.json").read_text())
    assert (saved.allocator, saved.prompts_per_step, saved.sample_rollouts) == ("vip", 8, 16)
    assert {name for name in state["config"]} == written


def test_a_checkpoint_goes_on(run):
    command = cli.parse(["--resume", "--output-dir", "earlier", "--steps", "3", "--sample-rollouts", "all"])
    assert command.config == dataclasses.replace(load_yaml(EARLIER / "config.yaml"), steps=3, sample_rollouts="all")
    trainer = Trainer(command.config, resume=True)
    result = trainer.run()
    assert result and [row["step"] for row in result.history] == [0, 1, 2, 3]
    state = json.loads((EARLIER / "state.json").read_text())
    assert trainer.totals["budget/rollouts_cum"] == state["totals"]["budget/rollouts_cum"] + command.config.budget


def test_what_the_run_learned_from_is_still_refused_by_name():
    saved = load_yaml(EARLIER / "config.yaml")
    with pytest.raises(ValueError, match="--seed is 1, the run has 0"):
        continued(saved, dataclasses.replace(saved, seed=1))
