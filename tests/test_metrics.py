"""The table of metrics explains every name, with its unit, in rows a README can hold."""

import re

from vipfast.telemetry import metrics

FIXED_NAMES = """
step allocator backend budget/rollouts budget/tokens budget/rollouts_cum budget/tokens_cum alloc/counts_min alloc/counts_mean
alloc/counts_max alloc/ceiling alloc/var_ratio_expected alloc/rounds signal/frac_all_zero signal/frac_all_one
signal/frac_wasted_rollouts reward/mean reward/std_within reward/unscored rollout/tokens_mean rollout/tokens_max
rollout/truncated_frac predict/brier predict/log_loss predict/corr predict/slope policy/entropy policy/kl policy/clip_frac_low
policy/clip_frac_high policy/ratio_raw_mean policy/ratio_raw_max policy/sync_gap train/loss train/grad_norm train/lr
train/skipped time/allocate_s time/generate_s time/reward_s time/logprob_s time/update_s time/sync_s time/eval_s
time/checkpoint_s time/step_s speed/tokens_per_s memory/peak_bytes eval/mean@8 eval/pass@16 eval/maj@4
"""


def test_every_fixed_name_is_explained_with_its_unit():
    assert metrics.unknown(FIXED_NAMES.split()) == []
    assert metrics.unknown(["reward/maen", "eval/mean", "eval/mean@", "train/loss@8"]) == [
        "reward/maen",
        "eval/mean",
        "eval/mean@",
        "train/loss@8",
    ]
    for name, meaning in metrics.METRICS.items():
        assert name == "step" or re.search(r"\([^()]+\)$", meaning), f"{name} lacks a unit"


def test_metric_table_has_one_row_per_metric():
    rows = metrics.markdown().splitlines()
    assert len(rows) == len(metrics.METRICS) + 2
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows)
    assert rows[2].startswith("| `step` | training steps done")
