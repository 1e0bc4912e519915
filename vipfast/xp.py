"""One array code for NumPy on the CPU and CuPy on the GPU, and the bridge to torch.

Code written against ``xp = namespace_of(array)`` runs where its arrays live. On a GPU, CuPy works inside ``scope``, on torch's
current stream, with memory from torch's pool, so neither library waits for the other or holds memory the other lacks.
Importing this module loads neither torch nor CuPy.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import scipy.linalg

CARRIED = frozenset("bool uint8 int8 int16 int32 int64 float16 float32 float64".split())
"""Dtypes that cross between torch and NumPy or CuPy without a copy."""


def namespace_of(*arrays: Any) -> Any:
    """The module that computes with these arrays: ``cupy`` if any of them is its own, else ``numpy``."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and any(isinstance(array, cupy.ndarray) for array in arrays) else np


def choose(device: str | None) -> tuple[Any, str | None]:
    """Where predictor and allocator of a run compute.

    Args:
        device: the run's ``--device``; None (not decided yet) counts as the CPU.

    Returns:
        (cupy, None) for "cuda"; (numpy, None) for the CPU; (numpy, the reason) where a GPU is asked for and CuPy cannot use it.
    """
    if device != "cuda":
        return np, None
    try:
        import cupy
    except ImportError as error:
        return np, f"CuPy cannot be imported ({error}); pip install 'vipfast[gpu]'"
    if not hasattr(cupy.cuda.Stream, "from_external"):
        return np, f"CuPy {cupy.__version__} cannot share torch's stream; pip install 'vipfast[gpu]' for 14 or newer"
    import torch

    if not torch.cuda.is_available():
        return np, f"torch {torch.__version__} sees no GPU"
    try:
        _try_out(cupy)
    except _failures(cupy) as error:
        return np, f"CuPy {cupy.__version__} cannot compute here ({str(error).strip().splitlines()[0]})"
    return cupy, None


def _failures(cupy: Any) -> tuple[type[Exception], ...]:
    """What CUDA's libraries raise in CuPy and torch: RuntimeErrors, but for NVRTC's."""
    return ImportError, RuntimeError, cupy.cuda.compiler.CompileException


@cache
def _try_out(cupy: Any) -> None:
    """Take torch's memory pool for CuPy, and run once what a step needs: memory, NVRTC, cuBLAS, triangular solves."""
    import torch

    def allocate(num_bytes: int, device: int) -> int:
        return torch.cuda.caching_allocator_alloc(num_bytes, device, cupy.cuda.get_current_stream().ptr)

    def free(pointer: int, device: int) -> None:
        torch.cuda.caching_allocator_delete(pointer)

    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(allocate, free).malloc)
    try:
        with scope(cupy):
            eye = cupy.eye(2)
            right = solve_triangular(eye, eye @ cupy.exp(eye - eye))
            if not bool((right == 1).all()):
                raise RuntimeError("a product with the identity is wrong")
    except _failures(cupy):
        cupy.cuda.set_allocator(before)
        raise


class _TorchStream:
    """A torch stream by the CUDA stream protocol, which torch's own streams speak from 2.10 on."""

    def __init__(self, pointer: int):
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@contextmanager
def scope(xp: Any) -> Iterator[None]:
    """Inside, CuPy works on torch's current device and stream; for NumPy nothing changes."""
    if xp is np:
        yield
        return
    import torch

    stream = _TorchStream(torch.cuda.current_stream().cuda_stream)
    with xp.cuda.Device(torch.cuda.current_device()), xp.cuda.Stream.from_external(stream):
        yield


def to_host(*arrays: Any) -> tuple[np.ndarray, ...]:
    """NumPy copies of arrays of one length [B], each in its own dtype; those on the GPU cross in a single transfer.

    Integers must stay below 2^53, since what crosses is float64.
    """
    away = [array for array in arrays if namespace_of(array) is not np]
    if not away:
        return tuple(np.asarray(array) for array in arrays)
    cupy = namespace_of(away[0])
    with scope(cupy):
        crossed = iter(cupy.stack([array.astype(cupy.float64) for array in away]).get())
    return tuple(
        np.asarray(array) if namespace_of(array) is np else next(crossed).astype(array.dtype, copy=False) for array in arrays
    )


def from_torch(tensor: Any) -> Any:
    """A view of a torch tensor: NumPy on the CPU, CuPy on a GPU. Gradients stay behind; bfloat16 is copied to float32.

    Raises:
        ValueError: a dtype or layout that does not cross (complex, float8, quantised, sparse).
    """
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # exact, and neither library has this dtype
        tensor = tensor.float()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in CARRIED or tensor.layout != torch.strided:
        raise ValueError(f"a tensor of {tensor.dtype}, {tensor.layout} cannot become an array; convert it to float32 first")
    if tensor.device.type == "cpu":
        return tensor.numpy()
    import cupy

    with scope(cupy):
        if not tensor.numel():  # there is no memory to share
            return cupy.empty(tuple(tensor.shape), dtype)
        if dtype == "bool":  # older DLPack has no bool
            return cupy.from_dlpack(tensor.view(torch.uint8)).view(cupy.bool_)
        return cupy.from_dlpack(tensor)


def to_torch(array: Any) -> Any:
    """A torch tensor over the same memory, on the array's device; only reversed axes are copied, which torch does not have.

    Raises:
        ValueError: a dtype that does not cross.
    """
    import torch

    xp = namespace_of(array)
    if str(array.dtype) not in CARRIED:
        raise ValueError(f"an array of {array.dtype} cannot become a tensor; convert it to float32 first")
    with scope(xp):
        if min(array.strides, default=0) < 0:
            array = xp.ascontiguousarray(array)
        if xp is np:
            return torch.from_numpy(array)
        if not array.size:
            return torch.empty(array.shape, dtype=getattr(torch, str(array.dtype)), device="cuda")
        if array.dtype == bool:
            return torch.from_dlpack(array.view(xp.uint8)).view(torch.bool)
        return torch.from_dlpack(array)


def cholesky(A: Any) -> Any | None:
    """Lower factor of a symmetric matrix [W, W], or None where it has none. cuSOLVER reports failure only when asked to, and
    a NaN comes through it as success, so the factor itself is looked at too.
    """
    xp = namespace_of(A)
    try:
        if xp is np:
            lower = scipy.linalg.cholesky(A, lower=True, check_finite=False)
        else:
            import cupyx

            with cupyx.errstate(linalg="raise"):
                lower = xp.linalg.cholesky(A)
    except np.linalg.LinAlgError:
        return None
    return lower if bool(xp.isfinite(lower).all()) else None


def solve_triangular(lower: Any, right: Any) -> Any:
    """L^-1 right for a lower triangular L [W, W] and right [W] or [W, M]."""
    if namespace_of(lower) is np:
        return scipy.linalg.solve_triangular(lower, right, lower=True, check_finite=False)
    import cupyx.scipy.linalg

    return cupyx.scipy.linalg.solve_triangular(lower, right, lower=True)
