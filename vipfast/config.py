"""Every option of a run, frozen. The command line, ``config.yaml`` and the notebook all speak these names.

The options stand in groups (vipfast/options/), each with its facts: bounds, whether a resumed run may change it, what leaves it
unread. This module imports neither torch nor a command-line library. ``None`` means "decided by the model or the task";
``resolve`` (vipfast/resolve.py) fills such fields in and prints what it chose and why.
"""

from dataclasses import dataclass

from vipfast import config_rules
from vipfast.options.allocation import AllocationOptions
from vipfast.options.facts import facts_of
from vipfast.options.grading import GradingOptions
from vipfast.options.machine import MachineOptions
from vipfast.options.model import ModelOptions
from vipfast.options.run import RunOptions
from vipfast.options.sampling import SamplingOptions
from vipfast.options.task import TaskOptions
from vipfast.options.update import UpdateOptions


@dataclass(frozen=True)
class Config(
    config_rules.NamedOptions,
    RunOptions,
    UpdateOptions,
    GradingOptions,
    SamplingOptions,
    AllocationOptions,
    MachineOptions,
    ModelOptions,
    TaskOptions,
):
    """Options of one training run: all groups as one flat namespace, the last named coming first."""

    def __post_init__(self):
        config_rules.take_lists(self)
        config_rules.check(self)


FACTS = facts_of(Config)
"""What is known of each option besides its type and default, by name."""
