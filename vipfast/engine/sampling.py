"""Drawing ids from logits with given uniforms, and the ids at which a rollout stops."""

from collections.abc import Sequence
from typing import Any

import torch

from vipfast.engine.base import Sampling
from vipfast.errors import NonFiniteError, UsageError


def sample(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one id per row by inverting the cumulative distribution at the row's own uniform.

    Args:
        logits: [R, V], raw logits in any floating type.
        uniform: float64 [R] in [0, 1).
        sampling: its temperature divides the logits; its top_p restricts the draw to the smallest set of likeliest ids
            whose probability reaches top_p.

    Returns:
        ids int64 [R], and their log-probs [R]: log_softmax(logits / temperature) over the whole vocabulary in float32
        (float64 for float64 logits). Under top_p < 1 the log-prob is still the full distribution's, which is what the
        trainer computes; the importance ratio then leaves out the truncation.

    Raises:
        NonFiniteError: a logit is NaN or +inf, or all of a row are -inf.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    logp = torch.log_softmax(logits / sampling.temperature, dim=-1)
    prob = logp.double().exp()  # not in place: double() of float64 is logp itself
    if sampling.top_p < 1:
        ranked, order = prob.sort(dim=-1, descending=True, stable=True)
        ranked[ranked.cumsum(-1) - ranked >= sampling.top_p] = 0
        prob = torch.zeros_like(prob).scatter_(-1, order, ranked)
    # -1 where the probability is 0: such an id is never the first to pass the target, whatever the sums round to
    cumulative = prob.cumsum(-1).masked_fill_(prob == 0, -1)
    total = cumulative.amax(-1)
    if not bool((total > 0).all()):
        raise NonFiniteError(
            f"the policy gave non-finite logits for {int((~(total > 0)).sum())} of {len(total)} rows, so nothing can be "
            "sampled: its weights hold NaN or inf, or its type overflows; lower the learning rate or use --dtype float32"
        )
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = (cumulative > target[:, None]).to(torch.int8).argmax(-1)
    return ids, logp.gather(-1, ids[:, None])[:, 0]


def stop_ids(tokenizer: Any, generation_config: Any = None, stop: Sequence[str] = ()) -> tuple[int, ...]:
    """The ids that end a rollout: the tokenizer's eos, the generation config's eos ids, and the ``--stop`` strings.

    Args:
        tokenizer: anything with ``eos_token_id`` and ``encode(text, add_special_tokens=False)``.
        generation_config: anything with ``eos_token_id`` (an id, a list of ids or None), or None.
        stop: strings, each of which must be a single token.

    Returns:
        Sorted ids without repeats.

    Raises:
        UsageError: a stop string is not exactly one token.
    """
    ids = set()
    for source in (tokenizer, generation_config):
        eos = getattr(source, "eos_token_id", None)
        ids.update(() if eos is None else [eos] if isinstance(eos, int) else eos)
    for text in stop:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        if len(encoded) != 1:
            raise UsageError(
                f"--stop {text!r} is {len(encoded)} tokens {list(encoded)[:8]} for this tokenizer; "
                "give a string that is a single token, such as its end-of-turn token"
            )
        ids.update(encoded)
    return tuple(sorted(int(i) for i in ids))
