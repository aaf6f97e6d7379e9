"""How the command line reads its words: what is wrong is told by the command that was meant, with what is near.

Two parsers on top of argparse's, and nothing of any command.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from textwrap import wrap
from typing import Any, NoReturn

MISUSE = 2  # exit status of a wrong argument
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
        "simulate-overload",
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


class Parser(argparse.ArgumentParser):
    """Refuses words that it does not know itself, instead of handing them up to where nobody knows its options.

    Only a command whose `takes_rest` is set gets them.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, rest = super().parse_known_args(args, namespace)
        if rest and not getattr(found, "takes_rest", False):
            self.error(" ".join(self._unknown(word) for word in rest[:1]))
        return found, rest

    def error(self, message: str) -> NoReturn:
        """One line that says what is wrong, and where the right words stand."""
        self.exit(MISUSE, f"{self.prog}: {message}\nSee `{self.prog} --help`.\n")

    def _unknown(self, word: str) -> str:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            return f"one word too many: {word}"
        known = [option for action in self._actions for option in action.option_strings]
        return f"unknown option {name}{nearest(name, known)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """A command that there is not. Trap: argparse has no public place to say this."""
        commands = action.choices
        if isinstance(action, argparse._SubParsersAction) and commands is not None and value not in commands:
            hint = nearest(str(value), commands) or f"; there are {', '.join(commands)}"
            raise argparse.ArgumentError(None, f"unknown command {value}{hint}")
        super()._check_value(action, value)


class Overview(Parser):
    """The parser above all commands. Its help shows them in groups, with examples."""

    def format_help(self) -> str:
        """What one can do."""
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
                lines += [heading, *(line for name in names for line in _told(name, commands[name], indent)), ""]
        wide = max(len(example) for example, _ in EXAMPLES)
        lines += ["Examples", *(f"  {example:<{wide}}  # {text}" for example, text in EXAMPLES), ""]
        lines += ["`holdfast COMMAND --help` explains a command, `holdfast --version` tells the version.", ""]
        return "\n".join(lines)


def _told(name: str, text: str, indent: int) -> list[str]:
    """A command and what it does, in lines whose text begins at column `indent`."""
    first, *rest = wrap(text, WIDTH - indent)
    return [f"  {name:<{indent - 2}}{first}", *(" " * indent + line for line in rest)]


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, or nothing where nothing is near."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
