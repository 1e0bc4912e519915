"""Tools around the transformers engine: a policy's own rollouts with real calls, and runs that train on them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from calling_policy import TOKENIZER
from dialogue import call
from pyarrow import parquet

from vipfast import Config, Trainer, streams
from vipfast.engine.base import Request, Sampling
from vipfast.engine.transformers import TransformersEngine
from vipfast.policy import load_policy
from vipfast.rewards.answers import final_answers
from vipfast.tools import calls as calls_module
from vipfast.tools import engine as engine_module
from vipfast.tools import prompt as prompt_module
from vipfast.tools.calculator import Calculator
from vipfast.tools.engine import ToolEngine
from vipfast.types import Finish

CORPUS = Path(__file__).parents[1] / "data" / "corpus.jsonl"
NEW = 160
PROBLEMS = [f"\n\n{a}+{b}=" for a, b in ((2, 3), (7, 1), (4, 4), (9, 2))]


@pytest.fixture(scope="module")
def policy(calling_folder):
    return load_policy(Config(model=str(calling_folder), device="cpu", dtype="float32")).eval()


class Beside(Calculator):
    beside = True


def plain(policy, **options):
    stops = (TOKENIZER.eos_token_id,)
    return TransformersEngine(policy, Sampling(NEW, stop_ids=stops, seed=1), TOKENIZER.pad_token_id, **options)


def with_tools(policy, tool=Calculator, max_turns=3, **options):
    limits = dict(max_new_tokens=NEW, max_turns=max_turns, max_tool_tokens=40, time_s=5.0)
    return ToolEngine(plain(policy, **options), [tool()], TOKENIZER, **limits)


def request(slot, count=8, first=0):
    return Request(slot, np.array(TOKENIZER.encode(PROBLEMS[slot])), f"uid{slot}", 1, first, count, streams.TRAIN)


def drained(engine, *requests):
    engine.submit(requests)
    rows = []
    while engine.pending:
        rows += engine.step()
    return {(row.slot, row.index): row for row in rows}


@pytest.fixture(scope="module")
def rollouts(policy):
    return drained(with_tools(policy), *map(request, range(4)))


def tokens(rows):
    return {name: row.tokens.tolist() for name, row in rows.items()}


def test_calls_happen_and_so_do_turns_without(rollouts):
    calls = [row.use.calls for row in rollouts.values()]
    assert len(calls) == 32 and 4 <= np.count_nonzero(calls) <= 28


def test_without_calls_rollouts_are_those_of_the_engine_alone_to_the_last_bit(policy):
    load = load_policy(Config(device="cpu", dtype="float32")).eval()  # the starter as it comes writes no calls
    alone, around = (drained(make(load), *map(request, range(4))) for make in (plain, with_tools))
    assert tokens(alone) == tokens(around)
    for name, row in alone.items():
        assert row.finish == around[name].finish
        np.testing.assert_array_equal(row.logp, around[name].logp)


def test_log_probs_of_sampled_ids_are_those_of_one_pass_over_the_whole_rollout(policy, rollouts):
    gaps = []
    for (slot, _), row in rollouts.items():
        prompt = TOKENIZER.encode(PROBLEMS[slot])
        with torch.no_grad():
            logits = policy(torch.tensor([[*prompt, *row.tokens]])).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(row.tokens)[:, None])[:, 0].numpy()
        gaps.append(np.abs(logp - row.logp)[row.sampled])
        assert (row.logp[~row.sampled] == 0).all()
    assert np.concatenate(gaps).max() < 1e-4 and np.concatenate(gaps).mean() < 1e-5


def test_texts_do_not_depend_on_rounds_threads_or_rows_in_flight(policy, rollouts):
    engine = with_tools(policy)
    rounds = drained(engine, *(request(slot, 3) for slot in range(4))) | drained(
        engine, *(request(slot, 5, first=3) for slot in (3, 1, 0, 2))
    )
    assert tokens(rounds) == tokens(rollouts)
    assert tokens(drained(with_tools(policy, Beside, max_rows=5), *map(request, range(4)))) == tokens(rollouts)


def test_what_tools_put_in_is_cut_out_of_the_answer(rollouts):
    for row in rollouts.values():
        if row.finish == Finish.STOP and row.use.calls:
            assert "tool_response" in TOKENIZER.decode(row.tokens[~row.sampled])
            assert len(row.last_turn) < 100 and row.sampled[-len(row.last_turn) :].all()


def test_the_store_keeps_nothing_of_turns_gone(policy):
    engine = with_tools(policy)
    held = []
    for step in range(2):
        requests = [Request(r.slot, r.tokens, r.uid, step, 0, 8, streams.TRAIN) for r in map(request, range(4))]
        drained(engine, *requests)
        held.append((len(engine.engine._blocks), len(engine.engine._prompts), len(engine._rollouts)))
    assert held == [(1, 4, 0)] * 2


def reward(completions, answers, metadata):
    """1 for the right sum, less the farther off, 0 for no number: groups without any spread would show nothing."""
    found = [next(iter(final_answers(text)), None) for text in completions]
    return [1 / (1 + abs(float(x) - float(y))) if x and x.isdigit() and len(x) < 9 else 0.0 for x, y in zip(found, answers)]


@pytest.fixture
def no_offer(monkeypatch):
    monkeypatch.setattr(prompt_module, "OFFER", "")  # the fine-tuned starter has seen none


def trained(folder, model, steps, num_prompts=20, **options):
    sums = [(a, b) for a in range(1, 6) for b in range(1, 5)][:num_prompts]
    prompts = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    defaults = dict(
        model=model, tools=("calculator",), max_new_tokens=NEW, max_turns=3, steps=steps, prompts_per_step=4,
        rollouts_per_prompt=6, eval_every=0, eval_samples=1, heldout_prompts=2, checkpoint_every=0, device="cpu", threads=1,
        output_dir=str(folder), sample_rollouts=32, allocator="vigor", vigor_num_rounds=2, max_tool_tokens=40,
    )  # fmt: skip
    assert Trainer(Config(**(defaults | options)), prompts=prompts, reward=reward).run() == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("steps", "rule"), [(5, {"allocator": "uniform"}), (1, {"round_mode": "early"})], ids=["uniform", "early"]
)
def test_a_few_steps_of_training_with_calls(tmp_path, calling_folder, no_offer, steps, rule):
    lines = trained(tmp_path / "run", str(calling_folder), steps, **rule)[1:]
    assert len(lines) == steps
    for line in lines:
        assert line["tools/calls_mean"] > 0 and 1 < line["tools/turns_mean"] <= 3 and line["time/tools_s"] > 0
        assert 0 <= line["tools/errors_frac"] <= 1 and line["tools/precision@3"] is None
        assert line["policy/sync_gap"] < 1e-5 and line["train/skipped"] == 0
    assert sum(line["train/trained_rollouts"] for line in lines) > 0 and any(line["train/grad_norm"] > 0 for line in lines)
    rows = parquet.read_table(tmp_path / "run" / "rollouts" / f"{steps}.parquet").to_pylist()
    answered = [row["completion"] for row in rows if "<tool_response>" in row["completion"]]
    assert answered and all("<tool_call>" in text for text in answered)
    spent = sum(len(TOKENIZER.encode(row["completion"])) for row in rows)
    assert 0 < lines[-1]["budget/tokens"] < spent  # what tools put in was not generated


def test_the_starter_as_it_comes_trains_with_tools_it_never_calls(tmp_path):
    lines = trained(
        tmp_path / "run", "starter", 1, 4, max_new_tokens=16, max_tool_tokens=8, prompts_per_step=2, allocator="uniform"
    )
    assert [line["tools/calls_mean"] for line in lines[1:]] == [0]
    assert all(line["tools/turns_mean"] == 1 and line["tools/errors_frac"] is None for line in lines[1:])


def test_a_step_of_training_with_searches_tells_their_precision(tmp_path, monkeypatch):
    """Every first turn that ends by itself searches; of the two passages found, one is the problem's own."""
    search = lambda text: calls_module.calls(call("heron in reeds", "search", "query"))  # noqa: E731
    monkeypatch.setattr(engine_module, "calls", search)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    prompts = [{"prompt": f"sort {a} {b} 1 =", "answer": "1", "gold_ids": ["7", "ferry"]} for a in (2, 3) for b in (4, 5)]
    config = Config(
        tools=("search",), search_corpus=str(CORPUS), search_k=2, max_new_tokens=140, max_tool_tokens=80, max_turns=2, steps=1,
        prompts_per_step=4, rollouts_per_prompt=4, allocator="uniform", checkpoint_every=0, device="cpu", threads=1,
        output_dir=str(tmp_path / "run"), sample_rollouts=16,
    )  # fmt: skip
    assert Trainer(config, prompts=prompts, reward=reward).run() == 0
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["tools/precision@2"] == line["tools/recall@2"] == line["tools/f1@2"] == 0.5
    assert line["tools/errors_frac"] == 0 and line["tools/calls_mean"] > 0
    rows = parquet.read_table(tmp_path / "run" / "rollouts" / "1.parquet").to_pylist()
    assert any("[1] Twin A\nThe heron nests in reeds.\n\n[2] Twin B" in row["completion"] for row in rows)
