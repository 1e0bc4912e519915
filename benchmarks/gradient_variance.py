"""Does planning rollouts bring a step's gradient nearer the true one? Mean squared error at equal rollouts, on the starter.

    python benchmarks/gradient_variance.py [--batches 20] [--estimator rloo] [--smoke]

For every batch of 64 training prompts the engine draws 64 rollouts each, and that pool then stands for the policy: allocators
draw 512 rollouts from it with replacement, many times over, through the trainer's own collect, advantages and weights, so the
true gradient is known exactly and no error of a reference enters. The k-th draw of a prompt is the same for all of them. A
rollout's score (gradient of its log-prob with respect to all weights) is computed once per distinct completion, folded to 4 093
numbers with random signs (which keeps squared lengths to about 2 %; ``fold_error`` is measured on one error vector against the
whole gradient) and centred over the prompt's pool, as scores are under a policy.

The truth is the gradient of the mean success rate: every prompt counts alike. Under prompt weighting an unbiased plan aims at
it; under rollout weighting a plan aims at sum_q E[n_q]/C times the prompts' own gradients, and how far that lies from the truth
is part of its error. Per allocator and weighting:

mse_ratio    mean squared error over uniform's, with a 95 % bootstrap interval over batches
rescaled     the same once the allocator's gradients are divided by one number, ``length``, their mean length along the truth
             relative to the truth's: a rule that only shrinks gradients, as stopping rules do, gains nothing here, and Adam
             undoes such a factor anyway. For an unbiased rule both ratios are equal
median       of the batches' own mse ratios: far from mse_ratio where few batches, with few prompts, make most of the error
bias, noise  the two parts of mse_ratio: squared distance of the mean gradient from the truth, and variance around that mean
constant     share of rollouts in groups whose rewards are all equal

vip and lagged baselines predict from 16 steps of 64 other prompts (the first epoch of a run: no prompt was seen before) and,
"seen", from a whole step's rollouts of each prompt 64 steps ago too, followed by those 16. The policy stands still throughout,
so drift, which makes predictions worse, is left out (predictors.py has it). ``oracle`` plans by the pool's own p (1 - p), and
``oracle_score`` by the true variance of each prompt's gradient, lengths of scores included, which no reward can tell. vigor's
lagged correction needs rollout weighting. ``ceiling``: what the best plan for known p could reach but for bounds and rounding.
"""

import argparse
import json
import time
import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from common import append_results, print_table
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from vipfast import streams
from vipfast.allocate import solver
from vipfast.allocate.uniform import Uniform
from vipfast.allocate.vip import Vip
from vipfast.allocation import make_allocator
from vipfast.config import Config
from vipfast.engine.base import Finished
from vipfast.kernels.policy_loss import group_advantages_ref
from vipfast.learn.advantage import rollout_weights
from vipfast.learn.pack import pack
from vipfast.predict.base import Prediction
from vipfast.rewards.base import Grades
from vipfast.rollout import collect
from vipfast.tasks import arithmetic
from vipfast.trainer import Trainer
from vipfast.types import Finish, Prompt, PromptBatch, Rollouts

FOLD = 4093  # numbers a score is folded to; a prime, so that no column of a weight matrix meets itself in a bucket
WARM_UP, EPOCH = 16, 64  # steps of other prompts that predictors see, and steps of an epoch
MOST = 128  # rollouts of one prompt that no allocator reaches in a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--estimator", default="rloo", choices=("rloo", "dr_grpo"))
    parser.add_argument("--smoke", action="store_true", help="2 batches of 16 prompts, 8 pool rollouts, 4 draws")
    args = parser.parse_args()
    num_prompts, pool_size, draws, batches = (16, 8, 4, 2) if args.smoke else (64, 64, 16, args.batches)
    started = time.perf_counter()
    warnings.filterwarnings("ignore", message="--allocator vigor")  # of few survivors and groups of two: measured below
    config = Config(prompts_per_step=num_prompts, estimator=args.estimator, device="cpu", threads=1)
    trainer = Trainer(config)
    measured = [trainer.selector.next(num_prompts) for _ in range(batches)]
    others = [trainer.selector.next(num_prompts) for _ in range(WARM_UP)]
    texts = [(prompt.uid, prompt.text) for prompt in trainer.task.train]
    rules = make_rules(config, texts, measured, others)

    moments: dict[tuple[str, str], list[Moments]] = {}
    constant: dict[str, list[float]] = {}
    ceilings, fold_error = [], None
    for b, prompts in enumerate(measured):
        pool = draw_pool(trainer, prompts, pool_size, EPOCH + 1 + b)
        truth_U = pool.truth()
        ceilings.append(solver.ceiling(pool.success_B * (1 - pool.success_B)))
        for name, (allocator, weightings) in rules.items():
            if isinstance(allocator, Vip) and isinstance(allocator.predictor, Known):
                allocator.predictor.learn(pool)
            estimates = {weighting: [] for weighting in weightings}
            for draw in range(draws):
                # Ties are broken anew in each draw, as they are in each step of a run.
                batch = PromptBatch(prompts, EPOCH + 1 + b, seed=draw)
                sampler = Sampler(pool.reward_BK, np.random.default_rng((b, draw)))
                rollouts, tally, _ = collect(allocator, batch, config.budget, sampler, sampler)
                constant.setdefault(name, []).append(float(tally.asked[tally.m2 == 0].sum() / tally.asked.sum()))
                for weighting in weightings:
                    estimates[weighting].append(pool.estimate(rollouts, args.estimator, weighting))
            for weighting, estimate_GU in estimates.items():
                of = Moments.of(np.stack(estimate_GU) @ pool.score_UD, truth_U @ pool.score_UD)
                moments.setdefault((name, weighting), []).append(of)
            if fold_error is None and name == "uniform":
                fold_error = measure_fold(trainer, pool, estimates["prompt"][0] - truth_U)
        print(f"batch {b + 1} of {batches}, {time.perf_counter() - started:.0f} s", flush=True)

    stacked = {key: Moments(*np.array(parts).T) for key, parts in moments.items()}
    base, result = stacked["uniform", "prompt"], {}
    for (name, weighting), ours in stacked.items():
        result.setdefault(name, {"constant": rounded(np.mean(constant[name]))})[weighting] = compare(ours, base)
    table = [("", "weighting", "mse_ratio", "95 %", "rescaled", "95 %", "median", "length", "bias", "noise", "constant")]
    for name, weighting in moments:
        row = (*result[name][weighting].values(), result[name]["constant"])
        table.append((name, weighting, *map(spelled, row)))
    print_table(f"gradient error over uniform's, {args.estimator}, {batches} batches, {draws} draws of each", table)
    overall = {"ceiling": np.mean(ceilings), "signal": base.truth.sum() / base.error().sum(), "fold_error": fold_error}
    result |= {name: rounded(value) for name, value in overall.items()}
    result |= {"estimator": args.estimator, "batches": batches, "seconds": round(time.perf_counter() - started)}
    print("  ".join(f"{name} {value:.3f}" for name, value in overall.items()))
    append_results("gradient_variance.py", result, smoke=args.smoke)
    print(json.dumps(result))


def spelled(value) -> str:
    return "-".join(f"{end:.3f}" for end in value) if isinstance(value, list) else f"{value:.3f}"


def make_rules(config: Config, texts: list, measured: list[list[Prompt]], others: list[list[Prompt]]) -> dict:
    """Name -> (allocator that has learned what it may know, weightings it allows)."""
    vip, vigor = replace(config, allocator="vip"), replace(config, allocator="vigor")
    lagged = replace(vigor, correction="lagged", weighting="rollout")
    both, make = ("prompt", "rollout"), lambda options: make_allocator(options, texts)
    planner = make(vip)
    told = lambda scores: Vip(Known(scores), config.estimator, planner.low, planner.high)  # noqa: E731
    first = [(1 + i, prompts) for i, prompts in enumerate(others)]
    again = [(1 + i, prompts) for i, prompts in enumerate(measured)]
    again += [(EPOCH + 1 - len(others) + i, prompts) for i, prompts in enumerate(others)]
    return {
        "uniform": (Uniform(), both),
        "vip": (warmed(planner, config, first), both),
        "vip_seen": (warmed(make(vip), config, again), both),
        "vigor": (make(vigor), both),
        "vigor_fresh": (make(replace(vigor, correction="fresh")), both),
        "vigor_lagged": (warmed(make(lagged), config, first), ("rollout",)),
        "vigor_lagged_seen": (warmed(make(lagged), config, again), ("rollout",)),
        "oracle": (told(scores=False), both),
        "oracle_score": (told(scores=True), both),
    }


def warmed(allocator, config: Config, steps: list[tuple[int, list[Prompt]]]):
    """The allocator after steps of its own on these prompts, solved as often as the starter solved them in 64 samples."""
    rate = {problem.text: problem.pass_rate for problem in arithmetic.load_pool("train")}
    for step, prompts in steps:
        reward_BK = np.array([np.arange(64) < round(64 * rate[prompt.text]) for prompt in prompts], np.float64)
        sampler = Sampler(reward_BK, np.random.default_rng((EPOCH, step)))
        allocator.learn(collect(allocator, PromptBatch(prompts, step, config.seed), config.budget, sampler, sampler)[1])
    return allocator


class Known:
    """A predictor that is told: success rates of a pool, and p (1 - p) or the true variance of each prompt's gradient."""

    name = "known"

    def __init__(self, scores: bool):
        self.scores = scores

    def learn(self, pool: "Pool") -> None:
        self.success_B, self.signal_B = pool.success_B, pool.success_B * (1 - pool.success_B)
        if self.scores:
            self.signal_B = pool.variance_B

    def predict(self, uids, texts) -> Prediction:
        return Prediction(self.success_B, np.zeros(len(uids)), self.signal_B)


class Sampler:
    """Engine and grader in one: a rollout is a draw from the pool with replacement, and its only token tells which."""

    def __init__(self, reward_BK: np.ndarray, rng: np.random.Generator):
        self.reward_BK, self.draw_BN = reward_BK, rng.integers(reward_BK.shape[1], size=(len(reward_BK), MOST))
        self.waiting: list[tuple[int, int]] = []

    @property
    def pending(self) -> int:
        return len(self.waiting)

    def submit(self, requests) -> None:
        for request in requests:
            self.waiting += [(request.slot, request.first_index + k) for k in range(request.count)]

    def step(self) -> list[Finished]:
        (rows, self.waiting), logp = (self.waiting, []), np.zeros(1, np.float32)
        return [Finished(slot, k, self.draw_BN[slot, k : k + 1], logp, Finish.STOP) for slot, k in rows]

    def grade(self, prompts, finished: list[Finished]) -> Grades:
        return Grades.plain([self.reward_BK[row.slot, row.tokens[0]] for row in finished])


@dataclass(frozen=True, eq=False)
class Pool:
    """K rollouts of each of B prompts: rewards, which of the U distinct completions each is, and these ones' scores."""

    rollouts: Rollouts
    distinct_U: np.ndarray  # int64 [U], rows of the rollouts, ascending
    completion_BK: np.ndarray  # int64 [B, K], into U
    reward_BK: np.ndarray  # float64 [B, K]
    score_UD: np.ndarray  # float32 [U, D], folded

    @property
    def success_B(self) -> np.ndarray:
        return self.reward_BK.mean(1)

    @property
    def variance_B(self) -> np.ndarray:
        """Variance of (r - p) s within each prompt, summed over the D numbers."""
        score_BKD = (self.score_UD[completion_K] for completion_K in self.completion_BK)
        advantages = (self.reward_BK - self.success_B[:, None])[..., None]
        return np.array([(A * (s - s.mean(0))).var(0).sum() for A, s in zip(advantages, score_BKD)], np.float64)

    def truth(self) -> np.ndarray:
        """float32 [U], what each completion's score counts in the exact gradient, every prompt alike."""
        deviation_BK = (self.reward_BK - self.success_B[:, None]) / self.reward_BK.size
        return self._summed(self.completion_BK.ravel(), deviation_BK.ravel())

    def estimate(self, rollouts: Rollouts, estimator: str, weighting: str) -> np.ndarray:
        """float32 [U], the same of a step's gradient, in units of 1 / max_new_tokens."""
        plan, ones_R = rollouts.plan, np.ones(rollouts.num_rollouts, np.int64)
        advantage_R = group_advantages_ref(rollouts.reward, rollouts.group_offsets, plan.use_R, plan.baseline_B, estimator)
        weight_R = rollout_weights(rollouts.group_offsets, ones_R, plan, weighting, "constant", 1)
        return self._summed(self.completion_BK[rollouts.group_R, rollouts.tokens], weight_R * advantage_R.numpy())

    def _summed(self, completion_R: np.ndarray, value_R: np.ndarray) -> np.ndarray:
        """Values by completion, less what centres the scores of each prompt's pool, as those of a policy are."""
        value_U = np.bincount(completion_R, value_R, minlength=len(self.distinct_U))
        prompt_U = self.rollouts.group_R[self.distinct_U]
        share_U = np.bincount(self.completion_BK.ravel()) / self.completion_BK.shape[1]
        return (value_U - share_U * np.bincount(prompt_U, value_U)[prompt_U]).astype(np.float32)


def draw_pool(trainer: Trainer, prompts: list[Prompt], pool_size: int, step: int) -> Pool:
    """The engine's own rollouts of the prompts, and the scores of the distinct ones."""
    batch, budget = PromptBatch(prompts, step, trainer.config.seed), pool_size * len(prompts)
    rollouts, _, _ = collect(Uniform(), batch, budget, trainer.engine, trainer.grader, stream=streams.EVAL)
    trainer.engine.reset()
    offsets, rows = rollouts.token_offsets, {}
    for i, q in enumerate(rollouts.group_R):
        rows.setdefault((q, rollouts.tokens[offsets[i] : offsets[i + 1]].tobytes()), []).append(i)
    distinct_U, completion_R = np.array([same[0] for same in rows.values()]), np.empty(budget, np.int64)
    for u, same in enumerate(rows.values()):
        completion_R[same] = u
    score_UD = np.zeros((len(distinct_U), FOLD), np.float32)
    for rows_u, parts in score_gradients(trainer, rollouts, distinct_U):
        score_UD[rows_u] = fold(parts)
    shape = len(prompts), pool_size
    return Pool(rollouts, distinct_U, completion_R.reshape(shape), rollouts.reward.reshape(shape).astype(np.float64), score_UD)


def score_gradients(trainer: Trainer, rollouts: Rollouts, rows_r: np.ndarray):
    """Gradients of each row's summed log-prob by every weight, a list of float32 [r, w] per rectangle and its rows."""
    model, temperature = trainer.model, trainer.config.temperature
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def logp(weights, ids_L, target_L, counts_L):
        logits_LV = functional_call(model, weights, (ids_L[None],), {"use_cache": False}).logits[0] / temperature
        return (logits_LV.log_softmax(-1).gather(1, target_L[:, None])[:, 0] * counts_L).sum()

    # Small rectangles: a gradient per row is 2 MB.
    for rectangle in pack(rollouts, rows_r, 512, trainer.tokenizer.pad_token_id):
        ids = torch.from_numpy(rectangle.input_ids)
        target, counts = torch.zeros(ids.numel(), dtype=torch.long), torch.zeros(ids.numel())
        target[rectangle.positions_T], counts[rectangle.positions_T] = torch.from_numpy(rectangle.targets_T), 1.0
        with sdpa_kernel(SDPBackend.MATH):  # the fused one cannot be batched over gradients
            found = vmap(grad(logp), (None, 0, 0, 0))(weights, ids, target.view_as(ids), counts.view_as(ids))
        yield np.searchsorted(rows_r, rectangle.rows_r), [part.flatten(1) for part in found.values()]


def fold(parts: list[torch.Tensor]) -> np.ndarray:
    """float32 [r, FOLD]: each weight goes into one bucket with a random sign, so inner products keep their expectation."""
    rng = np.random.default_rng(0)
    folded = torch.zeros(len(parts[0]), FOLD)
    for part in parts:
        for piece in part.split(FOLD, 1):
            signs = rng.integers(0, 2, piece.shape[1], np.int8).astype(np.float32) * 2 - 1
            folded[:, : piece.shape[1]].addcmul_(piece, torch.from_numpy(signs))
    return folded.numpy()


def measure_fold(trainer: Trainer, pool: Pool, error_U: np.ndarray) -> float:
    """Squared length of one estimate's error, folded over whole, less 1."""
    whole = 0.0
    for rows_u, parts in score_gradients(trainer, pool.rollouts, pool.distinct_U):
        whole = whole + torch.from_numpy(error_U[rows_u]) @ torch.cat(parts, 1)
    return float(np.sum((error_U @ pool.score_UD) ** 2) / whole.square().sum()) - 1


class Moments(NamedTuple):
    """Of the gradients g that an allocator gave for a batch whose truth is t; floats, or float64 [batches]."""

    square: np.ndarray  # mean |g|^2
    mean_square: np.ndarray  # |mean g|^2, freed of the noise of the mean
    along: np.ndarray  # (mean g) . t
    truth: np.ndarray  # |t|^2

    @classmethod
    def of(cls, gradient_GD: np.ndarray, truth_D: np.ndarray) -> "Moments":
        """G >= 2 gradients."""
        gradient_GD, truth_D, G = gradient_GD.astype(np.float64), truth_D.astype(np.float64), len(gradient_GD)
        mean_D, square = gradient_GD.mean(0), float((gradient_GD**2).sum(1).mean())
        mean_square = (G * float(mean_D @ mean_D) - square) / (G - 1)
        return cls(square, mean_square, float(mean_D @ truth_D), float(truth_D @ truth_D))

    def weighed(self, weight_SB: np.ndarray) -> "Moments":
        """Sums over batches with these weights, e.g. how often a bootstrap drew each."""
        return Moments(*(weight_SB @ column for column in self))

    def error(self, length=1.0):
        """Mean |g / length - t|^2."""
        return self.square / length**2 - 2 * self.along / length + self.truth

    def bias(self):
        """|mean g - t|^2."""
        return self.mean_square - 2 * self.along + self.truth

    def length(self):
        return self.along / self.truth


def compare(ours: Moments, uniform: Moments) -> dict:
    """Ratios of errors summed over batches, with intervals from 2 000 bootstrap draws of batches, both sides alike."""
    batches = len(ours.square)
    times_SB = np.random.default_rng(0).multinomial(batches, np.full(batches, 1 / batches), 2000)
    once, other = ours.weighed(np.ones(batches)), uniform.weighed(np.ones(batches))
    row = {}
    for name, error in (("mse_ratio", Moments.error), ("rescaled", lambda moments: moments.error(moments.length()))):
        drawn = error(ours.weighed(times_SB)) / error(uniform.weighed(times_SB))
        row[name] = rounded(error(once) / error(other))
        row[f"{name}_interval"] = [rounded(end) for end in np.percentile(drawn, [2.5, 97.5])]
    row["median"] = rounded(np.median(ours.error() / uniform.error()))
    parts = once.length(), once.bias() / other.error(), (once.square - once.mean_square) / other.error()
    return row | dict(zip(("length", "bias", "noise"), map(rounded, parts)))


def rounded(value) -> float:
    return round(float(value), 4)


if __name__ == "__main__":
    main()
