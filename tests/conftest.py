"""What must be settled before any test: how kernels run, and that Ctrl-C means something.

Kernels run compiled where there is a GPU and emulated where there is none; Triton asks when a kernel is defined.
"""

import os
import signal

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts what runs in its background with SIGINT ignored, and every process that tests start and interrupt inherits it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
