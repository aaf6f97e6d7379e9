"""The `holdfast` command. Reads arguments and says what went wrong; the work is elsewhere, imported when needed."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import cast

from holdfast.cluster import config, config_file, environment, operating_cli, sources, tenants_cli
from holdfast.cluster.arguments import Overview, Parser
from holdfast.cluster.config import Settings
from holdfast.loadgen import cli as bench
from holdfast.loadgen.cli import Commands
from holdfast.loadgen.simulator import cli as simulate
from holdfast.replicas.errors import HoldfastError

MISUSE = 2  # exit status of a wrong setting or argument
FAILED = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status. Errors of ours become one line on stderr. Without one: what there is."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    options.rest = rest
    if not hasattr(options, "run"):
        print(parser.format_help(), end="")
        return 0
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except HoldfastError as error:
        field = f" [{error.field}]" if error.field else ""
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        print(f"holdfast: {error.message}{field}{notes}", file=sys.stderr)
        return MISUSE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read our output has seen enough
        return _unread()


def _unread() -> int:
    """FAILED, with nothing left to be written when the interpreter flushes stdout at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return FAILED


def _parser() -> Parser:
    parser = Overview(prog="holdfast", description="Serve tool-calling agents from a Ray cluster.")
    parser.add_argument("--version", action="version", version=f"holdfast {version('holdfast')}")
    commands = cast("Commands[argparse.ArgumentParser]", parser.add_subparsers(metavar="COMMAND", parser_class=Parser))
    _add_serve(commands)
    _add_chat(commands)
    _add_config(commands)
    _add_key(commands)
    tenants_cli.add(commands)
    operating_cli.add(commands)
    operating_cli.add_checked(commands, _add_settings, _settings)
    _add_models(commands)
    _add_convert(commands)
    _add_inflate(commands)
    bench.add(commands)
    simulate.add(commands)
    return parser


def _add_serve(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = "Start Ray, Redis and the server on this machine; Ctrl-C stops all of it."
    command = commands.add_parser("serve", help=text, description=text)
    _add_settings(command)
    command.set_defaults(run=_serve)


def _add_chat(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = "Talk to a running server: answers as they come, tool calls as they close, and you answer them."
    command = commands.add_parser("chat", help=text, description=text)
    add = command.add_argument
    operating_cli.add_server(command, "an API key")
    add("--tools", type=Path, metavar="FILE", help="JSON: a tool, or a list of tools, that the model may call")
    add("--model", default="", help="as in /v1/models (default: the first)")
    add("--system", default="", metavar="TEXT", help="what the conversation begins with")
    add("--program", default="", metavar="ID", help="its program_id (default: a new one)")
    add("--temperature", type=float, default=0.0, help="(default: 0)")
    add("--max-tokens", type=int, default=512, help="of every answer (default: 512)")
    command.set_defaults(run=_chat)


def _add_config(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = "Print the whole configuration as YAML, defaults and overrides filled in, after checking it."
    note = "This is a file to use, so the password in redis.url stands in it; `holdfast config show` leaves it out."
    command = commands.add_parser("config", help=text, description=f"{text} {note}")
    _add_settings(command)
    command.set_defaults(run=_config)
    operating_cli.add_config(command, _add_settings, _loaded)


def _add_key(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = "Make an API key for a tenant and print it with the YAML that lets it in; the key itself is not kept."
    command = commands.add_parser("key", help=text, description=text)
    command.add_argument("tenant", help="name of the tenant the key belongs to")
    command.set_defaults(run=_key)


def _add_models(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = "Print which models can be served and how they run, or how the given ones would."
    command = commands.add_parser("models", help=text, description=text)
    command.add_argument("model", nargs="*", help="'pocket', a folder, or a hub name in the local cache")
    command.set_defaults(run=_models)


def _add_convert(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = "Make a folder that can be served from a GGUF file, with its tokenizer and its chat template."
    command = commands.add_parser("convert", help=text, description=text)
    command.add_argument("file", type=Path, help="the GGUF file")
    command.add_argument("out", type=Path, help="the new folder")
    command.set_defaults(run=_convert)


def _add_inflate(commands: "Commands[argparse.ArgumentParser]") -> None:
    text = "Write a model of a large model's shape that answers as the small one does, to measure with."
    command = commands.add_parser("inflate", help=text, add_help=False)  # the arguments are `inflate`'s own
    command.set_defaults(run=_inflate, takes_rest=True)


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, help="YAML file; `holdfast config` prints one with every key")
    command.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    command.add_argument("--port", type=int, help="port to listen on (default: 8000)")
    command.add_argument("--model", help="'pocket', a folder, or a hub name in the local cache (default: pocket)")
    command.add_argument("--replicas", type=int, help="number of engines; the cores are shared out (default: 1)")
    command.add_argument("--routers", type=int, help="number of processes that take requests (default: 1)")


def _settings(options: argparse.Namespace) -> Settings:
    return _loaded(options).settings


def _loaded(options: argparse.Namespace) -> sources.Loaded:
    overrides = config.Overrides(options.host, options.port, options.model, options.replicas, options.routers)
    return sources.load(options.config, environment.settings_variables(), overrides)


def _say(text: str) -> None:
    with suppress(OSError):  # a terminal that has gone must not keep a server from stopping in order
        print(text, flush=True)


def _serve(options: argparse.Namespace) -> int:
    from holdfast.cluster.serve import run

    run(_settings(options), _say)
    return 0


def _chat(options: argparse.Namespace) -> int:
    from holdfast.loadgen import talk

    server = operating_cli.server(options)
    tools = talk.read_tools(options.tools) if options.tools else ()
    of_turns = (options.model, options.system, options.program, tools, options.temperature, options.max_tokens)
    return talk.run(server.url, server.key, talk.ChatOptions(*of_turns))


def _config(options: argparse.Namespace) -> int:
    settings = _settings(options)
    config.check_tenants(settings)
    _say(config_file.dump(settings).rstrip())
    return 0


def _key(options: argparse.Namespace) -> int:
    from holdfast.router.tenants import Tenant, hash_key, make_key

    key = make_key()
    tenant = Tenant(options.tenant, (hash_key(key),))
    _say(f"API key, shown once: {key}\n\ntenants:\n  - name: {tenant.name}\n    key_hashes: [{tenant.key_hashes[0]!r}]")
    return 0


def _models(options: argparse.Namespace) -> int:
    from holdfast.cluster import models_page

    for text in map(models_page.runs_on, options.model) if options.model else [models_page.page()]:
        _say(text)
    return 0


def _convert(options: argparse.Namespace) -> int:
    from holdfast.cluster.convert import convert

    for note in convert(options.file, options.out):
        print(note, file=sys.stderr)
    _say(f"Serve the model: holdfast serve --model {options.out}")
    return 0


def _inflate(options: argparse.Namespace) -> int:
    from holdfast.loadgen.inflate import model

    return model.main(options.rest)


if __name__ == "__main__":
    raise SystemExit(main())
