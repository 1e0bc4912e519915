"""How completions are sampled, and the tools that they may call."""

from dataclasses import dataclass
from typing import Literal

from vipfast.options import idle
from vipfast.options.facts import option


@dataclass(frozen=True)
class SamplingOptions:
    """How completions are sampled, and the tools that they may call."""

    max_new_tokens: int | None = option(None, low=1, high=10**6, travels="to_training")
    """Length limit of a completion; the model's default unless given (16 for the starter, 1024 otherwise)."""
    max_prompt_tokens: int | None = option(None, low=1, high=10**7)
    """Longer prompts are dropped with a count; what the model's positions leave unless given."""
    temperature: float = option(1.0, travels="to_training")
    """Divides the logits in sampler, trainer and reference alike."""
    top_p: float = option(1.0, travels="to_training")
    """Nucleus of the sampler; below 1 the log-probs stay those of the full distribution."""
    stop: tuple[str, ...] = option((), travels="to_training")
    """Further stop strings; each must be a single token of the tokenizer."""
    tools: tuple[Literal["calculator", "python", "search"], ...] = option((), travels="to_training")
    """Tools that a rollout may call between turns: calculator, python (in the code sandbox), search (in --search-corpus)."""
    max_turns: int = option(4, low=2, high=10**4, travels="to_training", idle=idle.without_tools)
    """With --tools: turns of the policy in a rollout; one whose last turn ends with a call counts as cut by its length."""
    max_tool_tokens: int | None = option(None, low=1, high=10**6, travels="to_training", idle=idle.without_tools)
    """With --tools: tokens of one output, of longer ones beginning and end; a quarter of max_new_tokens, which counts outputs
    too, but at most 512 unless given."""
    tool_timeout: float = option(10.0, low=1e-3, high=3600, travels="to_training", idle=idle.without_tools)
    """With --tools: seconds a call may take before it is answered with an error."""
    search_corpus: str | None = option(None, travels="to_training", idle=(idle.without_tools, idle.without_search))
    """With --tools search: a .jsonl/.parquet/.txt file of passages (text, optionally id and title), or a folder of them."""
    search_k: int = option(3, low=1, high=1000, travels="to_training", idle=(idle.without_tools, idle.without_search))
    """With --tools search: passages that a search returns."""
