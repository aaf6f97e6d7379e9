"""Tool calls written as a list of Python calls. Their arguments become JSON when a call closes.

Only literals count: names other than the constants, and operators, make the text no call.
"""

import ast
import json
import warnings
from typing import Any

from holdfast.replicas.text.productions import call_array
from holdfast.replicas.text.scanning import NotACallError, Scan
from holdfast.replicas.text.tracker import Tracker

_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


def call_list(tracker: Tracker, char: str) -> Scan:
    """``[f(a=1), g(b="x")]``; a list without a call in it is no call."""
    return call_array(tracker, char, _call)


def _call(tracker: Tracker, char: str) -> Scan:
    """One call up to its closing parenthesis."""
    name: list[str] = []
    while char == "_" or char == "." or char.isalnum():
        name.append(char)
        tracker.held.append(char)
        char = yield
    if char != "(" or not name:
        raise NotACallError(char)
    source: list[str] = []
    stack: list[str] = []
    while True:
        if char in _CLOSERS:
            stack.append(_CLOSERS[char])
        elif char in (")", "]", "}") and stack.pop() != char:
            raise NotACallError(char)
        if char in ("'", '"'):
            char = yield from _quoted(tracker, char, source)
            continue
        if not char:
            raise NotACallError(char)
        source.append(char)
        tracker.held.append(char)
        if not stack:
            break
        char = yield
    arguments = arguments_of("f" + "".join(source))
    if arguments is None:
        raise NotACallError((yield))
    tracker.whole_call("".join(name), arguments)
    return (yield)


def _quoted(tracker: Tracker, char: str, source: list[str]) -> Scan:
    """A string in single or double quotes."""
    quote = char
    while True:
        source.append(char)
        tracker.held.append(char)
        escaped = char == "\\"
        char = yield
        if escaped and char:
            source.append(char)
            tracker.held.append(char)
            char = yield
        if not char:
            raise NotACallError(char)
        if char == quote:
            break
    source.append(char)
    tracker.held.append(char)
    return (yield)


def arguments_of(source: str) -> str | None:
    """The keyword arguments of the call `source` as a JSON object; None when they are not literals."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            return None
        values = {str(k.arg): _literal(k.value) for k in call.keywords}
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        text.encode()  # a lone surrogate cannot be sent
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return text


def _literal(node: ast.expr) -> Any:
    """The value of a literal; ValueError for anything else."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in _CONSTANTS:
            return _CONSTANTS[node.id]
        case ast.List() | ast.Tuple():
            return [_literal(element) for element in node.elts]
        case ast.Dict():
            return {_key(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case _:
            raise ValueError(f"not a literal: {type(node).__name__}")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("keys must be strings")
