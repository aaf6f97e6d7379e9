"""Tool calls written as a list of Python calls. Their arguments become JSON when a call closes.

Only literals count: names other than the constants, and operators, make the text no call.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping

from holdfast.replicas.text.productions import call_array
from holdfast.replicas.text.scanning import NotACallError, Scan
from holdfast.replicas.text.tracker import Tracker

_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_NUMBER = re.compile(r"(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")  # as JSON has them


def call_list(tracker: Tracker, char: str) -> Scan:
    """``[f(a=1), g(b="x")]``; a list without a call in it is no call."""
    return call_array(tracker, char, _call)


def _call(tracker: Tracker, char: str) -> Scan:
    """One call up to its closing parenthesis."""
    name: list[str] = []
    while char in ("_", ".", "-") or char.isalnum():
        name.append(char)
        tracker.held.append(char)
        char = yield
    if char != "(" or not name:
        raise NotACallError(char)
    source: list[str] = []
    stack: list[str] = []
    stand_ins: dict[str, str] = {}  # by the keyword that each stands for
    begun = 0  # where the argument at hand begins in `source`; -1: its name is read
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
        if char == "=" and len(stack) == 1 and begun >= 0:
            keyword = "".join(source[begun:]).strip()
            if keyword.isidentifier():  # Python refuses some names, and changes others
                source[begun:] = [stand_ins.setdefault(keyword, f"_{len(stand_ins)}")]
            begun = -1
        source.append(char)
        tracker.held.append(char)
        if not stack:
            break
        if len(stack) == 1 and char in ("(", ","):
            begun = len(source)
        char = yield
    arguments = arguments_of("f" + "".join(source), {stand_in: word for word, stand_in in stand_ins.items()})
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


def arguments_of(source: str, names: Mapping[str, str]) -> str | None:
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


def _as_written(number: str) -> str:
    """A number that Python's cannot hold, for a client whose numbers may."""
    if not _NUMBER.fullmatch(number):
        raise ValueError(f"not a number of JSON: {number}")
    return number


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("keys must be strings")
