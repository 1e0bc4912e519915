"""The CUDA kernel's own source, run: on a GPU where there is one, and on any machine with a C++ compiler, threads for threads.

Built for the CPU, ``__syncthreads`` is a barrier of as many threads as the block has, so what is tested is the very text that a
GPU compiles, together with the launcher that hands it its arguments.
"""

import contextlib
import ctypes
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from vipfast import xp
from vipfast.allocate import bisection, solver
from vipfast.allocate.objective import OBJECTIVES, rloo
from vipfast.allocate.vip import Vip
from vipfast.predict.base import Prediction
from vipfast.types import Prompt, PromptBatch

CUDA_ON_CPU = r"""
#include <pthread.h>
#include <string.h>
#define __global__
#define __device__ static
#define __shared__ static
#define __launch_bounds__(most)
struct Place { unsigned int x; };
static thread_local Place threadIdx;
static Place blockDim;
static pthread_barrier_t meeting;
static void __syncthreads() { if (blockDim.x > 1) pthread_barrier_wait(&meeting); }
static long long __double_as_longlong(double value) { long long bits; memcpy(&bits, &value, 8); return bits; }
SOURCE
struct Arguments {
    const double *weight, *table; const i64 *first, *low, *room; const u64* tie; i64 *until, *counts, B, units;
};
struct Lane { unsigned int lane; const Arguments* a; };
static void* work(void* lane) {
    threadIdx.x = ((Lane*)lane)->lane;
    const Arguments& a = *((Lane*)lane)->a;
    place_units(a.weight, a.table, a.first, a.low, a.room, a.tie, a.until, a.counts, a.B, a.units);
    return nullptr;
}
extern "C" void launch(unsigned int threads, const double* weight, const double* table, const i64* first, const i64* low,
                       const i64* room, const u64* tie, i64* until, i64* counts, i64 num_prompts, i64 units) {
    Arguments a = {weight, table, first, low, room, tie, until, counts, num_prompts, units};
    pthread_t handles[1024];
    Lane lanes[1024];
    blockDim.x = threads;
    pthread_barrier_init(&meeting, nullptr, threads);
    for (unsigned int lane = 0; lane < threads; ++lane) {
        lanes[lane] = {lane, &a};
        pthread_create(&handles[lane], nullptr, work, &lanes[lane]);
    }
    for (unsigned int lane = 0; lane < threads; ++lane) pthread_join(handles[lane], nullptr);
    pthread_barrier_destroy(&meeting);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the kernel's source with")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(CUDA_ON_CPU.replace("SOURCE", bisection.SOURCE))
    flags = "-std=c++17 -O1 -ffp-contract=off -shared -fPIC -pthread -o kernel.so kernel.cpp"
    subprocess.run([compiler, *flags.split()], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


class Away(np.ndarray):
    """An array that stands for one on a GPU."""


class CupyDouble:
    """The part of CuPy that the launcher uses, over host memory; its RawKernel runs the source built for the CPU."""

    ndarray, float64, int64 = Away, np.float64, np.int64

    def __init__(self, library, threads):
        self.library, self.threads, self.launches, self.crossings = library, threads, 0, 0

    def asarray(self, array):
        return np.array(array).view(Away)

    def ascontiguousarray(self, array, dtype):
        return np.ascontiguousarray(array, dtype).view(Away)

    def empty(self, length, dtype):
        return np.full(length, -7, dtype).view(Away)

    def stack(self, arrays):
        self.crossings += 1
        return SimpleNamespace(get=lambda: np.array(arrays, np.float64))

    def RawKernel(self, source, name):
        assert (source, name) == (bisection.SOURCE, "place_units")

        def launch(grid, block, arguments):
            assert grid == (1,) and block[0] & (block[0] - 1) == 0 and block[0] <= 1024
            assert all(array.flags.c_contiguous for array in arguments[:8])
            self.launches += 1
            pointers = [ctypes.c_void_p(array.ctypes.data) for array in arguments[:8]]
            self.library.launch(self.threads, *pointers, *map(ctypes.c_longlong, map(int, arguments[8:])))

        return launch


@pytest.fixture
def away(library, monkeypatch):
    """away(threads): from now on an ``Away`` utility is planned by the kernel, with that many threads."""

    def install(threads):
        double = CupyDouble(library, threads)
        monkeypatch.setitem(sys.modules, "cupy", double)
        monkeypatch.setattr(xp, "scope", lambda module: contextlib.nullcontext())
        return double

    return install


def in_order(gain_BK, low_B, room_B, units, ties_B):
    """Every unit that could be placed, sorted by the rule as it is written down, and the first ``units`` of them counted."""
    loss = (-solver.rounded(gain_BK)).tolist()
    queue = [(loss[q][j], low_B[q] + j, ties_B[q], q) for q in range(len(low_B)) for j in range(room_B[q])]
    counts = low_B.copy()
    for _, _, _, q in sorted(queue)[:units]:
        counts[q] += 1
    return counts


def problem(rng):
    """A random allocation full of ties: few distinct utilities, tie keys that collide, bounds that differ by prompt."""
    B = int(rng.integers(1, 13))
    low_B = rng.integers(3, 6, B) if rng.random() < 0.5 else np.full(B, 3)
    high_B = low_B + (rng.integers(0, 9, B) if rng.random() < 0.5 else int(rng.integers(0, 9)))
    utility_B = rng.choice([0.0, 1e-300, 0.16, 0.2 * 0.8, 0.8 * (1 - 0.8), np.nextafter(0.25, 0), 0.25], B)
    ties_B = rng.integers(0, 3, B).astype(np.uint64) if rng.random() < 0.3 else rng.integers(0, 2**64, B, dtype=np.uint64)
    budget = int(rng.integers(low_B.sum(), high_B.sum() + 1))
    return utility_B, budget, low_B, high_B, ties_B, OBJECTIVES[rng.choice(["rloo", "dr_grpo"])]


def test_kernel_numpy_and_the_written_rule_give_the_same_integers(away):
    double, rng = away(threads=1), np.random.default_rng(0)
    for _ in range(800):
        utility_B, budget, low_B, high_B, ties_B, objective = problem(rng)
        host = solver.solve(utility_B, budget, low_B, high_B, ties_B, objective)
        there = solver.solve(utility_B.view(Away), budget, low_B, high_B, ties_B, objective)
        n = np.arange(3, high_B.max() + 1.0)
        gain = np.append(objective(n)[:-1] - objective(n)[1:], 0)
        gain_BK = utility_B[:, None] * gain[np.minimum(low_B[:, None] - 3 + np.arange(10), len(gain) - 1)]
        wanted = in_order(gain_BK, low_B, high_B - low_B, budget - low_B.sum(), ties_B)
        assert host.tolist() == wanted.tolist() and np.asarray(there).tolist() == wanted.tolist()
    assert double.launches > 600


def test_tables_of_gains_with_losses_among_them(away):
    away(threads=1)
    rng = np.random.default_rng(1)
    for _ in range(500):
        B = int(rng.integers(1, 9))
        table = -np.sort(-rng.choice([-0.5, -1e-320, -0.0, 0.0, 1e-320, 0.1, 3.0], (B, 6)), axis=1)
        low_B, room_B = rng.integers(0, 4, B), rng.integers(0, 7, B)
        units, ties_B = int(rng.integers(0, room_B.sum() + 1)), rng.integers(0, 4, B).astype(np.uint64)
        wanted = in_order(table, low_B, room_B, units, ties_B)
        assert solver.solve_gains(table, int(low_B.sum()) + units, low_B, low_B + room_B, ties_B).tolist() == wanted.tolist()
        if units:
            ones, first_B = np.ones(B).view(Away), 6 * np.arange(B)
            there = bisection.place(ones, table.ravel(), first_B, low_B, np.minimum(room_B, units), units, ties_B)
            assert np.asarray(there).tolist() == wanted.tolist()


def test_threads_of_a_block_agree_with_one(away):
    rng = np.random.default_rng(2)
    for threads in (2, 8):
        away(threads)
        for _ in range(15):
            utility_B, budget, low_B, high_B, ties_B, objective = problem(rng)
            arguments = budget, low_B, high_B, ties_B, objective
            there = solver.solve(utility_B.view(Away), *arguments)
            assert np.asarray(there).tolist() == solver.solve(utility_B, *arguments).tolist()


def test_a_large_step(away):
    away(threads=1)
    rng = np.random.default_rng(3)
    B = 5000
    utility_B, ties_B = rng.choice(np.linspace(0, 0.25, 40), B), rng.integers(0, 2**64, B, dtype=np.uint64)
    host = solver.solve(utility_B, 8 * B, 2, 32, ties_B, rloo)
    assert (np.asarray(solver.solve(utility_B.view(Away), 8 * B, 2, 32, ties_B, rloo)) == host).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1e-9])
def test_what_the_host_refuses_comes_back_as_minus_one(away, bad):
    away(threads=2)
    utility_B = np.array([0.25, bad, 0.1])
    there = solver.solve(utility_B.view(Away), 24, 2, 32, np.arange(3, dtype=np.uint64), rloo)
    assert np.asarray(there).tolist() == [-1, -1, -1]
    with pytest.raises(ValueError, match="at least 0: prompt 1 of 3 has"):
        solver.solve(utility_B, 24, 2, 32, np.arange(3, dtype=np.uint64), rloo)


class OnTheGpu:
    """A predictor whose answers live there."""

    name = "known"

    def __init__(self, signal):
        self.signal = np.array(signal).view(Away)

    def predict(self, uids, texts):
        return Prediction(np.full(len(uids), 0.5).view(Away), np.zeros(len(uids)).view(Away), self.signal)


def test_vip_plans_with_the_kernel_and_brings_all_it_needs_over_at_once(away):
    double = away(threads=2)
    prompts = PromptBatch([Prompt(f"u{i}", "", np.zeros(0, np.int64)) for i in range(4)], 1, 0)
    counts = next(Vip(OnTheGpu([0.25, 0.09, 0.09, 0.25]), "rloo", 2, 32, arrays=double).rounds(prompts, 32))
    assert (double.launches, double.crossings) == (1, 1) and type(counts) is np.ndarray and counts.dtype == np.int64
    assert counts.tolist() == solver.solve(np.array([0.25, 0.09, 0.09, 0.25]), 32, 2, 32, prompts.ties_B, rloo).tolist()
    with pytest.raises(ValueError, match="prompt 1 of 4 has nan"):
        next(Vip(OnTheGpu([0.2, np.nan, 0.1, 0.1]), "rloo", 2, 32, arrays=double).rounds(prompts, 32))


def test_bounds_that_leave_no_choice_launch_nothing(away):
    double = away(threads=1)
    there = solver.solve(np.full(3, 0.2).view(Away), 6, 2, 32, np.arange(3, dtype=np.uint64), rloo)
    assert isinstance(there, Away) and there.tolist() == [2, 2, 2] and double.launches == 0


def cuda():
    module, why = xp.choose("cuda")
    return pytest.mark.skipif(module is np, reason=f"no GPU for CuPy: {why}")


@cuda()
def test_on_a_gpu_the_integers_are_the_same():
    import cupy

    rng = np.random.default_rng(4)
    for _ in range(300):
        utility_B, budget, low_B, high_B, ties_B, objective = problem(rng)
        arguments = budget, low_B, high_B, ties_B, objective
        there = solver.solve(cupy.asarray(utility_B), *arguments)
        assert there.get().tolist() == solver.solve(utility_B, *arguments).tolist()
    B = 100_000
    utility_B, ties_B = rng.choice(np.linspace(0, 0.25, 999), B), rng.integers(0, 2**64, B, dtype=np.uint64)
    there = solver.solve(cupy.asarray(utility_B), 8 * B, 2, 32, ties_B, rloo)
    assert (there.get() == solver.solve(utility_B, 8 * B, 2, 32, ties_B, rloo)).all()
    assert (solver.solve(cupy.asarray([0.1, np.nan]), 16, 2, 32, ties_B[:2], rloo).get() == -1).all()
