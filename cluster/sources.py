"""Where each value of a configuration comes from: the defaults, the file, the environment, the command line.

The later of these wins. In the environment `HOLDFAST_ENGINE__RETENTION__POLICY=none` sets `engine.retention.policy`;
the value is read as YAML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from holdfast.cluster import config, config_file
from holdfast.cluster.config import Overrides, Settings
from holdfast.replicas.errors import ConfigError

PREFIX = "HOLDFAST_"
DEFAULT = "default"
FLAGS = {
    "server.host": ("--host", "host"),
    "server.port": ("--port", "port"),
    "engine.model": ("--model", "model"),
    "replicas.count": ("--replicas", "replicas"),
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A whole configuration, and for each key that is not at its default what set it."""

    settings: Settings
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        """What set `key`."""
        return self.origins.get(key, DEFAULT)


def load(path: Path | None, variables: Mapping[str, str], overrides: Overrides) -> Loaded:
    """Everything there is, laid over each other. Raises ConfigError naming the key, and the file or variable."""
    data: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if path is not None:
        text = config_file.read_text(path)
        try:
            data = config_file.mapping(text)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}", error.field) from error
        origins = {key: f"{path}:{line}" for key, line in lines(text).items()}
    data = deepcopy(data)
    for name, value in sorted(variables.items()):
        key = ".".join(name.removeprefix(PREFIX).lower().split("__"))
        _put(data, key, _value(name, value))
        origins[key] = name
    try:
        settings = config_file.settings_of(data)
    except ConfigError as error:
        where = _place(error.field or "", origins)
        raise ConfigError(f"{where}: {error.message}" if where else error.message, error.field) from error
    for key, (flag, field) in FLAGS.items():
        if getattr(overrides, field) is not None:
            origins[key] = flag
    return Loaded(config.apply(settings, overrides), origins)


def keys(settings: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with its value, sections opened, lists whole."""
    for field in fields(settings):
        key, value = f"{path}.{field.name}".lstrip("."), getattr(settings, field.name)
        if is_dataclass(value):
            yield from keys(value, key)
        else:
            yield key, value


def lines(text: str) -> dict[str, int]:
    """The line, from 1, on which each key and each item of a list stands in a YAML text. Raises ConfigError."""
    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {error}", "config") from error
    return dict(_lines(root, ""))


def _lines(node: yaml.Node | None, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        inside = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        inside = [(str(index), item, item) for index, item in enumerate(node.value)]
    else:
        return
    for name, key, value in inside:
        here = f"{path}.{name}".lstrip(".")
        yield here, key.start_mark.line + 1
        yield from _lines(value, here)


def _place(field: str, origins: Mapping[str, str]) -> str:
    """What set `field`, or the nearest list or section around it; "" where nothing did."""
    while field and field not in origins:
        field = field.rpartition(".")[0]
    return origins.get(field, "")


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        inside = data.get(section)
        if not isinstance(inside, dict):
            inside = data[section] = {}
        data = inside
    data[name] = value


def _value(name: str, text: str) -> Any:
    try:
        return config_file.load(text) if text else ""
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name} is not a YAML value: {text!r}", "environment") from error
