"""The same recorded rollouts through the learner with kernels on and off: do loss, gradient, entropy and weights agree?

    python benchmarks/replay.py [--steps 20] [--dtype bfloat16] [--updates-per-step 2] [--beta 0.02] [--output FOLDER]
    TRITON_INTERPRET=1 python benchmarks/replay.py --steps 2 --prompts-per-step 4    # no GPU: Triton's interpreter, slow
    python benchmarks/replay.py --smoke                                              # likewise, as small as it gets

Sampled runs cannot be compared: the first draw that rounding turns makes two texts of one. So a run of the default task
(starter policy, vigor) is recorded with kernels off, and three learners with the same starting weights are fed its rollouts:
kernels on, kernels off, and off again. The last two go through the recorded policy once more and part by no more than plain
torch parts from itself on this machine (``noise``; 0 on a CPU). The one with kernels on drifts from the policy that sampled by
rounding alone, so the learner's own check of sampler against trainer holds for it as it stands; where that stops the replay,
the sides disagree.

Compared after each step, the worst over all steps against a bound:
    loss        abs(on - off) / mean abs(advantage): at most the largest relative error of a token's ratio
    grad_norm   abs(on - off) / off
    entropy     abs(on - off), nats
    param       norm(on - off) / norm(off - start) over all weights: how far apart they are, as a share of the way they came
Weights are not compared one by one: Adam divides a gradient by its own size, so a weight whose gradient is rounding noise moves
by the learning rate in a direction of chance, whatever computes it.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
from pathlib import Path

import torch
from common import append_results, print_table

BOUNDS = {
    "float32": {"loss": 1e-6, "grad_norm": 1e-3, "entropy": 2e-5, "param": 5e-3},
    "bfloat16": {"loss": 2e-2, "grad_norm": 2.5e-1, "entropy": 2e-2, "param": 3e-1},
}
"""What rounding explains, with a margin over the worst seen on a CPU (kernels interpreted, or their roundings in plain torch).

float32: sums in another order. Each is off by a few units of 2^-24, and a gradient that is what is left of terms that cancel by
more: 1.4e-4 of a norm was the worst of 24 steps; weights were 3e-4 apart.
bfloat16: the kernels keep logits in bfloat16, plain torch computes them in float32. The starter's largest logits lie between 8
and 16, where rounding takes up to 1/32, so it moves a probability by 3 % and the gradient of a small step, most of which
cancels, by 12 %; weights were 0.1 apart. It is the replay in float32 that finds a kernel that is slightly wrong.
"""

METRICS = {"loss": "train/loss", "grad_norm": "train/grad_norm", "entropy": "policy/entropy", "sync_gap": "policy/sync_gap"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda if there is one, unless given")
    parser.add_argument("--dtype", choices=tuple(BOUNDS), help="float32 on a CPU, bfloat16 on a GPU, unless given")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts-per-step", type=int, default=64)
    parser.add_argument("--rollouts-per-prompt", type=float, default=8.0)
    parser.add_argument(
        "--updates-per-step", type=int, default=1, help="above 1, ratios leave 1 and clips and old log-probs matter"
    )
    parser.add_argument("--beta", type=float, default=0.0, help="above 0, the KL term matters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder; each step becomes a line of replay.jsonl there")
    parser.add_argument(
        "--smoke", action="store_true", help="two steps of four prompts; without a GPU, kernels are interpreted"
    )
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.prompts_per_step = 2, 4
    return args


def main() -> int:
    args = parse()
    # Triton reads this when a kernel is defined, so it comes before the first import that defines one.
    if args.smoke and args.device != "cuda" and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from vipfast.kernels.launch import unavailable

    if reason := unavailable(args.device or ("cuda" if torch.cuda.is_available() else "cpu")):
        print(
            f"replay.py: {reason}, so there are no kernels to compare plain torch with. Run it on an NVIDIA GPU, or with "
            "TRITON_INTERPRET=1 --device cpu, which emulates them (slow: --steps 2 --prompts-per-step 4)",
            file=sys.stderr,
        )
        return 2
    config, tokenizer, recorded = record(args)
    num_tokens = sum(len(rollouts.tokens) for rollouts in recorded)
    print(f"recorded {len(recorded)} steps, {num_tokens} tokens, {config.dtype} on {config.device}; replaying")
    lines, stopped = replay(config, tokenizer, recorded)
    bound = BOUNDS[config.dtype]
    worst, noise = (
        {name: max((line[of][name] for line in lines), default=math.inf) for name in bound} for of in ("diff", "noise")
    )
    broken = [f"{name} {worst[name]:.3g} > {bound[name]:g}" for name in bound if worst[name] > bound[name]]
    show(lines, worst, noise, bound)
    if lines and worst["param"] == 0:
        broken.append("all weights are equal to the last bit, so the kernels cannot have run, or nothing was trained")
    if stopped:
        broken.append(f"stopped at {stopped}")
    print("kernels on and off agree" if not broken else f"kernels on and off do NOT agree: {'; '.join(broken)}")
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        with (args.output / "replay.jsonl").open("a") as file:
            file.writelines(json.dumps(strict(line), allow_nan=False) + "\n" for line in lines)
    result = {
        "replay_steps": len(lines),
        **{f"max_{name}_diff": worst[name] for name in bound},
        **{f"noise_{name}": noise[name] for name in ("loss", "param")},
        "bound": bound,
        "agrees": not broken,
        "dtype": config.dtype,
        "device": config.device,
        "updates_per_step": config.updates_per_step,
        "beta": config.beta,
        "tokens": num_tokens,
    }
    append_results("replay.py", strict(result), smoke=args.smoke)
    print(json.dumps(strict(result), allow_nan=False))
    return 0 if result["agrees"] else 1


def record(args: argparse.Namespace) -> tuple:
    """Resolved config, the tokenizer, and each step's rollouts of a run with kernels off. Writes no file."""
    from vipfast.config import Config
    from vipfast.trainer import Trainer

    names = ("device", "dtype", "steps", "prompts_per_step", "rollouts_per_prompt", "updates_per_step", "beta", "seed")
    trainer = Trainer(Config(allocator="vigor", kernels="off", **{name: getattr(args, name) for name in names}))
    recorded = [trainer.train_step(step)[1] for step in range(1, args.steps + 1)]
    return trainer.config, trainer.tokenizer, recorded


def replay(config, tokenizer, recorded: list) -> tuple[list[dict], str | None]:
    """A line per step with both sides and their differences, and why the replay stopped early (None: it did not)."""
    from vipfast.errors import NonFiniteError, SyncError
    from vipfast.learn.learner import Learner
    from vipfast.policy import load_policy, load_reference

    kernels = {"on": "required", "off": "off", "again": "off"}
    configs = {name: dataclasses.replace(config, kernels=value) for name, value in kernels.items()}
    learners = {
        name: Learner(load_policy(c, tokenizer), c, tokenizer.pad_token_id, load_reference(c, tokenizer))
        for name, c in configs.items()
    }
    backends = {name: learner.backend for name, learner in learners.items()}
    assert backends == {"on": "triton", "off": "torch", "again": "torch"}, backends
    start = weights(learners["off"])
    lines = []
    for step, rollouts in enumerate(recorded):
        try:
            found = {name: learner.update(rollouts, step) for name, learner in learners.items()}
        except (SyncError, NonFiniteError) as error:
            return lines, f"step {step + 1}: {error}"
        rows = {name: {key: metrics[long] for key, long in METRICS.items()} for name, metrics in found.items()}
        scale = found["off"]["train/advantage_abs_mean"] or 1.0
        vectors = {name: weights(learner) for name, learner in learners.items()}
        moved = float((vectors["off"] - start).norm())
        diffs = {name: differences(rows[name], rows["off"], scale) for name in ("on", "again")}
        for name, diff in diffs.items():
            apart = float((vectors[name] - vectors["off"]).norm())
            diff["param"] = apart / moved if moved else apart
        lines.append(
            {
                "step": step + 1,
                "dtype": config.dtype,
                "tokens": len(rollouts.tokens),
                "on": rows["on"],
                "off": rows["off"],
                "diff": diffs["on"],
                "noise": diffs["again"],
            }
        )
    return lines, None


def weights(learner) -> torch.Tensor:
    """All trained weights, one float64 vector on the CPU."""
    return torch.cat([parameter.detach().flatten().cpu().double() for parameter in learner.parameters])


def differences(row: dict, off: dict, scale: float) -> dict[str, float]:
    """How far a side's metrics are from those with kernels off; infinite where only one of the two is a number."""
    divisors = {"loss": scale, "grad_norm": off["grad_norm"] or 1.0, "entropy": 1.0}
    found = {}
    for name, divisor in divisors.items():
        if (row[name] is None) != (off[name] is None):
            found[name] = math.inf
        else:
            found[name] = 0.0 if off[name] is None else abs(row[name] - off[name]) / divisor
    return found


def show(lines: list[dict], worst: dict, noise: dict, bound: dict) -> None:
    table = [("step", "tokens", "loss on", "loss off", "Δ loss", "grad norm", "Δ grad", "entropy", "Δ entropy", "Δ weights")]
    for line in lines:
        on, off, diff = line["on"], line["off"], line["diff"]
        numbers = (on["loss"], off["loss"], diff["loss"], off["grad_norm"], diff["grad_norm"], off["entropy"], diff["entropy"])
        table.append((line["step"], line["tokens"], *map(number, numbers), number(diff["param"])))
    for name, row in (("worst", worst), ("bound", bound), ("noise", noise)):
        cells = ("loss", "", "grad_norm", "", "entropy", "param")
        table.append((name, "", "", "", *(number(row[cell]) if cell else "" for cell in cells)))
    print_table("kernels on and off", table)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def strict(value):
    """Strict JSON: a number that is not finite becomes null."""
    if isinstance(value, dict):
        return {name: strict(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
