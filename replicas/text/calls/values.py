"""Arguments that a format writes without quotes: by their schema it is told whether a value is a text or JSON.

`kinds` are types of JSON Schema; an integer is a number. What cannot be told, or is not said, may be anything.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from holdfast.replicas.text.calls.scan import whole_value

Kinds: TypeAlias = frozenset[str]

ANYTHING: Kinds = frozenset({"string", "number", "boolean", "null", "object", "array"})
TEXT: Kinds = frozenset({"string"})
_DEEPEST = 8  # references that are followed


def argument_schema(parameters: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The schema of one argument; {} where nothing is said of it."""
    properties, others = parameters.get("properties"), parameters.get("additionalProperties")
    found = properties.get(name, others) if isinstance(properties, Mapping) else others
    return found if isinstance(found, Mapping) else {}


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """`schema` without a reference at its top; {} where that leads nowhere in `root`."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, Mapping):
            return {}
        if not isinstance(reference := schema.get("$ref"), str):
            return schema
        schema = root
        for step in reference.removeprefix("#/").split("/"):
            schema = schema.get(step) if isinstance(schema, Mapping) else None
    return {}


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = _DEEPEST) -> Kinds:
    """What values of `schema` may be; references are looked up in `root`."""
    schema = resolved(schema, root)
    if not depth:
        return ANYTHING
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(map(_kind, values))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return frozenset().union(*(kinds_of(each, root, depth - 1) for each in schema[key]))
    types = schema.get("type")
    named = {types} if isinstance(types, str) else set(types) if isinstance(types, list) else set(ANYTHING)
    return frozenset("number" if each == "integer" else each for each in named) & ANYTHING or ANYTHING


def _kind(value: Any) -> str:
    for kind, types in (("string", str), ("boolean", bool), ("null", type(None)), ("object", dict), ("array", list)):
        if isinstance(value, types):
            return kind
    return "number"


def as_json(text: str, kinds: Kinds) -> str:
    """A value that was written as `text`, as JSON: of one of `kinds` where it can be read so, else a text."""
    found = whole_value(text) if kinds != TEXT else None
    if found is not None and _kind(value := json.loads(found)) in kinds and not isinstance(value, str):
        return found
    if found is not None and found.startswith('"') and "string" not in kinds:
        return found
    return json.dumps(text, ensure_ascii=False)
