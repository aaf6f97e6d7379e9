"""The face of the streaming tool-call validator: text in, text deltas and tool call deltas out.

Source: Stateful Inference, section 3.7. What comes out:

- A call is sent as soon as its name is known to be declared: first a delta with id and name, then its arguments as
  the model writes them. It is in `calls` once it has closed.
- A call of an undeclared tool, and everything else that turns out to be no call, comes out as text, unchanged;
  unless whoever `on_undeclared` asks wants to have it written again: then the reading ends, and nothing of it is sent.
- A call that was announced stays one: where its JSON breaks or ends early its arguments stay unfinished (as the
  client of a reply cut by `max_tokens` expects), it is never in `calls`, and what follows it is text.
- White space between calls, and one line end before the first, are markup: chat templates write them again.
- After a closed call another one may begin within a grace of white space. Any other text asks for the end of
  the reply (`should_stop`) and is dropped. With `parallel` False the first closed call does.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache

from holdfast.replicas.requests import TextDelta, ToolCall, ToolCallDelta
from holdfast.replicas.text.calls.formats import OPENERS, ToolFormat
from holdfast.replicas.text.calls.tracker import (
    ESCAPES,
    NO_ARGUMENTS,
    SPACE,
    CallRules,
    Delta,
    NotACallError,
    Put,
    Run,
    Scan,
    Tracker,
    json_string,
    json_value,
    space,
)

# ---- What the grammars of tool calls are put together from: text up to a marker, markup, a call as a JSON object.


_ARGUMENTS = frozenset({"arguments", "parameters"})
_ENVELOPE = _ARGUMENTS | {"name", "id", "type"}


def prose(tracker: Tracker, char: str, openers: tuple[str, ...]) -> Scan:
    """Text up to and with one of `openers`, which is held and named in `tracker.opener`; "" there: the text ended."""
    run = Run(_without("".join(sorted({opener[0] for opener in openers}))), tracker.say)
    tracker.opener = ""
    partial = ""
    while char:
        if any(opener.startswith(partial + char) for opener in openers):
            partial += char
            tracker.held.append(char)
            char = yield
            if partial in openers:
                tracker.opener = partial
                tracker.opened = tracker.position - len(partial)
                return char
        elif partial:
            partial = ""
            tracker.let_go()
        else:
            tracker.say(char)
            char = yield run
    tracker.let_go()
    return char


@lru_cache
def _without(first: str) -> re.Pattern[str]:
    """Runs of characters that begin no marker."""
    return re.compile(f"[^{re.escape(first)}]+")


def skip(tracker: Tracker, char: str) -> Scan:
    """White space inside a call's markup."""
    return (yield from space(char, tracker.held.append))


def expect(tracker: Tracker, char: str, word: str) -> Scan:
    """`word`, as markup inside a call."""
    for wanted in word:
        if char != wanted:
            raise NotACallError(char)
        tracker.held.append(char)
        char = yield
    return char


def closing(tracker: Tracker, char: str, word: str) -> Scan:
    """The marker after a call, white space before it; after an undeclared call it is text too."""
    char = yield from skip(tracker, char)
    char = yield from expect(tracker, char, word[:-1])
    if char != word[-1]:
        raise NotACallError(char)
    tracker.held.append(char)
    tracker.drop_markup()
    return (yield)


def arguments(tracker: Tracker, char: str, on_end: Callable[[], None] | None = None) -> Scan:
    """The value of a call's arguments: an object, the text of one, or for none null or an empty list.

    `on_end`: see `json_value`; the call may be closed by it.
    """
    call = tracker.call
    tracker.begin_arguments(char)
    first = char
    char = yield from json_value(char, tracker.argument, on_end, _escaping(tracker))
    if first not in ("{", '"') and "".join("".join(call.arguments).split()) not in NO_ARGUMENTS:
        raise NotACallError(char)  # a number or a list with something in it names no arguments
    if call is tracker.call:
        tracker.end_arguments()
    return char


def call_object(tracker: Tracker, char: str) -> Scan:
    """One call as a JSON object, its keys in any order.

    It must look like a call from its first key on, so that an answer in JSON is not held back. A key that calls do not
    have ends it at any place: were its value passed over, a misspelled key would cost the call its arguments.
    """
    char = yield from expect(tracker, char, "{")
    char = yield from skip(tracker, char)
    while char != "}":
        raw: list[str] = []
        char = yield from json_string(char, _both(tracker, raw))
        key = _decoded(raw, char)
        if key not in _ENVELOPE:
            raise NotACallError(char)
        char = yield from skip(tracker, char)
        char = yield from expect(tracker, char, ":")
        char = yield from skip(tracker, char)
        char = yield from _member(tracker, char, key)
        char = yield from skip(tracker, char)
        if char == ",":
            char = yield from expect(tracker, char, ",")
            char = yield from skip(tracker, char)
        elif char != "}":
            raise NotACallError(char)
    tracker.held.append(char)
    tracker.close()
    return (yield)


def _member(tracker: Tracker, char: str, key: str) -> Scan:
    """One value of a call object, each at most once but for those that mean nothing: ids and types, which are words."""
    call = tracker.call
    if key == "name" and call.name is None:
        raw: list[str] = []
        char = yield from json_string(char, _both(tracker, raw))
        tracker.named(_decoded(raw, char))
        return char
    if key in _ARGUMENTS and not call.complete:
        return (yield from arguments(tracker, char))
    if key == "name" or key in _ARGUMENTS or char in ("{", "["):
        raise NotACallError(char)
    return (yield from json_value(char, tracker.held.append))


def _escaping(tracker: Tracker) -> Put:
    """Takes what stands inside the strings of arguments, for a client that reads them as JSON."""
    return lambda text: tracker.argument(text, text.translate(ESCAPES))


def _both(tracker: Tracker, raw: list[str]) -> Put:
    def put(char: str) -> None:
        tracker.held.append(char)
        raw.append(char)

    return put


def _decoded(raw: list[str], unread: str) -> str:
    """The text of a JSON string."""
    try:
        return str(json.loads("".join(raw), strict=False))
    except ValueError:
        raise NotACallError(unread) from None


def call_array(tracker: Tracker, char: str, call: Callable[[Tracker, str], Scan]) -> Scan:
    """Calls in brackets, each read by `call`, with commas between and perhaps one behind; at least one."""
    char = yield from expect(tracker, char, "[")
    char = yield from skip(tracker, char)
    if char == "]":
        raise NotACallError(char)
    while char != "]":
        char = yield from call(tracker, char)
        char = yield from skip(tracker, char)
        if char == ",":
            char = yield from expect(tracker, char, ",")
            char = yield from skip(tracker, char)
        elif char != "]":
            raise NotACallError(char)
    tracker.held.append(char)
    tracker.drop_markup()
    return (yield)


# ---- Tool calls written as a list of Python calls. Their arguments become JSON when a call closes.
#
# Only literals count: names other than the constants, and operators, make the text no call.


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


# ---- One grammar per tool call format, as generators over characters (see `scanning`).
#
# Markers in prose are prose: only what follows a marker decides whether it began a call.


_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:/")


def hermes(tracker: Tracker) -> Scan:
    """``<tool_call>{...}</tool_call>``, any number of them; several objects in one pair of markers pass."""
    char = yield
    while char:
        char = yield from prose(tracker, char, OPENERS[ToolFormat.HERMES])
        if not tracker.opener:
            break
        try:
            char = yield from skip(tracker, char)
            char = yield from call_object(tracker, char)
            char = yield from skip(tracker, char)
            while char == "{":
                char = yield from call_object(tracker, char)
                char = yield from skip(tracker, char)
            char = yield from closing(tracker, char, "</tool_call>")
        except NotACallError as broken:
            tracker.fail()
            char = broken.char
    return char


def llama3(tracker: Tracker) -> Scan:
    """``{"name": ..., "parameters": ...}`` at the start or after ``<|python_tag|>``, more after ``;`` or a comma;
    or ``<function=name>{...}</function>`` anywhere."""
    char = yield
    char = yield from _leading_space(tracker, char)
    bare = char == "{"
    while char:
        if not bare:
            char = yield from prose(tracker, char, OPENERS[ToolFormat.LLAMA3])
            if not tracker.opener:
                break
        try:
            if not bare and tracker.opener == "<function=":
                char = yield from _function(tracker, char)
            else:
                char = yield from skip(tracker, char)
                char = yield from call_object(tracker, char)
                char = yield from _separator(tracker, char)
        except NotACallError as broken:
            bare = False
            tracker.fail()
            char = broken.char
        else:
            bare = char == "{" and tracker.opener != "<function="
            if not bare:
                tracker.let_go()
    return char


def mistral(tracker: Tracker) -> Scan:
    """``[TOOL_CALLS][{...}, ...]``, or ``[TOOL_CALLS]name{...}`` with ``[CALL_ID]id`` and ``[ARGS]`` in between."""
    char = yield
    while char:
        char = yield from prose(tracker, char, OPENERS[ToolFormat.MISTRAL])
        if not tracker.opener:
            break
        try:
            char = yield from skip(tracker, char)
            if char == "[":
                char = yield from _array(tracker, char)
            else:
                char = yield from _named(tracker, char)
        except NotACallError as broken:
            tracker.fail()
            char = broken.char
    return char


def pythonic(tracker: Tracker) -> Scan:
    """``[f(a=1), g(b="x")]`` at the start or after ``<|python_start|>``."""
    char = yield
    char = yield from _leading_space(tracker, char)
    bare = char == "["
    while char:
        if not bare:
            char = yield from prose(tracker, char, OPENERS[ToolFormat.PYTHONIC])
            if not tracker.opener:
                break
        try:
            char = yield from skip(tracker, char)
            char = yield from call_list(tracker, char)
            if not bare:
                char = yield from closing(tracker, char, "<|python_end|>")
        except NotACallError as broken:
            tracker.fail()
            char = broken.char
        bare = False
    return char


GRAMMARS: Mapping[ToolFormat, Callable[[Tracker], Scan]] = {
    ToolFormat.HERMES: hermes,
    ToolFormat.LLAMA3: llama3,
    ToolFormat.LLAMA3_FUNCTION: llama3,
    ToolFormat.MISTRAL: mistral,
    ToolFormat.PYTHONIC: pythonic,
}


def _leading_space(tracker: Tracker, char: str) -> Scan:
    while char in SPACE:
        tracker.say(char)
        char = yield
    return char


def _separator(tracker: Tracker, char: str) -> Scan:
    """What stands between two bare call objects."""
    while char in SPACE or char in (";", ","):
        tracker.held.append(char)
        char = yield
    return char


def _array(tracker: Tracker, char: str) -> Scan:
    """A JSON list of call objects."""
    return call_array(tracker, char, call_object)


def _named(tracker: Tracker, char: str) -> Scan:
    """``name{...}``, perhaps with an id and a marker before the arguments."""
    name: list[str] = []
    char = yield from _word(tracker, char, name)
    while char == "[":
        tag: list[str] = []
        while char and char != "]" and len(tag) < len("[CALL_ID]"):
            tag.append(char)
            tracker.held.append(char)
            char = yield
        char = yield from expect(tracker, char, "]")
        if "".join(tag) == "[CALL_ID":
            char = yield from _word(tracker, char, [])
        elif "".join(tag) != "[ARGS":
            raise NotACallError(char)
    char = yield from skip(tracker, char)
    return (yield from _arguments(tracker, char, "".join(name)))


def _function(tracker: Tracker, char: str) -> Scan:
    """``name>{...}</function>`` after ``<function=``."""
    name: list[str] = []
    char = yield from _word(tracker, char, name)
    char = yield from expect(tracker, char, ">")
    char = yield from skip(tracker, char)
    char = yield from _arguments(tracker, char, "".join(name))
    return (yield from closing(tracker, char, "</function>"))


def _arguments(tracker: Tracker, char: str, name: str) -> Scan:
    """The arguments of a call whose name stands before them."""
    if char != "{" or not name:
        raise NotACallError(char)
    tracker.named(name)
    return (yield from arguments(tracker, char, tracker.close))


def _word(tracker: Tracker, char: str, word: list[str]) -> Scan:
    while char in _NAME:
        word.append(char)
        tracker.held.append(char)
        char = yield
    return char


class ToolCallParser:
    """Reads one reply. `call_id` gives the id of the call with that index. How the text is cut never matters."""

    def __init__(
        self,
        format: ToolFormat,
        declared_names: frozenset[str],
        parallel: bool,
        call_id: Callable[[int], str],
        *,
        early_stop: bool = True,
        grace: int = 16,
    ) -> None:
        rules = CallRules(declared_names, parallel, early_stop, grace)
        self._tracker = Tracker(rules, call_id)
        self._scan: Scan | None = None
        self._run: Run | None = None  # what may be passed by the piece
        self._read = 0  # characters of earlier pieces
        if declared_names and format in GRAMMARS:
            self._scan = GRAMMARS[format](self._tracker)
            next(self._scan)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls that have closed."""
        return tuple(self._tracker.calls)

    @property
    def announced(self) -> int:
        """How many calls were sent, closed or not."""
        return self._tracker.announced

    @property
    def should_stop(self) -> bool:
        """Nothing that the model writes from here on would be sent."""
        return self._tracker.stopped

    def on_undeclared(self, ask: Callable[[int, int], bool]) -> None:
        """Who is asked about calls of undeclared tools: see `Tracker`."""
        self._tracker.on_undeclared = ask

    def feed(self, text: str) -> list[Delta]:
        """What `text` settles; nothing once `should_stop`."""
        if self._scan is None:
            return [TextDelta(text)] if text else []
        position = 0
        while position < len(text) and not self._tracker.stopped:
            run = self._run
            if run is not None and (plain := run.plain.match(text, position)):
                run.put(plain[0])
                position = plain.end()
                continue
            self._tracker.position = self._read + position
            self._run = self._scan.send(text[position])
            position += 1
        self._read += position
        return self._taken()

    def finish(self) -> list[Delta]:
        """The reply is over: what was held back. Call once."""
        scan, self._scan = self._scan, None
        if scan is None:
            return []
        try:
            if not self._tracker.stopped:
                self._tracker.position = self._read
                scan.send("")
        except StopIteration:
            pass
        self._tracker.end()
        return self._taken()

    def _taken(self) -> list[Delta]:
        taken, self._tracker.deltas = merged(self._tracker.deltas), []
        return taken


def merged(deltas: list[Delta]) -> list[Delta]:
    """The same stream with neighbours of one kind in one piece."""
    if len(deltas) < 2:
        return deltas
    result: list[Delta] = []
    run: list[Delta] = []
    for delta in deltas:
        if run and not _continues(run[0], delta):
            result.append(_joined(run))
            run = []
        run.append(delta)
    if run:
        result.append(_joined(run))
    return result


def _continues(first: Delta, delta: Delta) -> bool:
    if isinstance(first, TextDelta):
        return isinstance(delta, TextDelta)
    return isinstance(delta, ToolCallDelta) and delta.index == first.index and delta.call_id is None


def _joined(run: list[Delta]) -> Delta:
    first = run[0]
    if isinstance(first, TextDelta):
        texts = [delta for delta in run if isinstance(delta, TextDelta)]
        return TextDelta("".join(t.text for t in texts), tuple(entry for t in texts for entry in t.logprobs))
    calls = [delta for delta in run if isinstance(delta, ToolCallDelta)]
    return ToolCallDelta(first.index, first.call_id, first.name, "".join(call.arguments for call in calls))
