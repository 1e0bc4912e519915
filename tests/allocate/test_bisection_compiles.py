"""NVRTC, which needs neither GPU nor driver, compiles the kernel for every generation of GPU the package aims at."""

import ctypes
from pathlib import Path

import pytest
from nvidia import cuda_nvrtc

from vipfast.allocate import bisection


@pytest.fixture(scope="module")
def nvrtc():
    return ctypes.CDLL(str(next(Path(folder) for folder in cuda_nvrtc.__path__) / "lib" / "libnvrtc.so.12"))


def compiled(nvrtc, source, architecture):
    """(NVRTC's status, its log, the cubin)."""
    program, length = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None) == 0
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture={architecture}".encode(), b"-std=c++17")
    status = nvrtc.nvrtcCompileProgram(program, 2, options)
    assert nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(length)) == 0
    log = ctypes.create_string_buffer(length.value)
    assert nvrtc.nvrtcGetProgramLog(program, log) == 0
    cubin = b""
    if status == 0:
        assert nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(length)) == 0
        buffer = ctypes.create_string_buffer(length.value)
        assert nvrtc.nvrtcGetCUBIN(program, buffer) == 0
        cubin = buffer.raw
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return status, log.value.decode(), cubin


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_compiles_without_a_warning(nvrtc, architecture):
    status, log, cubin = compiled(nvrtc, bisection.SOURCE, architecture)
    assert (status, log) == (0, "")
    assert cubin.startswith(b"\x7fELF") and bisection.NAME.encode() in cubin


def test_a_broken_source_would_be_noticed(nvrtc):
    status, log, _ = compiled(nvrtc, bisection.SOURCE.replace("i64 left", "left", 1), "sm_90")
    assert status != 0 and "left" in log
