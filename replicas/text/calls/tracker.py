"""A reply with tool calls in it: text before and between calls, and calls as they open, fill and close.

This is the state and what may happen to it. Which text begins a call is for the `grammars` to say, through the
`productions`. Text held back since a marker began goes out as text when the marker turns out to begin no call.
"""

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from holdfast.replicas.requests import TextDelta, ToolCall, ToolCallDelta

# ---- Reading JSON one character at a time: what a streamed tool call is made of.
#
# A production is a generator that is sent one character after another. It takes the first character it has not
# read, and returns the first one it leaves unread; "" is the end of the text. So a parser is written as if the
# whole text were there, and it cannot matter how the text was cut into chunks. Where a production would treat
# many characters alike it yields a `Run`, and whoever drives it may hand those over at once.
#
# Not here: what a call is (`tracker`), and where one begins (`grammars`).


Put: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Run:
    """Characters matched by `plain` may go to `put` in one piece before the production is sent the next one."""

    plain: re.Pattern[str]
    put: Put


Scan: TypeAlias = Generator[Any, str, str]  # yields a Run or None; Any lets `yield` stand bare

SPACE = frozenset(" \t\r\n")
# Lenient: whatever looks like a number or a word passes, since the client parses the arguments anyway.
SCALAR = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-._")

# For control characters, which a JSON string may not hold as they are.
ESCAPES = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}

_INSIDE_STRING = re.compile(r'[^"\\]+')


class NotACallError(Exception):
    """The text turned out not to be a tool call at `char`, which is not read."""

    def __init__(self, char: str) -> None:
        super().__init__(char)
        self.char = char


def space(char: str, put: Put) -> Scan:
    """White space, possibly none."""
    while char in SPACE:
        put(char)
        char = yield
    return char


def json_string(char: str, put: Put, quoted: Put | None = None) -> Scan:
    """A JSON string with its quotes; `quoted` gets what stands between them, where it is given.

    Control characters inside are let through: small models write line ends.
    """
    if char != '"':
        raise NotACallError(char)
    quoted = quoted or put
    run = Run(_INSIDE_STRING, quoted)
    put(char)
    char = yield run
    while char != '"':
        if char == "\\":
            quoted(char)
            char = yield
        if not char:
            raise NotACallError(char)
        quoted(char)
        char = yield run
    put(char)
    return (yield)


def json_value(char: str, put: Put, on_end: Callable[[], None] | None = None, quoted: Put | None = None) -> Scan:
    """One JSON value: brackets match, strings and escapes are known, commas and colons are where they belong.

    `on_end` is called with the last bracket of an object or a list, before another character is asked for; `quoted`
    gets what stands inside of strings, where it is given.
    A comma before a closing bracket passes.
    """
    stack: list[str] = []
    want = "value"
    while True:
        if char in SPACE and stack:
            put(char)
            char = yield
        elif stack and char == stack[-1] and want in ("key", "next", "element"):
            stack.pop()
            put(char)
            if not stack and on_end:
                on_end()
            char = yield
            want = "next"
        elif want == "key":
            char = yield from json_string(char, put, quoted)
            want = "colon"
        elif want in ("value", "element"):
            if char == "{" or char == "[":
                stack.append("}" if char == "{" else "]")
                put(char)
                char = yield
                want = "key" if stack[-1] == "}" else "element"
            else:
                char = yield from _leaf(char, put, quoted)
                want = "next"
        elif char == (":" if want == "colon" else ","):
            put(char)
            char = yield
            want = "value" if want == "colon" else ("key" if stack[-1] == "}" else "element")
        else:
            raise NotACallError(char)
        if want == "next" and not stack:
            return char


def _leaf(char: str, put: Put, quoted: Put | None) -> Scan:
    """A string, a number or a word."""
    if char == '"':
        return (yield from json_string(char, put, quoted))
    if char not in SCALAR:
        raise NotACallError(char)
    while char in SCALAR:
        put(char)
        char = yield
    return char


Delta: TypeAlias = TextDelta | ToolCallDelta

NO_ARGUMENTS = ("null", "[]")
"""What models write, beside an empty object, for a call without arguments."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class CallRules:
    """What the request allows. `grace`: characters of white space after a closed call in which another may begin.

    `early_stop`: text after a closed call that does not begin another one ends the reply, and is dropped.
    """

    declared: frozenset[str]
    parallel: bool = True
    early_stop: bool = True
    grace: int = 16


@dataclass(slots=True)
class OpenCall:
    """The call being read. `announced`: its name is declared and has been sent, so it stays a call."""

    name: str | None = None
    call_id: str = ""
    announced: bool = False
    streaming: bool = False  # the arguments are an object, sent as they come
    complete: bool = False  # the arguments have closed
    arguments: list[str] = field(default_factory=list)


class Tracker:
    """`held` is text read since a marker began, and not yet sent either way.

    `_gap` is white space after the last text sent. It goes with the text that follows; before a call one line end
    of it belongs to the call's markup (templates write it), and between calls all of it.

    `on_undeclared` is asked about a call of an undeclared tool, once for each, with the positions of the marker before
    it and of its first character that is held. True ends the reading there, False makes the call text. An object that
    no marker stands before may be an answer in JSON: it is asked about once its arguments begin.
    """

    def __init__(self, rules: CallRules, call_id: Callable[[int], str]) -> None:
        self.on_undeclared: Callable[[int, int], bool] = _keep_as_text
        self.position = 0  # characters read, less the one that a production is about to look at
        self.opened = 0  # where the marker began
        self.deltas: list[Delta] = []
        self.calls: list[ToolCall] = []  # closed ones
        self.call = OpenCall()
        self.announced = 0
        self.stopped = False
        self.opener = ""  # the marker that began what is being read
        self.held: list[str] = []
        self._rules = rules
        self._call_id = call_id
        self._gap = ""
        self._said = False  # text other than white space since the start or the last call
        self._after_call = False
        self._room = 0

    def let_go(self) -> None:
        """What is held was no call: it goes out as text, or ends the reply where it follows a closed call."""
        text = "".join(self.held)
        self.held.clear()
        if self.stopped or not text:
            return
        if self._after_call and self._rules.early_stop:
            self._room -= len(text)
            self.stopped = self._room < 0 or not text.isspace()
            return
        body = text.rstrip()
        if not body:
            self._gap += text
            return
        self.deltas.append(TextDelta(self._gap + body))
        self._gap = text[len(body) :]
        self._said = True
        self._after_call = False

    def say(self, text: str) -> None:
        """Text outside of calls."""
        self.held.append(text)
        self.let_go()

    def end(self) -> None:
        """The reply is over: white space after text goes out; after a call it was markup."""
        if self._gap and (self._said or not self.announced):
            self.deltas.append(TextDelta(self._gap))
        self._gap = ""

    def named(self, name: str) -> None:
        """The call's name is known: a declared one is announced, with its arguments if they came first."""
        call = self.call
        call.name = name
        if name not in self._rules.declared:
            if self.opener or call.arguments:
                self._undeclared()
            return
        before = self._gap.removesuffix("\n") if self._said else ""
        if before:
            self.deltas.append(TextDelta(before))
        self._gap, self._said, self._after_call = "", False, False
        call.announced = True
        call.call_id = self._call_id(self.announced)
        self.deltas.append(ToolCallDelta(self.announced, call.call_id, name, "".join(call.arguments)))
        self.announced += 1
        self.held.clear()

    def begin_arguments(self, char: str) -> None:
        """The arguments begin with `char`: an object streams as written, anything else is sent when it is whole."""
        self.call.streaming = char == "{"
        if self.call.announced:
            self.held.clear()
        elif self.call.name is not None and not self.opener:
            self._undeclared()

    def argument(self, written: str, sent: str | None = None) -> None:
        """A piece of the arguments as the model wrote it, and as it is sent where that differs."""
        sent = written if sent is None else sent
        self.call.arguments.append(sent)
        if self.call.announced and self.call.streaming:
            self._send(sent)
        else:
            self.held.append(written)

    def end_arguments(self) -> None:
        call = self.call
        call.complete = True
        if call.streaming:
            return
        call.arguments = [_as_object("".join(call.arguments))]
        if call.announced:
            self.held.clear()
            self._send(call.arguments[0])

    def close(self) -> None:
        """The call has ended as it should; an undeclared one goes out as text."""
        call, self.call = self.call, OpenCall()
        if not call.announced:
            self._after_call = False  # a block of its own, not prose after a call
            self.let_go()
            return
        if not call.arguments:
            call.arguments.append("{}")
            self._send("{}")
        self.held.clear()
        self.calls.append(ToolCall(call.call_id, call.name or "", "".join(call.arguments)))
        self._after_call = True
        self._room = self._rules.grace
        self.stopped = not self._rules.parallel

    def whole_call(self, name: str, arguments: str) -> None:
        """A call that is only known once it has closed."""
        self.call.arguments.append(arguments)
        self.position += 1  # the bracket that closed it
        self.named(name)
        self.close()

    def fail(self) -> None:
        """The markup broke: a call whose arguments are whole has closed, what is held goes on as text."""
        if self.call.announced and self.call.complete:
            held = self.held[:]
            self.close()
            self.held[:] = held
        self.call = OpenCall()
        self.let_go()

    def drop_markup(self) -> None:
        """Held markup belongs to a closed call; where there was none it goes out as text."""
        if self._after_call:
            self.held.clear()
        else:
            self.let_go()

    def _undeclared(self) -> None:
        if not self.stopped:
            begun = self.position - sum(map(len, self.held))
            self.stopped = self.on_undeclared(self.opened, begun)

    def _send(self, arguments: str) -> None:
        self.deltas.append(ToolCallDelta(self.announced - 1, arguments=arguments))


def _keep_as_text(opened: int, begun: int) -> bool:
    return False


def _as_object(arguments: str) -> str:
    """Arguments that are not an object as written: some mean none, a string may hold the object's JSON."""
    if "".join(arguments.split()) in NO_ARGUMENTS:
        return "{}"
    try:
        inner = json.loads(arguments, strict=False)
        if isinstance(inner, str) and isinstance(json.loads(inner, strict=False), dict):
            inner.encode()  # a lone surrogate cannot be sent
            return _STRING.sub(lambda found: found[0].translate(ESCAPES), inner)
    except (ValueError, RecursionError):
        pass
    return arguments
