"""YAML <-> `Settings`: the border where names and types are checked. What values mean is `config`'s.

pydantic checks types here and nowhere else; unknown keys are found first, so that the nearest known one can be named.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import orjson
import yaml
from pydantic import TypeAdapter, ValidationError

from holdfast.cluster.config import Settings
from holdfast.replicas.errors import ConfigError

KEYS = frozenset({"tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"})


class Loader(yaml.SafeLoader):
    """Safe YAML whose keys are text, each one once in its mapping: of two the first would go without a word.

    Nothing in it may hold itself.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._open: list[str | None] = []  # anchors of the mappings and lists that are being read

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) and event.anchor in self._open:
            mark = parent.start_mark if parent is not None else None
            raise yaml.constructor.ConstructorError(None, None, f"{event.anchor!r} holds itself", mark)
        return super().compose_node(parent, index)

    def compose_sequence_node(self, anchor: Any) -> yaml.SequenceNode:
        self._open.append(anchor)
        node = super().compose_sequence_node(anchor)
        self._open.pop()
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        self._open.append(anchor)
        node = super().compose_mapping_node(anchor)
        self._open.pop()
        there = set()
        for key, _ in node.value:
            if key.tag not in KEYS:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is not text", key.start_mark)
            if key.value in there:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is there twice", key.start_mark)
            there.add(key.value)
        return node


def read(path: Path) -> Settings:
    """The settings in the YAML file at `path`. Raises ConfigError naming the field (dotted) and the file."""
    text = read_text(path)
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", error.field) from error


def read_text(path: Path) -> str:
    """The text of the file at `path`. Raises ConfigError."""
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "config") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}", "config") from error


def parse(text: str) -> Settings:
    """The settings in a YAML text. Raises ConfigError."""
    return settings_of(mapping(text))


def load(text: str) -> Any:
    """What a YAML text says. Raises YAMLError or ValueError."""
    return yaml.load(text, Loader)


def mapping(text: str) -> dict[str, Any]:
    """The sections in a YAML text, their contents as they are. Raises ConfigError."""
    try:
        data = load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: what looks like a date and is none
        raise ConfigError(f"not YAML: {error}", "config") from error
    except RecursionError as error:
        raise ConfigError("not a configuration: nested too deeply", "config") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"a configuration is a mapping of sections, not {type(data).__name__}", "config")
    return data


def settings_of(data: Mapping[str, Any]) -> Settings:
    """The settings in these sections. Raises ConfigError for the first fault."""
    for fault in unknown(data):
        raise fault
    return Settings(**{name: section(name, value) for name, value in data.items()})


def unknown(data: Mapping[str, Any]) -> Iterator[ConfigError]:
    """One error for each key that is none, naming the nearest one."""
    for field, known in unknown_keys(data, Settings):
        close = get_close_matches(field.rpartition(".")[2], known, n=1, cutoff=0.0)
        yield ConfigError(f"unknown key {field!r}; the nearest known one is {close[0]!r}", field)


def dump(settings: Settings) -> str:
    """`settings` as YAML that `parse` reads back."""
    return yaml.safe_dump(orjson.loads(orjson.dumps(settings)), sort_keys=False)


def section(name: str, value: Any) -> Any:
    """The section called `name`, checked. Raises ConfigError."""
    kind = get_type_hints(Settings)[name]
    try:
        # Through JSON, because strict mode then still takes a list for a tuple.
        return TypeAdapter(kind).validate_json(orjson.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join([name, *(str(part) for part in first["loc"])])
        raise ConfigError(f"{field}: {first['msg']}, not {first['input']!r}", field) from error
    except TypeError as error:
        raise ConfigError(f"{name}: {error}", name) from error
    except ConfigError as error:
        raise ConfigError(f"{name}.{error.message}", f"{name}.{error.field}") from error


def unknown_keys(data: Any, kind: Any, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Dotted paths of keys in `data` that dataclass `kind` has no field for, each with the fields there are."""
    if isinstance(data, list):
        for i, item in enumerate(data):
            yield from unknown_keys(item, kind, f"{path}.{i}")
    if not isinstance(data, dict):
        return
    hints = get_type_hints(kind)
    for key, value in data.items():
        here = f"{path}.{key}" if path else str(key)
        if key not in hints:
            yield here, list(hints)
        elif inner := _dataclass_in(hints[key]):
            yield from unknown_keys(value, inner, here)


def _dataclass_in(hint: Any) -> type | None:
    """The dataclass that `hint` is, or holds as `X | None` or `tuple[X, ...]`."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    if get_origin(hint) in (Union, UnionType, tuple, list):
        return next((found for arg in get_args(hint) if (found := _dataclass_in(arg))), None)
    return None
