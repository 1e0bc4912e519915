"""What must be settled before any test: how kernels run, and that Ctrl-C means something.

Kernels run compiled where there is a GPU and emulated where there is none; Triton asks when a kernel is defined.
"""

import os
import signal

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts what runs in its background with SIGINT ignored, and every process that tests start and interrupt inherits it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A deadline of 200 ms an example is a claim about a machine.
settings.register_profile("without deadline", parent=settings.default, deadline=None)
settings.load_profile("without deadline")
