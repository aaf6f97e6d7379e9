"""Command lines from dataclasses: every field with a help text is a flag, or an argument, of its command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from holdfast.replicas.errors import ConfigError

T = TypeVar("T")
Flags = Mapping[str, Mapping[str, Any]]  # the arguments of `add_argument`, by flag or name
_UNSHOWN: tuple[Any, ...] = (None, (), [], "", False)  # defaults that the help does not show


def option(help: str, default: Any = MISSING, factory: Any = MISSING, **more: Any) -> Any:
    """A field that is a flag: `--name`, without the `_s` of a field in seconds; `flag` names it otherwise.

    `flag=""` makes it an argument. `parse` makes the value of the text, or of each text of a repeated flag. The field's
    type sets the rest: a `tuple[str, ...]` or a mapping is repeated, a tuple of numbers has commas.
    """
    return field(default=default, default_factory=factory, metadata={"help": help, **more})


def nested(default: Any, *names: str) -> Any:
    """A field that holds an options dataclass. All its fields become flags, or only those named."""
    return field(default=default, metadata={"nested": names or tuple(item.name for item in fields(default))})


def add_options(
    command: argparse.ArgumentParser, kind: Any, skip: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> None:
    """Add the flags of a dataclass. `defaults` take the place of its own."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        default = (defaults or {}).get(item.name, item.default)
        if item.name in skip:
            continue
        if names := item.metadata.get("nested"):
            unnamed = {inner.name for inner in fields(default)} - set(names)
            add_options(command, type(default), unnamed, {name: getattr(default, name) for name in names})
        elif "help" in item.metadata:
            words = dict(item.metadata) | _kind_of(hints[item.name], "parse" in item.metadata)
            flag = words.pop("flag", f"--{item.name.removesuffix('_s').replace('_', '-')}")
            words.pop("parse", None)
            if words.get("action") != "append" and "--" in flag:
                words["default"] = None if default is MISSING or "parse" in item.metadata else default
                words["required"] = default is MISSING
            add_flags(command, {flag or item.name: words | ({"dest": item.name} if flag else {})})


def _kind_of(hint: Any, parsed: bool) -> dict[str, Any]:
    """The arguments of `add_argument` for a type."""
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) in (tuple, Mapping):
        item = get_args(hint)[0]
        return {"type": counts if item is int else numbers} if item in (int, float) else {"action": "append"}
    kinds = [option_type for option_type in get_args(hint) or (hint,) if option_type is not type(None)]
    return {} if kinds[0] is str and not parsed else {"type": Path if parsed else kinds[0]}


def add_flags(command: argparse.ArgumentParser, flags: Flags) -> None:
    """Add options, each with its default in its help."""
    for flag, words in flags.items():
        default = words.get("default")
        default_text = ",".join(f"{value:g}" for value in default) if isinstance(default, tuple) else default
        text = words["help"] + (f" (default: {default_text})" if default not in _UNSHOWN else "")
        command.add_argument(flag, **{**words, "help": text})


def built(kind: Callable[..., T], options: argparse.Namespace, **more: Any) -> T:
    """A dataclass from the parsed options of its fields; an option that was not set keeps its default."""
    values: dict[str, Any] = {}
    for item in fields(kind):  # type: ignore[arg-type]
        parse, value = item.metadata.get("parse"), getattr(options, item.name, None)
        if names := item.metadata.get("nested"):
            inner = {name: value for name in names if (value := getattr(options, name, None)) is not None}
            values[item.name] = replace(item.default, **inner)  # type: ignore[type-var]
        elif value is not None and parse and isinstance(value, list):
            parsed = tuple(map(parse, value))
            default = item.default_factory() if callable(item.default_factory) else None  # of a mapping
            values[item.name] = parsed if default is None else {**default, **dict(parsed)}
        elif value is not None:
            values[item.name] = parse(value) if parse else tuple(value) if isinstance(value, list) else value
    return kind(**values | more)


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


def at_least(least: float, names: str, options: Any) -> None:
    """Raise ConfigError for the first of these fields that is below ``least``, or no finite number."""
    for name in names.split():
        value, flag = getattr(options, name), name.removesuffix("_s").replace("_", "-")
        if not least <= value < inf:
            raise ConfigError(f"{flag} must be a number of at least {least:g}", flag)


def above_zero(names: str, options: Any) -> None:
    """Raise ConfigError for the first of these fields that is not a finite number more than 0."""
    for name in names.split():
        if not 0 < getattr(options, name) < inf:
            flag = name.removesuffix("_s").replace("_", "-")
            raise ConfigError(f"{flag} must be a number more than 0", flag)
