"""The page of all options, `holdfast config options`: made from the configuration classes and the comments in them.

The comment behind a field is what the page says of it, a class's docstring stands above its table. So an option is
described once, where it is defined.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import EnumMeta
from functools import cache
from typing import Any, get_args, get_type_hints

import orjson

from holdfast.cluster.config import Settings

HEAD = """# Options

<!-- Made by `make options` from the configuration classes: change the comments there. -->

Every key of the YAML file that `holdfast serve --config FILE` reads, and of `config` in the chart's values. Only what
differs from the default has to be in it. What is set later wins: the default, the file, the environment
(`HOLDFAST_ENGINE__PAGE_SIZE=32` sets `engine.page_size` for `holdfast` commands), the command line.
`holdfast config show` prints each value with where it comes from, `holdfast config check FILE` names the line of every
fault.
"""


@dataclass(frozen=True, slots=True)
class Option:
    """One key. `kind` is how its values are written."""

    key: str
    kind: str
    default: str
    text: str


def options(kind: Any = Settings, path: str = "") -> Iterator[tuple[str, str, list[Option]]]:
    """Sections in order: their name, what their class says, and their options; nested ones after the outer."""
    hints, told, own, inner = get_type_hints(kind), comments(kind), [], []
    for field in dataclasses.fields(kind):
        key, hint = f"{path}.{field.name}".lstrip("."), hints[field.name]
        nested = _item(hint)
        if nested is not None:
            inner.append((nested, key if hint is nested else f"{key}[]"))
        else:
            own.append(Option(key, _kind(hint), _default(field), told.get(field.name, "")))
    if own:
        yield path, _about(kind), own
    for nested, key in inner:
        yield from options(nested, key)


def page() -> str:
    """The whole page in Markdown."""
    parts = [HEAD]
    for name, about, found in options():
        parts.append(f"## {name}\n\n{about}\n\n| key | values | default | what |\n|---|---|---|---|")
        rows = (f"| `{each.key}` | {each.kind} | {each.default} | {each.text} |" for each in found)
        parts[-1] += "\n" + "\n".join(rows) + "\n"
    return "\n".join(parts).rstrip()


@cache
def comments(kind: type) -> dict[str, str]:
    """What the comments behind the fields of a class say, by field."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    found = {}
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            behind = (line.partition("  # ")[2] for line in lines[node.lineno - 1 : node.end_lineno])
            found[node.target.id] = " ".join(text.strip() for text in behind if text)
    return found


def _about(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split())


def _item(hint: Any) -> Any:
    """The configuration class that `hint` is or is a list of."""
    for each in (hint, *get_args(hint)):
        if dataclasses.is_dataclass(each):
            return each
    return None


def _kind(hint: Any) -> str:
    names = {int: "whole number", float: "number", bool: "true, false", str: "text"}
    if hint in names:
        return names[hint]
    inside = tuple(str(each.value) for each in list[Any](hint)) if isinstance(hint, EnumMeta) else get_args(hint)
    if all(isinstance(each, str) for each in inside):
        return ", ".join(f"`{each}`" for each in inside)
    if type(None) in inside:
        return f"{_kind(next(each for each in inside if each is not type(None)))}, null"
    return "list of " + _kind(inside[0])


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{orjson.dumps(field.default).decode()}`"
    return "" if field.default_factory is dataclasses.MISSING else f"`{orjson.dumps(field.default_factory()).decode()}`"
