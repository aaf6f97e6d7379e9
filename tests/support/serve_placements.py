"""`holdfast serve` that compares ways to place turns: each is asked for by the ids of programs.

    PYTHONPATH=tests/support python tests/support/serve_placements.py --config FILE
    python -m holdfast.loadgen.simulator.live URL --placement ours --placement two-choices --rounds 3

What it takes is what `holdfast serve` takes. `replicas.max_ongoing_requests` has to be more than ever come at once.
"""

import sys
from collections.abc import Mapping
from typing import Any

from holdfast.cluster import environment
from holdfast.cluster.cli import main as holdfast


def main() -> int:
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
