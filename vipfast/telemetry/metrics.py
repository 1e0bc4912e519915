"""What every logged metric means, in one place; README's table is this one (``markdown()``), and no other name is logged.

In a name, ``@k`` stands for the number of samples per held-out prompt (``eval/mean@8``), of tools for --search-k, and ``NAME``
for one of several rewards.
"""

import re
from collections.abc import Iterable

METRICS: dict[str, str] = {
    "step": "training steps done when the line was written; 0 is the state before training",
    "allocator": "rule that decided the rollout counts (name)",
    "backend": "engine, loss head and device that really ran (names)",
    "budget/rollouts": "rollouts drawn in this step (count)",
    "budget/tokens": "completion tokens generated in this step (count)",
    "budget/tokens_expected": "vip with a budget in tokens: completion tokens this step's plan was expected to take (count)",
    "budget/rollouts_cum": "rollouts drawn since the start of training, evaluation not included (count)",
    "budget/tokens_cum": "completion tokens generated since the start of training, evaluation not included (count)",
    "alloc/counts_min": "fewest rollouts a prompt of this step got (count)",
    "alloc/counts_mean": "mean rollouts per prompt of this step (count)",
    "alloc/counts_max": "most rollouts a prompt of this step got (count)",
    "alloc/ceiling": "least gradient variance any allocation could reach, relative to uniform, (E√a)²/E a with a = p(1−p); "
    "near 1 no rule can win (ratio)",
    "alloc/var_ratio_expected": "gradient variance expected of these counts, relative to uniform ones (ratio)",
    "alloc/rounds": "rounds of generation in this step (count)",
    "alloc/survivors": "vigor: prompts still active in the last round (count)",
    "alloc/tied_share": "vigor: share of the prompts kept after the first round that were chosen by tie-break (0 to 1)",
    "alloc/at_min": "vip: share of prompts at the lower bound (0 to 1)",
    "alloc/at_max": "vip: share of prompts at the upper bound (0 to 1)",
    "signal/frac_all_zero": "share of prompts whose scored rollouts all failed (0 to 1)",
    "signal/frac_all_one": "share of prompts whose scored rollouts all succeeded (0 to 1)",
    "signal/frac_wasted_rollouts": "share of rollouts in groups whose rewards are all equal, which teach nothing (0 to 1)",
    "reward/mean": "mean reward over the scored rollouts; an adaptive allocator moves it by its choice of prompts, "
    "so compare runs by eval/* (reward)",
    "reward/verified": "mean of the verifier's part of the reward over the scored rollouts, without other rewards (reward)",
    "reward/part/NAME": "with several --reward: mean of each alone, before its weight, over the scored rollouts (reward)",
    "reward/std_within": "standard deviation of the verifier's part within a prompt's group, averaged over prompts (reward)",
    "reward/unscored": "rollouts without a reward (count)",
    "reward/errors": "rollouts of this step whose reward function raised an exception or failed (count)",
    "reward/timeouts": "rollouts of this step whose grading was given up after its time limit (count)",
    "rollout/tokens_mean": "mean completion length, outputs of tools included (tokens)",
    "rollout/tokens_max": "longest completion, outputs of tools included (tokens)",
    "rollout/truncated_frac": "share of rollouts that hit the length limit (0 to 1)",
    "tools/turns_mean": "mean turns of the policy in a rollout (count)",
    "tools/calls_mean": "mean tool calls in a rollout (count)",
    "tools/errors_frac": "share of the tool calls that were answered with an error; null without calls (0 to 1)",
    "tools/precision@k": "share of the passages found by search that are the problem's own, over rollouts that found any "
    "and problems whose metadata names them; null without (0 to 1)",
    "tools/recall@k": "share of the problem's own passages found by search, over the same rollouts (0 to 1)",
    "tools/f1@k": "harmonic mean of a rollout's precision and recall of passages, over the same rollouts (0 to 1)",
    "predict/brier": "mean squared error of the success probability predicted before sampling, on this step's prompts (0 to 1)",
    "predict/log_loss": "cross-entropy of the predicted success probability on this step's rollouts (nats)",
    "predict/corr": "Pearson correlation of predicted and observed success rates over this step's prompts (−1 to 1)",
    "predict/slope": "calibration slope, observed on predicted logits; below 1 is overconfident (ratio)",
    "policy/entropy": "mean entropy of the policy over the trained tokens (nats)",
    "policy/kl": "mean estimated KL divergence from the starting policy over the trained tokens (nats)",
    "policy/clip_frac_low": "share of trained tokens held at the lower clip (0 to 1)",
    "policy/clip_frac_high": "share of trained tokens held at the upper clip (0 to 1)",
    "policy/ratio_raw_mean": "mean importance ratio of trainer over sampler before the cap; 1 when both agree (ratio)",
    "policy/ratio_raw_max": "largest importance ratio of trainer over sampler before the cap (ratio)",
    "policy/sync_gap": "mean |log-prob in the trainer − log-prob in the sampler| before any update (nats)",
    "train/loss": "the policy loss; near 0 on policy by construction, no measure of progress (loss)",
    "train/grad_norm": "norm of the gradient before clipping (norm)",
    "train/lr": "learning rate of this step (rate)",
    "train/skipped": "steps skipped because loss or gradient was not finite, since the start of the run (count)",
    "train/padding_share": "share of the tokens in the transformer's body that were padding (0 to 1)",
    "train/trained_rollouts": "rollouts with a non-zero advantage, which went through the backward pass (count)",
    "train/advantage_abs_mean": "mean absolute advantage over the rollouts in the update (reward)",
    "time/allocate_s": "allocator and predictor (seconds)",
    "time/generate_s": "generation over all rounds (seconds)",
    "time/reward_s": "grading that generation had to wait for (seconds)",
    "time/tools_s": "tool calls, summed over rollouts; beside generation (seconds)",
    "time/logprob_s": "log-probs before the first update, and of the reference (seconds)",
    "time/update_s": "forward, backward and optimizer (seconds)",
    "time/sync_s": "handing the new weights to the engine (seconds)",
    "time/eval_s": "evaluation (seconds)",
    "time/checkpoint_s": "saving a checkpoint since the line before (seconds)",
    "time/step_s": "the whole step without evaluation and checkpoint (seconds)",
    "speed/tokens_per_s": "completion tokens generated per second of generation (tokens/s)",
    "memory/peak_bytes": "peak memory of the process, on a GPU of the device (bytes)",
    "eval/mean@k": "share of k samples of every held-out prompt whose reward reaches --success-threshold (0 to 1)",
    "eval/pass@k": "share of held-out prompts solved at least once in k samples, unbiased (0 to 1)",
    "eval/maj@k": "share of held-out prompts whose most frequent answer is right; null where none is extracted (0 to 1)",
}


def describe(name: str) -> str | None:
    """The sentence about a metric, or None if there is no such metric: describe("eval/mean@8")."""
    return METRICS.get(re.sub(r"@\d+$", "@k", re.sub(r"^reward/part/.+", "reward/part/NAME", name)))


def unknown(names: Iterable[str]) -> list[str]:
    """The names that the table does not explain."""
    return [name for name in names if describe(name) is None]


def markdown() -> str:
    """The table of README: one row per metric, in logging order."""
    rows = [f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |" for name, meaning in METRICS.items()]
    return "\n".join(["| metric | meaning (unit) |", "|---|---|", *rows])
