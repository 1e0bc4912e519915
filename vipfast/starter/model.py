"""The starter's body and tokenizer: a Qwen2 model of half a million parameters over raw bytes."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

EOS, PAD = "<eos>", "<pad>"
EOS_ID, PAD_ID, VOCABULARY = 256, 257, 258


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte and no merges, so every UTF-8 text survives encode and decode; ``<eos>`` is 256, ``<pad>`` 257."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=EOS,  # there are no unknown bytes; left out, transformers' class for qwen2 adds an id past the vocabulary
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        padding_side="left",
    )


def make_model(seed: int) -> Qwen2ForCausalLM:
    """A freshly initialised model in float32: hidden 128, 3 layers of 4 heads, tied embeddings, 4 096 positions."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        attention_dropout=0.0,
        use_cache=True,
    )
    return Qwen2ForCausalLM(config)


def sensitise(model: Qwen2ForCausalLM, factor: float = 3.0) -> None:
    """Multiply each layer's norm gains by ``factor`` and divide the matrices they feed by it: the same function, moved further
    by a training step. AdamW moves every weight by about the learning rate, and rates chosen for large models hardly move
    this one: without it, reinforcement learning at 1e-4 takes some 60 steps to come as far as in 30 with it.
    """
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, readers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                norm.weight.mul_(factor)
                for reader in readers:
                    reader.weight.div_(factor)


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a ``from_pretrained`` folder in float32, with a generation config that names the stop ids and nothing else."""
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    # Written through a private temporary file; a wheel would keep its mode.
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
