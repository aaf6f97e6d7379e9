"""What a choice of a replica costs a router, by the number of replicas: processor time, in microseconds.

    python -m holdfast.loadgen.simulator.choosing [--replicas 10,100,1000] [--turns 5000]

    pinned     a program's next turn, whose replica has room
    new        a program whose prompt begins with what a tenth of the replicas hold
    named      a program of which only the name is known, while Redis is away
    report     what a replica tells, once a second each, with 64 beginnings of prompts: taken in

`sent` and `ended` are counted with each turn, as a router does. Ratios are to the smallest number of replicas.
"""

import argparse
import random
import time
from collections.abc import Callable

from holdfast.replicas.stats import LoadReport
from holdfast.router.placement import Ask, Placement, PlacementConfig, Prefix

BUSY = 8  # turns in hand of a replica, on average
PREFIXES = 64  # that a replica tells of


def fleet(replicas: int, rng: random.Random) -> tuple[Placement, list[tuple[str, LoadReport]]]:
    """A router's view of so many replicas at work, and what they tell."""
    made = Placement(PlacementConfig(), rng)
    names = [f"replicas#{i:06d}" for i in range(replicas)]
    made.update(dict.fromkeys(names, 1024))
    told = []
    for i, name in enumerate(names):
        others = {f"{rng.getrandbits(64):016x}": rng.randrange(100, 9000) for _ in range(PREFIXES - 1)}
        prefixes = others | ({"shared": 3000} if i % 10 == 0 else {})
        report = LoadReport(rng.randrange(2 * BUSY), 0, 0, 65536, 9000, 4000, 1e-4, prefixes)
        made.report(name, report)
        told.append((name, report))
    return made, told


def per_turn(made: Placement, ask: Callable[[int], Ask], turns: int) -> float:
    """Microseconds of processor time of a choice and its two counts."""
    began = time.thread_time()
    for i in range(turns):
        choice = made.choose(ask(i))
        assert choice is not None
        made.sent(choice.replica_id)
        made.ended(choice.replica_id)
    return (time.thread_time() - began) / turns * 1e6


def measure(replicas: int, turns: int) -> tuple[float, ...]:
    """Pinned, new, named and report, in microseconds."""
    made, told = fleet(replicas, random.Random(replicas))
    prefixes = (Prefix("shared", 3000),)
    pinned = per_turn(made, lambda i: Ask(8000, home=f"replicas#{i % replicas:06d}", held=8000), turns)
    new = per_turn(made, lambda i: Ask(8000, prefixes), turns)
    named = per_turn(made, lambda i: Ask(8000, name=f"acme/{i}"), turns)
    began = time.thread_time()
    for i in range(turns):
        made.report(*told[i % replicas])
    return pinned, new, named, (time.thread_time() - began) / turns * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="10,100,1000")
    parser.add_argument("--turns", type=int, default=5000)
    asked = parser.parse_args()
    found = {each: measure(each, asked.turns) for each in map(int, asked.replicas.split(","))}
    first = next(iter(found.values()))
    print("replicas | pinned us | new us | named us | report us")
    for replicas, costs in found.items():
        print(replicas, *(f"{us:.1f} ({us / base:.2f})" for us, base in zip(costs, first, strict=True)), sep=" | ")


if __name__ == "__main__":
    main()
