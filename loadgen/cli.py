"""`holdfast bench`: its arguments, and which part of the load generator they go to, imported when needed."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.loadgen.options import Options

_FORMATS = "mooncake_trace, multi_turn, openai, vllm or mini-swe-agent"
_MAX_TOKENS = 128

Commands = argparse._SubParsersAction  # argparse has no public name for it


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add `bench` and what it measures."""
    text = "Measure a server."
    command = commands.add_parser("bench", help=text, description=text)
    kinds = command.add_subparsers(metavar="BENCHMARK", required=True)
    text = "What HTTP, Ray and the router add to the bare engine: starts a server and an engine of the same model."
    overhead = kinds.add_parser("overhead", help=text, description=text)
    overhead.add_argument("--model", default="pocket", help="as for serve (default: pocket)")
    overhead.add_argument("--requests", type=int, default=200, help="requests of each kind (default: 200)")
    overhead.set_defaults(run=_overhead)
    text = "How much has its answer in time when more comes than can be served, on a server of its own, where that is "
    text += "told the time and where it is not."
    overload = kinds.add_parser("overload", help=text, description=text)
    add = overload.add_argument
    add("--model", default="pocket", help="as for serve (default: pocket)")
    add("--loads", type=numbers, default=(0.8, 1.0, 2.0, 3.0), metavar="X,X,..", help="times the capacity "
        "(default: 0.8,1,2,3)")  # fmt: skip
    add("--seconds", type=float, default=40.0, help="of each run (default: 40)")
    add("--deadline", type=float, default=6.0, help="seconds, mean; from half to one and a half (default: 6)")
    add("--sequences", type=int, default=8, help="engine.max_sequences (default: 8)")
    overload.set_defaults(run=_overload)
    _add_generator(kinds)
    _add_orchestrator(kinds)
    _add_drafts(kinds)
    _add_ablation(kinds)
    _add_compare(kinds)
    _add_scheduling(kinds)
    _add_traces(kinds)
    _add_reports(kinds)
    _add_serve_peer(kinds)
    _add_peers(kinds)


def _add_generator(kinds: "Commands[argparse.ArgumentParser]") -> None:
    text = "What the load generator itself costs, and how well it keeps a schedule, against a server that only waits."
    generator = kinds.add_parser("generator", help=text, description=text)
    generator.add_argument("--rate", type=float, default=500.0, help="requests a second (default: 500)")
    generator.add_argument("--seconds", type=float, default=10.0, help="how long (default: 10)")
    generator.add_argument("--first", type=float, default=0.05, help="seconds to a first token (default: 0.05)")
    generator.add_argument("--token", type=float, default=0.01, help="seconds to each further one (default: 0.01)")
    generator.add_argument("--tokens", type=int, default=4, help="of every answer (default: 4)")
    generator.set_defaults(run=_generator)


def _add_orchestrator(kinds: "Commands[argparse.ArgumentParser]") -> None:
    text = (
        "What the orchestrator gains: an agent's runs whose tools begin as calls close, whose prompts are sent ahead, "
    )
    text += "both and neither; starts a server."
    orchestrator = kinds.add_parser("orchestrator", help=text, description=text)
    add = orchestrator.add_argument
    add("--model", default="pocket", help="as for serve (default: pocket)")
    add("--rounds", type=int, default=30, help="of one run each way (default: 30)")
    add("--calls", type=int, default=3, help="that each run's question asks for (default: 3)")
    add("--words", type=int, default=100, help="that each tool tells (default: 100)")
    orchestrator.set_defaults(run=_orchestrator)


def _add_drafts(kinds: "Commands[argparse.ArgumentParser]") -> None:
    text = "Tokens per forward that each drafter would reach on a trace of conversations; needs no model."
    drafts = kinds.add_parser("drafts", help=text, description=text)
    drafts.add_argument("--trace", type=Path, required=True, help="JSON lines with OpenAI-format 'messages'")
    drafts.add_argument("--tools", type=Path, help="JSON list of OpenAI-format tools that the conversations had")
    drafts.add_argument("--tokenizer", type=Path, help="folder of a tokenizer (default: one trained on the trace)")
    drafts.add_argument("--cut", default="pocket", help="how that one cuts words: pocket, qwen, gpt2 or llama")
    drafts.add_argument("--json", action="store_true", help="print JSON")
    drafts.set_defaults(run=_drafts)


def _add_measuring(command: argparse.ArgumentParser, repetitions: int, max_tokens: str) -> None:
    """What `compare` and `replay` have in common; `_options` reads it."""
    add = command.add_argument
    add("--server", action="append", default=[], metavar="NAME=URL", help="once for each server")
    add("--repetitions", type=int, default=repetitions, help=f"of every workload or trace (default: {repetitions})")
    add("--seed", type=int, default=0, help="another seed, other texts (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write every request and every figure")
    add("--html", type=Path, metavar="FILE", help="write one page with tables and plots; needs matplotlib")
    add("--ablation", type=Path, metavar="FILE", help="put what `bench ablation --json` wrote into both")
    add("--model", default="", help="model name to ask for (default: the first each server names)")
    add("--max-tokens", type=int, help=max_tokens)
    add("--timeout", type=float, default=300.0, help="seconds a request may take (default: 300)")
    add("--warm-up", type=int, default=1, help="programs sent to each server before (default: 1)")
    text = "before a server begins after another one, which may be busy for a while (default: 1.5)"
    add("--pause", type=float, default=1.5, metavar="SECONDS", help=text)
    add("--api-key-file", type=Path, help="file with the API key, sent to every server")
    text = "API key of a tenant: of noisy, quiet-0, ..., or of the trace's"
    add("--tenant-key-file", action="append", default=[], metavar="NAME=FILE", help=text)


def _add_compare(kinds: "Commands[argparse.ArgumentParser]") -> None:
    text = "Servers side by side in one run, by the same agent programs; any OpenAI-compatible server."
    compare = kinds.add_parser("compare", help=text, description=text)
    _add_measuring(compare, repetitions=3, max_tokens=f"of every answer (default: {_MAX_TOKENS})")
    add = compare.add_argument
    add(
        "--workload",
        action="append",
        help="agents, bugfix, webapp, burst, concurrency (by default these), arrivals, swe, mixed, coding, bfcl, "
        "sutradhara, tenants, repeats; may come several times",
    )
    add("--forced", action="store_true", help="histories hold the scripted answers, alike everywhere")
    add("--webapp-turns", type=int, default=35, help="requests of webapp (default: 35)")
    text = "that its tools tell beside their results, in all (default: 0)"
    add("--webapp-words", type=int, default=0, help=text)
    add("--programs", type=int, default=8, help="at once in concurrency (default: 8)")
    add("--burst", type=int, default=8, help="requests at once in burst (default: 8)")
    add("--bursts", type=int, default=5, help="bursts one after another (default: 5)")
    add("--chain", type=int, default=3, help="calls a user message asks for (default: 3)")
    add("--jobs", type=int, default=20, help="programs that arrive by a schedule (default: 20)")
    add("--rate", type=float, default=0.2, help="of those, a second (default: 0.2)")
    add("--rates", type=numbers, default=(), metavar="R,R,..", help="each of these rates in turn, as --rate")
    add(
        "--concurrencies",
        type=counts,
        default=(),
        metavar="N,N,..",
        help="each of these in turn, as --programs and --burst",
    )
    add("--turns-times", type=int, default=1, help="turns of swe, mixed and bfcl, multiplied (default: 1)")
    add("--tool-times", type=float, default=1.0, help="seconds of their tools, multiplied (default: 1)")
    text = "of sutradhara's prompts, of what the tools of swe, mixed and bfcl tell (default: 1000)"
    add("--prompt-tokens", type=int, default=1000, help=text)
    add("--scale", type=float, default=0.01, help="of the lengths of coding (default: 0.01)")
    add("--quiet", type=int, default=3, help="tenants beside the noisy one (default: 3)")
    add("--noise", type=int, default=8, help="times a quiet one's load that it sends (default: 8)")
    add("--record", type=Path, metavar="FILE", help="write the run as a mooncake_trace")
    compare.set_defaults(run=_compare)


def _add_scheduling(kinds: "Commands[argparse.ArgumentParser]") -> None:
    text = "Orders and retention policies side by side on the real engine: starts a server for each, with a small and "
    text += "a large KV cache."
    scheduling = kinds.add_parser("scheduling", help=text, description=text)
    add = scheduling.add_argument
    add("--policy", action="append", help="as for simulate; may come several times, the first is what the others are "
        "compared to (default: request, continuum)")  # fmt: skip
    add("--cells", type=counts, default=(8192, 65536), metavar="N,N", help="of both caches (default: 8192,65536)")
    add("--model", default="pocket", help="as for serve (default: pocket)")
    add("--threads", type=int, default=1, help="of each engine (default: 1)")
    add("--workload", default="swe", help="swe, mixed, coding or bfcl (default: swe)")
    add("--cache", action="append", help="small or large (default: both)")
    add("--jobs", type=int, default=12, help="programs of a repetition (default: 12)")
    add("--rate", type=float, default=1.0, help="of those, a second (default: 1)")
    add("--prompt-tokens", type=int, default=600, help="words that tools tell a program in all (default: 600)")
    add("--turns-times", type=int, default=1, help="turns, multiplied (default: 1)")
    add("--tool-times", type=float, default=1.0, help="seconds of tools, multiplied (default: 1)")
    add("--max-tokens", type=int, default=96, help="of every answer (default: 96)")
    add("--repetitions", type=int, default=3, help="each of other programs, on servers started anew (default: 3)")
    add("--seed", type=int, default=0, help="of the first repetition's programs (default: 0)")
    add("--folder", type=Path, metavar="DIR", help="write small-0.json, small-1.json and so on, as compare does")
    add("--json", type=Path, metavar="FILE", help="write the ratios")
    scheduling.set_defaults(run=_scheduling)


def numbers(text: str) -> tuple[float, ...]:
    """An argument's numbers, with commas between."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas between") from error


def counts(text: str) -> tuple[int, ...]:
    """The same for whole numbers."""
    found = numbers(text)
    if not all(number.is_integer() for number in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not whole numbers")
    return tuple(int(number) for number in found)


def _add_traces(kinds: "Commands[argparse.ArgumentParser]") -> None:
    text = "Send the programs of a trace to servers, each when and after what pause it was sent then."
    replay = kinds.add_parser("replay", help=text, description=text)
    text = "of every answer of which the trace has no limit, or no length where these are forced "
    text += f"(default: {_MAX_TOKENS}, none where lengths are forced)"
    _add_measuring(replay, repetitions=1, max_tokens=text)
    add = replay.add_argument
    add("trace", type=Path, help="file to replay")
    add("--format", default="mooncake_trace", help=f"{_FORMATS} (default: mooncake_trace)")
    add("--recorded-answers", action="store_true", help="histories hold the trace's answers")
    add("--forced-lengths", action="store_true", help="answers get as long as they were")
    add("--forcing", default="holdfast", help="how a length is asked for: holdfast, vllm or limit (default: holdfast)")
    add("--speed", type=float, default=1.0, help="how much faster than it was (default: 1)")
    add("--scale", type=float, default=1.0, help="of prompts that are only a length (default: 1)")
    add("--rate", type=float, help="programs a second, of a trace without times (default: all at once)")
    replay.set_defaults(run=_replay)
    text = "Read a trace in one format and write it in another."
    convert = kinds.add_parser("trace-convert", help=text, description=text)
    convert.add_argument("source", type=Path, help="file to read")
    convert.add_argument("target", type=Path, help="file to write")
    convert.add_argument("--from", dest="read_as", required=True, help=_FORMATS)
    convert.add_argument("--to", dest="write_as", required=True, help="mooncake_trace or multi_turn")
    convert.add_argument("--tools", type=Path, help="JSON list of tools, for logs that do not declare their own")
    convert.add_argument("--live", action="store_true", help="answers are to be the replaying model's")
    convert.set_defaults(run=_trace_convert)


def _add_reports(kinds: "Commands[argparse.ArgumentParser]") -> None:
    text = "One HTML page with tables and plots from the JSON of a comparison."
    report = kinds.add_parser("report", help=text, description=text)
    report.set_defaults(run=_report)
    text = "A timeline of every program for ui.perfetto.dev from the JSON of a comparison."
    trace = kinds.add_parser("trace", help=text, description=text)
    trace.set_defaults(run=_trace)
    for command in (report, trace):
        command.add_argument("source", type=Path, metavar="RUN.json", help="what `bench compare --json` wrote")
    report.add_argument("target", type=Path, metavar="OUT.html", help="the page to write")
    report.add_argument("--ablation", type=Path, metavar="FILE", help="add what `bench ablation --json` wrote")
    trace.add_argument("target", type=Path, metavar="OUT.json", help="the timeline to write")


def _add_serve_peer(kinds: "Commands[argparse.ArgumentParser]") -> None:
    text = "Print, or start, another server with its best settings, to compare with."
    peer = kinds.add_parser("serve-peer", help=text, description=text)
    peer.add_argument("peer", help="vllm, llama.cpp or transformers")
    peer.add_argument("model", help="folder or name of the model, for llama.cpp a GGUF file")
    peer.add_argument("--venv", type=Path, help="virtual environment that has it (default: the search path)")
    peer.add_argument("--port", type=int, default=8101, help="port on 127.0.0.1 (default: 8101)")
    peer.add_argument("--context", type=int, help="longest context (default: 8192; transformers takes the model's)")
    peer.add_argument("--tool-parser", help="vLLM's parser of tool calls, as the model writes them (default: hermes)")
    peer.add_argument("--ngram", action="store_true", help="with its drafts by n-grams")
    peer.add_argument("--gpu", action="store_true", help="for a GPU rather than a CPU build")
    peer.add_argument("--start", action="store_true", help="start it instead of printing how")
    peer.set_defaults(run=_serve_peer)


def _add_peers(kinds: "Commands[argparse.ArgumentParser]") -> None:
    text = "Holdfast and its peers on this machine's cores: starts them in groups, compares each, prints one table."
    found = kinds.add_parser("peers", help=text, description=text)
    add = found.add_argument
    add("--model", required=True, help="folder of the model, for Holdfast and vLLM")
    add("--gguf", default="", metavar="FILE", help="the same for llama.cpp")
    add("--gguf-q8-0", default="", metavar="FILE", help="and in its eight bits")
    add("--venv", action="append", default=[], metavar="PEER=DIR", help="virtual environment that has a peer")
    text = "servers that take turns, Holdfast first: vllm, llama.cpp, llama.cpp-q8_0, each also with -ngram; may come "
    text += "several times (default: vllm, llama.cpp, llama.cpp-q8_0, each plain and with its n-grams)"
    add("--group", action="append", metavar="NAME,NAME,..", help=text)
    text = (
        'a Holdfast of this name with this `engine` section (default: holdfast={"dtype": "bfloat16", "kv_memory": 2})'
    )
    add("--engine", action="append", default=[], metavar="NAME=JSON", help=text)
    text = "a peer of this name with further options of its own, as in 'small=vllm --num-gpu-blocks-override 64'"
    add("--peer", action="append", default=[], metavar="NAME=PEER OPTIONS", help=text)
    text = "bugfix, webapp, concurrency or burst (default: all of them), or another of `bench compare`"
    add("--workload", action="append", help=text)
    add("--repetitions", type=int, default=2, help="of every workload (default: 2)")
    add("--seed", type=int, default=0, help="another seed, other texts (default: 0)")
    add("--forced", action="store_true", help="histories hold the scripted answers, alike everywhere")
    text = "before a server begins after another one, which may be busy for a while (default: 1.5)"
    add("--pause", type=float, default=1.5, metavar="SECONDS", help=text)
    add("--folder", type=Path, required=True, metavar="DIR", help="the comparisons' files and the peers' logs go there")
    found.set_defaults(run=_peers)


def _add_ablation(kinds: "Commands[argparse.ArgumentParser]") -> None:
    text = "Turn latencies of an engine with everything on, and with each mechanism off; no server."
    ablation = kinds.add_parser("ablation", help=text, add_help=False)  # the arguments are the benchmark's own
    ablation.set_defaults(run=_ablation, takes_rest=True)


def _overload(options: argparse.Namespace) -> int:
    from holdfast.loadgen import overload

    names = ("model", "loads", "seconds", "sequences")
    asked = {name: getattr(options, name) for name in names}
    return overload.main(overload.Options(**asked, deadline_s=options.deadline))


def _overhead(options: argparse.Namespace) -> int:
    from holdfast.loadgen import overhead

    return overhead.main(options.model, options.requests)


def _orchestrator(options: argparse.Namespace) -> int:
    from holdfast.loadgen import orchestrating

    return orchestrating.main(options.model, orchestrating.Sizes(options.rounds, options.calls, options.words))


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


def _options(options: argparse.Namespace, **more: Any) -> "Options":
    """What `_add_measuring` asked for, and `more`."""
    from holdfast.loadgen.options import Options, parse_server, parse_tenant_key, read_key

    return Options(
        servers=tuple(parse_server(server) for server in options.server),
        repetitions=options.repetitions,
        seed=options.seed,
        model=options.model,
        max_tokens=_MAX_TOKENS if options.max_tokens is None else options.max_tokens,
        timeout_s=options.timeout,
        warm_up=options.warm_up,
        pause_s=options.pause,
        api_key=read_key(options.api_key_file) if options.api_key_file else "",
        tenant_keys=tuple(parse_tenant_key(text) for text in options.tenant_key_file),
        json_file=options.json,
        html_file=options.html,
        ablation=options.ablation,
        **more,
    )


def _compare(options: argparse.Namespace) -> int:
    from holdfast.loadgen import compare
    from holdfast.loadgen.options import NOVEL
    from holdfast.loadgen.workloads.script import Sizes

    wanted = _options(
        options,
        workloads=tuple(options.workload or NOVEL),
        sizes=Sizes(**{field.name: getattr(options, field.name) for field in fields(Sizes)}),
        rates=options.rates,
        concurrencies=options.concurrencies,
        forced=options.forced,
        record=options.record,
    )
    return compare.main(wanted)


def _scheduling(options: argparse.Namespace) -> int:
    from holdfast.loadgen import scheduling
    from holdfast.loadgen.workloads.script import Sizes

    asked = scheduling.Asked(
        policies=tuple(options.policy or scheduling.PAIR),
        caches=tuple(options.cache or scheduling.TARGETS),
        cells=options.cells,
        model=options.model,
        threads=options.threads,
        workload=options.workload,
        sizes=Sizes(
            jobs=options.jobs,
            rate=options.rate,
            prompt_tokens=options.prompt_tokens,
            turns_times=options.turns_times,
            tool_times=options.tool_times,
        ),
        max_tokens=options.max_tokens,
        repetitions=options.repetitions,
        seed=options.seed,
        folder=options.folder,
    )
    return scheduling.main(asked, options.json)


def _replay(options: argparse.Namespace) -> int:
    from holdfast.loadgen import compare, replaying

    limit = _MAX_TOKENS if options.max_tokens is None and not options.forced_lengths else options.max_tokens
    asked = replaying.Replay(
        options.trace,
        options.format,
        options.recorded_answers,
        options.forced_lengths,
        options.forcing,
        options.speed,
        options.scale,
        limit,
        options.rate,
    )
    wanted = _options(options, workloads=(), trace=asked.about)
    return compare.main(wanted, asked.parts(options.seed, options.repetitions))


def _trace_convert(options: argparse.Namespace) -> int:
    from holdfast.loadgen.traces import formats

    named = formats.named
    reading = formats.convert(
        options.source, named(options.read_as), options.target, named(options.write_as), options.tools, options.live
    )
    print(reading.summary)
    return 0


def _report(options: argparse.Namespace) -> int:
    from holdfast.loadgen.report import commands

    return commands.report(options.source, options.target, options.ablation)


def _trace(options: argparse.Namespace) -> int:
    from holdfast.loadgen.report import commands

    return commands.timeline(options.source, options.target)


def _peers(options: argparse.Namespace) -> int:
    from holdfast.loadgen import side_by_side
    from holdfast.loadgen.options import parse_path

    asked = side_by_side.Asked(
        options.model,
        options.folder,
        tuple(tuple(group.split(",")) for group in options.group or ()) or side_by_side.GROUPS,
        {side_by_side.OURS: side_by_side.ENGINE} | dict(side_by_side.parse_engine(text) for text in options.engine),
        options.gguf,
        options.gguf_q8_0,
        dict(parse_path(text, "venv") for text in options.venv),
        dict(side_by_side.parse_variant(text) for text in options.peer),
        tuple(options.workload or side_by_side.WORKLOADS),
        options.repetitions,
        options.seed,
        options.forced,
        options.pause,
    )
    return side_by_side.main(asked)


def _serve_peer(options: argparse.Namespace) -> int:
    from holdfast.loadgen import peers

    wanted = peers.Wanted(
        options.model, options.port, options.venv, options.ngram, options.gpu, options.context, options.tool_parser
    )
    return peers.main(options.peer, wanted, options.start)
