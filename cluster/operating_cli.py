"""Arguments of the commands for whoever runs a cluster. The work is imported when it is asked for."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cluster import environment
from holdfast.cluster.config import Settings

if TYPE_CHECKING:
    from holdfast.cluster.sources import Loaded
    from holdfast.cluster.watch import Watched

Commands = argparse._SubParsersAction  # argparse has no public name for it
MISUSE = 2  # exit status of a file with faults
AddSettings = Callable[[argparse.ArgumentParser], None]
Load = Callable[[argparse.Namespace], Settings]


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add the commands."""
    text = "Print what a running server does: replicas, cells, tenants, programs."
    command = commands.add_parser("status", help=text, description=text)
    add_server(command)
    command.add_argument("--json", action="store_true", help="print JSON, with up to 200 programs")
    command.set_defaults(run=_status)
    text = "The same, kept on the screen with rates; q or Ctrl-C leaves, another key looks at once."
    pipe = "In a pipe it looks twice and prints the second look, with rates, as plain text."
    command = commands.add_parser("top", help=text, description=f"{text} {pipe}")
    add_server(command)
    command.add_argument("--interval", type=float, default=1.0, help="seconds between two looks (default: 1)")
    command.set_defaults(run=_top)


def add_checked(commands: "Commands[argparse.ArgumentParser]", add_settings: AddSettings, settings: Load) -> None:
    """Add the commands that look at a configuration; `settings` reads it from the arguments of `add_settings`."""
    text = "Check this machine against a configuration before serving, and say how to mend what is wrong."
    command = commands.add_parser("doctor", help=text, description=text)
    add_settings(command)
    command.add_argument(
        "--gpu", help="say only whether the model fits this GPU, such as h100-80gb, or one of so many GiB"
    )
    _add_tokens(command)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=lambda options: _doctor(settings(options), options))
    text = "Print the sizes of known models, and how many programs fit on which GPU beside the weights."
    command = commands.add_parser("sizing", help=text, description=f"{text} Of your own: doctor --model --gpu.")
    _add_tokens(command)
    command.add_argument("--markdown", action="store_true", help="the tables as they stand in the documentation")
    command.set_defaults(run=_sizing)


def _add_tokens(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tokens", type=int, default=30_000, help="length of a program at its end (default: 30000)")


def add_config(
    command: argparse.ArgumentParser, add_settings: AddSettings, loaded: "Callable[[argparse.Namespace], Loaded]"
) -> None:
    """Add what is below `config`. `config` alone prints YAML."""
    kinds = command.add_subparsers(metavar="show | check | options")
    text = "The same, and behind each value what set it: default, FILE:LINE, an environment variable, or a flag."
    show = kinds.add_parser("show", help=text, description=text, argument_default=argparse.SUPPRESS)
    add_settings(show)
    show.set_defaults(run=lambda options: _config_show(loaded(options)))
    text = "Check a file and name line and field of everything that is wrong with it."
    check = kinds.add_parser("check", help=text, description=text)
    check.add_argument("file", type=Path)
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run=_config_check)
    text = "Every key with its type, default and meaning, as Markdown."
    options = kinds.add_parser("options", help=text, description=text)
    options.set_defaults(run=_config_options)


def add_server(command: argparse.ArgumentParser, key: str = "an operator's API key") -> None:
    """Arguments that say which server is asked; `server` reads them."""
    command.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    command.add_argument(
        "--api-key-file", type=Path, help=f"file with {key}, where one is needed (or HOLDFAST_API_KEY)"
    )


def server(options: argparse.Namespace) -> "Watched":
    from holdfast.cluster import watch

    return watch.Watched(options.url, watch.key_from(options.api_key_file, environment.api_key()))


def _status(options: argparse.Namespace) -> int:
    from holdfast.cluster import top

    top.status(server(options), options.json, print)
    return 0


def _doctor(settings: Settings, options: argparse.Namespace) -> int:
    from holdfast.cluster import doctor, sizing

    machine = environment.machine()
    if options.gpu:
        size = sizing.gpu_bytes(options.gpu)
        gpu = doctor.Gpu(options.gpu, size, size, "")
        checks: list[tuple[str, doctor.Check]] = [("fit", partial(doctor.fit, settings, gpu, options.tokens))]
    else:
        facts = doctor.gather(machine.temporary, machine.cores)
        checks = doctor.all_checks(settings, facts, options.tokens)
    found = doctor.findings(checks)
    doctor.show(found, options.json)
    return int(doctor.worst(found) is doctor.State.FAIL)


def _config_show(loaded: "Loaded") -> int:
    from holdfast.cluster import config_commands

    print(config_commands.show(loaded))
    return 0


def _config_check(options: argparse.Namespace) -> int:
    from holdfast.cluster import config_commands

    faults = config_commands.check(options.file)
    print(config_commands.report(options.file, faults, options.json))
    return MISUSE if faults else 0


def _config_options(_: argparse.Namespace) -> int:
    from holdfast.cluster import option_table

    print(option_table.page())
    return 0


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


def _top(options: argparse.Namespace) -> int:
    from holdfast.cluster import top

    top.top(server(options), max(0.1, options.interval))
    return 0
