"""Which prompts come next: seeded epochs over the pool, each prompt once per epoch, no prompt twice in a step."""

import hashlib
import warnings
from collections.abc import Sequence

import numpy as np

from vipfast import streams
from vipfast.errors import DataError
from vipfast.types import Prompt, Tally


class EpochSelector:
    """Draws the pool in an order hashed from (seed, epoch, prompt_uid), so the dataset's own order does not matter.

    A step that runs over the end of an epoch goes on with the next one; prompts it already holds move to that epoch's end.
    """

    def __init__(self, pool: Sequence[Prompt], seed: int):
        self.pool = list(pool)
        self.seed = seed
        self.hashes_N = np.array([streams.uid_hash(prompt.uid) for prompt in self.pool], dtype=np.uint64)
        digest = hashlib.blake2b(np.sort(self.hashes_N).tobytes(), digest_size=16)
        self.fingerprint = digest.hexdigest()
        self._start(epoch=0, carried=[])

    def _start(self, epoch: int, carried: list[str], position: int = 0) -> None:
        self.epoch, self.carried, self.position = epoch, carried, position
        self.keys_N = streams.keys(streams.ORDER, self.seed, epoch, self.hashes_N)
        self.late_N = np.isin(self.hashes_N, np.array([streams.uid_hash(uid) for uid in carried], dtype=np.uint64))
        self.order_N = np.lexsort((self.keys_N, self.late_N))

    def next(self, num_prompts: int) -> list[Prompt]:
        """The next ``num_prompts`` prompts, all different.

        Raises:
            DataError: the pool holds fewer prompts than one step asks for.
        """
        if num_prompts > len(self.pool):
            raise DataError(
                f"--prompts-per-step {num_prompts}: the pool holds {len(self.pool)} distinct prompts; "
                f"use at most {len(self.pool)} or a larger --task"
            )
        taken = self._take(num_prompts)
        if len(taken) < num_prompts:
            self._start(self.epoch + 1, [prompt.uid for prompt in taken])
            taken += self._take(num_prompts - len(taken))
        return taken

    def _take(self, num_prompts: int) -> list[Prompt]:
        rows = self.order_N[self.position : self.position + num_prompts]
        self.position += len(rows)
        return [self.pool[row] for row in rows]

    def learn(self, tally: Tally) -> None:
        """Seeded epochs do not look at rewards."""

    def state_dict(self) -> dict:
        """epoch, position int; carried list of str; late, key int, by which the last prompt drawn came (-1 before the
        first); and fingerprint and size of the pool.
        """
        last = self.order_N[self.position - 1] if self.position else None
        return {
            "epoch": self.epoch,
            "position": self.position,
            "carried": self.carried,
            "late": -1 if last is None else int(self.late_N[last]),
            "key": -1 if last is None else int(self.keys_N[last]),
            "fingerprint": self.fingerprint,
            "size": len(self.pool),
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on in the same epoch. Warns where the pool's prompts are not those the state was saved with (their order may
        differ): those drawn before stay drawn, and a new one comes in this epoch if its place is still ahead.
        """
        self._start(state["epoch"], list(state["carried"]), state["position"])
        if state["fingerprint"] == self.fingerprint:
            return
        late, key = state["late"], np.uint64(max(state["key"], 0))
        self.position = int(((self.late_N < late) | (self.late_N == late) & (self.keys_N <= key)).sum())
        warnings.warn(
            f"--resume: the task's prompts are not those of the checkpoint: {len(self.pool)} now, {state['size']} then; they "
            f"are matched by content, and {len(self.pool) - self.position} are still to come in epoch {self.epoch}",
            stacklevel=2,
        )
