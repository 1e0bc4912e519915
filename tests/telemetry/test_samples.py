"""RUN/rollouts/STEP.parquet: a seeded sample of a step's texts, or all of them, with what the update made of each."""

import importlib
import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from vipfast.config import Config
from vipfast.telemetry.samples import COLUMNS, sample_rows, write_samples
from vipfast.telemetry.telemetry import Telemetry
from vipfast.types import Finish, Prompt, Rollouts, StepPlan

ROW = dict(zip(COLUMNS, ("u1", "sort 3 1 =", "1 3", "1 3", 1.0, 0, 0, "stop", 1, 0.5, 3, 2, "{}"), strict=True))


def step_of_three() -> Rollouts:
    prompts = [
        Prompt("u1", "sort 3 1 =", np.array([1]), "1 3", {"level": 2, "ort": "Köln"}),
        Prompt("u2", "even?", np.array([1]), {"all": [2]}),
    ]
    return Rollouts(
        prompts=prompts,
        prompt_tokens=np.array([1, 1]),
        prompt_offsets=np.array([0, 1, 2]),
        group_offsets=np.array([0, 2, 3]),
        token_offsets=np.array([0, 3, 4, 4]),
        tokens=np.array([49, 32, 51, 0xD800]),
        loss_mask=np.ones(4, bool),
        sampler_logp=np.zeros(4, np.float32),
        reward=np.array([1, 0, np.nan], np.float32),
        index=np.array([0, 1, 0]),
        round=np.array([0, 1, 0]),
        finish=np.array([Finish.STOP, Finish.LENGTH, Finish.ERROR], np.uint8),
        plan=StepPlan.plain([np.array([1, 1]), np.array([1, 0])]),
    )


def test_texts_come_back_from_parquet(tmp_path):
    from pyarrow import parquet

    rows = sample_rows(step_of_three(), lambda ids: "".join(map(chr, ids)), Config(), step=5)
    with Telemetry(tmp_path, Config(), total_steps=60, console=Console(file=io.StringIO())) as telemetry:
        telemetry.log(5, {"reward/mean": 0.25}, sample=rows)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["5.parquet"]
    table = parquet.read_table(tmp_path / "rollouts" / "5.parquet")
    assert tuple(table.column_names) == COLUMNS
    assert table.to_pylist() == [
        dict(zip(COLUMNS, row, strict=True))
        for row in (
            # rloo: 1 - 0 and 0 - 1; an unscored rollout has no part in the update
            ("u1", "sort 3 1 =", "1 3", "1 3", 1.0, 0, 0, "stop", 5, 1.0, 3, 2, '{"level": 2, "ort": "Köln"}'),
            ("u1", "sort 3 1 =", "?", "1 3", 0.0, 1, 1, "length", 5, -1.0, 1, 2, '{"level": 2, "ort": "Köln"}'),
            ("u2", "even?", "", '{"all": [2]}', None, 0, 0, "error", 5, 0.0, 0, 1, "{}"),
        )
    ]


def test_the_sample_is_seeded_and_differs_by_step():
    def pick(step):
        rows = sample_rows(step_of_three(), lambda ids: "", Config(sample_rollouts=1), step)
        return [(row["uid"], row["index"]) for row in rows]

    assert pick(1) == pick(1) and len(pick(1)) == 1
    assert len({tuple(pick(step)) for step in range(20)}) == 3


@pytest.mark.parametrize("columns", [COLUMNS[:8], COLUMNS], ids=["earlier", "now"])
def test_files_of_earlier_versions_are_read_like_those_of_now(columns, tmp_path, monkeypatch):
    import pyarrow
    from pyarrow import parquet

    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    predictor_pools = importlib.import_module("predictor_pools")
    rows = [{**{name: ROW[name] for name in columns}, "index": index} for index in range(predictor_pools.MOST)]
    (tmp_path / "rollouts").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rollouts" / "1.parquet")
    record = predictor_pools.read(tmp_path)
    assert (record.uids, record.texts, record.trials.tolist()) == (["u1"], ["sort 3 1 ="], [predictor_pools.MOST])


@pytest.mark.parametrize(("asked", "kept"), [(0, 0), (2, 2), (3, 3), (99, 3), ("all", 3)])
def test_as_many_are_kept_as_asked_for_or_all(asked, kept):
    assert len(sample_rows(step_of_three(), lambda ids: "", Config(sample_rollouts=asked), 1)) == kept


def test_advantages_are_those_of_the_update():
    masked = sample_rows(step_of_three(), lambda ids: "", Config(truncated="mask"), 1)
    assert [row["advantage"] for row in masked] == [0.0, 0.0, 0.0]  # one rollout of the group is left
    centred = sample_rows(step_of_three(), lambda ids: "", Config(estimator="dr_grpo"), 1)
    assert [row["advantage"] for row in centred] == [0.5, -0.5, 0.0]


def test_a_failed_write_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    import os

    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError):
        write_samples(tmp_path / "rollouts" / "1.parquet", [ROW])
    assert list((tmp_path / "rollouts").iterdir()) == []
