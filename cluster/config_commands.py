"""`holdfast config show` and `check`: a configuration with where it comes from, and a file with its faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import yaml

from holdfast.cluster import config, config_file, redis, sources
from holdfast.cluster.sources import Loaded
from holdfast.replicas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong in a file; `line` counts from 1, 0 where none can be told."""

    line: int
    field: str
    message: str


def show(loaded: Loaded) -> str:
    """YAML of every key, and behind it what set it. Passwords are left out."""
    out: list[str] = []
    opened: list[str] = []
    width = 0
    rows = []
    for key, value in sources.keys(loaded.settings):
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if opened[: depth + 1] != sections[: depth + 1]:
                rows.append((f"{'  ' * depth}{section}:", ""))
        opened = sections
        if key == "redis.url" and value:
            value = redis.without_password(value)
        text = f"{'  ' * len(sections)}{name}: {_word(value)}"
        rows.append((text, loaded.origin(key)))
    width = min(60, max(len(text) for text, _ in rows))
    out = [f"{text:<{width}}  # {origin}" if origin else text for text, origin in rows]
    return "\n".join(out)


def check(path: Path) -> list[Fault]:
    """Every unknown key, every value that cannot be, and what does not go together. Raises ConfigError where the file
    cannot be read.
    """
    text = config_file.read_text(path)
    try:
        data = config_file.mapping(text)
    except ConfigError as error:
        mark = getattr(error.__cause__, "problem_mark", None)
        problem = getattr(error.__cause__, "problem", None) or error.message
        return [Fault(mark.line + 1 if mark else 1, "", f"not YAML: {problem}" if mark else problem)]
    where = sources.lines(text)
    return sorted(
        (Fault(_line(error.field or "", where), error.field or "", error.message) for error in _faults(data)),
        key=lambda fault: fault.line,
    )


def report(path: Path, faults: list[Fault], as_json: bool) -> str:
    """The faults as editors read them (`FILE:LINE: message`), or as JSON."""
    if as_json:
        rows = [{"line": fault.line, "field": fault.field, "message": fault.message} for fault in faults]
        return json.dumps({"file": str(path), "faults": rows}, indent=2)
    if not faults:
        return f"{path} is a valid configuration"
    return "\n".join(
        f"{path}:{fault.line}: {fault.message}{f' [{fault.field}]' if fault.field else ''}" for fault in faults
    )


def _faults(data: dict[str, Any]) -> Iterator[ConfigError]:
    """Those of single keys, then those of what does not go together, as far as that can be read."""
    found = config_file.faults(data)
    yield from found
    wrong = {error.field or "" for error in found}
    sections = {field.partition(".")[0] for field in wrong}
    rest = {name: value for name, value in data.items() if name not in sections - {"tenants"} and name not in wrong}
    if isinstance(tenants := rest.get("tenants"), list):  # in the place of one with a fault stands one that clashes not
        rest["tenants"] = [
            {"name": f"entry-{i}", "key_hashes": [f"sha256:{i:064x}"]}
            if any(f"{field}.".startswith(f"tenants.{i}.") for field in wrong)
            else each
            for i, each in enumerate(tenants)
        ]
    try:
        config.check_tenants(config_file.settings_of(rest))
    except ConfigError as error:
        # Whether a server has keys at all is not to be said where some of what decides it is left out.
        if not sections & {"router", "server", "tenants"} or (error.field or "").startswith("tenants"):
            yield error


def _line(field: str, where: dict[str, int]) -> int:
    """The line of a field, or of the section that it is missing in."""
    while field:
        if field in where:
            return where[field]
        field = field.rpartition(".")[0]
    return 1


def _word(value: Any) -> str:
    """A value in YAML, on one line."""
    plain = orjson.loads(orjson.dumps(value))
    return yaml.safe_dump(plain, default_flow_style=True, width=10**6, sort_keys=False).removesuffix("\n...\n").strip()
