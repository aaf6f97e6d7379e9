"""JSON objects read field by field: every getter checks a type, every error names file, place and field.

A field that is null counts as absent. An entry remembers which fields were read, so that the others can be counted.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.loadgen.program import Json, Program
from holdfast.replicas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Reading:
    """The programs of a file, the number of its records, and how often each field that a trace has no place for."""

    programs: tuple[Program, ...]
    records: int
    left_out: Mapping[str, int]

    @property
    def turns(self) -> int:
        return sum(len(program.turns) for program in self.programs)

    @property
    def summary(self) -> str:
        """One line about it."""
        n_answered = sum(turn.output.answer is not None for program in self.programs for turn in program.turns)
        line = f"{self.records} records: {len(self.programs)} programs, {self.turns} turns, {n_answered} answers"
        fields = ", ".join(f"{name} ({count})" for name, count in sorted(self.left_out.items()))
        return f"{line}; left out: {fields}" if fields else line


class Entry:
    """One JSON object. ``place`` names file and record, ``prefix`` the object inside the record."""

    __slots__ = ("_inner", "_read", "data", "place", "prefix")

    def __init__(self, data: object, place: str, prefix: str = "") -> None:
        self.place, self.prefix = place, prefix
        self._read: set[str] = set()
        self._inner: list[Entry] = []
        if not isinstance(data, dict):
            raise self.error("", "must be an object")
        self.data: Json = data

    def error(self, name: str, why: str) -> ConfigError:
        """The error of field ``name`` (of the object itself where that is empty); to be raised by the caller."""
        field = _path(self.prefix, name)
        return ConfigError(f"{self.place}, field '{field}': {why}" if field else f"{self.place}: {why}", field or None)

    def raw(self, name: str) -> Any:
        """The field as it stands."""
        self._read.add(name)
        return self.data.get(name)

    def _checked(self, name: str, fits: Callable[[Any], bool], why: str) -> Any:
        value = self.raw(name)
        if value is not None and not fits(value):
            raise self.error(name, why)
        return value

    def text(self, name: str) -> str | None:
        """A string."""
        return self._checked(name, lambda value: isinstance(value, str), "must be a string")  # type: ignore[no-any-return]

    def flag(self, name: str) -> bool:
        """True or false; absent is false."""
        return bool(self._checked(name, lambda value: isinstance(value, bool), "must be true or false"))

    def number(self, name: str) -> float | None:
        """A finite number that is not negative."""
        return self._checked(name, _is_number, "must be a number, 0 or more")  # type: ignore[no-any-return]

    def count(self, name: str) -> int | None:
        """A whole number that is not negative."""
        why = "must be a whole number, 0 or more"
        return self._checked(name, lambda value: _is_whole(value) and value >= 0, why)  # type: ignore[no-any-return]

    def counts(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers."""
        why = "must be a list of whole numbers"
        value = self._checked(name, lambda value: isinstance(value, list) and all(map(_is_whole, value)), why)
        return None if value is None else tuple(value)

    def inner(self, name: str) -> Entry | None:
        """The object in field ``name``, to be read field by field."""
        value = self.raw(name)
        if value is None:
            return None
        self._inner.append(Entry(value, self.place, _path(self.prefix, name)))
        return self._inner[-1]

    def inners(self, name: str) -> list[Entry] | None:
        """The objects of the list in field ``name``, to be read field by field."""
        items = self._items(name)
        self._inner += items or ()
        return items

    def object(self, name: str) -> Json | None:
        """The object in field ``name`` as it stands."""
        return self._checked(name, lambda value: isinstance(value, dict), "must be an object")  # type: ignore[no-any-return]

    def objects(self, name: str) -> tuple[Json, ...] | None:
        """A list of objects as they stand."""
        items = self._items(name)
        return None if items is None else tuple(item.data for item in items)

    def messages(self, name: str) -> tuple[Json, ...] | None:
        """A list of messages, each with what a replay needs of it, as they stand."""
        items = self._items(name)
        for message in items or ():
            _check_message(message)
        return None if items is None else tuple(message.data for message in items)

    def unread(self) -> Counter[str]:
        """Counts of the fields that were not read and are not null, here and in the entries inside."""
        parts = [part for part in self.prefix.split(".") if part and not part.isdigit()]
        names = (name for name, value in self.data.items() if name not in self._read and value is not None)
        return sum((entry.unread() for entry in self._inner), Counter(".".join([*parts, name]) for name in names))

    def _items(self, name: str) -> list[Entry] | None:
        value = self._checked(name, lambda value: isinstance(value, list), "must be a list")
        if value is None:
            return None
        return [Entry(item, self.place, _path(self.prefix, f"{name}.{number}")) for number, item in enumerate(value)]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def required(entry: Entry, name: str) -> str:
    """The text in field ``name``. Raises ConfigError where there is none."""
    value = entry.text(name)
    if value is None:
        raise entry.error(name, "must be a string")
    return value


def function_of(call: Entry) -> Entry:
    """The function of a tool call. Raises ConfigError where there is none."""
    function = call.inner("function")
    if function is None or call.text("type") not in (None, "function"):
        raise call.error("function", "must be there: only calls of functions are known")
    return function


def answer_in(entry: Entry, name: str) -> Json | None:
    """The assistant's message in field ``name``, with what a replay needs of it, as it stands. Raises ConfigError."""
    value = entry.object(name)
    if value is None:
        return None
    if value.get("role") != "assistant":
        raise entry.error(name, "must be a message of the assistant")
    _check_message(Entry(value, entry.place, _path(entry.prefix, name)))
    return value


def _check_message(message: Entry) -> None:
    """Raises ConfigError without the fields that a replay needs: role, content, and the ids and functions of calls."""
    role, content = required(message, "role"), message.raw("content")
    if not isinstance(content, str | list | None) or (role != "assistant" and "content" not in message.data):
        raise message.error("content", "must be there: a string, or a list of parts")
    if role == "tool":
        required(message, "tool_call_id")
    for call in message.inners("tool_calls") or () if role == "assistant" else ():
        required(call, "id")
        function = function_of(call)
        required(function, "name")
        required(function, "arguments")


def _path(prefix: str, name: str) -> str:
    return f"{prefix}.{name}".strip(".")


# ---- files ----


def lines(path: Path) -> Iterator[Entry]:
    """The objects of a JSONL file, blank lines aside. Raises ConfigError."""
    try:
        # Not `splitlines`: JSON strings may hold separators of lines that are not those of JSONL.
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    place = f"{path}, line {number}"
                    yield Entry(_parsed(line, place), place)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "trace") from error


def document(path: Path) -> Any:
    """The JSON of a whole file. Raises ConfigError."""
    try:
        return _parsed(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "trace") from error


def write_lines(path: Path, rows: Iterable[Json]) -> None:
    """Write JSONL; the file appears only when all of it is written. Raises ConfigError."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n")
        part.replace(path)
    except (OSError, ValueError) as error:  # ValueError: not a number, or half a surrogate pair
        raise ConfigError(f"cannot write {path}: {error}", "trace") from error
    finally:
        part.unlink(missing_ok=True)


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON: {error}", "trace") from error
