"""Kernels run compiled where there is a GPU and emulated where there is none; Triton asks when a kernel is defined."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
