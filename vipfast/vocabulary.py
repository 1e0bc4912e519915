"""How many of a model's ids its tokenizer knows: heads are often padded, Qwen2.5's to 151,936 rows for 151,665 ids.

The number stands on the model, where sampler, trainer and reference find the same one: an id that counts in one of their
distributions and not in another's would part their log-probs.
"""

from typing import Any

from vipfast.errors import UsageError


def limit_to_tokenizer(model: Any, tokenizer: Any, name: str) -> None:
    """Give ids that the tokenizer does not know a probability of zero, wherever ``model`` is sampled from or trained.

    Args:
        model: a causal language model of transformers, before LoRA wraps it.
        tokenizer: anything with ``get_vocab()``. Ids below its highest one stay, also those that it leaves out.
        name: the model's, as given by --model.

    Raises:
        UsageError: the tokenizer knows ids for which the model has no row.
    """
    num_ids = max(tokenizer.get_vocab().values()) + 1
    num_rows = model.get_output_embeddings().weight.shape[0]
    num_embedded = model.get_input_embeddings().weight.shape[0]
    if num_ids > min(num_rows, num_embedded):
        raise UsageError(
            f"--model {name}: its tokenizer gives ids up to {num_ids - 1}, and the model has {num_embedded} embeddings and "
            f"{num_rows} rows of logits; give the tokenizer that belongs to it, or add rows with "
            f"model.resize_token_embeddings({num_ids}) and save the model anew"
        )
    if num_ids < num_rows:
        model.num_known_ids = num_ids


def num_known_ids(model: Any) -> int | None:
    """Of a model, LoRA-wrapped or not: ids from this one on are padding; None where there is no padding."""
    return getattr(model.get_base_model() if hasattr(model, "get_base_model") else model, "num_known_ids", None)
