"""What holds for every test: no time limits, for machines are shared; Triton's interpreter where there is no GPU.

Triton decides at its first import whether it interprets.
"""

import os
from pathlib import Path

from hypothesis import settings

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
