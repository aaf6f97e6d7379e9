"""`holdfast serve` that compares ways to place turns: each is asked for by the ids of programs.

    python tools/serve_placements.py --config FILE
    python -m holdfast.loadgen.simulator.live URL --placement ours --placement two-choices --rounds 3

What it takes is what `holdfast serve` takes. `replicas.max_ongoing_requests` has to be more than ever come at once.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.cluster import environment
from holdfast.cluster.cli import main as holdfast

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"


def main() -> int:
    os.environ["PYTHONPATH"] = str(SUPPORT)  # by which Ray's workers find `placements_in_serve`
    apply = environment.apply

    def applied(variables: Mapping[str, str]) -> None:
        apply(variables)
        from holdfast.cluster import application  # imports Ray, which reads the variables

        config = application.RequestRouterConfig

        def switched(**kwargs: Any) -> Any:
            return config(**kwargs | {"request_router_class": "placements_in_serve:Switched"})

        application.RequestRouterConfig = switched

    environment.apply = applied
    return holdfast(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
