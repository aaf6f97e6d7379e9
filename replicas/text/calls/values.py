"""Schemas of tools' arguments: the kinds of values that one allows, and the rules for each kind.

An argument in tags has no quotes: its schema tells whether it is a string or JSON. `alternatives` reads such a schema
for the tracker, which needs the kinds of values, and for the grammar, which needs the rules of each kind.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote

Kinds: TypeAlias = frozenset[str]
"""Types of JSON Schema. Where a number may stand, an integer may: "number" never comes without "integer"."""

ANYTHING: Kinds = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
TEXT: Kinds = frozenset({"string"})
_APART = ("string", "number", "boolean", "null", "object", "array")  # no value is of two of these
_DEEPEST = 8  # references and combinations that are followed
_STEPS = 10_000  # to find the alternatives of one schema
_OF_KIND = {
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"), "array"),
    **dict.fromkeys(("properties", "required", "additionalProperties", "patternProperties"), "object"),
    **dict.fromkeys(("propertyNames", "minProperties", "maxProperties"), "object"),
}
_COMBINED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "type", "const", "enum"})
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
"""Keywords for human readers."""
_SILENT = ANNOTATIONS | {"$defs", "definitions", "$schema"}


def argument_schema(parameters: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The schema of one argument; {} if it has none."""
    properties, others = parameters.get("properties"), parameters.get("additionalProperties")
    schema = properties.get(name, others) if isinstance(properties, Mapping) else others
    return schema if isinstance(schema, Mapping) else {}


def referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """The part of `root` that a `$ref` names; None where it names none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    value: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value


class _TooManyError(Exception):
    """A schema has too many alternatives, or was written to have them."""


def alternatives(schema: Any, root: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The schemas one of which a value of `schema` follows. References are looked up in `root`.

    Each has one "type" and only the keywords that matter to values of that type. Where a combination is not resolved (a
    reference that leads nowhere or too deep, options of "oneOf" that may hold together), its keyword is left in them.
    Empty where no value follows `schema`, and where there are too many alternatives.
    """
    left = _STEPS  # a small schema may have any number of alternatives

    def step(steps: int = 1) -> None:
        nonlocal left
        left -= steps
        if left < 0:
            raise _TooManyError

    def resolved(schema: Any, depth: int) -> Sequence[Mapping[str, Any]]:
        """The alternatives of `schema`, with at most `depth` nested combinations."""
        step()
        if schema is False:
            return ()
        if not isinstance(schema, Mapping):
            return _of_any_kind({})
        if not all(isinstance(schema.get(key, []), list) for key in ("enum", "allOf", "anyOf", "oneOf")):
            return ()
        if not depth and (unread := {key: schema[key] for key in ("$ref", "allOf", "anyOf", "oneOf") if key in schema}):
            return _of_any_kind(unread)
        options = _plain(schema)
        parts: list[Sequence[Mapping[str, Any]]] = []
        if "$ref" in schema:
            target = referred(schema["$ref"], root)
            parts.append(_of_any_kind({"$ref": schema["$ref"]}) if target is None else resolved(target, depth - 1))
        parts += (resolved(each, depth - 1) for each in schema.get("allOf", ()))
        for key in (key for key in ("anyOf", "oneOf") if key in schema):
            parts.append(_either(schema, key, [resolved(each, depth - 1) for each in schema[key]]))
        for part in parts:
            step(len(options) * len(part))
            options = [both for one in options for other in part if (both := _both(one, other)) is not None]
        return options

    try:
        return resolved(schema, _DEEPEST)
    except _TooManyError:
        return ()


def _plain(schema: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The alternatives of `schema` without its references and combinations."""
    keywords = {key: value for key, value in schema.items() if key not in _COMBINED and key not in _SILENT}
    types = schema.get("type", _APART)
    named = [types] if isinstance(types, str) else types if isinstance(types, (list, tuple)) else []
    kinds = [kind for kind in dict.fromkeys(map(str, named)) if kind in ANYTHING]
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        if "const" in schema:  # both hold
            values = [value for value in values if _text_of(value) == _text_of(schema["const"])]
        by_kind: dict[str, list[Any]] = {}
        for value in values:
            if (kind := kind_of(value)) in kinds or (kind == "integer" and "number" in kinds):
                by_kind.setdefault("number" if isinstance(value, float) else kind, []).append(value)
        return [_of_kind(kind, {**keywords, "enum": values}) for kind, values in by_kind.items()]
    return [_of_kind(kind, keywords) for kind in kinds if not (kind == "integer" and "number" in kinds)]


def _of_kind(kind: str, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    own = family(kind)
    return {"type": kind, **{key: value for key, value in keywords.items() if _OF_KIND.get(key, own) == own}}


def family(kind: str) -> str:
    """The kind that numbers and integers share; else the kind itself."""
    return "number" if kind == "integer" else kind


def _of_any_kind(keywords: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [{"type": kind, **keywords} for kind in _APART]


def _either(
    schema: Mapping[str, Any], key: str, options: Sequence[Sequence[Mapping[str, Any]]]
) -> Sequence[Mapping[str, Any]]:
    """The alternatives of "anyOf" or "oneOf". Of the latter, options of one kind may both hold, and neither counts."""
    if key == "anyOf":
        return [each for option in options for each in option]
    result: list[Mapping[str, Any]] = []
    for kind in _APART:
        of_kind = [same for option in options if (same := [each for each in option if family(each["type"]) == kind])]
        result += of_kind[0] if len(of_kind) == 1 else [{"type": kind, key: schema[key]}] if of_kind else []
    return result


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The alternative of values that follow both; None if no value can."""
    kinds = {one["type"], other["type"]}
    if len(kinds) > 1 and kinds != {"number", "integer"}:
        return None
    kind = one["type"] if len(kinds) == 1 else "integer"
    merged = {**one, **other, "type": kind}
    if "enum" in one and "enum" in other:
        listed = set(map(_text_of, other["enum"]))
        merged["enum"] = [value for value in one["enum"] if _text_of(value) in listed]
    if kind == "integer" and "enum" in merged:
        merged["enum"] = [int(value) for value in merged["enum"] if kind_of(value) == "integer"]
    for key, least in (("minLength", max), ("maxLength", min), ("minimum", max), ("maximum", min)):
        limits = [each[key] for each in (one, other) if isinstance(each.get(key), (int, float))]
        if len(limits) == 2:
            merged[key] = least(limits)
    parts = [(keys & one.keys(), keys & other.keys()) for keys in _TOGETHER]
    clash = any(one[key] != other[key] for key in (one.keys() & other.keys()) - _MERGED)
    if clash or any(own and its and own != its for own, its in parts):
        merged = {"type": kind, "allOf": [{k: v for k, v in each.items() if k != "type"} for each in (one, other)]}
    return merged if merged.get("enum", True) else None


_TOGETHER = (  # keywords that refer to each other
    frozenset({"properties", "patternProperties", "additionalProperties"}),
    frozenset({"prefixItems", "items"}),
)
_MERGED = frozenset({"type", "enum", "minLength", "maxLength", "minimum", "maximum"})


def _text_of(value: Any) -> str:
    """A text that is equal for equal values."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True, default=dict)


def kinds_of(schema: Any, root: Mapping[str, Any]) -> Kinds:
    """The kinds of values of `schema`; all kinds if that is unknown. References are looked up in `root`."""
    kinds = frozenset(str(each["type"]) for each in alternatives(schema, root))
    return kinds | ({"integer"} if "number" in kinds else set()) or ANYTHING


def kind_of(value: Any) -> str:
    for kind, types in (("string", str), ("boolean", bool), ("null", type(None)), ("object", dict), ("array", list)):
        if isinstance(value, types):
            return kind
    return "integer" if isinstance(value, int) or float(value).is_integer() else "number"


INTEGER = r"-?(0|[1-9][0-9]{0,39})"
_EXPONENT = r"[eE](\+?([0-9]{1,2}|1[0-9]{2}|2[0-5][0-9])|-[0-9]{1,3})"  # all stay below 1e308, a float's largest
NUMBER = rf"{INTEGER}(\.[0-9]{{1,40}})?({_EXPONENT})?"
"""Patterns of the numbers that grammars let through: finite ones, of so many digits."""

MOST_NESTED = 32
"""Levels that grammars allow in values that a schema does not describe."""
