"""Tokens per second of the engines beside ``model.generate``, on the starter's shape (0.53 M parameters), sync and idle time.

All sides sample the same number of rollouts of the same prompts with the same stop ids and length limit, each in turn and
several times; a token counts once per rollout, its stop id included. Random weights put about 1/8 of the probability on the
stop ids, so lengths are near geometric with mean 8, as on short problems. vLLM joins in where it is installed, once with a seed
per rollout and once with a seed per round. ``sync`` is the time to take new weights; ``idle`` the share of row-steps in which a
row that could have decoded had ended already or not begun.

    python benchmarks/engine.py [--smoke] [--prompts 64] [--rollouts 8] [--threads 1] [--device cpu]
"""

import argparse
import importlib.util
import json
import statistics
import tempfile
import time

import numpy as np
import torch
from common import append_results, print_table

from vipfast import streams
from vipfast.engine.base import Request, Sampling
from vipfast.engine.transformers import TransformersEngine
from vipfast.starter.model import make_model

EOS, PAD = 256, 257


def measure(engine, model, prompts: list[np.ndarray], rollouts: int, step: int, slots: int) -> dict[str, float]:
    """One round of every prompt and the sync after it; ``slots`` is how many rows the engine decodes at once."""
    start = time.perf_counter()
    engine.submit([Request(i, tokens, f"p{i}", step, 0, rollouts, streams.TRAIN) for i, tokens in enumerate(prompts)])
    tokens = steps = 0
    while engine.pending:
        tokens += sum(len(rollout.tokens) for rollout in engine.step())
        steps += 1
    ended = time.perf_counter()
    engine.sync(model.named_parameters())
    idle = 1 - tokens / (steps * min(slots, len(prompts) * rollouts))
    return {"tokens_per_s": tokens / (ended - start), "sync_s": time.perf_counter() - ended, "idle": idle}


def vllm_engines(model, sampling: Sampling, device: str, positions: int) -> tuple[dict[str, object], int]:
    """vLLM with either way to seed, over one and the same engine, and its rows at once."""
    from vipfast.engine.merge import PlainWeights
    from vipfast.engine.vllm import VllmEngine
    from vipfast.engine.vllm_launch import launch

    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        llm, params = launch(
            folder, sampling, dtype="float32", device=device, positions=positions, memory=0.5, parallel=1, sleeps=False
        )
    plain, engines = PlainWeights(model), {}
    for seeds in ("rollout", "engine"):
        engines[f"vllm, {seeds} seeds"] = VllmEngine(llm, params, sampling, positions, plain, seeds=seeds, device=device)
        engines[f"vllm, {seeds} seeds"].sync(model.named_parameters())
    return engines, llm.vllm_config.scheduler_config.max_num_seqs


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
    engines, slots = {"transformers": TransformersEngine(model, sampling, PAD)}, {}
    if importlib.util.find_spec("vllm") is not None:
        more, rows = vllm_engines(model, sampling, args.device, positions=64)
        engines |= more
        slots = dict.fromkeys(more, rows)
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in (*engines, "generate")}
    for repeat in range(args.repeats + 1):
        for name, engine in engines.items():
            seen[name].append(measure(engine, model, prompts, args.rollouts, repeat, slots.get(name, 10**9)))
        start = time.perf_counter()
        tokens = generate_tokens(model, prompts, args.rollouts, sampling)
        seen["generate"].append({"tokens_per_s": tokens / (time.perf_counter() - start)})
    seen = {name: values[1:] for name, values in seen.items()}  # the first of each warms up
    middle = lambda name, key: statistics.median(values[key] for values in seen[name])  # noqa: E731
    table = [("", "tokens/s", "from", "to", "sync ms", "idle")]
    for name, values in seen.items():
        speeds = [value["tokens_per_s"] for value in values]
        more = (f"{1e3 * middle(name, 'sync_s'):.1f}", f"{middle(name, 'idle'):.0%}") if name in engines else ("", "")
        table.append((name, f"{statistics.median(speeds):.0f}", f"{min(speeds):.0f}", f"{max(speeds):.0f}", *more))
    title = (
        f"{args.prompts} prompts × {args.rollouts} rollouts, {args.threads} threads, {args.device}, torch {torch.__version__}"
    )
    print_table(title, table)
    ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(seen["transformers"], seen["generate"], strict=True)]
    print(f"transformers / generate  {statistics.median(ratios):.2f}   {min(ratios):.2f} … {max(ratios):.2f}")
    row = {
        "vs_generate": statistics.median(ratios),
        "vs_generate_min": min(ratios),
        "vs_generate_max": max(ratios),
        "tokens_per_s": middle("transformers", "tokens_per_s"),
        "sync_s": middle("transformers", "sync_s"),
        "idle": middle("transformers", "idle"),
        "generate_tokens_per_s": middle("generate", "tokens_per_s"),
        "threads": args.threads,
        "device": args.device,
    }
    for name in engines.keys() - {"transformers"}:
        key = name.removesuffix(" seeds").replace(", ", "_")
        row |= {f"{key}_{what}": middle(name, what) for what in ("tokens_per_s", "sync_s", "idle")}
    append_results("engine.py", row, smoke=args.smoke)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
