"""What a run is expected to take: passes counted by hand as the learner cuts them, and one small run measured."""

import json
import subprocess
import sys

from vipfast import memory
from vipfast.config import Config
from vipfast.expected import Draw, Pool, expected_passes
from vipfast.resolve import resolve

BASE = dict(device="cpu", threads=1, output_dir="mine", allocator="uniform", max_new_tokens=11)


def passes(lengths, draws, **options):
    config = resolve(Config(**{**BASE, "prompts_per_step": len(lengths), **options})).config
    return expected_passes(config, Pool(100, 10, sum(lengths) / len(lengths), "", lengths), draws)


def test_a_step_of_few_rollouts_is_a_single_pass_of_its_own_tokens():
    # Inputs of 20 + 11 - 1 tokens, 2 · 3 of them.
    assert passes([20, 20], [Draw(2, 3, 3, 6)]) == (180, False)
    assert passes([20, 20], [Draw(2, 1, 1, 2), Draw(1, 4, 4, 4)]) == (180, False)  # 1 + 4 rollouts of one, 1 of the other


def test_the_budget_bounds_a_pass_and_a_longer_rollout_stands_alone():
    assert passes([20, 20], [Draw(2, 3, 3, 6)], micro_batch_tokens=100) == (90, True)
    assert passes([20, 20], [Draw(2, 3, 3, 6)], micro_batch_tokens=7) == (30, True)


def test_rollouts_of_unlike_length_share_no_pass():
    # 4 rows of 30 and 4 of 330: padding the short ones would cost 1,200 tokens, another pass 96.
    assert passes([20, 320], [Draw(2, 4, 4, 8)]) == (1320, True)
    packed = passes([20, 320], [Draw(2, 4, 4, 8)], packing="varlen")
    assert packed == (4 * 30 + 4 * 330, False)


def test_mini_batches_divide_what_a_pass_can_hold():
    assert passes([20, 20], [Draw(2, 4, 4, 8)], updates_per_step=2) == (120, False)


def test_prompts_that_are_not_at_hand_are_as_long_as_their_bound():
    config = resolve(Config(**BASE, prompts_per_step=2)).config
    assert expected_passes(config, Pool(None, 0, 50, ""), [Draw(2, 3, 3, 6)]) == (360, False)


def test_a_step_of_many_passes_fills_its_largest():
    config = resolve(Config(**BASE, prompts_per_step=10**5, micro_batch_tokens=8192)).config
    assert expected_passes(config, Pool(10**5, 0, 20, "", range(10, 30)), [Draw(10**5, 8, 8, 8 * 10**5)]) == (8192, True)


MEASURED = """
import sys, zlib
from transformers import Qwen2Config, Qwen2ForCausalLM
from vipfast import Config, Trainer
from vipfast.expected import expected_memory
from vipfast.policy import model_path, read_tokenizer

sizes = dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2)
Qwen2ForCausalLM(Qwen2Config(vocab_size=258, tie_word_embeddings=True, **sizes)).save_pretrained("model")
read_tokenizer(model_path("starter")).save_pretrained("model")
coin = lambda completions, answers, metadata: [float(zlib.crc32(text.encode()) % 2) for text in completions]
config = Config(
    model="model", steps=2, prompts_per_step=8, rollouts_per_prompt=8.0, allocator="uniform", max_new_tokens=48, threads=1,
    heldout_prompts=4, eval_samples=1, eval_every=0, device="cpu", output_dir="run", prompt_template="plain",
)
prompts = [{"prompt": f"What is {i} + {i}?", "answer": "1"} for i in range(100, 200)]
trainer = Trainer(config, prompts=prompts, reward=coin)
trainer.run()
print(max(expected_memory(trainer.config, trainer.task).values()))
"""


def test_a_small_run_takes_what_is_expected_within_half(tmp_path):
    done = subprocess.run([sys.executable, "-c", MEASURED], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = float(done.stdout.split()[-1]) + memory.PROCESS_BYTES
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    used = lines[-1]["memory/peak_bytes"]
    assert lines[-1]["train/trained_rollouts"] > 48
    assert expected / 1.5 < used < expected * 1.5
    # Mostly of the update, without which it would be near whatever the formula says.
    assert used > 1.5 * (memory.PROCESS_BYTES + memory.LIBRARY_BYTES)
