"""Nested state of a run -> ``state.json`` (structure, plain values) + ``state.pt`` (tensors alone), and back without pickles.

Kept exactly: None, bool, int of any size, float (NaN and infinities too), str, list, tuple, dict with any such keys, torch
tensors (handed back on the CPU), NumPy arrays and scalars of numbers, bools or strings. Anything else is refused by its place.
"""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np

JSON_FILE, TENSOR_FILE = "state.json", "state.pt"


def save_state(folder: Path, state: dict) -> None:
    """Write ``state`` into ``folder``.

    Raises:
        TypeError: a value is of a kind that cannot be kept exactly; the message names its place.
    """
    import torch

    tensors: dict[str, Any] = {}
    packed = _pack(state, "state", tensors)
    with open(folder / JSON_FILE, "w", encoding="utf-8") as file:
        json.dump(packed, file, allow_nan=False)
    with open(folder / TENSOR_FILE, "wb") as file:
        torch.save(tensors, file)


def load_state(folder: Path) -> dict:
    """Read back what ``save_state`` wrote; only tensors are unpickled (``weights_only``)."""
    import torch

    packed = json.loads((folder / JSON_FILE).read_text(encoding="utf-8"))
    return _unpack(packed, torch.load(folder / TENSOR_FILE, map_location="cpu", weights_only=True))


def rng_state() -> dict:
    """The global generators of Python, NumPy and torch. The run draws from none of them, but a user's reward may."""
    import torch

    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    numpy = np.random.get_state(legacy=False)
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state(), "cuda": cuda}


def set_rng_state(state: dict) -> None:
    """Put the global generators where ``rng_state`` found them (CUDA: if as many devices are here). Call it last on resume."""
    import torch

    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _pack(value: Any, place: str, tensors: dict[str, Any]) -> Any:
    """JSON form of a value; "$…" objects stand for what JSON lacks. ``tensors`` collects the arrays by running number."""
    import torch

    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, list):
        return [_pack(item, f"{place}[{i}]", tensors) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": _pack(list(value), place, tensors)}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _pack(item, f"{place}[{key!r}]", tensors) for key, item in value.items()}
        pairs = value.items()
        return {"$dict": [[_pack(key, place, tensors), _pack(item, f"{place}[{key!r}]", tensors)] for key, item in pairs]}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _collect(value.detach().cpu().clone(), tensors)}
    if isinstance(value, (np.ndarray, np.generic)):
        kind = "$array" if isinstance(value, np.ndarray) else "$scalar"
        array = np.array(value, order="C")
        if array.dtype.kind == "U":
            return {kind: array.tolist(), "dtype": array.dtype.str}
        if array.dtype.kind in "biufc" and array.dtype.isnative and array.dtype.char not in "gG":  # g, G: long double
            return {kind: _collect(torch.from_numpy(array), tensors)}
        raise TypeError(f"{place} is a NumPy value of dtype {array.dtype}, which a checkpoint cannot keep; use numbers")
    raise TypeError(f"{place} is a {type(value).__qualname__}, which a checkpoint cannot keep; use plain values or arrays")


def _collect(tensor: Any, tensors: dict[str, Any]) -> int:
    tensors[str(len(tensors))] = tensor
    return len(tensors) - 1


def _unpack(value: Any, tensors: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match next(iter(value), None):
        case "$float":
            return float(value["$float"])
        case "$tuple":
            return tuple(_unpack(value["$tuple"], tensors))
        case "$dict":
            return {_unpack(key, tensors): _unpack(item, tensors) for key, item in value["$dict"]}
        case "$tensor":
            return tensors[str(value["$tensor"])]
        case "$array" | "$scalar" as kind:
            dtype = value.get("dtype")
            array = np.array(value[kind], dtype=dtype) if dtype else tensors[str(value[kind])].numpy()
            return array if kind == "$array" else array[()]
    return {key: _unpack(item, tensors) for key, item in value.items()}
