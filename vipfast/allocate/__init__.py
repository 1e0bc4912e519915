"""How many rollouts each prompt of a step gets: ``Uniform``, ``Vip`` or ``Vigor``, behind one protocol (base.py).

The rules know no options, ranks or torch, so that another trainer can use them; ``vipfast.allocation`` makes a run's.
"""

from vipfast.allocate.base import Allocator
from vipfast.allocate.tokens import Lengths
from vipfast.allocate.uniform import Uniform
from vipfast.allocate.vigor import Schedule, Vigor
from vipfast.allocate.vip import Vip

__all__ = ["Allocator", "Lengths", "Schedule", "Uniform", "Vigor", "Vip"]
