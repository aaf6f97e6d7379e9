"""`holdfast bench`: its options, and the part of the load generator that each benchmark is, imported when needed."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from holdfast.loadgen.options import Options

T = TypeVar("T")
Commands = argparse._SubParsersAction  # argparse has no public name for it
Flags = Mapping[str, Mapping[str, Any]]  # the arguments of `add_argument`, by flag or name

MAX_TOKENS = 128
_FORMATS = "mooncake_trace, multi_turn, openai, vllm or mini-swe-agent"
_SIZES = {
    "webapp_turns": "requests of webapp",
    "webapp_words": "words that webapp's tools add to their results, in all",
    "programs": "programs at once in concurrency",
    "burst": "requests at once in burst",
    "bursts": "bursts one after another",
    "chain": "calls that a user message asks for",
    "jobs": "programs that arrive by a schedule",
    "rate": "programs a second that arrive by a schedule",
    "turns_times": "multiply the turns of swe, mixed and bfcl",
    "tool_times": "multiply the seconds of their tools",
    "prompt_tokens": "words of sutradhara's prompts, and words that the tools of swe, mixed and bfcl return",
    "scale": "multiply the lengths of coding",
    "quiet": "tenants beside the noisy one",
    "noise": "load of the noisy tenant, in quiet ones",
}


def numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas between") from error


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between."""
    values = numbers(text)
    if not all(value.is_integer() for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not whole numbers")
    return tuple(int(value) for value in values)


def add_flags(command: argparse.ArgumentParser, flags: Flags) -> None:
    """Add options, each with its default in its help."""
    for flag, words in flags.items():
        default = words.get("default")
        shown = ",".join(f"{value:g}" for value in default) if isinstance(default, tuple) else default
        text = words["help"] + (f" (default: {shown})" if default not in (None, (), [], "", False) else "")
        command.add_argument(flag, **{**words, "help": text})


def built(kind: Callable[..., T], options: argparse.Namespace, **more: Any) -> T:
    """A dataclass of the options that the command line has for its fields; what is not given keeps its default."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in vars(options).items() if name in names and value is not None} | more)


def _measuring(repetitions: int, limit: str) -> Flags:
    """Options of `compare` and `replay`."""
    return {
        "--server": {"action": "append", "default": [], "metavar": "NAME=URL", "help": "once for each server"},
        "--repetitions": {"type": int, "default": repetitions, "help": "repetitions of every workload or trace"},
        "--seed": {"type": int, "default": 0, "help": "another seed draws other texts (default: 0)"},
        "--json": {"type": Path, "metavar": "FILE", "help": "write every request and every figure"},
        "--html": {"type": Path, "metavar": "FILE", "help": "write a page with tables and plots; needs matplotlib"},
        "--ablation": {"type": Path, "metavar": "FILE", "help": "add the output of `bench ablation --json` to both"},
        "--model": {"default": "", "help": "model name to ask for (default: the first that each server names)"},
        "--max-tokens": {"type": int, "help": limit},
        "--timeout": {"type": float, "dest": "timeout_s", "default": 300.0, "help": "seconds a request may take"},
        "--warm-up": {"type": int, "default": 1, "help": "programs sent to each server before"},
        "--pause": {"type": float, "dest": "pause_s", "default": 1.5, "metavar": "SECONDS", "help": "seconds before a "
                    "server begins after another one, which may be busy for a while"},
        "--api-key-file": {"type": Path, "help": "file with the API key, sent to every server"},
        "--tenant-key-file": {"action": "append", "default": [], "metavar": "NAME=FILE", "help": "API key of a tenant: "
                              "of noisy, quiet-0, ..., or of the trace's"},
    }  # fmt: skip


def _sizes() -> Flags:
    from holdfast.loadgen.workloads.script import Sizes

    defaults = Sizes()
    kinds = {name: type(getattr(defaults, name)) for name in _SIZES}
    return {
        f"--{name.replace('_', '-')}": {"type": kinds[name], "default": getattr(defaults, name), "help": text}
        for name, text in _SIZES.items()
    }


_MODEL = {"--model": {"default": "pocket", "help": "as for serve"}}
FLAGS: dict[str, tuple[str, Flags]] = {
    "overhead": (
        "Measure the time that HTTP, Ray and the router add to the engine: starts a server and an engine of one model.",
        _MODEL | {"--requests": {"type": int, "default": 200, "help": "requests of each kind"}},
    ),
    "overload": (
        "Measure goodput and refusals at multiples of a server's capacity, with and without request deadlines.",
        _MODEL | {
            "--loads": {"type": numbers, "default": (0.8, 1.0, 2.0, 3.0), "metavar": "X,X,..",
                        "help": "multiples of the capacity"},
            "--seconds": {"type": float, "default": 40.0, "help": "seconds of each run"},
            "--deadline": {"type": float, "dest": "deadline_s", "default": 6.0,
                           "help": "mean seconds; from half to one and a half"},
            "--sequences": {"type": int, "default": 8, "help": "engine.max_sequences"},
        },
    ),
    "generator": (
        "Measure what the load generator itself costs, and how well it keeps a schedule, against a server that only "
        "waits.",
        {
            "--rate": {"type": float, "default": 500.0, "help": "requests a second"},
            "--seconds": {"type": float, "default": 10.0, "help": "seconds of the run"},
            "--first": {"type": float, "default": 0.05, "help": "seconds to a first token"},
            "--token": {"type": float, "default": 0.01, "help": "seconds to each further token"},
            "--tokens": {"type": int, "default": 4, "help": "tokens of every answer"},
        },
    ),
    "orchestrator": (
        "Measure what the orchestrator gains: runs whose tools begin as calls close, whose prompts are sent ahead, "
        "both, and neither. Starts a server.",
        _MODEL | {
            "--rounds": {"type": int, "default": 30, "help": "rounds of one run each way"},
            "--calls": {"type": int, "default": 3, "help": "calls that each run's question asks for"},
            "--words": {"type": int, "default": 100, "help": "words that each tool returns"},
        },
    ),
    "drafts": (
        "Count the tokens per forward that each drafter would reach on a trace of conversations; needs no model.",
        {
            "--trace": {"type": Path, "required": True, "help": "JSON lines with OpenAI-format 'messages'"},
            "--tools": {"type": Path, "help": "JSON list of OpenAI-format tools that the conversations had"},
            "--tokenizer": {"type": Path, "help": "folder of a tokenizer (default: one trained on the trace)"},
            "--cut": {"default": "pocket", "help": "how that one cuts words: pocket, qwen, gpt2 or llama"},
            "--json": {"action": "store_true", "help": "print JSON"},
        },
    ),
    "ablation": ("Measure turn latencies of an engine with everything on, and with each mechanism off; no server.", {}),
    "compare": (
        "Compare servers side by side in one run, by the same agent programs; any OpenAI-compatible server.",
        {
            **_measuring(3, f"limit of every answer (default: {MAX_TOKENS})"),
            "--workload": {"action": "append", "help": "agents, bugfix, webapp, burst, concurrency (by default these), "
                           "arrivals, swe, mixed, coding, bfcl, sutradhara, tenants, repeats; repeatable"},
            "--forced": {"action": "store_true", "help": "histories hold the scripted answers, the same everywhere"},
            "--rates": {"type": numbers, "default": (), "metavar": "R,R,..", "help": "each of these rates in turn"},
            "--concurrencies": {"type": counts, "default": (), "metavar": "N,N,..", "help": "each of these in turn, as "
                                "--programs and --burst"},
            "--record": {"type": Path, "metavar": "FILE", "help": "write the run as a mooncake_trace"},
        },
    ),
    "market": (
        "Measure questions about data that keeps arriving: to sessions it is appended to, and with the whole data in "
        "each request.",
        {
            "--server": {"action": "append", "default": [], "metavar": "NAME=URL", "help": "once for each server"},
            "--rates": {"type": numbers, "default": (1.0, 4.0), "metavar": "R,R,..", "help": "lines a second"},
            "--lines": {"type": counts, "default": (50, 200), "metavar": "N,N,..", "help": "lines at the beginning"},
            "--feeds": {"type": int, "default": 1, "help": "contexts at once"},
            "--seconds": {"type": float, "default": 20.0, "help": "seconds of each run"},
            "--every": {"type": float, "dest": "every_s", "default": 2.0, "help": "seconds between two questions"},
            "--max-tokens": {"type": int, "default": 16, "help": "tokens of every answer"},
            "--json": {"type": Path, "metavar": "FILE", "help": "write all times"},
        },
    ),
    "scheduling": (
        "Compare orders and retention policies on the real engine: starts a server for each, with a small and a large "
        "KV cache.",
        _MODEL | {
            "--policy": {"action": "append", "dest": "policies", "help": "as for simulate; repeatable, the others are "
                         "compared to the first (default: request, continuum)"},
            "--cells": {"type": counts, "default": (8192, 65536), "metavar": "N,N", "help": "cells of both caches"},
            "--threads": {"type": int, "default": 1, "help": "threads of each engine"},
            "--workload": {"default": "swe", "help": "swe, mixed, coding or bfcl"},
            "--cache": {"action": "append", "dest": "caches", "help": "small or large (default: both)"},
            "--jobs": {"type": int, "default": 12, "help": "programs of a repetition"},
            "--rate": {"type": float, "default": 1.0, "help": "programs a second"},
            "--prompt-tokens": {"type": int, "default": 600, "help": "words that tools return to a program in all"},
            "--turns-times": {"type": int, "default": 1, "help": "multiply the turns"},
            "--tool-times": {"type": float, "default": 1.0, "help": "multiply the tools' seconds"},
            "--max-tokens": {"type": int, "default": 96, "help": "limit of every answer"},
            "--repetitions": {"type": int, "default": 3, "help": "repetitions, each of other programs on new servers"},
            "--seed": {"type": int, "default": 0, "help": "seed of the first repetition's programs (default: 0)"},
            "--folder": {"type": Path, "metavar": "DIR", "help": "write small-0.json, small-1.json and so on, as "
                         "compare does"},
            "--json": {"type": Path, "metavar": "FILE", "help": "write the ratios"},
        },
    ),
    "replay": (
        "Send the programs of a trace to servers, each at its recorded time and with its recorded pauses.",
        {
            "trace": {"type": Path, "help": "file to replay"},
            **_measuring(1, "limit of answers without one in the trace, or without a length where lengths are forced "
                            f"(default: {MAX_TOKENS}; none where lengths are forced)"),
            "--format": {"default": "mooncake_trace", "help": _FORMATS},
            "--recorded-answers": {"action": "store_true", "help": "histories hold the trace's answers"},
            "--forced-lengths": {"action": "store_true", "help": "answers get their recorded lengths"},
            "--forcing": {"default": "holdfast", "help": "how a length is requested: holdfast, vllm or limit"},
            "--speed": {"type": float, "default": 1.0, "help": "divide the recorded times by this"},
            "--scale": {"type": float, "default": 1.0, "help": "multiply prompts that are only a length"},
            "--rate": {"type": float, "help": "programs a second, of a trace without times (default: all at once)"},
        },
    ),
    "trace-convert": (
        "Read a trace in one format and write it in another.",
        {
            "source": {"type": Path, "help": "file to read"},
            "target": {"type": Path, "help": "file to write"},
            "--from": {"dest": "read_as", "required": True, "help": _FORMATS},
            "--to": {"dest": "write_as", "required": True, "help": "mooncake_trace or multi_turn"},
            "--tools": {"type": Path, "help": "JSON list of tools, for logs that do not declare their own"},
            "--live": {"action": "store_true", "help": "answers are to be the replaying model's"},
        },
    ),
    "report": (
        "Write an HTML page with tables and plots from the JSON of a comparison.",
        {
            "source": {"type": Path, "metavar": "RUN.json", "help": "output of `bench compare --json`"},
            "target": {"type": Path, "metavar": "OUT.html", "help": "the page to write"},
            "--ablation": {"type": Path, "metavar": "FILE", "help": "add the output of `bench ablation --json`"},
        },
    ),
    "trace": (
        "Write a timeline of every program for ui.perfetto.dev from the JSON of a comparison.",
        {
            "source": {"type": Path, "metavar": "RUN.json", "help": "output of `bench compare --json`"},
            "target": {"type": Path, "metavar": "OUT.json", "help": "the timeline to write"},
        },
    ),
    "serve-peer": (
        "Print the command line of another server with its best settings, or start it.",
        {
            "peer": {"help": "vllm, llama.cpp or transformers"},
            "model": {"help": "folder or name of the model, for llama.cpp a GGUF file"},
            "--venv": {"type": Path, "help": "virtual environment that has it (default: the search path)"},
            "--port": {"type": int, "default": 8101, "help": "port on 127.0.0.1"},
            "--context": {"type": int, "help": "longest context (default: 8192; transformers takes the model's)"},
            "--tool-parser": {"help": "vLLM's parser of tool calls for the model (default: hermes)"},
            "--ngram": {"action": "store_true", "help": "with its drafts by n-grams"},
            "--gpu": {"action": "store_true", "help": "for a GPU rather than a CPU build"},
            "--start": {"action": "store_true", "help": "start it instead of printing the command"},
        },
    ),
    "peers": (
        "Compare Holdfast and its peers on this machine's cores: starts them in groups, prints one table.",
        {
            "--model": {"required": True, "help": "folder of the model, for Holdfast and vLLM"},
            "--gguf": {"default": "", "metavar": "FILE", "help": "the same model for llama.cpp"},
            "--gguf-q8-0": {"default": "", "metavar": "FILE", "help": "the same in llama.cpp's eight bits"},
            "--venv": {"action": "append", "default": [], "metavar": "PEER=DIR", "help": "virtual environment of a "
                       "peer"},
            "--group": {"action": "append", "metavar": "NAME,NAME,..", "help": "servers that take turns, Holdfast "
                        "first: vllm, llama.cpp, llama.cpp-q8_0, each also with -ngram; repeatable (default: each, "
                        "plain and with n-grams)"},
            "--engine": {"action": "append", "default": [], "metavar": "NAME=JSON", "help": "a Holdfast of this name "
                         'with this `engine` section (default: holdfast={"dtype": "bfloat16", "kv_memory": 2})'},
            "--peer": {"action": "append", "default": [], "metavar": "NAME=PEER OPTIONS", "help": "a peer of this name "
                       "with further options of its own, as in 'small=vllm --num-gpu-blocks-override 64'"},
            "--workload": {"action": "append", "dest": "workloads", "help": "bugfix, webapp, concurrency or burst "
                           "(default: all of them), or another of `bench compare`"},
            "--repetitions": {"type": int, "default": 2, "help": "repetitions of every workload"},
            "--seed": {"type": int, "default": 0, "help": "another seed draws other texts (default: 0)"},
            "--forced": {"action": "store_true", "help": "histories hold the scripted answers, the same everywhere"},
            "--pause": {"type": float, "dest": "pause_s", "default": 1.5, "metavar": "SECONDS", "help": "seconds "
                        "before a server begins after another one, which may be busy for a while"},
            "--folder": {"type": Path, "required": True, "metavar": "DIR", "help": "folder of the comparisons' files "
                         "and the peers' logs"},
        },
    ),
}  # fmt: skip


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add `bench` and its benchmarks."""
    text = "Measure a server."
    command = commands.add_parser("bench", help=text, description=text)
    kinds = command.add_subparsers(metavar="BENCHMARK", required=True)
    for name, (about, flags) in FLAGS.items():
        rest = name == "ablation"  # its arguments are its own
        kind = kinds.add_parser(name, help=about, description=about, add_help=not rest)
        add_flags(kind, {**flags, **(_sizes() if name == "compare" else {})})
        kind.set_defaults(run=globals()[f"_{name.replace('-', '_')}"], **({"takes_rest": True} if rest else {}))


def _overload(options: argparse.Namespace) -> int:
    from holdfast.loadgen import overload

    return overload.main(built(overload.Options, options))


def _overhead(options: argparse.Namespace) -> int:
    from holdfast.loadgen import overhead

    return overhead.main(options.model, options.requests)


def _orchestrator(options: argparse.Namespace) -> int:
    from holdfast.loadgen import orchestrating

    return orchestrating.main(options.model, built(orchestrating.Sizes, options))


def _ablation(options: argparse.Namespace) -> int:
    from holdfast.loadgen.bench import ablation

    return ablation.main(options.rest)


def _generator(options: argparse.Namespace) -> int:
    from holdfast.loadgen import generator
    from holdfast.loadgen.stub import Delays

    delays = Delays(options.first, options.token, options.tokens)
    return generator.main(generator.Load(options.rate, options.seconds, delays))


def _drafts(options: argparse.Namespace) -> int:
    from holdfast.loadgen.bench import drafts

    return drafts.main(options.trace, options.tools, options.tokenizer, options.cut, options.json)


def _comparison(options: argparse.Namespace, **more: Any) -> "Options":
    """The options that `_measuring` added, and `more`."""
    from holdfast.loadgen.options import Options, parse_server, parse_tenant_key, read_key

    more = {
        "servers": tuple(map(parse_server, options.server)),
        "tenant_keys": tuple(map(parse_tenant_key, options.tenant_key_file)),
        "api_key": read_key(options.api_key_file) if options.api_key_file else "",
        "json_file": options.json,
        "html_file": options.html,
        **more,
    }
    return built(Options, options, **more)


def _compare(options: argparse.Namespace) -> int:
    from holdfast.loadgen import compare
    from holdfast.loadgen.options import NOVEL
    from holdfast.loadgen.workloads.script import Sizes

    workloads = tuple(options.workload or NOVEL)
    return compare.main(_comparison(options, workloads=workloads, sizes=built(Sizes, options)))


def _market(options: argparse.Namespace) -> int:
    from holdfast.loadgen import market
    from holdfast.loadgen.options import parse_server

    return market.main(built(market.Options, options, servers=tuple(map(parse_server, options.server))), options.json)


def _scheduling(options: argparse.Namespace) -> int:
    from holdfast.loadgen import scheduling
    from holdfast.loadgen.workloads.script import Sizes

    lists = {name: tuple(getattr(options, name)) for name in ("policies", "caches") if getattr(options, name)}
    return scheduling.main(built(scheduling.Plan, options, sizes=built(Sizes, options), **lists), options.json)


def _replay(options: argparse.Namespace) -> int:
    from holdfast.loadgen import compare
    from holdfast.loadgen.replaying import Replay

    unlimited = options.max_tokens is None and options.forced_lengths
    replay = built(Replay, options, max_tokens=None) if unlimited else built(Replay, options)
    wanted = _comparison(options, workloads=(), trace=replay.about)
    return compare.main(wanted, replay.parts(options.seed, options.repetitions))


def _trace_convert(options: argparse.Namespace) -> int:
    from holdfast.loadgen.traces import formats

    source, target = formats.named(options.read_as), formats.named(options.write_as)
    reading = formats.convert(options.source, source, options.target, target, options.tools, options.live)
    print(reading.summary)
    return 0


def _report(options: argparse.Namespace) -> int:
    from holdfast.loadgen.report import page

    return page.report(options.source, options.target, options.ablation)


def _trace(options: argparse.Namespace) -> int:
    from holdfast.loadgen.report import page

    return page.timeline(options.source, options.target)


def _peers(options: argparse.Namespace) -> int:
    from holdfast.loadgen import side_by_side
    from holdfast.loadgen.options import parse_path
    from holdfast.loadgen.side_by_side import ENGINE, GROUPS, OURS, WORKLOADS, parse_engine, parse_variant

    plan = built(
        side_by_side.Plan,
        options,
        groups=tuple(tuple(group.split(",")) for group in options.group or ()) or GROUPS,
        engines={OURS: ENGINE} | dict(map(parse_engine, options.engine)),
        venvs=dict(parse_path(text, "venv") for text in options.venv),
        variants=dict(map(parse_variant, options.peer)),
        workloads=tuple(options.workloads or WORKLOADS),
    )
    return side_by_side.main(plan)


def _serve_peer(options: argparse.Namespace) -> int:
    from holdfast.loadgen import peers

    return peers.main(options.peer, built(peers.Wanted, options), options.start)
