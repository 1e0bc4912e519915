"""Values of options that stand for something, under the names by which code speaks of them."""

PYTHON = "python"
"""The reward of a run to which a function was handed as Trainer(reward=…) in Python."""

CUSTOM = "custom"
"""The task of a run whose prompts were handed to Trainer in Python."""

REASONING_GYM = "reasoning_gym:"
"""How the name of a procedural task begins."""
