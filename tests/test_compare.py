"""Ratios to uniform by hand, from metric lines as a run writes them."""

import json

import pytest

from vipfast.compare import Outcome, ratios, read


def outcome(allocator, scores, seed=0):
    curve = [(100 * i, 2.0 * i, score) for i, score in enumerate(scores)]
    return Outcome(allocator, seed, curve[-1][0], 9.0, 0.5, curve)


def test_cost_to_the_lower_final_score_is_interpolated():
    # uniform reaches .4 after 200 rollouts; vigor passes .4 half way between 0 (.2) and 100 (.6)
    found = ratios([outcome("uniform", [0.2, 0.3, 0.4]), outcome("vigor", [0.2, 0.6, 0.7])], 0)
    assert found == {"vigor": [pytest.approx(0.25)] * 3}


def test_seeds_are_paired_and_spread_is_told():
    runs = [outcome("uniform", [0.0, 0.4], 0), outcome("uniform", [0.0, 0.2], 1)]
    runs += [outcome("vip", [0.0, 0.8], 0), outcome("vip", [0.0, 0.2], 1)]
    assert ratios(runs, 1) == {"vip": [0.75, 0.5, 1.0]}


def test_a_losing_allocator_costs_more_than_uniform():
    assert ratios([outcome("uniform", [0.0, 0.8]), outcome("vip", [0.0, 0.4])], 0)["vip"][0] == 2.0


def test_reads_a_runs_own_lines(tmp_path):
    lines = [
        {"step": 0, "eval/mean@8": 0.2, "budget/rollouts_cum": 0},
        {"step": 1, "time/step_s": 1.5, "budget/rollouts_cum": 64, "signal/frac_wasted_rollouts": 0.5},
        {"step": 2, "time/step_s": 2.5, "budget/rollouts_cum": 128, "signal/frac_wasted_rollouts": 0.7, "eval/mean@8": 0.3},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = read(tmp_path, "vip", 0, 12.0)
    assert run.curve == [(0, 0.0, 0.2), (128, 4.0, 0.3)] and run.wasted == 0.6 and run.rollouts == 128
