"""The processes of one run as torchrun starts them, one per device: who this one is, and what they say to each other.

A process alone is rank 0 of 1: it opens nothing, imports nothing, and every call hands back what it was given. What is said
here is small (counts, tallies, errors) and goes over gloo between main memories; gradients go over NCCL where there are GPUs.
"""

import functools
import hashlib
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from vipfast.errors import NonFiniteError, RankError, RewardError, SyncError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

START_TIMEOUT_S = 1800
"""How long ranks wait for one another before the options, and with them ``--dist-timeout``, are known; a checkpoint is looked
through meanwhile."""

SHARED_ERRORS = (UsageError, RewardError, SyncError, NonFiniteError, SystemExit)
"""What one rank may run into while others wait for it; told to them, so that all stop for the same reason."""

_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|timed? ?out|timeout|recvvalue|sendbytes|failed to recv|"
    r"pair closure|remote process exited|communicator was aborted",
    re.IGNORECASE,
)


class Ranks:
    """Args: ``environ``: where torchrun has left its variables; without them this process is alone.

    Attributes: ``rank``, ``size`` int; ``local_rank`` int, the device of this rank; ``at_leave``, what else has to be closed
    before the connections are.
    """

    def __init__(self, environ: Mapping[str, str]):
        launched = "TORCHELASTIC_RUN_ID" in environ
        self.rank, self.local_rank, self.size = (
            int(environ[name]) if launched else alone for name, alone in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
        )
        self._store = self._host = self._limit = None
        self._first = 0  # of these ranks, by its number among all
        self._told = 0
        self.at_leave: list[Callable[[], None]] = []

    def connect(self, device: str, timeout_s: float) -> None:
        """Open the process group (NCCL for "cuda", gloo for "cpu") and take this rank's device; only the first call does.

        Raises:
            UsageError: more processes on this machine than GPUs.
        """
        if self.size == 1 or self._host is not None:
            return
        import torch
        from torch import distributed as dist

        limit, options = timedelta(seconds=timeout_s), {}
        self._limit = limit
        if device == "cuda":
            if self.local_rank >= torch.cuda.device_count():
                raise UsageError(
                    f"torchrun --nproc-per-node: rank {self.rank} wants a GPU of its own, and this machine has "
                    f"{torch.cuda.device_count()}; start at most that many"
                )
            torch.cuda.set_device(self.local_rank)
            options["device_id"] = torch.device("cuda", self.local_rank)
        store = self._opened_store()
        store.set_timeout(limit)
        backend = "nccl" if device == "cuda" else "gloo"
        place = dict(store=dist.PrefixStore("group", store), rank=self.rank, world_size=self.size)
        dist.init_process_group(backend, timeout=limit, **place, **options)
        self._host = dist.new_group(backend="gloo", timeout=limit) if device == "cuda" else dist.group.WORLD

    def split(self, num: int) -> "Ranks":
        """The group of ``num`` successive ranks that this one is in, as ranks of their own; every rank calls this alike."""
        if num == 1:
            return ALONE
        from torch import distributed as dist

        options = dict(backend="gloo", timeout=self._limit)
        groups = [dist.new_group(list(range(first, first + num)), **options) for first in range(0, self.size, num)]
        own = Ranks({})
        own.rank, own.size, own._first = self.rank % num, num, self.rank - self.rank % num
        own._host = groups[self.rank // num]
        return own

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        if self._host is None:
            return self._through_store(value)
        from torch import distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=self._first, group=self._host)
        return box[0]

    def gather(self, value: Any) -> list:
        """Every rank's value, in the order of ranks, on every rank."""
        if self.size == 1:
            return [value]
        from torch import distributed as dist

        values = [None] * self.size
        dist.all_gather_object(values, value, group=self._host)
        return values

    def together(self, work: Callable[[], Any]) -> list:
        """Every rank's result of ``work``; an error (SHARED_ERRORS) of one is raised on all, so that nobody waits in vain."""
        if self.size == 1:
            return [work()]
        results = self.gather(_outcome(work))
        for _, error in results:
            if error is not None:
                raise error
        return [result for result, _ in results]

    def decided(self, work: Callable[[], Any]) -> Any:
        """What ``work`` gives on rank 0, which alone runs it, or the error it raises there (SHARED_ERRORS): on every rank."""
        if self.size == 1:
            return work()
        result, error = self.broadcast(_outcome(work) if self.rank == 0 else None)
        if error is not None:
            raise error
        return result

    def add_up(self, tensors: Sequence["Tensor"]) -> None:
        """Replace each tensor by its sum over the ranks, in place and bit for bit the same on all."""
        if self.size == 1:
            return
        from torch import distributed as dist

        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    def exchange(self, parts: "Sequence[np.ndarray]") -> "list[np.ndarray]":
        """Send ``parts[r]`` to rank r; returns what each rank has sent here.

        Args:
            parts: one-dimensional arrays, all of one dtype on all ranks, of any lengths.
        """
        if self.size == 1:
            return list(parts)
        import numpy as np
        import torch
        from torch import distributed as dist

        sent = [len(part) for part in parts]
        received = [lengths[self.rank] for lengths in self.gather(sent)]
        there = torch.from_numpy(np.concatenate(parts))
        here = torch.empty(sum(received), dtype=there.dtype)
        dist.all_to_all_single(here, there, received, sent, group=self._host)
        return np.split(here.numpy(), np.cumsum(received)[:-1])

    def first_to_say(self, text: str) -> bool:
        """Whether no rank has said this before: what all ranks run into is told once."""
        if self.size == 1:
            return True
        try:
            return self._opened_store().add("said/" + hashlib.sha256(text.encode()).hexdigest(), 1) == 1
        except RuntimeError:  # torchrun, which keeps the store, is gone
            return True

    @contextmanager
    def losses_named(self) -> Iterator[None]:
        """Inside, a connection that breaks or stays silent for too long is a RankError with a remedy."""
        try:
            yield
        except RuntimeError as error:  # gloo has nothing narrower
            ours = isinstance(error, (*SHARED_ERRORS, RankError))
            if self.size == 1 or ours or not _LOST.search(str(error)):
                raise
            _outlive_sigterm()
            raise RankError(
                f"rank {self.rank} of {self.size} stops: another process of the run has ended or has not answered within "
                f"--dist-timeout (before the options are known: {START_TIMEOUT_S} s). Its own message, if it left one, says "
                "why; go on from the last checkpoint with --resume "
                f"({str(error).strip().splitlines()[0]})"
            ) from error

    def leave(self) -> None:
        """Wait for the others, run ``at_leave``, then close the connections; the end of a process that goes on to exit."""
        if self._host is None:
            return
        from torch import distributed as dist

        _outlive_sigterm()
        with self.losses_named():
            self.gather(None)
        for close in self.at_leave:
            close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._host = None

    def _opened_store(self):
        """Where ranks meet, kept by torchrun."""
        if self._store is None:
            from torch.distributed.rendezvous import rendezvous

            self._store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=START_TIMEOUT_S)))
        return self._store

    def _through_store(self, value: Any) -> Any:
        store, key = self._opened_store(), f"told/{self._told}"
        self._told += 1
        if self.rank == 0:
            store.set(key, pickle.dumps(value))
            return value
        return pickle.loads(store.get(key))


def _outlive_sigterm() -> None:
    """torchrun ends all others as soon as one has left with a code other than 0; they still have something to say."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _outcome(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return work(), None
    except SHARED_ERRORS as error:
        return None, error


ALONE = Ranks({})


@functools.cache
def join() -> Ranks:
    """The ranks this process is one of; always the same object."""
    return Ranks(os.environ)
