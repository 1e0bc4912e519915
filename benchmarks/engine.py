"""Tokens per second of the transformers engine beside ``model.generate``, on the starter's shape (0.53 M parameters).

Both sides sample the same number of rollouts of the same prompts with the same stop ids and length limit, each in turn and
several times; a token counts once per rollout, its stop id included. Random weights put about 1/8 of the probability on the
stop ids, so lengths are near geometric with mean 8, as on short problems.

    python benchmarks/engine.py [--smoke] [--prompts 64] [--rollouts 8] [--threads 1] [--device cpu]
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch
from common import append_results

from vipfast import streams
from vipfast.engine.base import Request, Sampling
from vipfast.engine.transformers import TransformersEngine
from vipfast.starter.model import make_model

EOS, PAD = 256, 257


def engine_tokens(engine: TransformersEngine, prompts: list[np.ndarray], rollouts: int, step: int) -> int:
    engine.submit([Request(i, tokens, f"p{i}", step, 0, rollouts, streams.TRAIN) for i, tokens in enumerate(prompts)])
    total = 0
    while engine.pending:
        total += sum(len(rollout.tokens) for rollout in engine.step())
    engine.sync(engine.model.named_parameters())
    return total


def generate_tokens(model, prompts: list[np.ndarray], rollouts: int, sampling: Sampling) -> int:
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), PAD)
    for row, tokens in enumerate(prompts):
        ids[row, longest - len(tokens) :] = torch.from_numpy(tokens)
    ids = ids.repeat_interleave(rollouts, 0).to(model.device)
    mask = (ids != PAD).long()
    options = dict(do_sample=True, temperature=sampling.temperature, top_k=0, top_p=1.0, max_new_tokens=sampling.max_new_tokens)
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, eos_token_id=list(sampling.stop_ids), pad_token_id=PAD, **options)
    made = out[:, longest:].cpu()
    stopped = torch.isin(made, torch.tensor(sampling.stop_ids))
    first = torch.where(stopped.any(1), stopped.int().argmax(1) + 1, made.shape[1])
    return int(first.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny and once: shows that the benchmark runs, measures nothing")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.smoke:
        args.prompts, args.rollouts, args.repeats = 4, 2, 1
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, rng.integers(12, 29)) for _ in range(args.prompts)]
    model = make_model(0).eval().to(args.device)
    sampling = Sampling(max_new_tokens=32, stop_ids=(*range(31), EOS))
    engine = TransformersEngine(model, sampling, PAD)
    speeds = {"engine": [], "generate": []}
    for repeat in range(args.repeats + 1):
        start = time.perf_counter()
        tokens = engine_tokens(engine, prompts, args.rollouts, step=repeat)
        speeds["engine"].append(tokens / (time.perf_counter() - start))
        start = time.perf_counter()
        tokens = generate_tokens(model, prompts, args.rollouts, sampling)
        speeds["generate"].append(tokens / (time.perf_counter() - start))
    speeds = {name: values[1:] for name, values in speeds.items()}  # the first of each warms up
    ratios = [ours / theirs for ours, theirs in zip(speeds["engine"], speeds["generate"], strict=True)]
    print(
        f"{args.prompts} prompts × {args.rollouts} rollouts, {args.threads} threads, {args.device}, torch {torch.__version__}"
    )
    for name, values in speeds.items():
        print(f"{name:>9}  {statistics.median(values):9.0f} tokens/s   {min(values):.0f} … {max(values):.0f}")
    print(f"{'ratio':>9}  {statistics.median(ratios):9.2f}            {min(ratios):.2f} … {max(ratios):.2f}")
    row = {
        "vs_generate": statistics.median(ratios),
        "vs_generate_min": min(ratios),
        "vs_generate_max": max(ratios),
        "tokens_per_s": statistics.median(speeds["engine"]),
        "generate_tokens_per_s": statistics.median(speeds["generate"]),
        "threads": args.threads,
        "device": args.device,
    }
    append_results("engine.py", row, smoke=args.smoke)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
