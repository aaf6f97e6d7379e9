"""Every workload by its name on the command line.

A new workload is a function of `Draw` and `Sizes` that returns a `Round`, in a file of its own beside `papers`, and a
line in `WORKLOADS`. A workload that arrives at a rate, or sends so many at once, also has a line in `LOADED_BY`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from holdfast.loadgen.workloads import drawing, papers
from holdfast.loadgen.workloads.drawing import Draw
from holdfast.loadgen.workloads.script import Round, Sizes

Drawing = Callable[[Draw, Sizes], Round]
WORKLOADS: dict[str, tuple[Drawing, ...]] = {
    "agents": (drawing.sequential, drawing.interleaved, drawing.round_robin),
    "bugfix": (drawing.bugfix,),
    "webapp": (drawing.webapp,),
    "burst": (drawing.burst,),
    "concurrency": (drawing.concurrency,),
    "arrivals": (drawing.arrivals,),
    "swe": (papers.swe,),
    "mixed": (papers.mixed,),
    "coding": (papers.coding,),
    "bfcl": (papers.bfcl,),
    "sutradhara": (papers.sutradhara,),
    "tenants": (papers.tenants,),
    "repeats": (drawing.repeats,),
}
"""The workloads of each name."""


LOADED_BY = {
    "burst": "burst",
    "concurrency": "programs",
    "arrivals": "rate",
    "swe": "rate",
    "mixed": "rate",
    "coding": "rate",
    "bfcl": "rate",
    "sutradhara": "rate",
    "tenants": "rate",
}
"""The field of `Sizes` that is a workload's load."""


def drawings(names: Sequence[str]) -> Iterator[tuple[str, Drawing]]:
    """The name and function of every workload that ``names`` stand for."""
    for name in names:
        for draw in WORKLOADS[name]:
            yield draw.__name__.replace("_", "-"), draw


def describe(round_: Round) -> str:
    """One line about a round."""
    counts = Counter(place for wave in round_.waves for lane in wave for place in lane)
    declared = {tool["function"]["name"] for program in round_.programs for tool in program.turns[0].tools}
    widest = max(len(wave) for wave in round_.waves)
    when = f"arriving over {max(round_.due):.0f} s" if round_.due else f"up to {widest} at once"
    line = f"{len(round_.programs)} programs, {counts.total()} requests, {when}, {len(declared)} tools"
    turns = [turn for place, program in enumerate(round_.programs) for turn in program.turns[1 : counts[place]]]
    if any(turn.delay_ms for turn in turns):
        line += f"; tools take {sum(turn.delay_ms or 0.0 for turn in turns) / len(turns) / 1e3:.2f} s (mean)"
    return line
