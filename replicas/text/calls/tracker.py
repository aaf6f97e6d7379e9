"""Tool calls in a streamed reply: text in, text and calls out, in every format, however the text is cut into pieces.

Source: Stateful Inference, section 3.7. One incremental state machine reads each format. It is a generator that reads
from a `CallTracker` as if the whole text were there, and pauses where the text ends. A new format is a function and a
row of `READERS`, at the end, or a row of `TAGS`. The rules for the client's view:

- A call is sent once its name is known to be declared and its arguments have begun: first its id and name, then its
  arguments as the model writes them. A call that has closed is in `calls` and is never taken back.
- Until then the text of a call is held back. If it turns out not to be a call, it is sent as text, as written. The same
  goes for a call of an undeclared tool, unless `on_unguarded` asks the model to write it again.
- A call that was sent stays a call; none of its characters are text. If its JSON breaks, its arguments stay unfinished,
  it is never in `calls`, and what follows is text. If the reply ends inside it, nothing more is sent.
- Where calls are guaranteed by a grammar, no part of a call is text: one that is cut before it was sent is dropped.
- White space between calls and one line end before the first call are markup: chat templates write them again.
- After a closed call another may begin within `GRACE` characters of white space. Any other text ends the reply
  (`stopped`), and so does a call that repeats the one before it: the model would repeat itself to its last token.
- A marker in prose is prose: only the text after a marker decides whether it began a call.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import groupby
from typing import Any, Literal, TypeAlias, TypeVar

from holdfast.replicas.requests import TextDelta, ToolCall, ToolCallDelta
from holdfast.replicas.text.calls.formats import QUOTE, TAGS, TagForm, ToolFormat
from holdfast.replicas.text.calls.values import MOST_NESTED, NUMBER, TEXT, Kinds, argument_schema, kind_of, kinds_of

T = TypeVar("T")
Scan: TypeAlias = Generator[None, None, T]
"""Reads from a `Text`, yields where that ends for now, and returns its result."""

Delta: TypeAlias = TextDelta | ToolCallDelta

GRACE = 16
"""Another call may begin within so many characters of white space after a closed one: line ends and an indentation."""


class MismatchError(Exception):
    """A scan did not expect the next character. `undecided`: text that was read before it and not passed on."""

    def __init__(self, undecided: str = "") -> None:
        super().__init__(undecided)
        self.undecided = undecided


class Text:
    """A text that comes in pieces. `over`: no piece follows. Scans pause once it has `stopped`."""

    def __init__(self, text: str = "", over: bool = False) -> None:
        self.text, self.at, self.over, self.stopped = text, 0, over, False
        self._before = 0  # characters of the text before `text`

    @property
    def position(self) -> int:
        """Characters that have been read."""
        return self._before + self.at

    def add(self, piece: str) -> None:
        self._before += self.at
        self.text = self.text[self.at :] + piece if self.at < len(self.text) else piece
        self.at = 0

    def peek(self) -> Scan[str]:
        """The next character, which stays unread; "" at the end of the text."""
        while self.stopped or (self.at == len(self.text) and not self.over):
            yield
        return self.text[self.at : self.at + 1]

    def take(self, length: int = 1) -> str:
        """Read characters that are known to be there."""
        self.at += length
        return self.text[self.at - length : self.at]

    def run(self, plain: re.Pattern[str], put: Callable[[str], None]) -> Scan[None]:
        """Read characters that `plain` matches, in pieces as they come."""
        while True:
            if match := plain.match(self.text, self.at):
                self.at = match.end()
                put(match[0])
            if self.at < len(self.text) or self.over:
                return
            yield

    def match(self, pattern: re.Pattern[str], begun: re.Pattern[str]) -> Scan[re.Match[str] | None]:
        """Read a match of `pattern`. Waits while the text so far matches `begun` to its end.

        Raises MismatchError if the whole text ends in a match of `begun`.
        """
        while (undecided := begun.match(self.text, self.at)) and not self.over:
            yield
        match = pattern.match(self.text, self.at)
        if match:
            self.at = match.end()
        elif undecided:
            raise MismatchError(self.take(len(undecided[0])))
        return match


def beginnings(*texts: str) -> str:
    """A pattern of proper beginnings of `texts`, at the end of the text so far."""
    return rf"(?:{'|'.join(re.escape(text[:n]) for text in texts for n in range(len(text) - 1, 0, -1))})\Z"


# ---- JSON as models write it ----
#
# It is passed on as valid JSON wherever its meaning is plain: Python's True, False and None become true, false and
# null; a comma before a closing bracket is left out; in strings control characters are escaped, \' becomes ', and the
# backslash of any other escape that JSON does not have is doubled. Anything else that is not JSON is a MismatchError.
#
# Some JSON makes the parsers of clients refuse the whole answer. A number beyond the range of a double and a value
# nested deeper than DEEPEST become a string of what the model wrote; half a surrogate pair becomes U+FFFD.

Put: TypeAlias = Callable[[str, str], None]
"""Takes a piece of a value as the model wrote it, and as valid JSON. Undecided text is never passed."""

DEEPEST = 100
"""Levels of arguments; serde_json, the strictest common parser but one, takes 128 for a whole answer."""

SPACE = frozenset(" \t\r\n")
SP = re.compile(r"[ \t\r\n]+")
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_SCALAR = re.compile(
    r"(?P<number>-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++|(?!\.))(?:[eE][+-]?[0-9]++|(?![eE])))|" + "|".join(_CONSTANTS)
)
_SCALAR_BEGUN = re.compile(
    rf"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?)?\Z|{beginnings(*_CONSTANTS)}"
)
_COMMA = {"}": re.compile(r',[ \t\r\n]*(?=["}])'), "]": re.compile(r',[ \t\r\n]*(?=["0-9tfnTFN{\[\]-])')}
_ANY_COMMA = re.compile(r",[ \t\r\n]*(?=[^ \t\r\n])")
_COMMA_BEGUN = re.compile(r",[ \t\r\n]*\Z")
# Characters of a string that need no escape. No text has halves of surrogate pairs in it, only escapes have.
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_HEX = "[0-9a-fA-F]"
_HIGH, _LOW = rf"u[dD][89abAB]{_HEX}{{2}}", rf"u[dD][c-fC-F]{_HEX}{{2}}"
_ESCAPE = re.compile(
    rf"\\(?:(?P<valid>[\"\\/bfnrt]|u(?![dD][89a-fA-F]){_HEX}{{4}}|{_HIGH}\\{_LOW})|(?P<quote>')"
    rf"|(?P<half>{_LOW}|{_HIGH}(?!\\?\Z|\\u{_HEX}{{0,3}}\Z))|u{_HEX}{{0,3}}(?=[^0-9a-fA-F])|(?=[^u]))"
)
_ESCAPE_BEGUN = re.compile(rf"\\(?:u{_HEX}{{0,3}}|{_HIGH}(?:\\(?:u{_HEX}{{0,3}})?)?)?\Z")


def json_value(text: Text, put: Put, bare: bool = False) -> Scan[None]:
    """One JSON value. `bare`: keys have no quotes, and strings may stand between two `QUOTE`."""
    closers: list[str] = []  # of the open brackets
    expected: Literal["value", "element", "key", "colon", "next"] = "value"

    def hand(written: str, valid: str) -> None:
        put(written, valid if len(closers) <= DEEPEST else json.dumps(valid, ensure_ascii=False)[1:-1])

    while True:
        char = yield from text.peek()
        if closers and char in SPACE:
            yield from text.run(SP, lambda space: hand(space, space))
        elif closers and char == closers[-1] and expected in ("element", "key", "next"):
            closers.pop()
            put(text.take(), char + '"' if len(closers) == DEEPEST else char)
            expected = "next"
        elif char == "," and expected == "next":
            comma = yield from text.match(_ANY_COMMA if bare else _COMMA[closers[-1]], _COMMA_BEGUN)
            if not comma:
                raise MismatchError
            hand(comma[0], comma[0][comma.string[comma.end()] == closers[-1] :])
            expected = "key" if closers[-1] == "}" else "element"
        elif char == ":" and expected == "colon":
            hand(text.take(), char)
            expected = "value"
        elif expected in ("value", "element") and char in ("{", "["):
            put(text.take(), '"' + char if len(closers) == DEEPEST else char)
            closers.append("}" if char == "{" else "]")
            expected = "key" if char == "{" else "element"
        elif (char == '"' or (bare and char == QUOTE[0])) and expected in ("value", "element", "key"):
            yield from (json_string if char == '"' else _quoted)(text, hand)
            expected = "colon" if expected == "key" else "next"
        elif bare and expected == "key":
            yield from _bare_key(text, hand)
            expected = "colon"
        else:
            scalar = (yield from text.match(_SCALAR, _SCALAR_BEGUN)) if expected in ("value", "element") else None
            if not scalar:
                raise MismatchError
            word = scalar[0]
            infinite = scalar["number"] and math.isinf(float(word))
            hand(word, f'"{word}"' if infinite else _CONSTANTS.get(word, word))
            expected = "next"
        if expected == "next" and not closers:
            return


def json_string(text: Text, put: Put) -> Scan[None]:
    """A JSON string with its quotes."""
    if (yield from text.peek()) != '"':
        raise MismatchError
    put(text.take(), '"')
    while True:
        yield from text.run(_PLAIN, lambda plain: put(plain, plain))
        char = yield from text.peek()
        if char == "\\":
            escape = yield from text.match(_ESCAPE, _ESCAPE_BEGUN)
            if not escape:
                raise MismatchError
            written = escape[0]
            valid = r"\ufffd" if escape["half"] else "'" if escape["quote"] else written
            put(written, valid if escape.lastgroup else "\\" + written)
        elif not char:
            raise MismatchError
        else:
            put(text.take(), char if char == '"' else json.dumps(char)[1:-1])
            if char == '"':
                return


_QUOTE, _QUOTE_BEGUN = re.compile(re.escape(QUOTE)), re.compile(beginnings(QUOTE))
_IN_QUOTES = re.compile(f"[^{QUOTE[0]}]+")
_BARE_KEY = re.compile(r'[^:,<>{}\[\]"\r\n]+')


def _quoted(text: Text, put: Put) -> Scan[None]:
    """A string between two `QUOTE`."""

    def escape(plain: str) -> None:
        put(plain, json.dumps(plain, ensure_ascii=False)[1:-1])

    if not (yield from text.match(_QUOTE, _QUOTE_BEGUN)):
        raise MismatchError
    put(QUOTE, '"')
    while True:
        yield from text.run(_IN_QUOTES, escape)
        if not (yield from text.peek()):
            raise MismatchError
        if (yield from text.match(_QUOTE, _QUOTE_BEGUN)):
            put(QUOTE, '"')
            return
        escape(text.take())


def _bare_key(text: Text, put: Put) -> Scan[None]:
    """A key without quotes."""
    parts: list[str] = []
    yield from text.run(_BARE_KEY, parts.append)
    key = "".join(parts)
    if not (yield from text.peek()) or not key:
        raise MismatchError(key)
    put(key, json.dumps(key.strip(), ensure_ascii=False))


def value_alone(text: Text, put: Put) -> Scan[None]:
    """One JSON value with nothing but white space around it."""
    yield from text.run(SP, lambda _: None)
    yield from json_value(text, put)
    yield from text.run(SP, lambda _: None)
    if (yield from text.peek()):
        raise MismatchError


def whole_value(text: str) -> str | None:
    """`text` as valid JSON; None where it is not one value with nothing but white space around it."""
    valid: list[str] = []
    try:
        for _ in value_alone(Text(text, over=True), lambda _, part: valid.append(part)):
            pass
    except MismatchError:
        return None
    return "".join(valid)


def whole_object(text: str) -> str | None:
    """As `whole_value`, of objects only."""
    return whole_value(text) if text.lstrip(" \t\r\n").startswith("{") else None


# ---- arguments that are not written in JSON ----

_FINITE = re.compile(NUMBER)
_KIND_OF_FIRST = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


def as_json(text: str, kinds: Kinds) -> str:
    """The value of an argument in tags, as JSON: of one of `kinds` if it can be read as one, else a string.

    Where a string is allowed, a number of more digits than grammars allow is one, and so is a value nested deeper.
    """
    written = whole_value(text) if kinds != TEXT else None
    if written is not None:
        value = json.loads(written)
        kind = kind_of(value)
        if "string" not in kinds:
            fits = kind == "string" or kind in kinds or (kind == "number" and "integer" in kinds)
        elif kind in ("integer", "number"):
            fits = kind in kinds and _FINITE.fullmatch(written) is not None
        else:
            fits = kind in kinds and kind != "string" and _depth(value) <= MOST_NESTED
        if fits:
            return written
    return json.dumps(text, ensure_ascii=False)


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0


class TagValue:
    """An argument in tags, of one of `kinds`, that comes in pieces. Its JSON is that of `as_json` for the whole.

    A string is sent in pieces, from the first character that no other value could have. Other values are sent whole.
    """

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._is_string = kinds == TEXT
        self._quote = '"'  # opens the string; empty once it was sent
        self._written: list[str] = []  # not sent yet
        self._json = Text()
        self._scan: Scan[None] | None = None

    def feed(self, piece: str) -> str:
        """The JSON that `piece` settles. The quote of a value that can only be a string is sent before any piece."""
        self._is_string = self._is_string or not self._may_be_other(piece)
        self._written.append(piece)
        if not self._is_string:
            return ""
        escaped = self._quote + json.dumps("".join(self._written), ensure_ascii=False)[1:-1]
        self._written, self._quote = [], ""
        return escaped

    def end(self) -> str:
        """The rest of the JSON."""
        return f'{self.feed("")}"' if self._is_string else as_json("".join(self._written), self._kinds)

    def _may_be_other(self, piece: str) -> bool:
        """Whether the value may still be something other than a string once `piece` follows."""
        if self._scan is None:
            piece = piece.lstrip()
            if not piece:
                return True
            kind = _KIND_OF_FIRST.get(piece[0].lower(), "integer")
            if "string" in self._kinds if kind == "string" else kind not in self._kinds:
                return False
            self._scan = value_alone(self._json, lambda written, valid: None)
        self._json.add(piece)
        try:
            next(self._scan)
        except MismatchError:
            return False
        return True


_PYTHON_NAMES = {"true": True, "false": False, "null": None, "none": None}  # JSON's constants, names in Python
_NUMBER = re.compile(r"(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")  # as JSON has them


def _keyword_arguments(source: str, keywords: Mapping[str, str]) -> str | None:
    """The keyword arguments of the Python call `source` as a JSON object; None unless all are literals.

    `keywords` maps those in `source` to the ones that the model wrote.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            return None
        text = _members((keywords.get(str(k.arg), str(k.arg)), _literal(k.value, source)) for k in call.keywords)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    # Python does not join the halves of surrogate pairs that are written as escapes.
    return whole_value(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _literal(node: ast.expr | None, source: str) -> str:
    """A literal as JSON; ValueError for anything else."""
    match node:
        case ast.Constant(value=float() as number) if number == math.inf:
            written = ast.get_source_segment(source, node) or ""
            if _NUMBER.fullmatch(written):
                return written  # no float holds it, but the client's numbers may
        case ast.Constant(value=str() | int() | float() | None as value):  # bool is an int
            return json.dumps(value, ensure_ascii=False)
        case ast.Name() if node.id in _PYTHON_NAMES:
            return json.dumps(_PYTHON_NAMES[node.id])
        case ast.List() | ast.Tuple():
            return f"[{', '.join(_literal(element, source) for element in node.elts)}]"
        case ast.Dict() if all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
            keys = (str(key.value) for key in node.keys if isinstance(key, ast.Constant))
            return _members((key, _literal(value, source)) for key, value in zip(keys, node.values, strict=True))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number) as operand):
            return json.dumps(-number) if number != math.inf else "-" + _literal(operand, source)
    raise ValueError("not a literal of JSON")


def _members(members: Iterable[tuple[str, str]]) -> str:
    """A JSON object of values that are JSON already. Of equal keys the last one counts."""
    written = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in dict(members).items())
    return f"{{{', '.join(written)}}}"


# ---- the state of a reply ----


@dataclass(slots=True)
class _OpenCall:
    """The call being read. `sent`: the client has its id and name."""

    begun: bool = False  # its first character has been read
    expected: str | None = None  # the name, in formats where only the end of a call tells that it is one
    name: str | None = None
    arguments: list[str] = field(default_factory=list)  # as valid JSON
    complete: bool = False  # the arguments have closed
    call_id: str = ""
    sent: bool = False
    written_id: str = ""  # the id that the model gave it
    odd: bool = False  # its keys up to the arguments are not those that calls have


class CallTracker(Text):
    """Reads one reply of a `format`.

    `parallel`: several calls are allowed; else the first closed call ends the reply. `call_id` makes the id of the call
    with that index, unless the model writes one. `early_stop`: text after a closed call ends the reply and is dropped,
    and so does a repeated call. `guaranteed` says at any time whether a grammar ensures that a marker begins a
    call. `schemas`: the tools' arguments by name, for formats that do not tell a string from a number.

    `on_unguarded` is called once for each call of an undeclared tool, with the positions of its marker and of its first
    character. True ends the reading there; False makes the call text. An object without a marker may be an answer in
    JSON, so the tracker waits until its arguments begin, or its name follows them. `on_unguarded` is also called if
    such an object calls a declared tool with keys that no grammar allows; False makes that one a call.

    Text outside of calls goes through `say`. Text that may belong to a call goes to `hold`, then to `release` if it
    does not. White space after text waits in `_gap` for the next text; before a call one line end of it is markup. A
    call goes through `begin_call`, `name_call`, its arguments (before or after the name), `close_call` and
    `end_markup` for the markup behind it; `break_off` ends it anywhere.
    """

    def __init__(
        self,
        format: ToolFormat,
        declared_names: frozenset[str],
        parallel: bool,
        call_id: Callable[[int], str],
        *,
        early_stop: bool = True,
        guaranteed: Callable[[], bool] = lambda: False,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        self.on_unguarded: Callable[[int, int], bool] = lambda opened, begun: False
        self.calls: tuple[ToolCall, ...] = ()  # closed ones
        self.n_sent = 0  # calls, closed or not
        self.call = _OpenCall()
        self.cut = False  # the model did not end the reply
        self.opener = ""  # the marker that began the calls being read
        self.opened = 0  # its position
        self._declared = declared_names
        self._parallel, self._early_stop, self._guaranteed = parallel, early_stop, guaranteed
        self.schemas = schemas or {}
        self._call_id = call_id
        self._ids: set[str] = set()  # of the calls that were sent
        self._deltas: list[Delta] = []  # not taken yet
        self._arguments: list[str] = []  # of a call that was sent, behind `_deltas`
        self._held: list[str] = []
        self._held_from = 0
        self._gap = ""
        self._text_seen = False  # text other than white space since the start or the last call
        self._after_call = False  # nothing but white space and markup since a call closed
        self._grace = 0  # characters of white space that another call may still wait
        reader = READERS.get(format) if declared_names else None
        self._closers = reader.closers if reader else b""
        self._scan: Scan[None] | None = reader.read(self) if reader else None  # None: everything is text

    def feed(self, text: str) -> list[Delta]:
        """The deltas that `text` settles; none once `stopped`."""
        if self._scan is None:
            return [TextDelta(text)] if text else []
        if text and not self.stopped:
            self.add(text)
            next(self._scan)
        if self._arguments:
            self._send_arguments()
        deltas, self._deltas = self._deltas, []
        return merged(deltas) if len(deltas) > 1 else deltas

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """The reply is over. Returns the last deltas. `cut`: the model did not end it. Call once."""
        if self._scan is None:
            return []
        self.cut, self.over = cut, True
        if not self.stopped:
            next(self._scan, None)
        if cut and self._guaranteed():
            self._held.clear()  # perhaps the beginning of a marker
        self.release()
        if self._gap and (self._text_seen or not self.n_sent):  # white space after a call was markup
            self._emit(TextDelta(self._gap))
        return self.feed("")

    def may_close(self, coming: bytes) -> bool:
        """Whether text that has not been read yet may close a call that has begun before it."""
        return bool(self.call.begun or self.n_sent) and any(closer in coming for closer in self._closers)

    def read(self, *parts: str | tuple[str, ...] | re.Pattern[str]) -> Scan[str]:
        """Read and hold markup: words, one of several words, and characters of a pattern, possibly none.

        Returns the last word of several, or the last name: the characters of a pattern other than SP.
        """
        result = ""
        for part in parts:
            read = ""
            words = (part,) if isinstance(part, str) else part
            while read not in words if isinstance(words, tuple) else True:
                char = yield from self.peek()
                if isinstance(words, re.Pattern):
                    if not char or not words.match(char):
                        break
                elif not char or not any(word.startswith(read + char) for word in words):
                    raise MismatchError
                read += self.take()
                self.hold(char)
            if part is not SP and words is part:
                result = read
        return result

    def say(self, text: str) -> None:
        """Text outside of calls, which ends the reply if it follows a closed call. Nothing is held."""
        if self.stopped or not text:
            return
        if self._after_call and self._early_stop:
            self._grace -= len(text)
            self.stopped = self._grace < 0 or not text.isspace()
        elif body := text.rstrip():
            self._emit(TextDelta(self._gap + body))
            self._gap = text[len(body) :]
            self._text_seen, self._after_call = True, False
        else:
            self._gap += text

    def hold(self, text: str) -> None:
        """Text that may belong to a call and has just been read. Between arguments that are sent it is markup."""
        if self.call.sent and not self.call.complete:
            return
        if not self._held:
            self._held_from = self.position - len(text)
        self._held.append(text)

    def release(self) -> None:
        """The held text belongs to no call."""
        text = "".join(self._held)
        self._held.clear()
        self.say(text)

    def begin_call(self, expected: str | None = None) -> None:
        """A call may have begun: the text is more than white space and markup between calls."""
        self.call.begun, self.call.expected = True, expected

    def name_call(self, name: str, written_id: str = "") -> None:
        """The call's name is known, and its id if the model wrote one."""
        call = self.call
        call.name, call.written_id = name, written_id
        if name in self._declared:
            if call.complete:
                call.odd = call.expected is None
                if self._goes_on(guarded=bool(self.opener) or not call.odd):
                    self._send_call()
        elif self.opener or call.complete:
            self._goes_on(guarded=False)

    def begin_arguments(self, streamed: bool) -> None:
        """The arguments begin: in pieces through `argument` if `streamed`, else at once through `set_arguments`."""
        if self.call.name in self._declared:
            if self._goes_on(guarded=bool(self.opener) or not self.call.odd) and streamed:
                self._send_call()
        elif self.call.name is not None and not self.opener:
            self._goes_on(guarded=False)

    def argument(self, written: str, valid: str) -> None:
        """A piece of the arguments as the model wrote it, and as valid JSON."""
        self.call.arguments.append(valid)
        if not self.call.sent:
            self.hold(written)
        elif valid:
            self._arguments.append(valid)

    def set_arguments(self, valid: str) -> None:
        """The arguments are `valid`; the model's text for them is held."""
        self.call.arguments, self.call.complete = [valid], True
        if self.call.name in self._declared:
            self._send_call()

    def close_call(self) -> None:
        """The call is complete. A call of an undeclared tool becomes text."""
        call = self.call
        if call.name not in self._declared:
            self.call = _OpenCall()
            self._after_call = False  # a block of its own, not prose after a call
            self.release()
        elif self.stopped and not call.sent:  # the model will write it again
            self.call = _OpenCall()
        else:
            if not call.sent:
                call.arguments = call.arguments or ["{}"]
                self._send_call()
            self._held.clear()
            self._count_call()

    def end_markup(self) -> None:
        """The held text is markup behind closed calls; if there were none it is text."""
        self.call = _OpenCall()
        if self._after_call:
            self._held.clear()
        else:
            self.release()

    def break_off(self, undecided: str, ended: bool) -> None:
        """The text does not continue as a call, or the reply has `ended` inside of one."""
        call = self.call
        if undecided:
            self.hold(undecided)
        if ended:
            begun = (
                (self.opener and call.name is None)
                or self._after_call
                or {call.name, call.expected} & self._declared
                or self.cut
            )
            if (begun and self._guaranteed()) or call.sent or (self._after_call and not call.begun):
                self._held.clear()
        if call.sent and call.complete:
            self._count_call()
        self.call = _OpenCall()
        self.release()

    def _emit(self, delta: Delta) -> None:
        if self._arguments:
            self._send_arguments()
        self._deltas.append(delta)

    def _send_arguments(self) -> None:
        self._deltas.append(ToolCallDelta(self.n_sent - 1, arguments="".join(self._arguments)))
        self._arguments.clear()

    def _send_call(self) -> None:
        """Send the call: the held text belongs to it, and the arguments read so far are sent."""
        call = self.call
        if before := self._gap.removesuffix("\n") if self._text_seen else "":
            self._emit(TextDelta(before))
        self._gap, self._text_seen, self._after_call = "", False, False
        call.sent = True
        known = call.written_id in self._ids or not call.written_id
        call.call_id = self._call_id(self.n_sent) if known else call.written_id
        self._ids.add(call.call_id)
        self._emit(ToolCallDelta(self.n_sent, call.call_id, call.name, "".join(call.arguments)))
        self.n_sent += 1
        self._held.clear()

    def _count_call(self) -> None:
        """The call being read has closed."""
        call, self.call = self.call, _OpenCall()
        closed = ToolCall(call.call_id, call.name or "", "".join(call.arguments))
        repeats = any((each.name, each.arguments) == (closed.name, closed.arguments) for each in self.calls[-1:])
        self.calls += (closed,)
        self._emit(ToolCallDelta(self.n_sent - 1, closed=True))
        self._after_call, self._grace = True, GRACE
        self.stopped = not self._parallel or (repeats and self._early_stop)

    def _goes_on(self, guarded: bool) -> bool:
        """Whether the call goes on; `on_unguarded` decides where no grammar does."""
        if not guarded and not self.stopped:
            self.stopped = self.on_unguarded(self.opened, self._held_from)
        return not self.stopped


def merged(deltas: list[Delta]) -> list[Delta]:
    """The stream of `deltas` with neighbours of one kind merged."""
    if len(deltas) < 2:
        return deltas
    result: list[Delta] = []
    for index, group in groupby(deltas, lambda delta: -1 if isinstance(delta, TextDelta) else delta.index):
        run: list[Any] = list(group)
        if len(run) == 1:
            result += run
        elif index < 0:
            logprobs = tuple(entry for each in run for entry in each.logprobs)
            result.append(TextDelta("".join(each.text for each in run), logprobs))
        else:
            arguments = "".join(each.arguments for each in run)
            result.append(replace(run[0], arguments=arguments, closed=run[-1].closed))
    return result


# ---- parts of formats ----

Block: TypeAlias = Callable[[CallTracker], Scan[None]]
"""Reads calls, from the first character behind the marker that they begin with."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Where calls stand in a reply, and how they are read.

    `marked`: by the marker that they begin with, anywhere; a marker's first character occurs in it only once. `bare`:
    by their first character, at the start of the reply only. `closers`: the characters that may end a call.
    """

    marked: Mapping[str, Block]
    bare: Mapping[str, Block] = field(default_factory=dict)
    closers: bytes = b"}"

    def read(self, t: CallTracker) -> Scan[None]:
        """A whole reply."""
        block: Block | None = None
        if self.bare:
            yield from t.run(SP, t.say)
            block = self.bare.get((yield from t.peek()))
        prose, marker, begun = _prose_patterns(tuple(self.marked))
        while True:
            try:
                if block is not None:
                    yield from block(t)
            except MismatchError as error:  # it only looked like a call
                t.break_off(error.undecided, ended=not (yield from t.peek()))
            yield from t.run(prose, t.say)
            if not (yield from t.peek()):
                return
            t.opener = ""
            try:
                match = yield from t.match(marker, begun)
            except MismatchError as error:
                t.hold(error.undecided)
                return
            if match:
                t.opener, t.opened = match[0], t.position - len(match[0])
                t.hold(match[0])
                t.begin_call()
            else:
                t.say(t.take())
            block = self.marked[match[0]] if match else None


@cache
def _prose_patterns(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Text without the first character of any of `markers`; one of them; the beginning of one."""
    first = re.escape("".join(sorted({marker[0] for marker in markers})))
    return re.compile(f"[^{first}]+"), re.compile("|".join(map(re.escape, markers))), re.compile(beginnings(*markers))


NAME = re.compile("[a-zA-Z0-9_.:/-]+")
"""A name, an id or a type."""


def _section(marker: str, call: Block, opener: str, closer: str) -> Mapping[str, Block]:
    """Calls between `marker` and `closer`, each read by `call` behind its `opener`; at least one.

    Some models leave out `marker`.
    """

    def section(t: CallTracker) -> Scan[None]:
        words: tuple[str, ...] = (opener,)
        word = t.opener
        while word != closer:
            if word == opener:
                yield from call(t)
                t.end_markup()
                words = (opener, closer)
            word = yield from t.read(SP, words)
            if word == opener:
                t.begin_call()
        t.end_markup()

    return dict.fromkeys((marker, opener), section)


def _list(t: CallTracker, call: Block) -> Scan[None]:
    """Calls in brackets, each read by `call`, with commas between and perhaps one behind; at least one."""
    yield from t.read("[", SP)
    if (yield from t.peek()) == "]":
        raise MismatchError
    while (yield from t.peek()) != "]":
        yield from call(t)
        yield from _comma(t, "]")
    yield from t.read("]")
    t.end_markup()


def _comma(t: CallTracker, end: str) -> Scan[None]:
    """Between two members of a list or an object, or behind the last one: a comma, or nothing before `end`."""
    yield from t.read(SP)
    if (yield from t.peek()) != end:
        yield from t.read(",", SP)


def _held_json(t: CallTracker, scan: Callable[[Text, Put], Scan[None]]) -> Scan[str]:
    """The value that `scan` reads, as valid JSON. The model's text for it is held."""
    valid: list[str] = []

    def put(written: str, part: str) -> None:
        t.hold(written)
        valid.append(part)

    yield from scan(t, put)
    return "".join(valid)


def _arguments(t: CallTracker, bare: bool = False) -> Scan[None]:
    """A call's arguments: an object, sent as it is read; the text of an object; or null, [] or "" for none."""
    if (yield from t.peek()) == "{":
        t.begin_arguments(streamed=True)
        yield from json_value(t, t.argument, bare)
        t.call.complete = True
        return
    t.begin_arguments(streamed=False)
    value = yield from _held_json(t, json_value)
    if value.startswith('"') and value != '""':
        arguments = whole_object(json.loads(value))
    else:
        arguments = "{}" if value in ('""', "null") or "".join(value.split()) == "[]" else None
    if arguments is None:
        raise MismatchError
    t.set_arguments(arguments)


_ARGUMENTS = ("arguments", "parameters")


def _object(t: CallTracker) -> Scan[None]:
    """One call as a JSON object, its keys in any order. Ids and types are ignored.

    Any key that calls do not have ends the call, even the first key, so that an answer in JSON is not held back.
    Skipping the value instead would lose the arguments of a call with a misspelled key.
    """
    if (yield from t.peek()) == "{":
        t.begin_call()
    yield from t.read("{", SP)
    while (yield from t.peek()) != "}":
        key = json.loads((yield from _held_json(t, json_string)))
        if key not in ("name", "id", "type", *_ARGUMENTS):
            raise MismatchError
        yield from t.read(SP, ":", SP)
        call = t.call
        if key == "name" and call.name is None:
            t.name_call(json.loads((yield from _held_json(t, json_string))))
        elif key in _ARGUMENTS and not call.complete:
            yield from _arguments(t)
        elif key in ("id", "type") and (yield from t.peek()) not in ("{", "["):
            value = yield from _held_json(t, json_value)
            call.odd = call.odd or key == "id" or value != '"function"'
        else:
            raise MismatchError
        yield from _comma(t, "}")
    yield from t.read("}")
    t.close_call()


def _named(t: CallTracker, name: str, written_id: str = "", bare: bool = False) -> Scan[None]:
    """The arguments of a call whose name stands before them; it closes with them. `bare`: see `json_value`."""
    if not name or (yield from t.peek()) != "{":
        raise MismatchError
    t.name_call(name, written_id)
    yield from _arguments(t, bare)
    t.close_call()


def _tagged(t: CallTracker, form: TagForm, close: str) -> Scan[None]:
    """A call in `form`, from its name up to and with `close`."""
    name = yield from t.read(SP, NAME)
    if not name:
        raise MismatchError
    yield from t.read(form.named, SP)
    t.name_call(name)
    parameters = t.schemas.get(name, {})
    keys: set[str] = set()
    while (yield from t.read((form.key, close))) == form.key:
        key = yield from t.read(re.compile(f"[^{re.escape(form.value[0])}]+"))
        for part in form.value.split("\n"):
            tag = yield from t.read(SP, (part, form.json) if form.json else (part,))
        if key in keys:
            raise MismatchError
        t.argument("", f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        if not keys:
            t.begin_arguments(streamed=True)
        keys.add(key)
        kinds = kinds_of(argument_schema(parameters, key), parameters)
        if form.json:  # the tag says whether its value is a string, which counts where the schema allows both
            kinds = (kinds - TEXT if tag == form.json else kinds & TEXT) or kinds
        yield from _tag_value(t, form, TagValue(kinds))
        yield from t.read(SP)
    t.argument("", "}" if keys else "{}")
    t.call.complete = True
    t.close_call()


_IN_TAG = re.compile(r"[^<\n]+")


def _tag_value(t: CallTracker, form: TagForm, value: TagValue) -> Scan[None]:
    """A value up to and with its end."""

    def put(written: str) -> None:
        t.argument(written, value.feed(written))

    ends = ("\n" + form.end, form.end) if form.line else (form.end,)
    end, begun = re.compile("|".join(map(re.escape, ends))), re.compile(beginnings(*ends))
    put("")
    if form.line and (yield from t.peek()) == "\n":
        t.hold(t.take())
    match = None
    while not match:
        yield from t.run(_IN_TAG, put)
        if not (char := (yield from t.peek())):
            raise MismatchError
        if char in ("<", "\n") and not (match := (yield from t.match(end, begun))):
            put(t.take())
    t.hold(match[0])
    t.argument("", value.end())


# ---- formats ----


def _objects(t: CallTracker, close: str) -> Scan[None]:
    """Calls as objects, with white space between them, up to and with `close`; at least one."""
    yield from t.read(SP)
    called = False
    while not called or (yield from t.peek()) == "{":
        yield from _object(t)
        yield from t.read(SP)
        called = True
    yield from t.read(close)
    t.end_markup()


def _deepseek_call(t: CallTracker) -> Scan[None]:
    """``name<｜tool▁sep｜>{...}``, or a type in place of the name, and then the name and a block of JSON."""
    name = yield from t.read(NAME, "<｜tool▁sep｜>", SP)
    fence = "" if (yield from t.peek()) == "{" else "```"
    if fence:
        name = yield from t.read(NAME, SP, "```json", SP)
    yield from _named(t, name)
    yield from t.read(SP, fence, SP, "<｜tool▁call▁end｜>")


_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def _kimi_call(t: CallTracker) -> Scan[None]:
    """``functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>``; the id is what the template writes."""
    written = yield from t.read(SP, NAME, SP, "<|tool_call_argument_begin|>", SP)
    match = _KIMI_ID.fullmatch(written)
    yield from _named(t, match[1] if match else "", written)
    yield from t.read(SP, "<|tool_call_end|>")


def _harmony(t: CallTracker) -> Scan[None]:
    """``<|channel|>commentary to=functions.name`` or ``to=functions.name<|channel|>commentary``, perhaps behind
    ``<|start|>assistant``, and a message of JSON up to ``<|call|>``. That ends a reply; a message that follows may be a
    call as well.
    """
    opener = t.opener
    while True:
        if opener == "<|start|>":
            yield from t.read("assistant")
            if (yield from t.peek()) == "<":
                yield from t.read(opener := "<|channel|>")
        if opener == "<|channel|>":
            yield from t.read(NAME)
        name = (yield from t.read(SP, "to=", NAME)).removeprefix("functions.")
        if opener != "<|channel|>":
            yield from t.read("<|channel|>", NAME)
        word = ""
        while word != "<|message|>":  # before it may stand the type of the content
            word = yield from t.read(SP, NAME, SP, ("<|constrain|>", "<|message|>"))
        yield from t.read(SP)
        char = yield from t.peek()
        if name and (char == "<" or not (char or t.cut)):  # an empty message: no arguments
            t.name_call(name)
            t.set_arguments("{}")
            t.close_call()
        else:
            yield from _named(t, name)
        opener = yield from t.read(SP, ("<|call|>", "<|start|>"))
        if opener == "<|call|>":
            t.end_markup()
            return
        t.begin_call()


_BETWEEN_OBJECTS = re.compile(r"[ \t\r\n;,]+")


def _llama3(t: CallTracker) -> Scan[None]:
    """``{"name": ..., "parameters": ...}``, more after ``;`` or a comma."""
    yield from t.read(SP)
    while True:
        yield from _object(t)
        yield from t.read(_BETWEEN_OBJECTS)
        if (yield from t.peek()) != "{":
            raise MismatchError  # no call follows: the separators are text


def _llama3_function(t: CallTracker) -> Scan[None]:
    """``<function=name>{...}</function>``."""
    yield from _named(t, (yield from t.read(NAME, ">", SP)))
    yield from t.read(SP, "</function>")
    t.end_markup()


def _mistral(t: CallTracker) -> Scan[None]:
    """``[TOOL_CALLS][{...}, ...]``, or ``[TOOL_CALLS]name{...}`` with ``[CALL_ID]id`` and ``[ARGS]`` in between."""
    yield from t.read(SP)
    if (yield from t.peek()) == "[":
        yield from _list(t, _object)
        return
    name = yield from t.read(NAME)
    while (yield from t.peek()) == "[":
        if (yield from t.read(("[CALL_ID]", "[ARGS]"))) == "[CALL_ID]":
            yield from t.read(NAME)
    yield from t.read(SP)
    yield from _named(t, name)


def _pythonic(t: CallTracker) -> Scan[None]:
    """``[f(a=1), g(b="x")]``, perhaps in ``<|python_start|>...<|python_end|>``; a list without a call is no call."""
    yield from t.read(SP)
    yield from _list(t, _python_call)
    if t.opener:
        yield from t.read(SP, "<|python_end|>")
        t.end_markup()


def _gemma4(t: CallTracker) -> Scan[None]:
    """``call:name{key:<|"|>text<|"|>,other:1}<tool_call|>``."""
    name = yield from t.read(SP, "call:", NAME, SP)
    yield from _named(t, name, bare=True)
    yield from t.read(SP, "<tool_call|>")
    t.end_markup()


_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_PYTHON_NAME = re.compile(r"[\w.-]+")
_IN_PYTHON_STRING = re.compile(r"""[^'"\\]+""")
_PLAIN_PYTHON = re.compile(r"""[^'"(),=\[\]{}]+""")


def _python_call(t: CallTracker) -> Scan[None]:
    """One call up to its closing parenthesis, which shows that it is one."""
    if (yield from t.peek()):
        t.begin_call()
    name = yield from t.read(_PYTHON_NAME)
    if not name or (yield from t.peek()) != "(":
        raise MismatchError
    t.begin_call(name)
    source: list[str] = []
    closers: list[str] = []  # of the open brackets
    stand_ins: dict[str, str] = {}  # for keywords: Python refuses some names, and changes others
    begun = 0  # where the argument at hand begins in `source`; -1: its name is read
    quote = ""  # of the string that is open

    def put(text: str) -> None:
        source.append(text)
        t.hold(text)

    while not source or closers:
        yield from t.run(_IN_PYTHON_STRING if quote else _PLAIN_PYTHON, put)
        char = yield from t.peek()
        if quote and char == "\\":
            put(t.take())
        if not (yield from t.peek()):
            raise MismatchError
        if quote:
            quote = "" if char == quote else quote
        elif char in ("'", '"'):
            quote = char
        elif char in _BRACKETS:
            closers.append(_BRACKETS[char])
        elif char in (")", "]", "}") and closers.pop() != char:
            raise MismatchError
        elif char == "=" and len(closers) == 1 and begun >= 0:
            keyword = "".join(source[begun:]).strip()
            if keyword.isidentifier():
                source[begun:] = [stand_ins.setdefault(keyword, f"_{len(stand_ins)}")]
            begun = -1
        put(t.take())
        if len(closers) == 1 and not quote and char in ("(", ","):
            begun = len(source)
    arguments = _keyword_arguments("f" + "".join(source), {stand_in: word for word, stand_in in stand_ins.items()})
    if arguments is None:
        raise MismatchError
    t.set_arguments(arguments)
    t.name_call(name)
    t.close_call()


def _tags(form: TagForm) -> Reader:
    if not form.open:
        return Reader({form.begin: partial(_tagged, form=form, close=form.finish)}, closers=b">")
    call = partial(_tagged, form=form, close=form.close)
    return Reader(_section(form.begin, call, form.open, form.finish), closers=b">")


_DEEPSEEK = Reader(_section("<｜tool▁calls▁begin｜>", _deepseek_call, "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"))
_LLAMA3 = Reader({"<|python_tag|>": _llama3, "<function=": _llama3_function}, bare={"{": _llama3})

READERS: Mapping[ToolFormat, Reader] = {
    ToolFormat.HERMES: Reader({"<tool_call>": partial(_objects, close="</tool_call>")}),
    ToolFormat.LLAMA3: _LLAMA3,
    ToolFormat.LLAMA3_FUNCTION: _LLAMA3,
    ToolFormat.MISTRAL: Reader({"[TOOL_CALLS]": _mistral}),
    ToolFormat.PYTHONIC: Reader({"<|python_start|>": _pythonic}, bare={"[": _pythonic}, closers=b")"),
    ToolFormat.LLAMA4: Reader({"<|python_start|>": partial(_objects, close="<|python_end|>")}, bare={"{": _llama3}),
    ToolFormat.DEEPSEEK_V3: _DEEPSEEK,
    ToolFormat.DEEPSEEK_V31: _DEEPSEEK,
    ToolFormat.KIMI_K2: Reader(
        _section("<|tool_calls_section_begin|>", _kimi_call, "<|tool_call_begin|>", "<|tool_calls_section_end|>")
    ),
    ToolFormat.MINIMAX: Reader({"<tool_calls>": partial(_objects, close="</tool_calls>")}),
    ToolFormat.GEMMA4: Reader({"<|tool_call>": _gemma4}),
    ToolFormat.HARMONY: Reader({"<|channel|>": _harmony, "<|start|>": _harmony}, bare={"t": _harmony}),
    **{format: _tags(form) for format, form in TAGS.items()},
}
