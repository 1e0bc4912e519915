"""vipfast: RL with verifiable rewards that spends a fixed rollout budget where it teaches.

``Trainer(Config(...), prompts=..., reward=callable).run()`` is the whole library; importing it loads no torch.
"""

from vipfast.config import Config

__all__ = ["Config", "Trainer"]
__version__ = "0.1.0"


def __getattr__(name: str):
    """Import Trainer, and torch with it, only when it is asked for."""
    if name == "Trainer":
        from vipfast.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
