"""YAML <-> `Settings`: the border where names and types are checked. What values mean is `config`'s.

pydantic checks types here and nowhere else; unknown keys are found first, so that the nearest known one can be named.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Set
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import orjson
import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from holdfast.cluster.config import Settings
from holdfast.replicas.errors import ConfigError

KEYS = frozenset({"tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"})


REMOVED: Mapping[str, str] = {
    **{
        f"engine.{name}": f"to turn it off, write `engine.without: [{name}]`"
        for name in (
            *("prefix_cache", "sessions", "grouped_prefill"),
            *("kv_tags", "tokenize_cache", "device_sampling", "cuda_graphs"),
        )
    },
    **{
        f"engine.{name}": f"its value is always {value} now"
        for name, value in (
            ("background_chunk", "128"),
            ("batch_share", "0.05"),
            ("call_grace", "16"),
            ("adaptive_chunks", "true"),
            ("equal_chunks", "false"),
            ("forced_drafts", "32"),
            ("grammar_cache", "64"),
            ("hung_factor", "20"),
            ("kv_tags_share", "0.5"),
            ("latency_max_tokens", "32"),
            ("question_tokens", "256"),
            ("session_questions", "8"),
            ("stream_interval_s", "0.005"),
            ("tenant_questions", "64"),
            *((f"speculation.{name}", "true") for name in ("prompt_lookup", "memory", "cost_gate", "shared_budget")),
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
    **{
        f"placement.{name}": f"its value is always {value} now"
        for name, value in (
            ("pins", "65536"),
            ("patience_s", "10"),
            ("turn_tokens", "1200"),
            ("shared_turns", "6"),
            ("crowded_load", "1.5"),
            ("move_factor", "4"),
            ("report_s", "1"),
            ("accept_s", "3"),
        )
    },
    "placement.max_waiting_tokens": "it is 1,024 for each of `placement.max_waiting` requests",
    "placement.foretold_s": "routers no longer refuse requests for an engine; engines refuse them by themselves",
    **{
        f"server.{name}": f"its value is always {value} now"
        for name, value in (
            ("header_s", "10"),
            ("client_connections", "1024"),
            ("body_rate", "16 MiB a second"),
            ("internal_host", "127.0.0.1"),
        )
    },
    "server.connections": "it follows the limit of open files (`ulimit -Hn`), at most 16,384",
    **{
        f"router.{name}": f"its value is always {value} now"
        for name, value in (
            ("audit_records", "10000"),
            ("cache_answer_bytes", "262144"),
            ("cache_entries", "1024"),
            ("cache_share", "0.5"),
            ("max_body_values", "131072"),
            ("output_estimate", "512"),
            ("prefill_most_s", "600"),
            ("prefill_s", "60"),
            ("program_entries", "65536"),
            ("program_quota_s", "600"),
            ("program_rest_s", "3600"),
            ("program_tenant_entries", "65536"),
            ("single_flight", "true"),
            ("stall_s", "30"),
            ("store_retry_s", "1"),
            ("tool_latency_s", "0.5"),
            ("oidc.refresh_s", "300"),
        )
    },
    "router.long_body_bytes": "the router parses every body itself",
    "router.body_memory": "it is 4 times `router.max_body_bytes`",
    "router.cache_lease_s": "routers no longer share what they are computing",
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
        raise ConfigError(f"not YAML: {_problem(error)}", "config") from error
    except RecursionError as error:
        raise ConfigError("not a configuration: nested too deeply", "config") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"a configuration is a mapping of sections, not {type(data).__name__}", "config")
    return data


def _problem(error: Exception) -> str:
    """What is wrong, in one line, and where."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark and problem else str(error)


def settings_of(data: Mapping[str, Any]) -> Settings:
    """The settings in these sections. Raises ConfigError for the first fault."""
    for fault in unknown(data):
        raise fault
    return Settings(**{name: section(name, value) for name, value in data.items()})


def faults(data: Mapping[str, Any]) -> list[ConfigError]:
    """Everything that is wrong in these sections: unknown keys, then values."""
    found = list(unknown(data))
    strange = {fault.field for fault in found}
    for name, value in data.items():
        if name not in strange:
            found += _faults(name, get_type_hints(Settings)[name], value, strange)
    return found


def _faults(path: str, hint: Any, value: Any, strange: Set[str | None]) -> list[ConfigError]:
    """What is wrong in the `value` of type `hint` that stands at `path`, `strange` keys passed over.

    A fault hides others: of the values that are of the right type the first wrong one ends the reading. So what is
    inside is read before what is around it, and each key with a fault is left out, as if it had its default, until
    nothing new is found.
    """
    kind = _dataclass_in(hint)
    if kind is not None and isinstance(value, list) and hint is not kind:
        return [fault for i, item in enumerate(value) for fault in _faults(f"{path}.{i}", kind, item, strange)]
    if kind is None or not isinstance(value, dict):
        return _errors(path, hint, value)
    found = []
    rest = {key: each for key, each in value.items() if f"{path}.{key}" not in strange}
    for key, inner in get_type_hints(kind).items():
        if key in rest and _dataclass_in(inner) and (inside := _faults(f"{path}.{key}", inner, rest[key], strange)):
            found += inside
            del rest[key]
    told: set[str | None] = set()
    while new := [fault for fault in _errors(path, kind, rest) if fault.field not in told]:
        found += new
        told |= {fault.field for fault in new}
        rest = {key: each for key, each in rest.items() if not _below(f"{path}.{key}", told)}
    return found


def _below(path: str, fields: Set[str | None]) -> bool:
    """Whether one of `fields` is `path`, or inside of it."""
    return any(f"{field}.".startswith(f"{path}.") for field in fields)


def _errors(path: str, hint: Any, value: Any) -> list[ConfigError]:
    """What a reading of `value` ends with: all that is of a wrong type, or the first that cannot be; [] for nothing."""
    try:
        _read(path, hint, value)
    except ConfigError as error:
        return _each(path, error.__cause__) if isinstance(error.__cause__, ValidationError) else [error]
    return []


def unknown(data: Mapping[str, Any]) -> Iterator[ConfigError]:
    """One error for each key that is none, naming the nearest one."""
    for field, known in unknown_keys(data, Settings):
        close = get_close_matches(field.rpartition(".")[2], known, n=1, cutoff=0.0)
        instead = REMOVED.get(field) or f"the nearest known one is {close[0]!r}"
        yield ConfigError(f"unknown key {field!r}; {instead}", field)


def dump(settings: Settings) -> str:
    """`settings` as YAML that `parse` reads back."""
    return yaml.safe_dump(orjson.loads(orjson.dumps(settings)), sort_keys=False)


def section(name: str, value: Any) -> Any:
    """The section called `name`, checked. Raises ConfigError."""
    return _read(name, get_type_hints(Settings)[name], value)


def _read(path: str, hint: Any, value: Any) -> Any:
    """`value` as the type that `hint` says. Raises ConfigError; `path` is where it stands."""
    try:
        # Through JSON, because strict mode then still takes a list for a tuple.
        return TypeAdapter(hint).validate_json(orjson.dumps(value), strict=True)
    except ValidationError as error:
        raise _each(path, error)[0] from error
    except TypeError as error:
        raise ConfigError(f"{path}: {error}", path) from error
    except ConfigError as error:
        raise ConfigError(f"{path}.{error.message}", f"{path}.{error.field}") from error


def _each(path: str, error: ValidationError) -> list[ConfigError]:
    """One error for each thing that pydantic found in what stands at `path`."""
    told = []
    for each in error.errors(include_url=False):
        field = ".".join([path, *(str(part) for part in each["loc"])])
        told.append(ConfigError(f"{field}: {each['msg']}, not {each['input']!r}{_nearest(each)}", field))
    return told


def _nearest(error: ErrorDetails) -> str:
    """The nearest allowed word, for text that is none of several."""
    if error["type"] != "literal_error" or not isinstance(error["input"], str):
        return ""
    close = get_close_matches(error["input"], re.findall("'([^']*)'", error["ctx"]["expected"]), n=1, cutoff=0.0)
    return f"; the nearest is {close[0]!r}"


def unknown_keys(data: Any, kind: Any, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Dotted paths of keys in `data` that dataclass `kind` has no field for, each with the fields there are."""
    if isinstance(data, list):
        for i, item in enumerate(data):
            yield from unknown_keys(item, kind, f"{path}.{i}")
    if not isinstance(data, dict):
        return
    hints, names = get_type_hints(kind), [each.name for each in dataclasses.fields(kind)]
    for key, value in data.items():
        here = f"{path}.{key}" if path else str(key)
        if key not in names:
            yield here, names
        elif inner := _dataclass_in(hints[key]):
            yield from unknown_keys(value, inner, here)


def _dataclass_in(hint: Any) -> type | None:
    """The dataclass that `hint` is, or holds as `X | None` or `tuple[X, ...]`."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    if get_origin(hint) in (Union, UnionType, tuple, list):
        return next((found for arg in get_args(hint) if (found := _dataclass_in(arg))), None)
    return None
