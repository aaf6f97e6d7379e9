"""Reading text one character at a time, and JSON as models write it, which is handed on as valid JSON.

A scan is a generator that is sent one character after another. It takes the first character it has not read, and
returns the first one it leaves unread; "" is the end of the text. So a reader is written as if the whole text were
there, and it cannot matter how the text was cut into chunks. Where a scan would treat many characters alike it yields
a `Run`, and whoever drives it may hand those over at once.

What models write is not always JSON. It is put right where its meaning is plain: Python's ``True``, ``False`` and
``None`` become ``true``, ``false`` and ``null``; a comma before a closing bracket is left out; in strings control
characters are escaped, ``\\'`` is ``'``, and the backslash of any other escape that JSON does not have is one of the
text. Anything else that is not JSON ends the scan with `NotACallError`.

Some JSON cannot be held by the parsers that clients use, and one such value makes them refuse the whole answer. It is
told so that all of them can: a number beyond the range of a double and a value nested deeper than `DEEPEST` levels
become a string of what the model wrote, and half a surrogate pair becomes U+FFFD.

Not here: what a call is (`tracker`), and where one begins (`readers`).
"""

import json
import math
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Put: TypeAlias = Callable[[str, str], None]
"""Takes a piece of a value as it was written, and as it is in valid JSON. Nothing undecided is handed over."""


@dataclass(frozen=True, slots=True)
class Run:
    """Characters matched by `plain` may go to `put` in one piece before the scan is sent the next one."""

    plain: re.Pattern[str]
    put: Callable[[str], None]


Scan: TypeAlias = Generator[Any, str, str]  # yields a Run or None; Any lets `yield` stand bare


class NotACallError(Exception):
    """The text turned out to be no call at the character `unread`; "" there: it ended too early.

    `undecided` was read before that and has not been handed over.
    """

    def __init__(self, unread: str, undecided: str = "") -> None:
        super().__init__(undecided + unread)
        self.unread = unread
        self.undecided = undecided


DEEPEST = 100  # levels of arguments; serde_json, the strictest common parser but one, takes 128 for a whole answer
_LOST = r"\ufffd"  # in place of half a surrogate pair

SPACE = frozenset(" \t\r\n")
_DIGITS = frozenset("0123456789")
_HEX = _DIGITS | frozenset("abcdefABCDEF")
_ESCAPED = frozenset('"\\/bfnrt')
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_SCALARS = _DIGITS | {'"', "-"} | {word[0] for word in _WORDS}

# What may stand in a string as it is. (No text has halves of surrogate pairs in it, only escapes have.)
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')


def json_value(char: str, put: Put, on_end: Callable[[], None] | None = None) -> Scan:
    """One JSON value. `on_end` is called with the last bracket of an object or a list, before another character is
    asked for."""
    closers: list[str] = []  # of the open brackets
    comma = ""  # and white space behind it: the next character tells whether it stays
    want: Literal["value", "element", "key", "colon", "next"] = "value"

    def tell(written: str, sent: str) -> None:
        put(written, sent if len(closers) <= DEEPEST else json.dumps(sent, ensure_ascii=False)[1:-1])

    while True:
        if char in SPACE and closers:
            if comma:
                comma += char
            else:
                tell(char, char)
            char = yield
        elif closers and char == closers[-1] and want in ("element", "key", "next"):
            if comma:
                tell(comma, comma[1:])
                comma = ""
            closers.pop()
            put(char, char + '"' if len(closers) == DEEPEST else char)
            if not closers and on_end:
                on_end()
            char = yield
            want = "next"
        elif char == "," and want == "next":
            comma = char
            char = yield
            want = "key" if closers[-1] == "}" else "element"
        elif char == ":" and want == "colon":
            tell(char, char)
            char = yield
            want = "value"
        elif not _may_begin(want, char):
            raise NotACallError(char, comma)
        else:
            if comma:
                tell(comma, comma)
                comma = ""
            if char in ("{", "["):
                put(char, '"' + char if len(closers) == DEEPEST else char)
                closers.append("}" if char == "{" else "]")
                want = "key" if char == "{" else "element"
                char = yield
            else:
                char = yield from _scalar(char, tell)
                want = "colon" if want == "key" else "next"
        if want == "next" and not closers:
            return char


def _may_begin(want: str, char: str) -> bool:
    """Whether the key or the value that is wanted may begin with `char`."""
    return char == '"' if want == "key" else want in ("value", "element") and (char in _SCALARS or char in ("{", "["))


def _scalar(char: str, put: Put) -> Scan:
    if char == '"':
        return json_string(char, put)
    return _word(char, put) if char.isalpha() else _number(char, put)


def json_string(char: str, put: Put) -> Scan:
    """A JSON string with its quotes."""
    if char != '"':
        raise NotACallError(char)
    run = Run(_PLAIN, lambda text: put(text, text))
    put(char, char)
    char = yield run
    while char != '"':
        if not char:
            raise NotACallError(char)
        if char == "\\":
            char = yield from _escape(put)
        else:
            put(char, char if _PLAIN.match(char) else json.dumps(char)[1:-1])
            char = yield run
    put(char, char)
    return (yield)


def _escape(put: Put) -> Scan:
    """What follows a backslash in a string, as far as it belongs to that, and further escapes behind the first half
    of a surrogate pair."""
    half = ""  # the first half of a pair, and its other half may follow
    while True:
        written = "\\"
        char = yield
        if char == "u":
            written += char
            while len(written) < len(r"\u0000") and (char := (yield)) in _HEX:
                written += char
        unit = int(written[2:], 16) if len(written) == len(r"\u0000") else 0
        if half and 0xDC00 <= unit <= 0xDFFF:
            put(half + written, half + written)
            return (yield)
        if half and char:
            put(half, _LOST)
            half = ""
        if 0xD800 <= unit <= 0xDBFF:
            half = written
            if (char := (yield)) == "\\":
                continue
            if not char:
                raise NotACallError(char, half)
            put(half, _LOST)
            return char
        if len(written) == len(r"\u0000"):
            put(written, _LOST if 0xDC00 <= unit <= 0xDFFF else written)
            return (yield)
        if char in _ESCAPED and len(written) == 1:
            put(written + char, written + char)
            return (yield)
        if char == "'" and len(written) == 1:
            put(written + char, char)
            return (yield)
        if not char:
            raise NotACallError(char, half + written)
        put(written, "\\" + written)
        return char


def _number(char: str, put: Put) -> Scan:
    """A number, handed over as a whole: its end tells whether a double can hold it."""
    written: list[str] = []
    try:
        if char == "-":
            written.append(char)
            char = yield
        if char == "0":
            written.append(char)
            char = yield
        else:
            char = yield from _digits(char, written)
        if char == ".":
            written.append(char)
            char = yield from _digits((yield), written)
        if char in ("e", "E"):
            written.append(char)
            char = yield
            if char in ("+", "-"):
                written.append(char)
                char = yield
            char = yield from _digits(char, written)
    except NotACallError as found:
        raise NotACallError(found.unread, "".join(written)) from None
    number = "".join(written)
    put(number, f'"{number}"' if math.isinf(float(number)) else number)
    return char


def _digits(char: str, written: list[str]) -> Scan:
    if char not in _DIGITS:
        raise NotACallError(char)
    while char in _DIGITS:
        written.append(char)
        char = yield
    return char


def _word(char: str, put: Put) -> Scan:
    """One of the constants, in JSON's spelling or Python's."""
    written = ""
    while char and any(word.startswith(written + char) for word in _WORDS):
        written += char
        if written in _WORDS:
            put(written, _WORDS[written])
            return (yield)
        char = yield
    raise NotACallError(char, written)


def space(char: str, put: Callable[[str], None]) -> Scan:
    """White space, possibly none."""
    while char in SPACE:
        put(char)
        char = yield
    return char


def whole_object(text: str) -> str | None:
    """`text` as valid JSON, where it is one object and nothing else."""
    return whole_value(text) if text.lstrip("".join(SPACE)).startswith("{") else None


def whole_value(text: str) -> str | None:
    """`text` as valid JSON, where it is one value and nothing else but white space around it."""
    valid: list[str] = []
    scan = value_alone(text[:1], lambda _, sent: valid.append(sent))
    try:
        run, position = next(scan), 1
        while True:
            if run is not None and (plain := run.plain.match(text, position)):
                run.put(plain[0])
                position = plain.end()
            run = scan.send(text[position : position + 1])
            position += 1
    except NotACallError:
        return None
    except StopIteration:
        pass
    return "".join(valid)


def value_alone(char: str, put: Put) -> Scan:
    """One JSON value and nothing else but white space around it."""
    char = yield from space(char, lambda _: None)
    char = yield from json_value(char, put)
    char = yield from space(char, lambda _: None)
    if char:
        raise NotACallError(char)
    return char
