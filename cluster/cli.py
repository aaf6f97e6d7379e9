"""The `holdfast` command: its arguments and error messages. Each command imports its work when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NoReturn, cast

from holdfast.cluster import config, config_file, environment, tenants
from holdfast.cluster.config import Settings
from holdfast.loadgen import cli as bench
from holdfast.loadgen.cli import Commands
from holdfast.loadgen.simulator import cli as simulate
from holdfast.replicas.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.cluster import status

MISUSE = 2  # exit status of a wrong setting, argument or file
FAILED = 1
WIDTH = 110  # columns of the overview
GROUPS: Mapping[str, Sequence[str]] = {
    "Begin": ("serve", "chat"),
    "Look": ("status", "top", "doctor"),
    "Set up": ("config", "key", "tenants", "sizing", "models", "convert"),
    "Measure": (
        "bench",
        "simulate",
        "simulate-placement",
        "simulate-orchestrator",
        "simulate-tenants",
        "simulate-states",
        "inflate",
    ),
}
REST = "Others"  # the heading of commands in none of the groups
EXAMPLES = (
    ("holdfast serve", "a server here, with the model that comes with it, and a page to look at it"),
    ("holdfast chat", "talk to it"),
    ("holdfast chat --tools tools.json", "declare tools, and answer the calls"),
    ("holdfast top", "watch it work"),
    ("holdfast serve --model FOLDER", "another model"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status. A HoldfastError becomes one line on stderr. Without a command: the help."""
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
    except BrokenPipeError:  # the reader of our output has seen enough; nothing is left to flush
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return FAILED


# ---- the commands ----


def _parser() -> Parser:
    parser = Overview(prog="holdfast", description="Serve tool-calling agents from a Ray cluster.")
    parser.add_argument("--version", action="version", version=f"holdfast {version('holdfast')}")
    commands = cast("Commands[argparse.ArgumentParser]", parser.add_subparsers(metavar="COMMAND", parser_class=Parser))

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str, details: str = "") -> Parser:
        parser = commands.add_parser(name, help=text, description=f"{text} {details}".rstrip())
        parser.set_defaults(run=run)
        return cast(Parser, parser)

    _add_settings(command("serve", _serve, "Start Ray, Redis and the server on this machine; Ctrl-C stops all of it."))
    text = "Talk to a running server: answers as they come, tool calls as they close, and you answer them."
    chat = command("chat", _chat, text)
    _add_server(chat, "an API key")
    add = chat.add_argument
    add("--tools", type=Path, metavar="FILE", help="JSON: a tool, or a list of tools, that the model may call")
    add("--model", default="", help="as in /v1/models (default: the first)")
    add("--system", default="", metavar="TEXT", help="what the conversation begins with")
    add("--program", default="", metavar="ID", help="its program_id (default: a new one)")
    add("--temperature", type=float, default=0.0, help="(default: 0)")
    add("--max-tokens", type=int, default=512, help="of every answer (default: 512)")
    text = "Print the whole configuration as YAML, defaults and overrides filled in, after checking it."
    note = "This is a file to use, so the password in redis.url stands in it; `holdfast config show` leaves it out."
    _add_config(command("config", _config, text, note))
    text = "Make an API key for a tenant and print it with the YAML that lets it in; the key itself is not kept."
    command("key", _key, text).add_argument("tenant", help="name of the tenant the key belongs to")
    tenants.add(commands)
    look = command("status", _status, "Print what a running server does: replicas, cells, tenants, programs.")
    _add_server(look, "an operator's API key")
    look.add_argument("--json", action="store_true", help="print JSON, with up to 200 programs")
    text = "The same, kept on the screen with rates; q or Ctrl-C leaves, another key looks at once."
    top = command("top", _top, text, "In a pipe it looks twice and prints the second look, with rates, as plain text.")
    _add_server(top, "an operator's API key")
    top.add_argument("--interval", type=float, default=1.0, help="seconds between two looks (default: 1)")
    text = "Check this machine against a configuration before serving, and say how to mend what is wrong."
    doctor = command("doctor", _doctor, text)
    _add_settings(doctor)
    doctor.add_argument(
        "--gpu", help="say only whether the model fits this GPU, such as h100-80gb, or one of so many GiB"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    text = "Print the sizes of known models, and how many programs fit on which GPU beside the weights."
    sizing = command("sizing", _sizing, text, "Of your own: doctor --model --gpu.")
    sizing.add_argument("--markdown", action="store_true", help="the tables as they stand in the documentation")
    for each in (doctor, sizing):
        each.add_argument("--tokens", type=int, default=30_000, help="length of a program at its end (default: 30000)")
    models = command(
        "models", _models, "Print which models can be served and how they run, or how the given ones would."
    )
    models.add_argument("model", nargs="*", help="'pocket', a folder, or a hub name in the local cache")
    text = "Make a folder that can be served from a GGUF file, with its tokenizer and its chat template."
    convert = command("convert", _convert, text)
    convert.add_argument("file", type=Path, help="the GGUF file")
    convert.add_argument("out", type=Path, help="the new folder")
    text = "Write a model of a large model's shape that answers as the small one does, to measure with."
    inflate = commands.add_parser("inflate", help=text, add_help=False)  # it reads its own arguments
    inflate.set_defaults(run=_inflate, takes_rest=True)
    bench.add(commands)
    simulate.add(commands)
    return parser


def _add_settings(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--config", type=Path, help="YAML file; `holdfast config` prints one with every key")
    add("--host", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, help="port to listen on (default: 8000)")
    add("--model", help="'pocket', a folder, or a hub name in the local cache (default: pocket)")
    add("--replicas", type=int, help="number of engines; the cores are shared out (default: 1)")
    add("--routers", type=int, help="number of processes that take requests (default: 1)")


def _add_server(command: argparse.ArgumentParser, key: str) -> None:
    command.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    text = f"file with {key}, where one is needed (or HOLDFAST_API_KEY)"
    command.add_argument("--api-key-file", type=Path, help=text)


def _add_config(command: argparse.ArgumentParser) -> None:
    """`config` alone prints YAML."""
    _add_settings(command)
    kinds = command.add_subparsers(metavar="show | check | options")
    text = "The same, and behind each value what set it: default, FILE:LINE, an environment variable, or a flag."
    show = kinds.add_parser("show", help=text, description=text, argument_default=argparse.SUPPRESS)
    _add_settings(show)
    show.set_defaults(run=_config_show)
    text = "Check a file and name line and field of everything that is wrong with it."
    check = kinds.add_parser("check", help=text, description=text)
    check.add_argument("file", type=Path)
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run=_config_check)
    text = "Every key with its type, default and meaning, as Markdown."
    options = kinds.add_parser("options", help=text, description=text)
    options.set_defaults(run=_config_options)


def _settings(options: argparse.Namespace) -> Settings:
    return _loaded(options).settings


def _loaded(options: argparse.Namespace) -> config_file.Loaded:
    flags = {key: getattr(options, flag.removeprefix("--")) for key, flag in config_file.FLAGS.items()}
    return config_file.load(options.config, environment.settings_variables(), flags)


def _server(options: argparse.Namespace) -> status.Server:
    from holdfast.cluster import status

    return status.Server(options.url, status.key_from(options.api_key_file, environment.api_key()))


def _say(text: str) -> None:
    with suppress(OSError):  # a terminal that has gone must not keep a server from stopping in order
        print(text, flush=True)


def _serve(options: argparse.Namespace) -> int:
    from holdfast.cluster.serve import run

    run(_settings(options), _say)
    return 0


def _chat(options: argparse.Namespace) -> int:
    from holdfast.loadgen import talk

    server = _server(options)
    tools = talk.read_tools(options.tools) if options.tools else ()
    of_turns = (options.model, options.system, options.program, tools, options.temperature, options.max_tokens)
    return talk.run(server.url, server.key, talk.ChatOptions(*of_turns))


def _config(options: argparse.Namespace) -> int:
    settings = _settings(options)
    config.check_tenants(settings)
    _say(config_file.dump(settings).rstrip())
    return 0


def _config_show(options: argparse.Namespace) -> int:
    print(config_file.show(_loaded(options)))
    return 0


def _config_check(options: argparse.Namespace) -> int:
    faults = config_file.check(options.file)
    print(config_file.report(options.file, faults, options.json))
    return MISUSE if faults else 0


def _config_options(_: argparse.Namespace) -> int:
    print(config_file.options_page())
    return 0


def _key(options: argparse.Namespace) -> int:
    from holdfast.router.tenants import Tenant, hash_key, make_key

    key = make_key()
    tenant = Tenant(options.tenant, (hash_key(key),))
    _say(f"API key, shown once: {key}\n\ntenants:\n  - name: {tenant.name}\n    key_hashes: [{tenant.key_hashes[0]!r}]")
    return 0


def _status(options: argparse.Namespace) -> int:
    from holdfast.cluster import status

    status.print_status(_server(options), options.json)
    return 0


def _top(options: argparse.Namespace) -> int:
    from holdfast.cluster import status

    status.top(_server(options), max(0.1, options.interval))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from holdfast.cluster import doctor, sizing

    settings = _settings(options)
    if options.gpu:
        size = sizing.gpu_bytes(options.gpu)
        gpu = doctor.Gpu(options.gpu, size, size, "")
        checks: list[tuple[str, doctor.Check]] = [("fit", partial(doctor.fit, settings, gpu, options.tokens))]
    else:
        checks = doctor.all_checks(settings, doctor.gather(), options.tokens)
    findings = doctor.findings(checks)
    doctor.show(findings, options.json)
    return FAILED if doctor.worst(findings) is doctor.State.FAIL else 0


def _sizing(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from holdfast.cluster import sizing

    for rows in sizing.tables(options.tokens):
        if options.markdown:
            print(sizing.markdown(rows) + "\n")
            continue
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for name in rows[0]:
            table.add_column(name, no_wrap=True, justify="right" if table.columns else "left")
        for row in rows[1:]:
            table.add_row(*row)
        Console().print(table, "")
    return 0


def _models(options: argparse.Namespace) -> int:
    from holdfast.cluster import models_page

    for text in map(models_page.runs_on, options.model) if options.model else [models_page.families()]:
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


# ---- parsers whose errors name the command and the nearest known word ----


class Parser(argparse.ArgumentParser):
    """Refuses unknown words itself, with the nearest known one. Only a command with `takes_rest` gets them."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        options, rest = super().parse_known_args(args, namespace)
        if rest and not getattr(options, "takes_rest", False):
            self.error(" ".join(self._unknown(word) for word in rest[:1]))
        return options, rest

    def error(self, message: str) -> NoReturn:
        """Exit with the error and a reference to the help."""
        self.exit(MISUSE, f"{self.prog}: {message}\nSee `{self.prog} --help`.\n")

    def _unknown(self, word: str) -> str:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            return f"one word too many: {word}"
        options = [option for action in self._actions for option in action.option_strings]
        return f"unknown option {name}{nearest(name, options)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """An unknown command. Trap: argparse has no public place for this."""
        commands = action.choices
        if isinstance(action, argparse._SubParsersAction) and commands is not None and value not in commands:
            hint = nearest(str(value), commands) or f"; there are {', '.join(commands)}"
            raise argparse.ArgumentError(None, f"unknown command {value}{hint}")
        super()._check_value(action, value)


class Overview(Parser):
    """The parser of all commands. Its help shows them in groups, with examples."""

    def format_help(self) -> str:
        commands = {
            each.dest: each.help or ""
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for each in action._choices_actions
        }
        groups = {heading: [name for name in names if name in commands] for heading, names in GROUPS.items()}
        grouped = {name for names in groups.values() for name in names}
        groups[REST] = [name for name in commands if name not in grouped]
        indent = 2 + max(map(len, commands)) + 2
        lines = [self.description or "", ""]
        for heading, names in groups.items():
            if names:
                lines += [heading, *(line for name in names for line in _described(name, commands[name], indent)), ""]
        wide = max(len(example) for example, _ in EXAMPLES)
        lines += ["Examples", *(f"  {example:<{wide}}  # {text}" for example, text in EXAMPLES), ""]
        lines += ["`holdfast COMMAND --help` explains a command, `holdfast --version` tells the version.", ""]
        return "\n".join(lines)


def _described(name: str, text: str, indent: int) -> list[str]:
    """A command and its help, in lines whose text begins at column `indent`."""
    first, *rest = wrap(text, WIDTH - indent)
    return [f"  {name:<{indent - 2}}{first}", *(" " * indent + line for line in rest)]


def nearest(word: str, words: Iterable[str]) -> str:
    """`; did you mean …?`, or "" where nothing is near."""
    close = get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


if __name__ == "__main__":
    raise SystemExit(main())
