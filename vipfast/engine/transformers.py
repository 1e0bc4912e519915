"""Rollouts with a transformers causal language model, on CPU or one GPU.

What differs from ``model.generate``:
- a prompt is prefilled once, its keys and values copied to all of its rollouts and kept over an allocator's rounds;
- a finished row leaves the batch at once, and rows may join at any step;
- sampling is the run's own, whatever the model's generation_config says, with counter-based uniforms: a rollout's text does
  not depend on the rounds, the order or the neighbours it was asked with.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from vipfast import streams
from vipfast.engine.base import Finished, Request, Sampling
from vipfast.engine.cache import PromptBlock, RowCache
from vipfast.engine.sampling import sample
from vipfast.engine.weights import copy_weights
from vipfast.errors import UsageError
from vipfast.types import Finish
from vipfast.vocabulary import num_known_ids

PREFILL_TOKENS = 8192
"""Most tokens, padding included, of one prefill pass."""

SAMPLE_ELEMENTS = 2**24
"""Most rows × vocabulary entries that are sampled at once; bounds the float64 sums."""

INTEGERS = ("slot", "index", "prompt", "cursor", "start", "made", "limit", "last")
ROW = np.dtype([*((name, np.int64) for name in INTEGERS), ("key", np.uint64)])
"""A row: ``prompt`` names its tokens, ``cursor`` counts the tokens whose keys are stored, ``last`` is the newest id,
``made`` of at most ``limit`` ids are sampled, ``key`` is its random stream, of which ``start`` numbers were drawn before."""


class TransformersEngine:
    """Implements ``engine.base.Engine``.

    Args:
        model: a causal language model of transformers with "sdpa" or "eager" attention, LoRA-wrapped or not. It may be the
            very model that trains: its modes and gradients stay as they were. Padding ids (vocabulary.py) are never sampled.
        sampling: the run's sampling parameters.
        pad_id: any id of the vocabulary; fills prompts up to a common length and is never attended.
        max_rows: most rollouts decoded at once; more wait their turn. None: no bound.
        autocast: compute dtype over the master weights, as the trainer computes (torch.bfloat16); None: the model's own.

    Raises:
        UsageError: the model cannot be decoded exactly here, or an option is out of range.
    """

    name = "transformers"

    def __init__(
        self,
        model: torch.nn.Module,
        sampling: Sampling,
        pad_id: int,
        max_rows: int | None = None,
        autocast: torch.dtype | None = None,
    ):
        if sampling.temperature <= 0:
            raise UsageError(f"--temperature {sampling.temperature}: sampling needs a temperature above 0")
        if not 0 < sampling.top_p <= 1:
            raise UsageError(f"--top-p {sampling.top_p}: give a value in (0, 1]")
        if sampling.max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens {sampling.max_new_tokens}: give at least 1")
        if max_rows is not None and max_rows < 1:
            raise UsageError(f"max_rows {max_rows}: give at least 1, or None for no bound")
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = base.config.get_text_config()
        accepted = inspect.signature(base.forward).parameters
        if "position_ids" not in accepted or config._attn_implementation not in ("sdpa", "eager"):
            raise UsageError(
                f"--model {type(base).__name__} with attention {config._attn_implementation!r}: this engine needs "
                "position_ids and an attention mask per row; load it with attn_implementation='sdpa'"
            )
        self.model, self.sampling, self.pad_id = model, sampling, pad_id
        self.max_rows, self.autocast, self._num_ids = max_rows, autocast, num_known_ids(model)
        self.device = base.get_input_embeddings().weight.device
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._keep_argument = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._positions = getattr(config, "max_position_embeddings", None) or 2**31
        self._window = _attention_window(config)
        self._stop = np.array(sampling.stop_ids, np.int64)
        self.reset()

    @property
    def pending(self) -> int:
        return self._num_rows + len(self._queue) + len(self._refused)

    def reset(self) -> None:
        """Forget pending work, cached prompts and their memory."""
        self._queue, self._rows = np.zeros(0, ROW), np.zeros(0, ROW)
        self._tokens = np.zeros((0, 0), np.int64)
        self._logp = np.zeros((0, 0), np.float32)
        self._num_rows = 0
        self._refused: list[Finished] = []
        self._cache = RowCache()
        self._forget_prompts()

    def _forget_prompts(self) -> None:
        self._num_prompts = 0
        self._prompts: dict[int, np.ndarray] = {}
        self._passing: set[int] = set()  # prompts of rollouts that go on, forgotten once these have joined
        self._prompt_of: dict[bytes, int] = {}
        self._place: dict[int, tuple[int, int]] = {}  # prompt -> block, row of the block
        self._blocks: dict[int, PromptBlock] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue rollouts; a prompt that leaves no position to write in comes back from ``step`` as an error row each.

        Raises:
            UsageError: a prompt is empty, or it is longer than a sliding attention window allows.
        """
        new = [self._queue]
        for request in requests:
            tokens = np.ascontiguousarray(request.tokens, np.int64)
            if not len(tokens):
                raise UsageError(f"prompt {request.uid} has no tokens; give at least one, such as a bos token")
            indices = np.arange(request.first_index, request.first_index + request.count)
            limit = min(self.sampling.max_new_tokens - request.made, self._positions - len(tokens))
            if limit < 1:
                empty = np.zeros(0, np.int64), np.zeros(0, np.float32)
                self._refused += [Finished(request.slot, int(index), *empty, Finish.ERROR) for index in indices]
                continue
            if len(tokens) + limit > self._window:
                raise UsageError(
                    f"prompt {request.uid} of {len(tokens)} tokens plus --max-new-tokens {limit} exceeds the model's sliding "
                    f"attention window of {self._window}, which this engine does not follow; shorten them or use another engine"
                )
            rows = np.zeros(request.count, ROW)
            rows["slot"], rows["index"], rows["limit"], rows["cursor"] = request.slot, indices, limit, len(tokens)
            rows["start"] = request.made
            rows["prompt"] = prompt = self._prompt_of.setdefault(tokens.tobytes(), self._num_prompts)
            if prompt == self._num_prompts:
                self._num_prompts += 1
                self._prompts[prompt] = tokens
                if request.made:
                    self._passing.add(prompt)
            uid = streams.uid_hash(request.uid)
            rows["key"] = streams.keys(request.stream, self.sampling.seed, request.step, uid, indices)
            new.append(rows)
        self._queue = np.concatenate(new)

    @torch.no_grad()  # not inference_mode: buffers a model sets while it runs must stay usable in training
    def step(self) -> list[Finished]:
        """Decode one token for every row in flight, let waiting rows join with their first; return the rows that ended.

        Raises:
            NonFiniteError: the model gave NaN; nothing was sampled, and only ``reset`` leads on.
        """
        finished, self._refused = self._refused, []
        if not self._num_rows and not len(self._queue):
            return finished
        with _eval_mode(self.model):
            logits = self._decode() + self._admit()
        rows = self._rows[: self._num_rows]
        uniform = torch.from_numpy(streams.uniforms(rows["key"], rows["start"] + rows["made"])).to(self.device)
        drawn = [
            sample(block[chunk], draw, self.sampling)
            for block, picks, part in _with_parts(logits, uniform)
            for chunk, draw in zip(*(x.split(max(1, SAMPLE_ELEMENTS // block.shape[1])) for x in (picks, part)), strict=True)
        ]
        ids, logp = (torch.cat(parts).cpu().numpy() for parts in zip(*drawn, strict=True))
        self._record(rows, ids, logp)
        done = np.isin(ids, self._stop)
        finish = np.where(done, Finish.STOP, Finish.LENGTH)
        done |= rows["made"] == rows["limit"]
        for i in np.flatnonzero(done):
            row, made = rows[i], int(rows["made"][i])
            texts = self._tokens[i, :made].copy(), self._logp[i, :made].copy()
            finished.append(Finished(int(row["slot"]), int(row["index"]), *texts, Finish(finish[i])))
        self._drop(done)
        return finished

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache) -> torch.Tensor:
        """One pass; ``ids``, ``positions`` [n, t], ``mask`` bool [n, t, positions read]. Returns the last logits [n, V]."""
        bias = torch.zeros(mask.shape, dtype=self.model.dtype, device=self.device).masked_fill_(~mask, -torch.inf)[:, None]
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": bias, self._cache_argument: cache}
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            return self.model(**inputs, use_cache=True, **self._keep_argument).logits[:, -1, : self._num_ids]

    def _decode(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Feed the newest id of every row in flight. Returns logits and which of their rows are meant, in row order."""
        if not self._num_rows:
            return []
        rows = self._rows[: self._num_rows]
        width = int(rows["cursor"].max()) + 1
        self._reserve(self._num_rows, self._num_rows)
        cursor = torch.from_numpy(rows["cursor"].copy()).to(self.device)
        self._cache.aim(cursor, width)
        mask = torch.arange(width, device=self.device) <= cursor[:, None, None]
        ids = torch.from_numpy(rows["last"].copy()).to(self.device)[:, None]
        logits = self._forward(ids, cursor[:, None], mask, self._cache)
        rows["cursor"] += 1
        return [(logits, self._cache.row)]

    def _admit(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Move waiting rows into flight, prefilling prompts not seen since the last sync. Returns as ``_decode`` does."""
        room = len(self._queue) if self.max_rows is None else self.max_rows - self._num_rows
        new, self._queue = self._queue[:room], self._queue[room:]
        if not len(new):
            return []
        prompts = [prompt for prompt in np.unique(new["prompt"]).tolist() if prompt not in self._place]
        for passing in (False, True):  # apart, since a block is forgotten whole
            self._prefill([prompt for prompt in prompts if (prompt in self._passing) == passing])
        place = np.array([self._place[prompt] for prompt in new["prompt"].tolist()])
        order = np.argsort(place[:, 0], kind="stable")
        new, place = new[order], place[order]
        used, total = self._num_rows, self._num_rows + len(new)
        self._rows = np.concatenate([self._rows[:used], new])
        self._tokens = _grown(self._tokens, used, (total, max(self._tokens.shape[1], 16)))
        self._logp = _grown(self._logp, used, self._tokens.shape)
        self._num_rows = total
        self._reserve(used, total)
        logits = []
        for b in np.unique(place[:, 0]).tolist():
            picks = torch.from_numpy(place[place[:, 0] == b, 1]).to(self.device)
            self._cache.fill(used, self._blocks[b], picks)
            used += len(picks)
            logits.append((self._blocks[b].logits, picks))
        if self._passing:
            self._forget_passing()
        return logits

    def _forget_passing(self) -> None:
        """Drop the prompts of rollouts that have gone on: their rows hold a copy, and nothing will ask for them again."""
        waiting = set(self._queue["prompt"].tolist())
        for prompt in [prompt for prompt in self._passing if prompt in self._place and prompt not in waiting]:
            del self._prompt_of[self._prompts.pop(prompt).tobytes()], self._place[prompt]
            self._passing.remove(prompt)
        used = {block for block, _ in self._place.values()}
        self._blocks = {number: block for number, block in self._blocks.items() if number in used}

    def _prefill(self, prompts: list[int]) -> None:
        """Run prompts through the model in left-padded batches of similar length and keep what they leave."""
        prompts = sorted(prompts, key=lambda prompt: len(self._prompts[prompt]))
        while prompts:
            num = len(prompts)
            while num > 1 and num * len(self._prompts[prompts[num - 1]]) > PREFILL_TOKENS:
                num -= 1
            batch, prompts = prompts[:num], prompts[num:]
            lengths = np.array([len(self._prompts[prompt]) for prompt in batch])
            longest = int(lengths[-1])
            ids = np.full((num, longest), self.pad_id)
            for row, prompt in enumerate(batch):
                ids[row, longest - lengths[row] :] = self._prompts[prompt]
            pad = torch.from_numpy(longest - lengths).to(self.device)
            position = torch.arange(longest, device=self.device)
            causal, real = position <= position[:, None], position >= pad[:, None, None]
            # a padded position sees itself: a softmax over nothing would be NaN, and NaN times weight 0 is NaN
            mask = (causal & real) | torch.eye(longest, dtype=torch.bool, device=self.device)
            block = PromptBlock(self.autocast)
            block.logits = self._forward(
                torch.from_numpy(ids).to(self.device), (position - pad[:, None]).clamp_(min=0), mask, block
            ).clone()
            block.align_left(pad)
            number = max(self._blocks, default=-1) + 1
            self._place |= {prompt: (number, row) for row, prompt in enumerate(batch)}
            self._blocks[number] = block

    def _reserve(self, used: int, rows: int) -> None:
        """Room for the next token of every row: grown by a quarter at a time, never past what the limits allow."""
        state = self._rows[: self._num_rows]
        # a block is copied whole, so its longest prompt must fit as well
        now = max([int(state["cursor"].max()) + 1, *(block.positions for block in self._blocks.values())])
        most = max(now, int((state["cursor"] + state["limit"] - state["made"]).max()))
        if not self._cache.holds(rows, now):
            like = next(iter(self._blocks.values()), self._cache).tensors
            self._cache.resize(used, rows, min(most, now + max(32, now // 4)), like)

    def _record(self, rows: np.ndarray, ids: np.ndarray, logp: np.ndarray) -> None:
        if rows["made"].max() >= self._tokens.shape[1]:
            shape = (len(self._tokens), 2 * self._tokens.shape[1])
            self._tokens, self._logp = (_grown(x, len(x), shape) for x in (self._tokens, self._logp))
        self._logp = self._logp.astype(logp.dtype, copy=False)
        at = np.arange(len(rows)), rows["made"]
        self._tokens[at], self._logp[at] = ids, logp
        rows["last"] = ids
        rows["made"] += 1

    def _drop(self, done: np.ndarray) -> None:
        """Close the gaps that finished rows leave with rows from the back."""
        left = len(done) - int(done.sum())
        to, source = np.flatnonzero(done[:left]), left + np.flatnonzero(~done[left:])
        if len(to):
            for state in (self._rows, self._tokens, self._logp):
                state[to] = state[source]
            width = int(self._rows["cursor"][to].max())
            self._cache.move(*(torch.from_numpy(x).to(self.device) for x in (to, source)), width)
        self._num_rows = left

    def sync(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Copy ``weights`` into the model (``weights.copy_weights``; raises SyncError) and forget the cached prompts."""
        assert not self.pending, f"sync with {self.pending} rollouts in flight: they would mix two policies"
        self._forget_prompts()
        copy_weights(weights, self.model)

    def sleep(self) -> None:
        """Free the caches (``sync`` keeps the row store's memory for the next step); the weights may be the trainer's own."""
        assert not self.pending, f"sleep with {self.pending} rollouts in flight"
        self.reset()

    def wake(self) -> None:
        """Nothing to do: caches are made when they are needed."""

    def close(self) -> None:
        self.reset()


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Dropout and gradient checkpointing off, then every module's mode as it was."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        vars(module)["training"] = False  # torch's __setattr__ would take a tenth of a small model's step
    try:
        yield
    finally:
        for module in training:
            vars(module)["training"] = True


def _attention_window(config: Any) -> int:
    """Positions within which every layer's attention is plain causal attention.

    Raises:
        UsageError: a layer is no attention at all (recurrent or linear).
    """
    layers = set(getattr(config, "layer_types", None) or ())
    if other := layers - {"full_attention", "sliding_attention"}:
        raise UsageError(f"--model has layers of type {sorted(other)}; this engine decodes attention layers only")
    sliding = "sliding_attention" in layers or (not layers and getattr(config, "use_sliding_window", True))
    return (getattr(config, "sliding_window", None) if sliding else None) or 2**31


def _grown(array: np.ndarray, used: int, shape: tuple[int, int]) -> np.ndarray:
    """A zeroed array of ``shape`` that begins with the first ``used`` rows of ``array``."""
    new = np.zeros(shape, array.dtype)
    new[:used, : array.shape[1]] = array[:used]
    return new


def _with_parts(logits: list[tuple[torch.Tensor, torch.Tensor]], values: torch.Tensor):
    """Deal ``values`` [R] out to the blocks of rows they belong to."""
    parts = values.split([len(picks) for _, picks in logits])
    return [(block, picks, part) for (block, picks), part in zip(logits, parts, strict=True)]
