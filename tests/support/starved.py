"""An engine whose steps find no memory as long as a file is there: they ask for more than any machine has.

HOLDFAST_TEST_STARVED=FILE python tests/support/replicas_in_serve.py starved:StarvedReplica serve
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.cluster.engine_replica import EngineReplica


class StarvedReplica(EngineReplica):
    async def __init__(self, *told: Any) -> None:  # type: ignore[misc]
        await super().__init__(*told)
        runner: Any = self._service.engine._pipeline._runner
        file = Path(os.environ["HOLDFAST_TEST_STARVED"])
        for name in ("run", "begin"):
            if hasattr(runner, name):
                setattr(runner, name, starved(getattr(runner, name), file))


def starved(step: Callable[..., Any], file: Path) -> Callable[..., Any]:
    def run(*told: Any) -> Any:
        if file.exists():
            np.ones(2**60, np.uint8)
        return step(*told)

    return run
