"""Reading JSON one character at a time: what a streamed tool call is made of.

A production is a generator that is sent one character after another. It takes the first character it has not
read, and returns the first one it leaves unread; "" is the end of the text. So a parser is written as if the
whole text were there, and it cannot matter how the text was cut into chunks. Where a production would treat
many characters alike it yields a `Run`, and whoever drives it may hand those over at once.

Not here: what a call is (`tracker`), and where one begins (`grammars`).
"""

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

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
