"""`holdfast bench`: a benchmark is a line about it, its options, and the function that takes them."""

import argparse
from importlib import import_module
from typing import Any

from holdfast.loadgen import options as of
from holdfast.loadgen.flags import add_options, built

Commands = argparse._SubParsersAction  # argparse has no public name for it

BENCHMARKS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "overhead": (
        "Measure the time that HTTP, Ray and the router add to the engine: starts a server and an engine of one model.",
        "overhead.main", (of.Overhead,),
    ),
    "overload": (
        "Measure goodput and refusals at multiples of a server's capacity, with and without request deadlines.",
        "overload.main", (of.Overload,),
    ),
    "orchestrator": (
        "Measure what the orchestrator gains: runs whose tools begin as calls close, whose prompts are sent ahead, "
        "both, and neither. Starts a server.",
        "orchestrating.main", (of.Orchestrated,),
    ),
    "drafts": (
        "Count the tokens per forward that each drafter would reach on a trace of conversations; needs no model.",
        "bench.drafts.main", (of.Drafts,),
    ),
    "ablation": (
        "Measure turn latencies of an engine with everything on, and with each mechanism off; no server.",
        "bench.__main__.main", (),
    ),
    "compare": (
        "Compare servers side by side in one run, by the same agent programs; any OpenAI-compatible server.",
        "compare.main", (of.Options,),
    ),
    "market": (
        "Measure questions about data that keeps arriving: to sessions it is appended to, and with the whole data in "
        "each request.",
        "market.main", (of.Market,),
    ),
    "scheduling": (
        "Compare orders and retention policies on the real engine: starts a server for each, with a small and a large "
        "KV cache.",
        "scheduling.main", (of.Scheduling,),
    ),
    "replay": (
        "Send the programs of a trace to servers, each at its recorded time and with its recorded pauses.",
        "compare.replay", (of.Replay, of.Options),
    ),
    "trace-convert": (
        "Read a trace in another format and write it as a mooncake_trace.", "traces.formats.main", (of.Conversion,),
    ),
    "report": (
        "Write an HTML page with tables and plots from the JSON of a comparison.", "report.page.report", (of.View,),
    ),
    "trace": (
        "Write a timeline of every program for ui.perfetto.dev from the JSON of a comparison.",
        "report.page.timeline", (of.View,),
    ),
    "serve-peer": (
        "Print the command line of another server with its best settings, or start it.",
        "peers.serve", (of.Wanted,),
    ),
    "peers": (
        "Compare Holdfast and its peers on this machine's cores: starts them in groups, prints one table.",
        "peers.main", (of.Peers,),
    ),
}  # fmt: skip
"""The help text of each benchmark, its function below `holdfast.loadgen`, and the dataclasses of its options."""

_NOT_REPLAYED = ("workloads", "sizes", "forced", "max_tokens", "record", "rates", "concurrencies")
"""Options of a comparison that a replay does not have."""


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add `bench` and its benchmarks."""
    text = "Measure a server."
    command = commands.add_parser("bench", help=text, description=text)
    kinds = command.add_subparsers(metavar="BENCHMARK", required=True)
    for name, (help_text, _, options) in BENCHMARKS.items():
        own_arguments = name == "ablation"  # it parses its own arguments
        kind = kinds.add_parser(name, help=help_text, description=help_text, add_help=not own_arguments)
        replay = name == "replay"
        for option_set in options:
            skip, defaults = (_NOT_REPLAYED, {"repetitions": 1}) if replay and option_set is of.Options else ((), {})
            add_options(kind, option_set, skip, defaults)
        kind.set_defaults(run=_run, benchmark=name, **({"takes_rest": True} if own_arguments else {}))


def _run(options: argparse.Namespace) -> int:
    _, function, kinds = BENCHMARKS[options.benchmark]
    module, _, name = function.rpartition(".")
    run = getattr(import_module(f"holdfast.loadgen.{module}"), name)
    if options.benchmark == "ablation":
        return int(run(["ablation", *options.rest]))
    if options.benchmark == "drafts":
        return int(run(options.trace, options.tools, options.tokenizer, options.cut, options.as_json))
    replayed = {"workloads": ()} if options.benchmark == "replay" else {}
    return int(run(*(built(kind, options, **(replayed if kind is of.Options else {})) for kind in kinds)))
