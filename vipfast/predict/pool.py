"""Which prompts a predictor's state was made with, and what to say when a resumed run has others."""

import warnings
from collections.abc import Iterable, Sequence
from functools import cached_property

from vipfast.streams import uid_hash


class Pool:
    """The uids of the prompts a run may plan, in any order; none means "not known", which is never compared."""

    def __init__(self, uids: Sequence[str]):
        self.uids = uids

    @cached_property
    def fingerprint(self) -> int:
        """0 for a pool that is not known, else an integer that does not depend on the order."""
        return sum(uid_hash(uid) for uid in set(self.uids)) % 2**64

    def state_dict(self) -> dict:
        return {"pool": self.fingerprint}

    def load_state_dict(self, state: dict, observed: Iterable[str]) -> None:
        """Warn where the state's pool is another one, counting how many prompts have results (``observed``) in the state."""
        if not (self.fingerprint and state["pool"]) or self.fingerprint == state["pool"]:
            return
        mine, theirs = set(self.uids), set(observed)
        known = len(mine & theirs)
        warnings.warn(
            f"the predictor's state was made with another pool of prompts: {known} of the {len(mine)} prompts here have "
            f"results in it, matched by uid, and the other {len(mine) - known} start at the prior; results of "
            f"{len(theirs - mine)} prompts that are not here any more are kept",
            stacklevel=4,
        )
