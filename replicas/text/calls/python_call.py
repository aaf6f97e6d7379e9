"""The keyword arguments of a call written in Python, as a JSON object. Only literals count.

Not here: where such a call begins and ends in a text (`readers`).
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping

_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}  # those that Python reads as names
_NUMBER = re.compile(r"(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")  # as JSON has them


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
        text.encode()  # a lone surrogate cannot be sent
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return text


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
