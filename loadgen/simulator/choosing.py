"""The cost of choosing a replica, by the number of replicas: processor time, in microseconds.

    python -m holdfast.loadgen.simulator.choosing [--replicas 10,100,1000] [--turns 5000]

    pinned     a program's next turn, whose replica has room
    new        a program whose prompt begins with what a tenth of the replicas hold
    named      a program of which only the name is known, while Redis is away
    report     a replica's report with 64 beginnings of prompts, which comes once a second: taken in

A turn includes the router's two counts of it. Ratios are to the smallest number of replicas.
"""

import argparse
import random
import time
from collections.abc import Callable

from holdfast.loadgen.table import print_table
from holdfast.replicas.stats import LoadReport
from holdfast.router.placement import Placement, PlacementRequest, Prefix

BUSY = 8  # turns in progress at a replica, on average
PREFIXES = 64  # in a replica's report


def measure(replicas: int, turns: int) -> tuple[float, ...]:
    """Microseconds of a pinned, a new and a named turn, and of a report."""
    rng = random.Random(replicas)
    names = [f"replicas#{i:06d}" for i in range(replicas)]
    router = Placement(rng)
    router.update(dict.fromkeys(names, 1024))
    reports = []
    for i, name in enumerate(names):
        prefixes = {f"{rng.getrandbits(64):016x}": rng.randrange(100, 9000) for _ in range(PREFIXES - 1)}
        prefixes |= {"shared": 3000} if i % 10 == 0 else {}
        reports.append((name, LoadReport(rng.randrange(2 * BUSY), 0, 0, 65536, 9000, 4000, 1e-4, prefixes)))
        router.report(*reports[-1])

    def turn(request: PlacementRequest) -> None:
        choice = router.choose(request)
        assert choice is not None
        router.sent(choice.replica_id)
        router.ended(choice.replica_id)

    def timed(once: Callable[[int], None]) -> float:
        start = time.thread_time()
        for i in range(turns):
            once(i)
        return (time.thread_time() - start) / turns * 1e6

    return (
        timed(lambda i: turn(PlacementRequest(8000, home=names[i % replicas], held=8000))),
        timed(lambda i: turn(PlacementRequest(8000, (Prefix("shared", 3000),)))),
        timed(lambda i: turn(PlacementRequest(8000, name=f"acme/{i}"))),
        timed(lambda i: router.report(*reports[i % replicas])),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="10,100,1000")
    parser.add_argument("--turns", type=int, default=5000)
    options = parser.parse_args()
    results = {count: measure(count, options.turns) for count in map(int, options.replicas.split(","))}
    baseline = next(iter(results.values()))
    rows = [
        [str(replicas), *(f"{us:.1f} ({us / base:.2f})" for us, base in zip(costs, baseline, strict=True))]
        for replicas, costs in results.items()
    ]
    print_table("microseconds", ["replicas", "pinned", "new", "named", "report"], rows)


if __name__ == "__main__":
    main()
