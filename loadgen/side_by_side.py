"""`holdfast bench peers`: Holdfast and its peers on this machine's cores, group after group, as one table of ratios.

Each group's servers are started, take turns as `bench compare` has them take turns, and end before the next group's
start. Holdfast is in every group, so every ratio is of servers that ran beside each other.
"""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.loadgen import compare, peers
from holdfast.loadgen.options import PAUSE_S, Options
from holdfast.loadgen.peers import Peer, Wanted
from holdfast.loadgen.report.page import read_run
from holdfast.loadgen.serving import serving, serving_peer
from holdfast.loadgen.table import brief, check_writable
from holdfast.loadgen.workloads.script import Sizes
from holdfast.replicas.errors import ConfigError

OURS = "holdfast"
NGRAM, Q8_0 = "-ngram", "-q8_0"  # what is said after a peer's name
GROUPS = tuple((OURS, peer + drafts) for peer in ("vllm", "llama.cpp", "llama.cpp" + Q8_0) for drafts in ("", NGRAM))
WORKLOADS = ("bugfix", "webapp", "concurrency", "burst")
SIZES = Sizes(webapp_turns=25, webapp_words=1350, programs=8, burst=8, bursts=5, jobs=6, rate=0.5, prompt_tokens=500)
"""25 turns that end near 6,000 of Pocket's tokens; eight programs; bursts of eight prompts of about 830 tokens; six
agents of those that come by a schedule, one every two seconds.
"""
ENGINE = {"dtype": "bfloat16", "kv_memory": 2}
_COLUMNS = {
    "program": "job mean",
    "median turn": "latency p50",
    "p99": "latency p99",
    "1st token p99": "ttft p99",
    "ms a token": "per token p50",
    "wall": "wall",
    "tokens a second": "tokens per s",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Which servers are compared, how. Raises ConfigError."""

    model: str
    folder: Path  # the comparisons' files and the peers' logs go there
    groups: tuple[tuple[str, ...], ...] = GROUPS
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {OURS: ENGINE})  # Holdfast's, by name
    gguf: str = ""
    gguf_q8_0: str = ""
    venvs: Mapping[str, Path] = field(default_factory=dict)  # by peer
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by name: a peer, and options of its own
    workloads: tuple[str, ...] = WORKLOADS
    repetitions: int = 2
    seed: int = 0
    forced: bool = False
    pause_s: float = PAUSE_S

    def __post_init__(self) -> None:
        for group in self.groups:
            if group[0] not in self.engines:
                raise ConfigError(f"a group begins with Holdfast ({', '.join(self.engines)}), not {group[0]}", "group")
            for name in group:
                if name not in self.engines:
                    self.peer(name, 0)  # raises before a server is started
            self.options([(name, "") for name in group], None)

    def peer(self, name: str, port: int) -> Peer:
        """The command of ``vllm``, ``llama.cpp-q8_0-ngram`` and so on, or of a variant. Raises ConfigError."""
        kind_of, *more = self.variants.get(name, (name,))
        plain = kind_of.removesuffix(NGRAM)
        kind = plain.removesuffix(Q8_0)
        if kind not in peers.PEERS:
            raise ConfigError(f"unknown server {name!r}; known: {', '.join((*self.engines, *peers.PEERS))}", "group")
        model = self.model
        if kind == "llama.cpp":
            model = self.gguf_q8_0 if plain.endswith(Q8_0) else self.gguf
        ngram, options = kind_of.endswith(NGRAM), tuple(more)
        return peers.PEERS[kind](Wanted(model, port, self.venvs.get(kind), ngram=ngram, more=options))

    def options(self, servers: Sequence[tuple[str, str]], file: Path | None) -> Options:
        """Of one group's comparison. Raises ConfigError."""
        return Options(
            servers=tuple(servers),
            workloads=self.workloads,
            repetitions=self.repetitions,
            seed=self.seed,
            sizes=SIZES,
            forced=self.forced,
            pause_s=self.pause_s,
            json_file=file,
        )


def main(plan: Plan) -> int:
    """Measure group after group, print all ratios; the exit status, that of the first comparison that fails.

    SIGTERM ends it as Ctrl-C does, its servers with it. Raises ConfigError, and UnavailableError where a server does
    not start.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    files = []
    for number, group in enumerate(plan.groups):
        file = plan.folder / f"{number}.json"
        check_writable(file, "folder")
        with ExitStack() as stack:
            servers = [(name, _start(stack, plan, name, file)) for name in group]
            status = compare.main(plan.options(servers, file))
        if status:
            return status
        files.append(file)
    print("\n".join(ratios([read_run(file) for file in files])))
    return 0


def ratios(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A Markdown table of what the peers take over what the first server of their run takes, with intervals."""
    lines = [f"| workload | {' | '.join(('peer', 'over', *_COLUMNS))} |", "|---" * (3 + len(_COLUMNS)) + "|"]
    entries = [summary | {"over": run["servers"][0]["name"]} for run in runs for summary in run["summaries"]]
    for workload in dict.fromkeys(each["workload"] for each in entries):
        for each in entries:
            if each["workload"] == workload and each["server"] != each["over"]:
                cells = [_cell(each["ratios"].get(name)) for name in _COLUMNS.values()]
                lines.append(f"| {' | '.join((workload, each['server'], each['over'], *cells))} |")
    return lines


def _start(stack: ExitStack, plan: Plan, name: str, file: Path) -> str:
    if name in plan.engines:
        return stack.enter_context(serving(plan.model, plan.engines[name]))
    log = file.with_name(f"{file.stem}-{name}.log")
    return stack.enter_context(serving_peer(partial(plan.peer, name), log))


def _cell(estimate: Mapping[str, float | None] | None) -> str:
    if estimate is None or estimate["value"] is None:
        return "-"
    low, high = estimate["low"], estimate["high"]
    interval = "" if low is None or high is None else f" ({brief(low)}-{brief(high)})"
    return brief(estimate["value"]) + interval


def parse_variant(text: str) -> tuple[str, tuple[str, ...]]:
    """Name, and a peer with its options, from ``NAME=PEER OPTIONS``. Raises ConfigError."""
    name, _, command = text.partition("=")
    words = shlex.split(command)
    if not name or not words:
        raise ConfigError(f"{text!r} is not NAME=PEER OPTIONS, as in small=vllm --num-gpu-blocks-override 64", "peer")
    return name, tuple(words)


def parse_engine(text: str) -> tuple[str, Mapping[str, Any]]:
    """Name and `engine` section from ``NAME=JSON``. Raises ConfigError."""
    name, _, section = text.partition("=")
    try:
        found = json.loads(section)
    except ValueError:
        found = None
    if not name or not isinstance(found, dict):
        raise ConfigError(f"""{text!r} is not NAME=JSON, as in {OURS}={{"dtype": "bfloat16"}}""", "engine")
    return name, found
