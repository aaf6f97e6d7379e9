"""What holds for every test: no time limits, for machines are shared; Triton's interpreter where there is no GPU.

Hypothesis draws other examples in every run, but under continuous integration (`CI` is set) the same ones, so that a
commit fails there or does not; what a developer's run finds becomes a case of its own. Triton decides at its first
import whether it interprets.
"""

import os
from pathlib import Path

from hypothesis import settings

settings.register_profile("shared machine", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("shared machine")

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
