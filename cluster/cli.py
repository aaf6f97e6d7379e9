"""The `holdfast` command. Reads arguments and says what went wrong; the work is elsewhere, imported when needed."""

import argparse
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

from holdfast.cluster import config, config_file
from holdfast.cluster.config import Settings
from holdfast.replicas.errors import HoldfastError

MISUSE = 2  # exit status of a wrong setting or argument
FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status. Errors of ours become one line on stderr."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    options.rest = rest
    if rest and options.run not in (_inflate, _bench_ablation):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return int(options.run(options))
    except HoldfastError as error:
        field = f" [{error.field}]" if error.field else ""
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        print(f"holdfast: {error.message}{field}{notes}", file=sys.stderr)
        return MISUSE
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="holdfast", description="Serve tool-calling agents from a Ray cluster.")
    parser.add_argument("--version", action="version", version=f"holdfast {version('holdfast')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_config(commands)
    _add_key(commands)
    _add_inflate(commands)
    _add_bench(commands)
    return parser


_FORMATS = "mooncake_trace, multi_turn, openai, vllm or mini-swe-agent"

Commands = argparse._SubParsersAction  # argparse has no public name for it


def _add_serve(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = "Start Ray, Redis and the server on this machine; Ctrl-C stops all of it."
    command = commands.add_parser("serve", help=text, description=text)
    _add_settings(command)
    command.set_defaults(run=_serve)


def _add_config(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = "Print the whole configuration as YAML, defaults and overrides filled in, after checking it."
    command = commands.add_parser("config", help=text, description=text)
    _add_settings(command)
    command.set_defaults(run=_config)


def _add_key(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = "Make an API key for a tenant and print it with the YAML that lets it in; the key itself is not kept."
    command = commands.add_parser("key", help=text, description=text)
    command.add_argument("tenant", help="name of the tenant the key belongs to")
    command.set_defaults(run=_key)


def _add_inflate(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = "Write a model of a large model's shape that answers as the small one does, to measure with."
    command = commands.add_parser("inflate", help=text, add_help=False)  # the arguments are `inflate`'s own
    command.set_defaults(run=_inflate)


def _add_bench(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = "Measure a server."
    command = commands.add_parser("bench", help=text, description=text)
    kinds = command.add_subparsers(metavar="BENCHMARK", required=True)
    text = "What HTTP, Ray and the router add to the bare engine: starts a server and an engine of the same model."
    overhead = kinds.add_parser("overhead", help=text, description=text)
    overhead.add_argument("--model", default="pocket", help="as for serve (default: pocket)")
    overhead.add_argument("--requests", type=int, default=200, help="requests of each kind (default: 200)")
    overhead.set_defaults(run=_bench_overhead)
    _add_drafts(kinds)
    _add_ablation(kinds)
    _add_compare(kinds)
    _add_traces(kinds)
    _add_reports(kinds)
    _add_serve_peer(kinds)


def _add_drafts(kinds: "Commands[argparse.ArgumentParser]") -> None:
    text = "Tokens per forward that each drafter would reach on a trace of conversations; needs no model."
    drafts = kinds.add_parser("drafts", help=text, description=text)
    drafts.add_argument("--trace", type=Path, required=True, help="JSON lines with OpenAI-format 'messages'")
    drafts.add_argument("--tools", type=Path, help="JSON list of OpenAI-format tools that the conversations had")
    drafts.add_argument("--tokenizer", type=Path, help="folder of a tokenizer (default: one trained on the trace)")
    drafts.add_argument("--cut", default="pocket", help="how that one cuts words: pocket, qwen, gpt2 or llama")
    drafts.add_argument("--json", action="store_true", help="print JSON")
    drafts.set_defaults(run=_bench_drafts)


def _add_compare(kinds: "Commands[argparse.ArgumentParser]") -> None:
    text = "Servers side by side in one run, by the same agent programs; any OpenAI-compatible server."
    compare = kinds.add_parser("compare", help=text, description=text)
    compare.add_argument("--server", action="append", default=[], metavar="NAME=URL", help="once for each server")
    compare.add_argument(
        "--workload",
        action="append",
        help="agents, bugfix, webapp, burst, concurrency (by default these), arrivals, swe, bfcl, sutradhara, tenants, "
        "repeats; may come several times",
    )
    compare.add_argument("--repetitions", type=int, default=3, help="of every workload (default: 3)")
    compare.add_argument("--seed", type=int, default=0, help="another seed, other conversations (default: 0)")
    compare.add_argument("--json", type=Path, metavar="FILE", help="write every request and every figure")
    compare.add_argument("--forced", action="store_true", help="histories hold the scripted answers, alike everywhere")
    compare.add_argument("--model", default="", help="model name to ask for (default: the first each server names)")
    compare.add_argument("--max-tokens", type=int, default=128, help="of every answer (default: 128)")
    compare.add_argument("--timeout", type=float, default=300.0, help="seconds a request may take (default: 300)")
    compare.add_argument("--warm-up", type=int, default=1, help="programs sent to each server before (default: 1)")
    compare.add_argument("--api-key-file", type=Path, help="file with the API key, sent to every server")
    compare.add_argument("--webapp-turns", type=int, default=35, help="requests of webapp (default: 35)")
    compare.add_argument("--programs", type=int, default=8, help="at once in concurrency (default: 8)")
    compare.add_argument("--burst", type=int, default=8, help="requests at once in burst (default: 8)")
    compare.add_argument("--bursts", type=int, default=5, help="bursts one after another (default: 5)")
    compare.add_argument("--chain", type=int, default=3, help="calls a user message asks for (default: 3)")
    compare.add_argument("--jobs", type=int, default=20, help="programs that arrive by a schedule (default: 20)")
    compare.add_argument("--rate", type=float, default=0.2, help="of those, a second (default: 0.2)")
    compare.add_argument("--turns-times", type=int, default=1, help="turns of swe and bfcl, multiplied (default: 1)")
    compare.add_argument(
        "--prompt-tokens",
        type=int,
        default=1000,
        help="of sutradhara's prompts, swe's and bfcl's tools (default: 1000)",
    )
    compare.add_argument("--quiet", type=int, default=3, help="tenants beside the noisy one (default: 3)")
    compare.add_argument("--noise", type=int, default=8, help="times a quiet one's load that it sends (default: 8)")
    compare.add_argument(
        "--tenant-key-file", action="append", default=[], metavar="NAME=FILE", help="API key of noisy, quiet-0, ..."
    )
    compare.add_argument("--record", type=Path, metavar="FILE", help="write the run as a mooncake_trace")
    compare.set_defaults(run=_bench_compare)


def _add_traces(kinds: "Commands[argparse.ArgumentParser]") -> None:
    text = "Send the programs of a trace to servers, each when and after what pause it was sent then."
    replay = kinds.add_parser("replay", help=text, description=text)
    replay.add_argument("trace", type=Path, help="file to replay")
    replay.add_argument("--server", action="append", default=[], metavar="NAME=URL", help="once for each server")
    replay.add_argument("--format", default="mooncake_trace", help=f"{_FORMATS} (default: mooncake_trace)")
    replay.add_argument("--recorded-answers", action="store_true", help="histories hold the trace's answers")
    replay.add_argument("--forced-lengths", action="store_true", help="answers get as long as they were")
    replay.add_argument(
        "--forcing", default="holdfast", help="how a length is asked for: holdfast, vllm or limit (default: holdfast)"
    )
    replay.add_argument("--speed", type=float, default=1.0, help="how much faster than it was (default: 1)")
    replay.add_argument("--scale", type=float, default=1.0, help="of prompts that are only a length (default: 1)")
    replay.add_argument("--repetitions", type=int, default=1, help="of the trace (default: 1)")
    replay.add_argument("--seed", type=int, default=0, help="of texts for prompts that are only a length")
    replay.add_argument("--json", type=Path, metavar="FILE", help="write every request and every figure")
    replay.add_argument("--model", default="", help="model name to ask for (default: the first each server names)")
    replay.add_argument("--max-tokens", type=int, default=128, help="where the trace has no limit (default: 128)")
    replay.add_argument("--timeout", type=float, default=300.0, help="seconds a request may take (default: 300)")
    replay.add_argument("--warm-up", type=int, default=1, help="programs sent to each server before (default: 1)")
    replay.add_argument("--api-key-file", type=Path, help="file with the API key, sent to every server")
    replay.set_defaults(run=_bench_replay)
    text = "Read a trace in one format and write it in another."
    convert = kinds.add_parser("trace-convert", help=text, description=text)
    convert.add_argument("source", type=Path, help="file to read")
    convert.add_argument("target", type=Path, help="file to write")
    convert.add_argument("--from", dest="read_as", required=True, help=_FORMATS)
    convert.add_argument("--to", dest="write_as", required=True, help="mooncake_trace or multi_turn")
    convert.add_argument("--tools", type=Path, help="JSON list of tools, for logs that do not declare their own")
    convert.add_argument("--live", action="store_true", help="answers are to be the replaying model's")
    convert.set_defaults(run=_bench_trace_convert)


def _add_reports(kinds: "Commands[argparse.ArgumentParser]") -> None:
    text = "One HTML page with tables and plots from the JSON of a comparison."
    report = kinds.add_parser("report", help=text, description=text)
    report.set_defaults(run=_bench_report)
    text = "A timeline of every program for ui.perfetto.dev from the JSON of a comparison."
    trace = kinds.add_parser("trace", help=text, description=text)
    trace.set_defaults(run=_bench_trace)
    for command in (report, trace):
        command.add_argument("source", type=Path, metavar="RUN.json", help="what `bench compare --json` wrote")
    report.add_argument("target", type=Path, metavar="OUT.html", help="the page to write")
    trace.add_argument("target", type=Path, metavar="OUT.json", help="the timeline to write")


def _add_serve_peer(kinds: "Commands[argparse.ArgumentParser]") -> None:
    text = "Print, or start, another server with its best settings, to compare with."
    peer = kinds.add_parser("serve-peer", help=text, description=text)
    peer.add_argument("peer", help="vllm or transformers")
    peer.add_argument("model", help="folder or name of the model; it is served as 'm' by vllm")
    peer.add_argument("--venv", type=Path, help="virtual environment that has it (default: the search path)")
    peer.add_argument("--port", type=int, default=8101, help="port on 127.0.0.1 (default: 8101)")
    peer.add_argument("--context", type=int, default=8192, help="longest context (default: 8192)")
    peer.add_argument("--ngram", action="store_true", help="with vLLM's n-gram speculation")
    peer.add_argument("--gpu", action="store_true", help="for a GPU rather than a CPU build")
    peer.add_argument("--start", action="store_true", help="start it instead of printing how")
    peer.set_defaults(run=_bench_serve_peer)


def _add_ablation(kinds: "Commands[argparse.ArgumentParser]") -> None:
    text = "Turn latencies of an engine with everything on, and with each mechanism off; no server."
    ablation = kinds.add_parser("ablation", help=text, add_help=False)  # the arguments are the benchmark's own
    ablation.set_defaults(run=_bench_ablation)


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, help="YAML file; `holdfast config` prints one with every key")
    command.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    command.add_argument("--port", type=int, help="port to listen on (default: 8000)")
    command.add_argument("--model", help="'pocket', a folder, or a hub name in the local cache (default: pocket)")
    command.add_argument("--replicas", type=int, help="number of engines; the cores are shared out (default: 1)")


def _settings(options: argparse.Namespace) -> Settings:
    settings = config_file.read(options.config) if options.config else Settings()
    overrides = config.Overrides(options.host, options.port, options.model, options.replicas)
    return config.apply(settings, overrides)


def _say(text: str) -> None:
    with suppress(OSError):  # a terminal that has gone must not keep a server from stopping in order
        print(text, flush=True)


def _serve(options: argparse.Namespace) -> int:
    from holdfast.cluster.serve import run

    run(_settings(options), _say)
    return 0


def _config(options: argparse.Namespace) -> int:
    settings = _settings(options)
    config.check_tenants(settings)
    _say(config_file.dump(settings).rstrip())
    return 0


def _key(options: argparse.Namespace) -> int:
    from holdfast.router.tenants import Tenant, hash_key

    key = f"hf-{secrets.token_urlsafe(32)}"
    tenant = Tenant(options.tenant, (hash_key(key),))
    _say(f"API key, shown once: {key}\n\ntenants:\n  - name: {tenant.name}\n    key_hashes: [{tenant.key_hashes[0]!r}]")
    return 0


def _inflate(options: argparse.Namespace) -> int:
    from holdfast.replicas.pocket import inflate

    return inflate.main(options.rest)


def _bench_overhead(options: argparse.Namespace) -> int:
    from holdfast.loadgen import overhead

    return overhead.main(options.model, options.requests)


def _bench_ablation(options: argparse.Namespace) -> int:
    from holdfast.replicas.ablation import __main__ as ablation

    return ablation.main(options.rest)


def _bench_drafts(options: argparse.Namespace) -> int:
    from holdfast.loadgen import drafts

    return drafts.main(options.trace, options.tools, options.tokenizer, options.cut, options.json)


def _bench_compare(options: argparse.Namespace) -> int:
    from holdfast.loadgen import compare
    from holdfast.loadgen.workloads.script import Sizes

    wanted = compare.Options(
        servers=tuple(compare.parse_server(server) for server in options.server),
        workloads=tuple(options.workload or compare.NOVEL),
        repetitions=options.repetitions,
        seed=options.seed,
        sizes=Sizes(**{field.name: getattr(options, field.name) for field in fields(Sizes)}),
        forced=options.forced,
        model=options.model,
        max_tokens=options.max_tokens,
        timeout_s=options.timeout,
        warm_up=options.warm_up,
        api_key=compare.read_key(options.api_key_file) if options.api_key_file else "",
        json_file=options.json,
        record=options.record,
        tenant_keys=tuple(compare.parse_tenant_key(text) for text in options.tenant_key_file),
    )
    return compare.main(wanted)


def _bench_replay(options: argparse.Namespace) -> int:
    from holdfast.loadgen import compare, replaying

    asked = replaying.Asked(
        options.trace,
        options.format,
        options.recorded_answers,
        options.forced_lengths,
        options.forcing,
        options.speed,
        options.scale,
        options.max_tokens,
    )
    wanted = compare.Options(
        servers=tuple(compare.parse_server(server) for server in options.server),
        workloads=(),
        repetitions=options.repetitions,
        seed=options.seed,
        model=options.model,
        max_tokens=options.max_tokens,
        timeout_s=options.timeout,
        warm_up=options.warm_up,
        api_key=compare.read_key(options.api_key_file) if options.api_key_file else "",
        json_file=options.json,
        trace=asked.told,
    )
    return compare.main(wanted, replaying.replays(asked, options.seed, options.repetitions))


def _bench_trace_convert(options: argparse.Namespace) -> int:
    from holdfast.loadgen.traces import formats

    named = formats.named
    reading = formats.convert(
        options.source, named(options.read_as), options.target, named(options.write_as), options.tools, options.live
    )
    _say(reading.summary)
    return 0


def _bench_report(options: argparse.Namespace) -> int:
    from holdfast.loadgen.report import commands

    return commands.report(options.source, options.target)


def _bench_trace(options: argparse.Namespace) -> int:
    from holdfast.loadgen.report import commands

    return commands.timeline(options.source, options.target)


def _bench_serve_peer(options: argparse.Namespace) -> int:
    from holdfast.loadgen import peers

    wanted = peers.Wanted(options.model, options.port, options.venv, options.ngram, options.gpu, options.context)
    return peers.main(options.peer, wanted, options.start)


if __name__ == "__main__":
    raise SystemExit(main())
