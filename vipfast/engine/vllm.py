"""Rollouts with vLLM inside the trainer's own process: asleep while the policy is updated, awake with its new weights after.

A weight change takes one order, and each step of it answers a way in which it has gone wrong elsewhere:

    free torch's cached memory    what the update left behind would not let the engine back in
    wake the weights alone        keys and values would not fit beside the weights being handed over
    reload_weights, once          the only way that packs, ties and pads as a first load does; never from disk
    compare names on both sides   a name that is not taken is skipped with a log line at most
    reset the prefix cache        it is keyed by text, not by weights
    wake keys and values          with the next request
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vipfast import streams
from vipfast.engine.base import Finished, Request, Sampling
from vipfast.engine.merge import PlainWeights
from vipfast.errors import NonFiniteError, SyncError, UsageError
from vipfast.types import Finish


class VllmEngine:
    """Implements ``engine.base.Engine`` over a running vLLM.

    Args:
        llm: vLLM's LLMEngine, in this process (``vllm_launch.launch``).
        params: vLLM's SamplingParams, or anything with its keywords.
        sampling: the run's sampling parameters.
        positions: most tokens of a prompt with its completion.
        plain: names and merges the policy's weights.
        seeds: "rollout": a rollout's seed is hash(seed, step, prompt_uid, stream) + its index, so its text is the same in
            whatever rounds it was asked for. "engine": one seed for all that is submitted while nothing is pending, which
            samples faster and gives that up; the same requests in the same order still give the same texts.
        sleep_level: what ``sleep`` frees: 0 nothing, 1 moves the weights to host memory, 2 drops them; 1 and 2 free the keys
            and values.
        device: where vLLM samples, "cpu" or "cuda".
        num_ids: ids from this one on are padding and never sampled; None: there are none. The same number must hold for the
            policy in the trainer.
    """

    name = "vllm"

    def __init__(
        self,
        llm: Any,
        params: Callable[..., Any],
        sampling: Sampling,
        positions: int,
        plain: PlainWeights,
        *,
        seeds: str = "rollout",
        sleep_level: int = 0,
        device: str = "cpu",
        num_ids: int | None = None,
    ):
        self.llm, self.sampling, self.positions, self.plain = llm, sampling, positions, plain
        self.sleep_level, self.device = sleep_level, device
        # Every value is given, since a default may come from the model's generation_config. Stop ids are the run's alone.
        fixed = dict(temperature=sampling.temperature, top_p=sampling.top_p, top_k=0, min_p=0.0, repetition_penalty=1.0)
        fixed |= dict(stop_token_ids=list(sampling.stop_ids), ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False)
        self._params = lambda **own: params(**fixed, **own)
        self._stop = frozenset(sampling.stop_ids)
        self._numbers = itertools.count()
        self._asked: dict[str, tuple[int, int, int]] = {}  # request -> slot, first index, count
        self._refused: list[Finished] = []
        self._asleep: set[str] = set()
        self._synced = False
        self._own_seeds = seeds == "rollout"
        self._random = _RandomNumbers(device, sampling.seed)
        if num_ids is not None:
            self.llm.collective_rpc(_forbid_padding, args=(num_ids,))

    @property
    def pending(self) -> int:
        return sum(count for _, _, count in self._asked.values()) + len(self._refused)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue rollouts; a prompt that leaves no position to write in comes back from ``step`` as an error row each.

        Raises:
            SyncError: the engine has no weights of the policy yet, or none since it slept.
            UsageError: a prompt is empty.
        """
        if not self._synced:
            raise SyncError("vLLM was asked to sample before it got the policy's weights: sync comes first, also after sleep")
        self.wake()
        for request in requests:
            if not len(request.tokens):
                raise UsageError(f"prompt {request.uid} has no tokens; give at least one, such as a bos token")
            base = _key(request, self.sampling.seed)
            if not self._own_seeds and not self._asked:
                self._random.seed(base + request.first_index)
            indices = range(request.first_index, request.first_index + request.count)
            room = min(self.sampling.max_new_tokens - request.made, self.positions - len(request.tokens))
            if room < 1:
                self._refused += [_error(request.slot, index) for index in indices]
                continue
            for first, count in [(i, 1) for i in indices] if request.one_by_one else [(request.first_index, request.count)]:
                seed = base + first if self._own_seeds else None
                name, prompt = str(next(self._numbers)), {"type": "token", "prompt_token_ids": request.tokens.tolist()}
                self.llm.add_request(name, prompt, self._params(n=count, seed=seed, max_tokens=room))
                self._asked[name] = (request.slot, first, count)

    def step(self) -> list[Finished]:
        """Decode one token for what vLLM has scheduled; returns the rollouts of requests that ended, a request at a time.

        Raises:
            NonFiniteError: vLLM gave NaN or infinite log-probs; only ``reset`` leads on.
        """
        finished, self._refused = self._refused, []
        if not self._asked:
            return finished
        with self._random:
            outputs = self.llm.step()
        for output in outputs:
            slot, first, _ = self._asked.pop(output.request_id)
            finished += [self._row(slot, first + completion.index, completion) for completion in output.outputs]
        if self._asked and not self.llm.has_unfinished_requests():
            finished += [_error(slot, first + i) for slot, first, count in self._asked.values() for i in range(count)]
            self._asked.clear()
        return finished

    def _row(self, slot: int, index: int, completion: Any) -> Finished:
        tokens = np.array(completion.token_ids, np.int64)
        given = completion.logprobs.logprobs if completion.logprobs is not None else []
        if not len(tokens) or len(given) != len(tokens) or None in given:
            return _error(slot, index)
        logp = np.array(given, np.float32)
        if not np.isfinite(logp).all():
            raise NonFiniteError(
                f"vLLM gave a log-prob of {logp[~np.isfinite(logp)][0]} for a token it sampled, so nothing can be learned: "
                "the policy's weights hold NaN or inf, or its type overflows; lower the learning rate or use --dtype float32"
            )
        return Finished(slot, index, tokens, logp, Finish.STOP if int(tokens[-1]) in self._stop else Finish.LENGTH)

    def reset(self) -> None:
        """Forget pending work and cached prompts."""
        if self._asked:
            self.llm.abort_request(list(self._asked))
        self._asked, self._refused = {}, []
        self._reset_prefix_cache()

    def sync(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Load ``weights``, (name, tensor) of the policy's parameters read once, in the order at the top of this file.

        Raises:
            SyncError: a weight of the policy is missing, one is not the policy's, or vLLM did not take in all it has. It then
                holds a mixture, and samples nothing more before another sync.
        """
        assert not self.pending, f"sync with {self.pending} rollouts in flight: they would mix two policies"
        self._synced = False
        self._wake("weights")
        handed: set[str] = set()
        try:
            [(loaded, own)] = self.llm.collective_rpc(_reload, args=(self._checked(weights, handed), self.plain.tied))
        except (KeyError, ValueError) as error:
            raise SyncError(f"vLLM has no place for a weight of the policy ({error}); both must hold the same model") from error
        _compare("the policy handed over", handed, self.plain.names)
        if loaded is not None:
            _compare("vLLM took in", loaded, own)
        self._reset_prefix_cache()
        self._synced = True

    def _checked(self, weights: Iterable[tuple[str, Any]], handed: set[str]) -> Iterator[tuple[str, Any]]:
        for name, tensor in self.plain(weights):
            handed.add(name)
            if name in self.plain.names:  # vLLM, stopped in the middle of a reload, would take no other
                yield name, tensor

    def _reset_prefix_cache(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise SyncError("vLLM kept cached prompts of older weights: it still holds requests that were not asked for here")

    def sleep(self) -> None:
        """Give memory back to the update (level 0: none); after level 2 a sync must come before the next rollout."""
        assert not self.pending, f"sleep with {self.pending} rollouts in flight"
        if self.sleep_level and not self._asleep:
            self.llm.sleep(level=self.sleep_level)
            self._asleep = {"weights", "kv_cache"}
            self._synced = self._synced and self.sleep_level == 1

    def close(self) -> None:
        """vLLM's groups of processes must end before the ones they were made in."""
        self.llm.engine_core.shutdown()

    def wake(self) -> None:
        self._wake("weights")
        self._wake("kv_cache")

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            free_cached_memory()
            self.llm.wake_up(tags=[tag])
            self._asleep.remove(tag)


class _RandomNumbers:
    """vLLM draws from the process's global states, seeded requests or not; here it finds its own, and leaves others' alone."""

    def __init__(self, device: str, number: int):
        self.device = device
        self.seed(number)

    def seed(self, number: int) -> None:
        torch_states = {device: torch.Generator(device).manual_seed(number).get_state() for device in {"cpu", self.device}}
        self.states = torch_states, np.random.RandomState(number % 2**32).get_state()

    def __enter__(self) -> None:
        self.outside = random_states(self.device)
        set_random_states(self.states)

    def __exit__(self, *error) -> None:
        self.states = random_states(self.device)
        set_random_states(self.outside)


def random_states(device: str) -> Any:
    """The global random states of torch on the CPU and ``device``, and of NumPy."""
    torch_states = {"cpu": torch.get_rng_state()}
    if device == "cuda":
        torch_states["cuda"] = torch.cuda.get_rng_state()
    return torch_states, np.random.get_state()


def set_random_states(states: Any) -> None:
    torch_states, numpy_state = states
    torch.set_rng_state(torch_states["cpu"])
    if "cuda" in torch_states:
        torch.cuda.set_rng_state(torch_states["cuda"])
    np.random.set_state(numpy_state)


def free_cached_memory() -> None:
    """Hand what torch's allocator keeps for later back to the device, once the device is done with it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _reload(worker: Any, weights: Iterator[tuple[str, Any]], tied: dict[str, list[str]]) -> tuple[set[str] | None, set[str]]:
    """Runs in vLLM's worker: names its model says it loaded (None if it does not say), and names of all its parameters.

    A tied head that is a module of its own in vLLM may hold a packed copy, so it is handed the weight under its name too.
    """
    model, told = worker.get_model(), []
    load = model.load_weights
    own = {f"{path}.{name}" for path, module in model.named_modules() for name, _ in module.named_parameters(recurse=False)}
    model.load_weights = lambda weights: told.append(load(weights)) or told[-1]
    try:
        worker.reload_weights(weights_iterator=_with_tied(weights, tied, own))
    finally:
        del model.load_weights
    return told[-1], own


def _forbid_padding(worker: Any, num_ids: int) -> None:
    """Runs in vLLM's worker: logits of ids from ``num_ids`` on are -inf as they leave its model.

    That is before vLLM takes log-probs, raw or processed; its allowed_token_ids and logit_bias are heeded in processed ones
    alone, and logit_bias is bounded.
    """
    model = worker.get_model()
    compute = type(model).compute_logits.__get__(model)

    def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        logits = compute(*args, **kwargs)
        if logits is not None:  # as on ranks that do not sample
            logits[..., num_ids:] = -torch.inf
        return logits

    model.compute_logits = compute_logits


def _with_tied(weights: Iterator[tuple[str, Any]], tied: dict[str, list[str]], own: set[str]) -> Iterator[tuple[str, Any]]:
    for name, tensor in weights:
        yield name, tensor
        yield from ((other, tensor) for other in tied.get(name, ()) if other in own)


def _compare(what: str, given: set[str], wanted: set[str]) -> None:
    missing, unknown = sorted(wanted - given), sorted(given - wanted)
    if missing or unknown:
        raise SyncError(
            f"the weights {what} are not the model's: {len(missing)} missing {missing[:5]}, {len(unknown)} unknown "
            f"{unknown[:5]}; both sides must hold the same model"
        )


def _key(request: Request, seed: int) -> int:
    """Below 2^62, so that adding an index stays an int64. Rollouts that go on must not draw again what they have drawn."""
    goes_on = (request.first_index, request.made) if request.made else ()
    return int(streams.keys(request.stream, seed, request.step, streams.uid_hash(request.uid), *goes_on)) >> 2


def _error(slot: int, index: int) -> Finished:
    return Finished(slot, index, np.zeros(0, np.int64), np.zeros(0, np.float32), Finish.ERROR)
