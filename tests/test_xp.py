"""The array namespace and its bridge to torch. What needs a GPU is skipped without one; how that is decided is not."""

import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from vipfast import xp
from vipfast.predict.kernel import Factor

CUPY, WHY_NOT = xp.choose("cuda")
gpu = pytest.mark.skipif(CUPY is np, reason=f"no GPU for CuPy: {WHY_NOT}")


def random_covariance(size, rng):
    X = rng.normal(size=(size, size))
    return X @ X.T / size + 0.1 * np.eye(size)


def test_numpy_is_the_namespace_of_anything_else():
    assert xp.namespace_of(np.zeros(2), [1.0], 3) is np
    assert xp.choose("cpu") == (np, None) and xp.choose(None) == (np, None)
    with xp.scope(np):
        assert xp.to_host(np.arange(3), [0.5, 1, 2])[1].tolist() == [0.5, 1, 2]


def test_importing_it_loads_neither_torch_nor_cupy():
    code = "import sys, vipfast.xp; assert not {'torch', 'cupy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_gpu_that_cupy_cannot_use_is_told_with_the_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    module, why = xp.choose("cuda")
    assert module is np and "CuPy cannot be imported" in why and "vipfast[gpu]" in why

    stream = types.SimpleNamespace()
    old = types.SimpleNamespace(__version__="13.4.1", cuda=types.SimpleNamespace(Stream=stream, compiler=RecordedCupy))
    monkeypatch.setitem(sys.modules, "cupy", old)
    assert xp.choose("cuda")[0] is np and "CuPy 13.4.1 cannot share torch's stream" in xp.choose("cuda")[1]

    stream.from_external = None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert xp.choose("cuda") == (np, f"torch {torch.__version__} sees no GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def fail(cupy):
        raise RuntimeError("cudaErrorInsufficientDriver: too old\nand more")

    monkeypatch.setattr(xp, "_try_out", fail)
    assert xp.choose("cuda") == (np, "CuPy 13.4.1 cannot compute here (cudaErrorInsufficientDriver: too old)")


class RecordedCupy:
    """Records what is asked of CuPy's allocator and streams; arrays themselves are NumPy's."""

    __version__, ndarray, eye = "14", types.SimpleNamespace, staticmethod(np.eye)

    class CompileException(Exception):
        """NVRTC's, which is no RuntimeError."""

    def __init__(self, breaks=None):
        self.log, self.cuda, self.compiler = [], self, self
        self.breaks, self.allocator, self.Stream = breaks, "default", self
        self.ptr = 77

    def get_allocator(self):
        return self.allocator

    def set_allocator(self, allocator):
        self.allocator = allocator

    def get_current_stream(self):
        return self

    def PythonFunctionAllocator(self, malloc, free):
        return types.SimpleNamespace(malloc=(malloc, free))

    def from_external(self, stream):
        self.log.append(("stream", stream.__cuda_stream__()))
        return self

    def Device(self, index):
        self.log.append(("device", index))
        return self

    def __enter__(self):
        self.log.append("in")

    def __exit__(self, *error):
        self.log.append("out")

    def exp(self, A):
        assert self.log[-4:] == [("device", 0), "in", ("stream", (0, 77)), "in"], "work must stay on torch's device and stream"
        if self.breaks:
            raise self.breaks
        return np.exp(A)


@pytest.fixture
def torch_gpu(monkeypatch):
    """torch as on a machine whose current stream is 77; returns what its memory pool was asked."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", lambda *a: calls.append(("alloc", *a)) or 4096)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", lambda *a: calls.append(("free", *a)))
    return calls


def test_cupy_takes_torchs_pool_and_stream(monkeypatch, torch_gpu):
    double = RecordedCupy()
    monkeypatch.setitem(sys.modules, "cupy", double)
    assert xp.choose("cuda") == (double, None)
    assert double.log[:4] == [("device", 0), "in", ("stream", (0, 77)), "in"]
    malloc, free = double.allocator
    assert malloc(512, 0) == 4096 and torch_gpu == [("alloc", 512, 0, 77)]
    free(4096, 0)
    assert torch_gpu[1:] == [("free", 4096)]


@pytest.mark.parametrize("error", [RuntimeError, RecordedCupy.CompileException, ImportError])
def test_a_cupy_that_fails_keeps_its_own_pool(monkeypatch, torch_gpu, error):
    double = RecordedCupy(breaks=error("CUBLAS_STATUS_NOT_INITIALIZED\nlong story"))
    monkeypatch.setitem(sys.modules, "cupy", double)
    assert xp.choose("cuda") == (np, "CuPy 14 cannot compute here (CUBLAS_STATUS_NOT_INITIALIZED)")
    assert double.allocator == "default"


def test_tensors_of_the_cpu_cross_without_a_copy_or_are_refused():
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool):
        tensor = torch.zeros(3, dtype=dtype)
        array = xp.from_torch(tensor)
        array[1] = 1
        assert tensor.tolist() == [0, 1, 0] and str(array.dtype) == str(dtype).removeprefix("torch.")
        assert xp.to_torch(array).data_ptr() == tensor.data_ptr()
    learned = torch.arange(3.0, requires_grad=True)
    assert xp.from_torch(learned).tolist() == [0, 1, 2]
    assert xp.from_torch(torch.zeros(0, 4)).shape == (0, 4) and xp.to_torch(np.zeros((0, 4))).shape == (0, 4)
    assert xp.from_torch(torch.arange(6).reshape(2, 3).T).tolist() == [[0, 3], [1, 4], [2, 5]]
    half = xp.from_torch(torch.tensor([1.5, -2], dtype=torch.bfloat16))
    assert half.dtype == np.float32 and half.tolist() == [1.5, -2]
    for refused in (torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.float8_e4m3fn), torch.eye(2).to_sparse()):
        with pytest.raises(ValueError, match="cannot become an array; convert it to float32"):
            xp.from_torch(refused)


def test_arrays_become_tensors_or_are_refused():
    assert xp.to_torch(np.arange(4)[::-1]).tolist() == [3, 2, 1, 0]
    assert xp.to_torch(np.arange(6.0).reshape(2, 3).T).tolist() == [[0, 3], [1, 4], [2, 5]]
    for refused in (np.zeros(2, complex), np.zeros(2, np.uint64), np.array(["a"])):
        with pytest.raises(ValueError, match="cannot become a tensor"):
            xp.to_torch(refused)


def test_cholesky_says_when_there_is_no_factor():
    A = random_covariance(20, np.random.default_rng(0))
    assert np.allclose(xp.cholesky(A) @ xp.cholesky(A).T, A)
    broken = A.copy()
    broken[3, 3] = np.nan
    assert xp.cholesky(broken) is None and xp.cholesky(-np.eye(3)) is None and xp.cholesky(np.ones((2, 2))) is None
    right = np.random.default_rng(1).normal(size=(20, 3))
    assert np.allclose(np.tril(xp.cholesky(A)) @ xp.solve_triangular(xp.cholesky(A), right), right)


@gpu
def test_cholesky_on_the_gpu_never_fails_in_silence():
    A = random_covariance(256, np.random.default_rng(0))
    assert np.allclose(xp.cholesky(CUPY.asarray(A)).get(), xp.cholesky(A))
    for bad in (-np.eye(3), np.ones((2, 2)), np.where(np.eye(3) > 0, np.nan, 0.0)):
        assert xp.cholesky(CUPY.asarray(bad)) is None
    with pytest.raises(np.linalg.LinAlgError, match="not finite"):
        Factor(CUPY.asarray(np.full((3, 3), np.nan)))


@gpu
def test_cpu_and_gpu_take_the_same_jitter_and_give_the_same_posterior():
    rng = np.random.default_rng(2)
    X = np.repeat(rng.normal(size=(128, 8)), 2, axis=0)
    # Below zero by 3e-9, so that no rounding decides which jitter is the first to do: 1e-8.
    K = np.exp(-0.5 * ((X[:, None] - X) ** 2).sum(-1)) - 3e-9 * np.eye(256)
    host, there = Factor(K), Factor(CUPY.asarray(K))
    assert host.jitter == pytest.approx(1e-8) and there.jitter == pytest.approx(1e-8)
    one, other = host.whiten(K[:, :5]), there.whiten(CUPY.asarray(K[:, :5])).get()
    assert np.allclose(one.T @ one, other.T @ other, atol=1e-6)


@gpu
def test_tensors_of_the_gpu_cross_without_a_copy():
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool):
        tensor = torch.zeros(3, dtype=dtype, device="cuda")
        array = xp.from_torch(tensor)
        array[1] = 1
        assert tensor.tolist() == [0, 1, 0] and xp.to_torch(array).data_ptr() == tensor.data_ptr()
    assert xp.from_torch(torch.ones(2, dtype=torch.bfloat16, device="cuda")).dtype == np.float32
    assert xp.from_torch(torch.zeros(0, 4, device="cuda")).shape == (0, 4)
    assert xp.to_torch(CUPY.zeros((0, 4))).shape == (0, 4)
    assert xp.from_torch(torch.arange(3.0, device="cuda", requires_grad=True)).get().tolist() == [0, 1, 2]


@gpu
def test_one_pool_one_stream_and_no_leak():
    before = torch.cuda.memory_allocated()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), xp.scope(CUPY):
        assert CUPY.cuda.get_current_stream().ptr == stream.cuda_stream
        block = CUPY.zeros(1 << 20)
        assert torch.cuda.memory_allocated() - before >= 8 << 20, "CuPy's memory comes from torch's pool"
        total = torch.from_dlpack(block + 1).sum()
    assert float(total) == 1 << 20
    del block, total
    kept = torch.ones(1000, device="cuda")
    for _ in range(10_000):
        kept = xp.to_torch(xp.from_torch(kept))
    del kept
    assert torch.cuda.memory_allocated() == before


@gpu
def test_to_host_is_one_transfer_and_keeps_dtypes():
    counts, p = CUPY.arange(5), CUPY.linspace(0, 1, 5)
    there = xp.to_host(counts, np.ones(5), p)
    assert [array.dtype for array in there] == [np.int64, np.float64, np.float64]
    assert there[0].tolist() == [0, 1, 2, 3, 4] and there[2].tolist() == p.get().tolist()
