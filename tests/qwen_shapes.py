"""Qwen2.5 by its sizes alone, for plans of memory: no weights."""

import json

# The models' own config.json, as far as it tells sizes, and the parameters their checkpoints hold.
SHAPES = {
    "0.5B": (dict(hidden=896, layers=24, heads=14, kv=2, intermediate=4864, vocab=151936, tied=True), 494_032_768),
    "1.5B": (dict(hidden=1536, layers=28, heads=12, kv=2, intermediate=8960, vocab=151936, tied=True), 1_543_714_304),
    "7B": (dict(hidden=3584, layers=28, heads=28, kv=4, intermediate=18944, vocab=152064, tied=False), 7_615_616_512),
}


def folder(path, name):
    """A folder below ``path`` with what a dry run reads of the model, and its name as text."""
    shape, _ = SHAPES[name]
    sizes = dict(
        hidden_size=shape["hidden"], num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"], intermediate_size=shape["intermediate"], vocab_size=shape["vocab"],
        tie_word_embeddings=shape["tied"], model_type="qwen2", max_position_embeddings=32768,
    )  # fmt: skip
    path = path / f"Qwen2.5-{name}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(sizes))
    (path / "tokenizer.json").write_text("{}")
    return str(path)
