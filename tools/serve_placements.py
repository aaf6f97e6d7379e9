"""`holdfast serve` with several placement policies: a program's id selects its policy.

    python tools/serve_placements.py --config FILE
    python -m holdfast.loadgen.simulator.live URL --placement ours --placement two-choices --rounds 3

It takes the options of `holdfast serve`. Set `replicas.max_ongoing_requests` above the most requests at once.
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
    os.environ["PYTHONPATH"] = str(SUPPORT)  # Ray's workers import `placements_in_serve` from here
    apply = environment.apply

    def apply_and_patch(variables: Mapping[str, str]) -> None:
        apply(variables)
        from holdfast.cluster import application  # imports Ray, which reads the variables

        config = application.RequestRouterConfig

        def switched_config(**kwargs: Any) -> Any:
            return config(**kwargs | {"request_router_class": "placements_in_serve:Switched"})

        application.RequestRouterConfig = switched_config

    environment.apply = apply_and_patch
    return holdfast(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
