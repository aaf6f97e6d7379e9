"""The engine's code, instruction by instruction of the interpreter."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast import replicas

OURS = tuple(str(Path(folder).resolve()) for folder in replicas.__path__)


def at_each_instruction(call: Callable[[], object], act: Callable[[], object]) -> None:
    """Call `call`, and `act` at each of its instructions in `replicas/`."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
