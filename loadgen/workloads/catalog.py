"""Every workload under the name that the command line has for it."""

from __future__ import annotations

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
"""What each name on the command line stands for."""


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
"""Which of `Sizes` is the load of a workload, where it has one."""


def drawings(names: Sequence[str]) -> Iterator[tuple[str, Drawing]]:
    """The name and function of every workload that ``names`` stand for."""
    for name in names:
        for draw in WORKLOADS[name]:
            yield draw.__name__.replace("_", "-"), draw


def describe(drawn: Round) -> str:
    """What was drawn, in a line."""
    turns = sum(len(lane) for wave in drawn.waves for lane in wave)
    widest = max(len(wave) for wave in drawn.waves)
    declared = {tool["function"]["name"] for script in drawn.scripts for tool in script.tools}
    when = f"arriving over {max(drawn.due):.0f} s" if drawn.due else f"up to {widest} at once"
    told = f"{len(drawn.scripts)} programs, {turns} requests, {when}, {len(declared)} tools"
    pauses = [pause for script in drawn.scripts for pause in script.pauses]
    if not pauses:
        return told
    seconds = sum(pause.seconds for pause in pauses)
    words = sum(pause.words for pause in pauses) / len(drawn.scripts)
    return f"{told}; tools take {seconds / len(pauses):.2f} s (mean) and tell {words:.0f} words more a program"
