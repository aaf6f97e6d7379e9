"""Arguments that a format does not write in JSON, as JSON.

Without quotes: by its schema it is told whether a value is a text or JSON. `kinds` are types of JSON Schema; an integer
is a number. What cannot be told, or is not said, may be anything.

As keyword arguments of a call in Python: only literals count.

Not here: where arguments begin and end in a text (`readers`).
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any, TypeAlias

from holdfast.replicas.text.calls.scan import whole_value

Kinds: TypeAlias = frozenset[str]

ANYTHING: Kinds = frozenset({"string", "number", "boolean", "null", "object", "array"})
TEXT: Kinds = frozenset({"string"})
_DEEPEST = 8  # references that are followed
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}  # those that Python reads as names
_NUMBER = re.compile(r"(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")  # as JSON has them


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


# ---- Python ----


def keyword_arguments(source: str, names: Mapping[str, str]) -> str | None:
    """The keyword arguments of the call `source` as a JSON object; None when they are not literals.

    `names` are those of the keywords that stand in `source` under another one.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            return None
        text = _object({names.get(str(k.arg), str(k.arg)): _literal(k.value, source) for k in call.keywords})
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    # Python does not join the halves of surrogate pairs that are written as escapes.
    return whole_value(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _literal(node: ast.expr, source: str) -> str:
    """A literal as JSON; ValueError for anything else."""
    match node:
        case ast.Constant(value=float() as number) if number == math.inf:
            return _as_written(ast.get_source_segment(source, node) or "")
        case ast.Constant(value=str() | int() | float() | None as value):  # bool is an int
            return json.dumps(value, ensure_ascii=False)
        case ast.Name() if node.id in _CONSTANTS:
            return json.dumps(_CONSTANTS[node.id])
        case ast.List() | ast.Tuple():
            return f"[{', '.join(_literal(element, source) for element in node.elts)}]"
        case ast.Dict():
            members = zip(node.keys, node.values, strict=True)
            return _object({_key(key): _literal(value, source) for key, value in members})
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number) as operand):
            return json.dumps(-number) if number != math.inf else "-" + _literal(operand, source)
        case _:
            raise ValueError(f"not a literal: {type(node).__name__}")


def _object(members: Mapping[str, str]) -> str:
    """A JSON object of values that are JSON already."""
    pairs = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members.items())
    return "{" + ", ".join(pairs) + "}"


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("keys must be strings")


def _as_written(number: str) -> str:
    """A number that Python's cannot hold, for a client whose numbers may."""
    if not _NUMBER.fullmatch(number):
        raise ValueError(f"not a number of JSON: {number}")
    return number
