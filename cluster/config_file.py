"""YAML, environment and command line -> `Settings`, with the source of each value, and the commands that show it.

The later of these wins: defaults, file, environment, command line. `HOLDFAST_ENGINE__RETENTION__POLICY=none` sets
`engine.retention.policy`; its value is read as YAML. pydantic checks types here and nowhere else. Unknown keys are
found first, so that the error can name the nearest known key.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Set
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from enum import EnumMeta
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import orjson
import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from holdfast.cluster import config, redis
from holdfast.cluster.config import Settings
from holdfast.replicas.errors import ConfigError

V = TypeVar("V")
KEYS = frozenset({"tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"})


_ALWAYS = {
    "engine": (
        "background_chunk 128, batch_share 0.05, call_grace 16, adaptive_chunks true, equal_chunks false, "
        "forced_drafts 32, grammar_cache 64, hung_factor 20, kv_tags_share 0.5, latency_max_tokens 32, "
        "question_tokens 256, session_questions 8, stream_interval_s 0.005, tenant_questions 64, "
        "speculation.prompt_lookup true, speculation.memory true, speculation.cost_gate true, "
        "speculation.shared_budget true"
    ),
    "placement": (
        "pins 65536, patience_s 10, turn_tokens 1200, shared_turns 6, crowded_load 1.5, move_factor 4, "
        "report_s 1, accept_s 3"
    ),
    "server": "header_s 10, client_connections 1024, body_rate 16 MiB a second, internal_host 127.0.0.1",
    "router": (
        "audit_records 10000, cache_answer_bytes 262144, max_body_values 131072, output_estimate 512, "
        "prefill_most_s 600, prefill_s 60, program_entries 65536, program_quota_s 600, program_rest_s 3600, "
        "program_tenant_entries 65536, stall_s 30, store_retry_s 1, tool_latency_s 0.5, oidc.refresh_s 300"
    ),
}
"""Keys of earlier versions whose value is fixed now, each with that value."""

REMOVED: Mapping[str, str] = {
    **{
        f"{section}.{name}": f"its value is always {value} now"
        for section, fixed in _ALWAYS.items()
        for name, _, value in (each.partition(" ") for each in fixed.split(", "))
    },
    **{
        f"engine.{name}": f"to turn it off, write `engine.without: [{name}]`"
        for name in (
            *("prefix_cache", "sessions", "grouped_prefill"),
            *("kv_tags", "tokenize_cache", "device_sampling", "cuda_graphs"),
        )
    },
    **{
        f"engine.speculation.{name}": "it is a constant now"
        for name in (
            *("min_n", "memory_min_n", "raw_length", "own_value_length", "ema_weight", "confidence", "floor"),
            *("verify_rows", "explore_every", "memory_context"),
        )
    },
    **{
        f"engine.retention.{name}": "it is a constant of a policy now (docs/scheduling.md)"
        for name in (
            *("settle_s", "fixed_s", "delta", "tool_samples", "overall_samples", "unknown_s", "turns_weight"),
            *("trusted_samples", "wait_window", "prior_s", "away_waits"),
        )
    },
    "placement.max_waiting_tokens": "it is 1,024 for each of `placement.max_waiting` requests",
    "placement.foretold_s": "routers no longer refuse requests for an engine; engines refuse them by themselves",
    "server.connections": "it follows the limit of open files (`ulimit -Hn`), at most 16,384",
    "router.long_body_bytes": "the router parses every body itself",
    "router.body_memory": "it is 4 times `router.max_body_bytes`",
    "router.cache_lease_s": "routers no longer share what they are computing",
    "router.single_flight": "equal requests at the same moment are each computed",
    **{
        f"router.{name}": "cached answers are in Redis alone; their bound is `router.cache_tenant_bytes`"
        for name in ("cache_memory", "cache_entries", "cache_share")
    },
    "router.placement_headers": "a new program is placed by `router.parent_headers` and x-correlation-id",
    "router.store_entries": "routers always have a Redis",
    "router.store_memory": "routers always have a Redis",
    "engine.high_water": "prompts wait above 95 % of the cells; `engine.without: [chunk_deferral]` turns that off",
    "engine.latency_chunk": "it is 1,024 tokens, or a quarter of `engine.step_tokens` if that is more",
    "engine.max_waiting_tokens": "it is 4 Mi, or 1,024 times `engine.max_waiting` if that is more",
    "engine.preposition": "the engine no longer computes prompts ahead by itself; clients use /v1/prefills",
    "engine.preposition_after_s": "the engine no longer computes prompts ahead by itself; clients use /v1/prefills",
    "engine.speculation.skeleton": "calls are held to their schema, whose forced tokens need no drafts",
    "engine.speculation.scope_bytes": "a tenant has at most 1/16 of `engine.speculation.memory_bytes`",
}
"""Keys of earlier versions, and what replaces each."""


class Loader(yaml.SafeLoader):
    """Safe YAML without duplicate keys, keys that are not text, and anchors that contain themselves."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._open: list[str | None] = []  # anchors of the open mappings and lists

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) and event.anchor in self._open:
            mark = parent.start_mark if parent is not None else None
            raise yaml.constructor.ConstructorError(None, None, f"{event.anchor!r} contains itself", mark)
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


# ---- where values come from ----

PREFIX = "HOLDFAST_"
FLAGS = {
    "server.host": "--host",
    "server.port": "--port",
    "engine.model": "--model",
    "replicas.count": "--replicas",
    "server.routers": "--routers",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A whole configuration, with the source of each key that is not at its default."""

    settings: Settings
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        """The source that set `key`."""
        return self.origins.get(key, "default")


def load(path: Path | None, variables: Mapping[str, str], flags: Mapping[str, Any]) -> Loaded:
    """The configuration from all sources. `flags`: values of the command line by key; None: not set.

    Raises ConfigError naming the key, and the file, variable or flag.
    """
    data: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if path is not None:
        text = read_text(path)
        try:
            data = mapping(text)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}", error.field) from error
        origins = {key: f"{path}:{line}" for key, line in lines(text).items()}
    data = deepcopy(data)
    for name, value in sorted(variables.items()):
        key = ".".join(name.removeprefix(PREFIX).lower().split("__"))
        _set(data, key, _variable(name, value))
        origins[key] = name
    for key, value in flags.items():
        if value is not None:
            _set(data, key, value)
            origins[key] = FLAGS[key]
    try:
        settings = settings_of(data)
    except ConfigError as error:
        origin = _around(error.field or "", origins, "")
        raise ConfigError(f"{origin}: {error.message}" if origin else error.message, error.field) from error
    return Loaded(settings, origins)


def keys(settings: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with its value, sections opened, lists whole."""
    for field in dataclasses.fields(settings):
        key, value = f"{path}.{field.name}".lstrip("."), getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
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
        key_path = f"{path}.{name}".lstrip(".")
        yield key_path, key.start_mark.line + 1
        yield from _lines(value, key_path)


def _around(field: str, known: Mapping[str, V], otherwise: V) -> V:
    """The value of `field`, or of the nearest list or section around it."""
    while field and field not in known:
        field = field.rpartition(".")[0]
    return known.get(field, otherwise)


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        inside = data.get(section)
        if not isinstance(inside, dict):
            inside = data[section] = {}
        data = inside
    data[name] = value


def _variable(name: str, text: str) -> Any:
    try:
        return load_yaml(text) if text else ""
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name} is not a YAML value: {text!r}", "environment") from error


# ---- the file ----


def read(path: Path) -> Settings:
    """The settings in the YAML file at `path`. Raises ConfigError naming the field (dotted), the file and the line."""
    return load(path, {}, {}).settings


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


def load_yaml(text: str) -> Any:
    """The content of a YAML text. Raises YAMLError or ValueError."""
    return yaml.load(text, Loader)


def mapping(text: str) -> dict[str, Any]:
    """The sections in a YAML text, their contents as they are. Raises ConfigError."""
    try:
        data = load_yaml(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date
        raise ConfigError(f"not YAML: {_problem(error)}", "config") from error
    except RecursionError as error:
        raise ConfigError("not a configuration: nested too deeply", "config") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"a configuration is a mapping of sections, not {type(data).__name__}", "config")
    return data


def _problem(error: Exception) -> str:
    """The error in one line, with its place."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark and problem else str(error)


def settings_of(data: Mapping[str, Any]) -> Settings:
    """The settings in these sections. Raises ConfigError for the first fault."""
    for fault in unknown(data):
        raise fault
    hints = get_type_hints(Settings)
    return Settings(**{name: _read(name, hints[name], value) for name, value in data.items()})


def faults(data: Mapping[str, Any]) -> list[ConfigError]:
    """All errors in these sections: unknown keys, then values."""
    errors = list(unknown(data))
    skip = {fault.field for fault in errors}
    for name, value in data.items():
        if name not in skip:
            errors += _faults(name, get_type_hints(Settings)[name], value, skip)
    return errors


def _faults(path: str, hint: Any, value: Any, skip: Set[str | None]) -> list[ConfigError]:
    """Errors in the `value` of type `hint` at `path`, without the keys in `skip`.

    One error hides others, because the first wrong value ends the reading. So inner sections are read before outer
    ones. Keys with an error are left out, as if they had their defaults, until a reading finds no new error.
    """
    kind = _dataclass_in(hint)
    if kind is not None and isinstance(value, list) and hint is not kind:
        return [fault for i, item in enumerate(value) for fault in _faults(f"{path}.{i}", kind, item, skip)]
    if kind is None or not isinstance(value, dict):
        return _errors(path, hint, value)
    errors = []
    rest = {key: each for key, each in value.items() if f"{path}.{key}" not in skip}
    for key, inner in get_type_hints(kind).items():
        if key in rest and _dataclass_in(inner) and (nested := _faults(f"{path}.{key}", inner, rest[key], skip)):
            errors += nested
            del rest[key]
    seen: set[str | None] = set()
    while new_errors := [fault for fault in _errors(path, kind, rest) if fault.field not in seen]:
        errors += new_errors
        seen |= {fault.field for fault in new_errors}
        rest = {key: each for key, each in rest.items() if not _below(f"{path}.{key}", seen)}
    return errors


def _below(path: str, fields: Set[str | None]) -> bool:
    """Whether one of `fields` is `path`, or inside of it."""
    return any(f"{field}.".startswith(f"{path}.") for field in fields)


def _errors(path: str, hint: Any, value: Any) -> list[ConfigError]:
    """Errors of a reading of `value`: all wrong types, or else the first invalid value; [] if there are none."""
    try:
        _read(path, hint, value)
    except ConfigError as error:
        return _errors_of(path, error.__cause__) if isinstance(error.__cause__, ValidationError) else [error]
    return []


def unknown(data: Mapping[str, Any]) -> Iterator[ConfigError]:
    """One error for each unknown key. It names the nearest known key."""
    for field, names in unknown_keys(data, Settings):
        close = get_close_matches(field.rpartition(".")[2], names, n=1, cutoff=0.0)
        instead = REMOVED.get(field) or f"the nearest known one is {close[0]!r}"
        yield ConfigError(f"unknown key {field!r}; {instead}", field)


def dump(settings: Settings) -> str:
    """`settings` as YAML that `parse` reads back."""
    return yaml.safe_dump(orjson.loads(orjson.dumps(settings)), sort_keys=False)


def _read(path: str, hint: Any, value: Any) -> Any:
    """`value` as the type that `hint` says. Raises ConfigError; `path` is where it stands."""
    try:
        # Through JSON, because strict mode then still takes a list for a tuple.
        return TypeAdapter(hint).validate_json(orjson.dumps(value), strict=True)
    except ValidationError as error:
        raise _errors_of(path, error)[0] from error
    except TypeError as error:
        raise ConfigError(f"{path}: {error}", path) from error
    except ConfigError as error:
        raise ConfigError(f"{path}.{error.message}", f"{path}.{error.field}") from error


def _errors_of(path: str, error: ValidationError) -> list[ConfigError]:
    """One error for each fault that pydantic found in the value at `path`."""
    seen = []
    for each in error.errors(include_url=False):
        field = ".".join([path, *(str(part) for part in each["loc"])])
        seen.append(ConfigError(f"{field}: {each['msg']}, not {each['input']!r}{_nearest(each)}", field))
    return seen


def _nearest(error: ErrorDetails) -> str:
    """The nearest allowed word, for text that is not one of the allowed words."""
    if error["type"] != "literal_error" or not isinstance(error["input"], str):
        return ""
    close = get_close_matches(error["input"], re.findall("'([^']*)'", error["ctx"]["expected"]), n=1, cutoff=0.0)
    return f"; the nearest is {close[0]!r}"


def unknown_keys(data: Any, kind: Any, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Dotted paths of keys in `data` without a field in dataclass `kind`, each with the names of the known fields."""
    if isinstance(data, list):
        for i, item in enumerate(data):
            yield from unknown_keys(item, kind, f"{path}.{i}")
    if not isinstance(data, dict):
        return
    hints, names = get_type_hints(kind), [each.name for each in dataclasses.fields(kind)]
    for key, value in data.items():
        key_path = f"{path}.{key}" if path else str(key)
        if key not in names:
            yield key_path, names
        elif inner := _dataclass_in(hints[key]):
            yield from unknown_keys(value, inner, key_path)


def _dataclass_in(hint: Any) -> type | None:
    """The dataclass that `hint` is, or holds as `X | None` or `tuple[X, ...]`."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    if get_origin(hint) in (Union, UnionType, tuple, list):
        return next((nested for arg in get_args(hint) if (nested := _dataclass_in(arg))), None)
    return None


# ---- `holdfast config show` and `check` ----


@dataclass(frozen=True, slots=True)
class Fault:
    """An error in a file. `line` counts from 1; 0: unknown."""

    line: int
    field: str
    message: str


def show(loaded: Loaded) -> str:
    """YAML of every key, with its source in a comment. Passwords are left out."""
    out: list[str] = []
    opened: list[str] = []
    width = 0
    rows = []
    for key, value in keys(loaded.settings):
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
    """Every unknown key, every invalid value, and values that contradict each other. Raises ConfigError where the file
    cannot be read.
    """
    text = read_text(path)
    try:
        data = mapping(text)
    except ConfigError as error:
        mark = getattr(error.__cause__, "problem_mark", None)
        problem = getattr(error.__cause__, "problem", None) or error.message
        return [Fault(mark.line + 1 if mark else 1, "", f"not YAML: {problem}" if mark else problem)]
    rows = lines(text)
    return sorted(
        (Fault(_around(error.field or "", rows, 1), error.field or "", error.message) for error in _all_faults(data)),
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


def _all_faults(data: dict[str, Any]) -> Iterator[ConfigError]:
    """Errors of single keys, then contradictions between the values that can be read."""
    errors = faults(data)
    yield from errors
    faulty = {error.field or "" for error in errors}
    sections = {field.partition(".")[0] for field in faulty}
    rest = {name: value for name, value in data.items() if name not in sections - {"tenants"} and name not in faulty}
    if isinstance(tenants := rest.get("tenants"), list):  # a tenant without conflicts replaces each faulty one
        rest["tenants"] = [
            {"name": f"entry-{i}", "key_hashes": [f"sha256:{i:064x}"]}
            if any(f"{field}.".startswith(f"tenants.{i}.") for field in faulty)
            else each
            for i, each in enumerate(tenants)
        ]
    try:
        config.check_tenants(settings_of(rest))
    except ConfigError as error:
        # Faulty tenants are left out here, so this check cannot know whether the server has keys.
        if not sections & {"router", "server", "tenants"} or (error.field or "").startswith("tenants"):
            yield error


def _word(value: Any) -> str:
    """A value in YAML, on one line."""
    plain = orjson.loads(orjson.dumps(value))
    return yaml.safe_dump(plain, default_flow_style=True, width=10**6, sort_keys=False).removesuffix("\n...\n").strip()


# ---- `holdfast config options`: made from the configuration classes and the comments behind their fields ----

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
    """Sections in order: name, docstring of the class, and options. Nested sections follow the outer one."""
    hints, texts, own, inner = get_type_hints(kind), comments(kind), [], []
    for field in dataclasses.fields(kind):
        key, hint = f"{path}.{field.name}".lstrip("."), hints[field.name]
        nested = _dataclass_in(hint)
        if nested is not None:
            inner.append((nested, key if hint is nested else f"{key}[]"))
        else:
            own.append(Option(key, _kind(hint), _default(field), texts.get(field.name, "")))
    if own:
        yield path, " ".join((inspect.getdoc(kind) or "").split()), own
    for nested, key in inner:
        yield from options(nested, key)


def options_page() -> str:
    """The whole page in Markdown."""
    parts = [HEAD]
    for name, description, section_options in options():
        parts.append(f"## {name}\n\n{description}\n\n| key | values | default | what |\n|---|---|---|---|")
        rows = (f"| `{each.key}` | {each.kind} | {each.default} | {each.text} |" for each in section_options)
        parts[-1] += "\n" + "\n".join(rows) + "\n"
    return "\n".join(parts).rstrip()


@cache
def comments(kind: type) -> dict[str, str]:
    """The comments behind the fields of a class, by field."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    texts = {}
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            behind = (line.partition("  # ")[2] for line in lines[node.lineno - 1 : node.end_lineno])
            texts[node.target.id] = " ".join(text.strip() for text in behind if text)
    return texts


def _kind(hint: Any) -> str:
    names = {int: "whole number", float: "number", bool: "true, false", str: "text"}
    if hint in names:
        return names[hint]
    members = tuple(str(each.value) for each in list[Any](hint)) if isinstance(hint, EnumMeta) else get_args(hint)
    if all(isinstance(each, str) for each in members):
        return ", ".join(f"`{each}`" for each in members)
    if type(None) in members:
        return f"{_kind(next(each for each in members if each is not type(None)))}, null"
    return "list of " + _kind(members[0])


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{orjson.dumps(field.default).decode()}`"
    return "" if field.default_factory is dataclasses.MISSING else f"`{orjson.dumps(field.default_factory()).decode()}`"
