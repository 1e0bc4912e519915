"""The plan a dry run prints: counts worked by hand, and no torch behind it."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vipfast import cli, memory
from vipfast.config import Config
from vipfast.config_file import load_yaml
from vipfast.dry_run import Draw, draws_per_round, num_evaluations, plan, read_pool
from vipfast.model_facts import ModelFacts, read_facts
from vipfast.resolve import resolve

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
TINY = ModelFacts("by hand", 1000, 2, 8, 16, 4, 2, 2, 50, 64)
LIBRARIES = {"libraries loaded with the model": memory.LIBRARY_BYTES}
RUN = dict(device="cpu", threads=1, output_dir="mine")


def rows(config, title):
    tables = plan(resolve(config, ask_torch=False).config)
    return next(table.rows for table in tables if table.title.startswith(title))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_passes_a_dry_run(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert cli.main(["--config", str(recipe), "--dry-run"]) == 0
    out = capsys.readouterr().out
    for title in ("prompts", "rounds of", "tokens", "memory"):
        assert f"\n{title}" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("stem", "gigabytes"), [("gsm8k-0.5b-1gpu", 24), ("dapo-1.5b-8gpu", 141)])
def test_recipe_fits_the_gpu_it_names(stem, gigabytes, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    path = ROOT / "recipes" / f"{stem}.yaml"
    assert f"{gigabytes} GB" in path.read_text()
    totals = [size for _, part, size in rows(load_yaml(path), "memory") if part.startswith("= in all")]
    assert len(totals) == 6  # always, load, generate, update, sync, evaluate
    assert all(float(size.removesuffix(" GB")) < gigabytes for size in totals)


def test_default_recipe_is_the_default():
    config, default = (resolve(c, ask_torch=False).config for c in (load_yaml(ROOT / "recipes" / "default.yaml"), Config()))
    changed = {name for name in vars(config) if getattr(config, name) != getattr(default, name)}
    assert changed <= {"threads", "output_dir"}


def test_dry_run_imports_no_torch(tmp_path):
    code = (
        "import sys\nfrom vipfast.cli import main\n"
        "code = main(['--dry-run', '--allocator', 'vip'])\n"
        "print(code, sorted({'torch', 'transformers', 'sentence_transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "0 []"
    assert not list(tmp_path.iterdir())


def test_vigor_rounds_of_the_paper():
    config = resolve(Config(**RUN, prompts_per_step=160)).config
    assert draws_per_round(config) == [Draw(160, 2, 2, 320), Draw(80, 4, 4, 320), Draw(40, 8, 8, 320), Draw(20, 16, 16, 320)]


def test_uniform_spends_a_budget_that_does_not_divide():
    config = resolve(Config(**RUN, allocator="uniform", rollouts_per_prompt=7.5)).config
    assert draws_per_round(config) == [Draw(64, 7, 8, 480)]


def test_vip_shows_its_bounds():
    config = resolve(Config(**RUN, allocator="vip", estimator="dr_grpo")).config
    assert draws_per_round(config) == [Draw(64, 3, 32, 512)]


@pytest.mark.parametrize(
    ("steps", "every", "count"),
    # Steps 0, 20, 40, 60; 0, 20, 40, 50; 0, 60; 0.
    [(60, 20, 4), (50, 20, 4), (60, 0, 2), (0, 20, 1), (0, 0, 1)],
)
def test_evaluations_at_start_every_so_often_and_end(steps, every, count):
    assert num_evaluations(Config(steps=steps, eval_every=every)) == count


def test_a_budget_in_tokens_is_said_to_be_one():
    config = resolve(Config(**{**RUN, "allocator": "vip"}, budget_unit="tokens", max_rollouts=16)).config
    (table,) = [table for table in plan(config) if table.title == "rounds of vip"]
    assert table.rows == [("1", "64", "2 to 16", "1,024")]
    assert table.notes[0] == "budget: the tokens of 512 rollouts of mean length per step, as expected; drawn: at most"
    assert ("completions, at most", "16,384", f"{60 * 16_384:,}") in rows(config, "tokens")


def test_prompts_and_tokens_of_the_embedded_task():
    config = Config(**RUN, steps=10)
    assert ("in the pool", "4,096") in rows(config, "prompts")
    assert ("in the run", "640 (0.16 epochs)") in rows(config, "prompts")
    # 64 · 8 rollouts of at most 16 tokens; evaluations at 0 and 10, of 512 · 8 rollouts.
    assert ("completions, at most", "8,192", "81,920") in rows(config, "tokens")
    assert ("evaluation, at most (×2)", "", "131,072") in rows(config, "tokens")


def test_prompts_of_a_file_are_counted_without_duplicates(tmp_path):
    path = tmp_path / "sums.jsonl"
    lines = [{"prompt": f"{i} + 1 =", "answer": i + 1} for i in range(10, 30)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *lines]))
    pool = read_pool(Config(task=str(path), heldout_prompts=5, prompts_per_step=4))
    # 20 distinct prompts of 8 bytes; at most a tenth is held out.
    assert (pool.num_train, pool.num_heldout, pool.prompt_tokens) == (18, 2, 8)


def test_dataset_that_is_not_here_is_said_to_be_unknown():
    table = dict(row[:2] for row in rows(Config(**RUN, task="openai/gsm8k"), "prompts"))
    assert table["in the pool"] == "unknown" and table["mean tokens of one"] == "up to 4,080"


def test_the_heads_chunk_is_the_kernels_own():
    from vipfast.kernels.logit_rows import CHUNK_BYTES, CUDA_CHUNK_BYTES

    assert memory.HEAD_CHUNK_BYTES == {"cpu": CHUNK_BYTES, "cuda": CUDA_CHUNK_BYTES}


def test_memory_by_hand():
    config = resolve(Config(**RUN, micro_batch_tokens=10)).config
    parts = memory.estimate(config, TINY, prompt_tokens=4.0, rows={"generate": 3})
    assert parts["always"] == {"weights (float32)": 4000, "Adam state": 8000, **LIBRARIES}
    # Keys and values of 2 layers, 2 heads of 2 numbers, 4 bytes: 64 bytes a token; 3 rollouts of 4 + 16 tokens. One is drawn
    # from log-probs in float32, two rows in float64 and one of bools.
    drawing = {"logits of one position": 3 * 50 * 4, "drawing from them": 3 * 50 * (4 + 8 + 8 + 1)}
    assert parts["generate"] == {"KV cache": 3 * 20 * 64, **drawing}
    # Per token and layer 6·8 + 2·8 + 2·4 + 4·16 = 136 numbers; logits of 10 tokens and 50 ids.
    assert parts["update"] == {
        "gradients": 4000,
        "activations": 10 * 2 * 136 * 4,
        "the head's gradient as it is formed": 4 * 8 * 50,
        "a chunk of logits, and as much twice over to work on it": 3 * 10 * 50 * 4,
        "KV cache": 3 * 20 * 64,
    }
    # Passes that hold 7 tokens at most: half of the activations of one are still malloc's when the next begins.
    fewer = memory.estimate(config, TINY, 4.0, {}, passes=memory.Passes(7, several=True))["update"]
    assert fewer["activations"] == 7 * 2 * 136 * 4 == 2 * fewer["kept by malloc of earlier passes"]


def test_memory_of_checkpointing_packing_and_kernels():
    def update(device="cuda", **options):
        config = resolve(Config(**(RUN | {"device": device}), micro_batch_tokens=10, **options), ask_torch=False).config
        return memory.estimate(config, TINY, 4.0, {})["update"]

    # On CUDA in bfloat16: 4·8 numbers of the residual stream, 8 + 4 of q and k in float32; 2·8 + 2·8 + 2·4 + 4·16 in bfloat16.
    layer = (32 + 12) * 4 + 104 * 2
    assert update()["activations"] == 10 * 2 * layer
    assert update(gradient_checkpointing=True)["activations"] == 10 * (2 * 8 * 4 + layer)
    # One buffer that the kernels work in, rather than three: smaller here than the 8·50 numbers of the head's gradient.
    assert update(lora_rank=1)["a chunk of logits"] == 10 * 50 * 2
    assert update()["the head's gradient once more, multiplied"] == 4 * 8 * 50 and "a chunk of logits" not in update()
    assert update(kernels="off")["a chunk of logits, and as much twice over to work on it"] == 3 * 10 * 50 * 4
    assert update("cpu", packing="varlen")["mask of a packed row"] == 100 * 5
    assert "mask of a packed row" not in update(packing="rectangles")
    assert "the head's gradient as it is formed" not in update(lora_rank=1)


def test_the_estimate_of_activations_is_near_what_autograd_keeps():
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from vipfast.learn.policy import Policy

    sizes = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=100, tie_word_embeddings=True, **sizes))
    facts = ModelFacts("by hand", 0, 6, 64, 256, 4, 2, 16, 100, None)
    for dtype in ("float32", "bfloat16"):
        policy, kept = Policy(model, dtype, "cpu", 1.0, train=True), {}

        def keep(tensor, kept=kept):
            # weights, and bfloat16 copies of them, have no dimension of 11 rows or all their tokens
            if {11, 517} & set(tensor.shape):
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # held, so that no address comes twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16, enabled=policy.autocast):
                # rows below the 64 tokens from which bfloat16 attention asks the processor, not ATEN_CPU_CAPABILITY
                states = policy.body(input_ids=torch.arange(517).view(11, 47) % 100, use_cache=False)[0]
        assert states.requires_grad
        config = Config(device="cpu", dtype=dtype, micro_batch_tokens=517)
        estimate = memory.estimate(config, facts, 4.0, {})["update"]["activations"]
        assert 0.9 < estimate / sum(storage.nbytes() for storage in kept.values()) < 1.1


def test_memory_of_bfloat16_lora_and_reference():
    facts = dataclasses.replace(TINY, num_parameters=3000)
    config = resolve(Config(**RUN, dtype="bfloat16", lora_rank=1, beta=0.1)).config
    # A layer's linear maps have 2·8·(8 + 4) + 3·8·16 = 576 weights.
    assert facts.linear_parameters == 2 * 576
    # Adapters of rank 1: 2·(8 + 8) + 2·(8 + 4) + 3·(8 + 16) = 128 numbers a layer.
    assert TINY.lora_parameters(1) == 256
    assert memory.estimate(config, facts, 4.0, {})["always"] == {
        "weights (float32)": 4 * (3000 - 1152 + 256),
        "frozen layers (bfloat16)": 2 * 1152,
        "bfloat16 copies of the weights": 2 * (50 * 8 + 256),  # of the head and the adapters
        "reference model": 4 * (3000 - 1152) + 2 * 1152,
        "Adam state": 8 * 256,
        **LIBRARIES,
    }
    wide = dataclasses.replace(config, base_dtype="float32")
    assert memory.estimate(wide, facts, 4.0, {})["always"] == {
        "weights (float32)": 4 * 3256,
        "bfloat16 copies of the weights": 2 * 3000,
        "reference model": 4 * 3000,
        "Adam state": 8 * 256,
        **LIBRARIES,
    }


def test_float64_doubles_weights():
    config = resolve(Config(**RUN, dtype="float64")).config
    assert memory.estimate(config, TINY, 4.0, {})["always"] == {
        "weights (float64)": 8000,
        "Adam state": 16000,
        **LIBRARIES,
    }


def test_starter_fits_the_two_gigabytes_promised():
    totals = [size for _, part, size in rows(Config(**RUN), "memory") if part.startswith("= in all")]
    assert all(re.fullmatch(r"[\d.]+ MB|[01]\.\d+ GB", size) for size in totals)


def test_facts_of_the_starter_are_read_from_its_folder():
    assert read_facts("starter").positions == 4096
