"""The text of a grammar in the library's Lark dialect, rule by rule, and the schemas that it speaks of.

Not here: what a reply has to be (`grammar`), and the spellings that a value may have (`spelling`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEEPEST = 32  # schemas in schemas that are read here; what is deeper is left to the library as it is
_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',  # others could spell half a surrogate pair
}


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """A JSON schema and the request's field that holds it. Not `strict`: what the library lacks is left out."""

    content: Mapping[str, Any]
    strict: bool
    field: str

    def part(self, value: Any) -> "Schema":
        """The schema of one of its values, with the definitions that it may refer to."""
        shared = {key: self.content[key] for key in ("$defs", "definitions") if key in self.content}
        return Schema({**(value if isinstance(value, Mapping) else {}), **shared}, self.strict, self.field)


class LarkText:
    """Rules of a grammar as they are written, one a line."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, *alternatives: str) -> str:
        """A rule with these right-hand sides; returns its name. One with "::" in its name has a parameter."""
        self._lines.append(f"{name}: {' | '.join(alternatives)}")
        return name.partition("[")[0]

    def json(self, name: str, schema: Schema) -> str:
        """A rule for the values of `schema`, written as `json.dumps` does, which is how chat templates write them."""
        style = _STYLE if schema.strict else {**_STYLE, "lenient": True}
        return self.add(name, "%json " + json.dumps({**_bounded(schema.content), "x-guidance": style}))

    def thought(self, name: str, opener: str, closer: str, behind: str) -> str:
        """A rule for a text between the two, and what stands `behind` it; or for nothing."""
        text = self.add(f"{name.upper()}_TEXT", r"/(.|\n)*/")
        until = self.add(f"{name}_until[lazy]", f"{text} {literal(closer)}")
        return self.add(name, f"({literal(opener)} {until} {literal(behind)})?")

    @property
    def text(self) -> str:
        """The whole grammar."""
        return "\n".join(self._lines) + "\n"


def literal(text: str) -> str:
    """`text` as a terminal; nothing for no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def escaped(text: str) -> str:
    """A pattern of nothing but `text`."""
    return re.escape(text).replace("/", r"\/")


# ---- numbers and nesting that every client can read ----

_MOST = {"integer": 10**18 - 1, "number": 10**15}  # where the library has to know both limits of a range
_LEAST_PART = 1e-10  # of a number that has a range: the library writes as many digits as it likes otherwise
_ANY = "x-any-"  # definitions of any value, by how deep it may be nested
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def beyond(node: Mapping[str, Any], kind: str) -> str:
    """A pattern of the numbers that `_bounded` takes from those of `node` and that may stand; "" where it takes none.

    The library knows the limits of a range in 64 bits only.
    """
    if "multipleOf" in node or any(abs(limit) > _MOST[kind] for limit in _limits(node).values()):
        return ""
    least = len(str(_MOST["integer"] + 1 if kind == "integer" else _MOST["number"]))
    digits = f"[1-9][0-9]{{{least - 1},39}}" + (r"(\.[0-9]{1,10})?" if kind == "number" else "")
    high = not {"maximum", "exclusiveMaximum"} & node.keys()
    low = not {"minimum", "exclusiveMinimum"} & node.keys()
    return f"-?{digits}" if high and low else digits if high else f"-{digits}" if low else ""


def _limits(node: Mapping[str, Any]) -> Mapping[str, float]:
    return {key: node[key] for key in _LIMITS if isinstance(node.get(key), (int, float)) and node[key] is not True}


def _bounded(root: Mapping[str, Any]) -> Mapping[str, Any]:
    """`root` with numbers of so many digits, and with nesting of so many levels in what may be anything."""
    bounded: dict[str, Any] = _bound(root, DEEPEST)
    if f"#/$defs/{_ANY}" in json.dumps(bounded, default=dict):
        own = bounded.get("$defs", {})
        bounded["$defs"] = {**own, **_ANY_VALUES} if isinstance(own, Mapping) else own
    return bounded


def _bound(node: Any, depth: int, whole: bool = True) -> Any:
    """`node` bounded. Not `whole`: it is combined with others, and says nothing of values that they allow."""
    if node is True or node == {}:
        return {"$ref": f"#/$defs/{_ANY}{_DEEPEST_ANY}"} if whole else node
    if not isinstance(node, Mapping) or not depth or "const" in node or "enum" in node:
        return node
    bound: dict[str, Any] = {}
    combined = bool({"$ref", "allOf", "anyOf", "oneOf", "not", "if"} & node.keys())
    for key, value in node.items():
        if key in _NAMED and isinstance(value, Mapping):
            bound[key] = {name: _bound(each, depth - 1, key != "$defs") for name, each in value.items()}
        elif key in ("items", "additionalProperties"):
            bound[key] = _bound(value, depth - 1)
        elif key in ("allOf", "anyOf", "oneOf", "prefixItems") and isinstance(value, (list, tuple)):
            alone = (key != "allOf" and node.keys() <= {key, "$defs", "definitions"}) or key == "prefixItems"
            bound[key] = [_bound(each, depth - 1, alone) for each in value]
        else:
            bound[key] = value
    if "$ref" in node:
        return bound
    types = node.get("type", [] if combined else ["number"])
    kinds = {types} if isinstance(types, str) else set(types) if isinstance(types, (list, tuple)) else set()
    if kinds & {"integer", "number"}:
        bound |= _number_limits(node, "number" if "number" in kinds else "integer")
    if whole and not combined:
        if "array" in kinds and not {"items", "prefixItems"} & node.keys():
            bound["items"] = _bound(True, depth)
        if "object" in kinds and not {"additionalProperties", "unevaluatedProperties"} & node.keys():
            bound["additionalProperties"] = _bound(True, depth)
    return bound


def _number_limits(node: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The limits that a number of `node` lacks."""
    limits, most = _limits(node), _MOST[kind]
    found: dict[str, Any] = {}
    if not {"minimum", "exclusiveMinimum"} & node.keys() and all(limit > -most for limit in limits.values()):
        found["minimum"] = -most
    if not {"maximum", "exclusiveMaximum"} & node.keys() and all(limit < most for limit in limits.values()):
        found["maximum"] = most
    if kind == "number" and "multipleOf" not in node:
        found["multipleOf"] = _LEAST_PART
    return found


_DEEPEST_ANY = 16
_SCALARS: Sequence[Mapping[str, Any]] = (
    {"type": ["string", "boolean", "null"]},
    {"type": "number", **_number_limits({}, "number")},
)
_ANY_VALUES = {
    f"{_ANY}{level}": {
        "anyOf": [
            *_SCALARS,
            {"type": "array", "items": {"$ref": f"#/$defs/{_ANY}{level - 1}"}},
            {"type": "object", "additionalProperties": {"$ref": f"#/$defs/{_ANY}{level - 1}"}},
        ]
        if level
        else [*_SCALARS]
    }
    for level in range(_DEEPEST_ANY + 1)
}


# ---- what only people read ----

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum", "required", "dependentRequired", "dependencies"})


def without_annotations(schema: Any, depth: int = DEEPEST) -> Any:
    """`schema` with nothing in it that only people read, down to some depth: what it allows is the same."""
    if not depth:
        return schema
    if isinstance(schema, Mapping):
        return {
            key: value
            if key in _VALUES
            else _each(value, depth)
            if key in _NAMED
            else without_annotations(value, depth - 1)
            for key, value in schema.items()
            if key not in _ANNOTATIONS
        }
    return [without_annotations(each, depth - 1) for each in schema] if isinstance(schema, (list, tuple)) else schema


def _each(named: Any, depth: int) -> Any:
    if not isinstance(named, Mapping):
        return named
    return {name: without_annotations(schema, depth - 1) for name, schema in named.items()}
