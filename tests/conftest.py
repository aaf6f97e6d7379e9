"""Without a GPU, Triton kernels run in its interpreter; that is decided when Triton is first imported."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
