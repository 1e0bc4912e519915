"""vipfast: RL with verifiable rewards that spends a fixed rollout budget where it teaches.

``Trainer(Config(...), prompts=..., reward=callable).run()`` is the whole library; importing it loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vipfast.config import Config
    from vipfast.trainer import Trainer

__all__ = ["Config", "Trainer"]
__version__ = "0.1.0"

_HOMES = {"Config": "vipfast.config", "Trainer": "vipfast.trainer"}


def __getattr__(name: str):
    """Import Config, or Trainer and torch with it, only when it is asked for: allocators and predictors need neither."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
