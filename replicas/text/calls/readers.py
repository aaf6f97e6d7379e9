"""How the calls of each format are read: one `Reader` per format, and the parser that runs it over a streamed reply.

A format is the markers that calls begin with, and for each marker a scan (see `scan`) of what follows: it tells a
`Tracker` what it finds, and raises `NotACallError` where the text is no call after all. Markers in prose are prose:
only what follows a marker decides whether it began calls.

The file reads in order: `ToolCallParser`; the parts that scans are put together from; then every format, ending in
`READERS`. A further format is a scan and a row there.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeAlias

from holdfast.replicas.requests import TextDelta, ToolCall
from holdfast.replicas.text.calls.formats import TAGS, TagForm, ToolFormat
from holdfast.replicas.text.calls.scan import (
    SPACE,
    NotACallError,
    Put,
    Run,
    Scan,
    json_string,
    json_value,
    space,
    whole_object,
)
from holdfast.replicas.text.calls.tracker import CallLimits, Delta, Tracker, merged
from holdfast.replicas.text.calls.values import TEXT, TagValue, argument_schema, keyword_arguments, kinds_of


class ToolCallParser:
    """Reads one reply: text in, text and calls out, see `tracker`. How the text is cut never matters.

    `call_id` gives the id of the call with that index, where the model gives it none. `guaranteed` tells
    whether what a marker begins is sure to be a call. `schemas` are those of the tools' arguments, by name.
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
        limits = CallLimits(declared_names, parallel, early_stop, guaranteed, schemas or {})
        self._tracker = Tracker(limits, call_id)
        self._scan: Scan | None = None  # none where everything is text
        self._run: Run | None = None  # what may be passed by the piece
        self._read = 0  # characters of earlier pieces
        self._closers = b""
        if declared_names and format in READERS:
            self._closers = READERS[format].closers
            self._scan = READERS[format].read(self._tracker)
            next(self._scan)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls that have closed."""
        return tuple(self._tracker.calls)

    @property
    def n_sent(self) -> int:
        """How many calls were sent, closed or not."""
        return self._tracker.n_sent

    @property
    def should_stop(self) -> bool:
        """Nothing that the model writes from here on would be sent."""
        return self._tracker.stopped

    def may_close(self, coming: bytes) -> bool:
        """Whether text that has not been read yet may close a call. False where one begins in it as well."""
        among_calls = self._tracker.call.begun or self._tracker.n_sent
        return bool(among_calls) and any(closer in coming for closer in self._closers)

    def on_unguarded(self, ask: Callable[[int, int], bool]) -> None:
        """Who is asked about calls that no grammar has followed: see `Tracker`."""
        self._tracker.on_unguarded = ask

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

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """The reply is over: what was held back. `cut`: it was not the model that ended it. Call once."""
        scan, self._scan = self._scan, None
        self._tracker.cut = cut
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


Block: TypeAlias = Callable[[Tracker, str], Scan]
"""Scans calls, from the first character behind the marker they begin with."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Where calls stand in a reply, and how they are scanned.

    `marked`: by a marker, anywhere; a marker's first character occurs in it only once. `bare`: by a first character,
    at the start of the reply, which is itself part of the calls. `closers`: characters one of which a call ends with.
    """

    marked: Mapping[str, Block]
    bare: Mapping[str, Block] = field(default_factory=dict)
    closers: bytes = b"}"

    def read(self, tracker: Tracker) -> Scan:
        """A whole reply."""
        char = yield
        if self.bare:
            char = yield from space(char, tracker.say)
            if char in self.bare:
                char = yield from _attempt(self.bare[char], tracker, char)
        while char:
            char = yield from _prose(tracker, char, tuple(self.marked))
            if tracker.opener:
                char = yield from _attempt(self.marked[tracker.opener], tracker, char)
        return char


def _attempt(block: Block, tracker: Tracker, char: str) -> Scan:
    """Calls, or what looked like some."""
    try:
        return (yield from block(tracker, char))
    except NotACallError as found:
        tracker.break_off(found)
        return found.unread


def _prose(tracker: Tracker, char: str, markers: tuple[str, ...]) -> Scan:
    """Text up to and with one of `markers`, which is held, and told to the tracker."""
    run = Run(_without(markers), tracker.say)
    tracker.opener = ""
    partial = ""
    while char:
        if any(marker.startswith(partial + char) for marker in markers):
            partial += char
            tracker.hold(char)
            if partial in markers:
                tracker.open_calls(partial)
                return (yield)
            char = yield
        elif partial:
            partial = ""
            tracker.release()
        else:
            tracker.say(char)
            char = yield run
    tracker.end_text()
    return char


@lru_cache
def _without(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Runs of characters that begin none of `markers`."""
    return re.compile(f"[^{re.escape(''.join(sorted({marker[0] for marker in markers})))}]+")


# Parts of calls. All that they read is held, until the tracker knows what it is.


def _expect(tracker: Tracker, char: str, word: str) -> Scan:
    """`word`, and nothing else."""
    for wanted in word:
        if char != wanted:
            raise NotACallError(char)
        tracker.hold(char)
        char = yield
    return char


def _word(
    tracker: Tracker, char: str, *words: str, found: list[str], on_end: Callable[[str], None] = lambda _: None
) -> Scan:
    """One of `words`, none of which another begins with, put into `found`. It is markup. `on_end` is told with its last
    character."""
    read = ""
    while True:
        if not char or not any(word.startswith(read + char) for word in words):
            raise NotACallError(char)
        read += char
        tracker.markup(char)
        if read in words:
            found.append(read)
            on_end(read)
            return (yield)
        char = yield


def _sections(marker: str, call: Block, opener: str, closer: str) -> Mapping[str, Block]:
    """Calls between `marker` and `closer`, and those of models that leave out `marker`, each behind its `opener`."""
    section = partial(_section, call=call, opener=opener, closer=closer)
    return {marker: section, opener: partial(section, opened=True)}


def _section(tracker: Tracker, char: str, call: Block, opener: str, closer: str, opened: bool = False) -> Scan:
    """Calls with white space between them, each read by `call` behind its `opener`, up to `closer`; at least one.

    `opened`: the first opener has been read.
    """
    called = False
    while True:
        if not opened:
            found: list[str] = []
            char = yield from space(char, tracker.hold)
            char = yield from _word(tracker, char, *((opener, closer) if called else (opener,)), found=found)
            if found[0] == closer:
                tracker.end_markup()
                return char
            tracker.begin_call()
        char = yield from call(tracker, char)
        tracker.end_markup()
        called, opened = True, False


def _closing(tracker: Tracker, char: str, marker: str) -> Scan:
    """The marker that ends calls, white space before it."""
    char = yield from space(char, tracker.hold)
    char = yield from _expect(tracker, char, marker[:-1])
    if char != marker[-1]:
        raise NotACallError(char)
    tracker.hold(char)
    tracker.end_markup()
    return (yield)


def _list(tracker: Tracker, char: str, call: Block) -> Scan:
    """Calls in brackets, each read by `call`, with commas between and perhaps one behind; at least one."""
    char = yield from _expect(tracker, char, "[")
    char = yield from space(char, tracker.hold)
    if char == "]":
        raise NotACallError(char)
    while char != "]":
        char = yield from call(tracker, char)
        char = yield from _comma(tracker, char, "]")
    tracker.hold(char)
    tracker.end_markup()
    return (yield)


def _comma(tracker: Tracker, char: str, end: str) -> Scan:
    """Between two members of a list or an object, or behind the last one: a comma, or nothing before `end`."""
    char = yield from space(char, tracker.hold)
    if char == ",":
        char = yield from _expect(tracker, char, ",")
        return (yield from space(char, tracker.hold))
    if char != end:
        raise NotACallError(char)
    return char


_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:/")


def _name(tracker: Tracker, char: str, name: list[str]) -> Scan:
    """A name or an id that stands without quotes, put into `name`."""
    while char in _NAME:
        name.append(char)
        tracker.hold(char)
        char = yield
    return char


def _string(tracker: Tracker, char: str, found: list[str]) -> Scan:
    """A JSON string, what it says put into `found`."""
    valid: list[str] = []
    char = yield from json_string(char, _held(tracker, valid))
    found.append(json.loads("".join(valid)))
    return char


def _held(tracker: Tracker, valid: list[str]) -> Put:
    def put(written: str, sent: str) -> None:
        tracker.hold(written)
        valid.append(sent)

    return put


def _arguments(tracker: Tracker, char: str, on_end: Callable[[], None]) -> Scan:
    """The value of a call's arguments: an object, the text of one, or what models write for none: null, [] and "".

    An object goes out as it is read, and `on_end` is called with its last bracket.
    """
    tracker.begin_arguments(streamed=char == "{")
    if char == "{":
        return (yield from json_value(char, tracker.argument, on_end))
    valid: list[str] = []
    char = yield from json_value(char, _held(tracker, valid))
    value = "".join(valid)
    if value.startswith('"'):
        found = whole_object(json.loads(value)) if value != '""' else "{}"
    else:
        found = "{}" if value == "null" or "".join(value.split()) == "[]" else None
    if found is None:
        raise NotACallError(char)
    tracker.set_arguments(found)
    return char


_ARGUMENTS = frozenset({"arguments", "parameters"})
_KEYS = _ARGUMENTS | {"name", "id", "type"}


def _object(tracker: Tracker, char: str) -> Scan:
    """One call as a JSON object, its keys in any order.

    It must look like a call from its first key on, so that an answer in JSON is not held back. A key that calls do not
    have ends it at any place: were its value passed over, a misspelled key would cost the call its arguments.
    """
    if char == "{":
        tracker.begin_call()
    char = yield from _expect(tracker, char, "{")
    char = yield from space(char, tracker.hold)
    while char != "}":
        key: list[str] = []
        char = yield from _string(tracker, char, key)
        if key[0] not in _KEYS:
            raise NotACallError(char)
        char = yield from space(char, tracker.hold)
        char = yield from _expect(tracker, char, ":")
        char = yield from space(char, tracker.hold)
        char = yield from _member(tracker, char, key[0])
        char = yield from _comma(tracker, char, "}")
    tracker.hold(char)
    tracker.close_call()
    return (yield)


def _member(tracker: Tracker, char: str, key: str) -> Scan:
    """One value of a call object, each at most once but for those that mean nothing: ids and types, which are words."""
    call = tracker.call
    if key == "name" and call.name is None:
        name: list[str] = []
        char = yield from _string(tracker, char, name)
        tracker.name_call(name[0])
        return char
    if key in _ARGUMENTS and not call.complete:
        return (yield from _arguments(tracker, char, tracker.end_arguments))
    if key == "name" or key in _ARGUMENTS or char in ("{", "["):
        raise NotACallError(char)
    valid: list[str] = []
    char = yield from json_value(char, _held(tracker, valid))
    call.odd = call.odd or key == "id" or "".join(valid) != '"function"'
    return char


def _named(tracker: Tracker, char: str, name: str, written_id: str = "") -> Scan:
    """The arguments of a call whose name stands before them; it closes with them."""
    if char != "{" or not name:
        raise NotACallError(char)
    tracker.name_call(name, written_id)
    return (yield from _arguments(tracker, char, tracker.close_call))


def _tagged(tracker: Tracker, char: str, form: TagForm, close: str) -> Scan:
    """A call in `form`, from its name up to and with `close`."""
    name: list[str] = []
    char = yield from space(char, tracker.hold)
    char = yield from _name(tracker, char, name)
    if not name:
        raise NotACallError(char)
    char = yield from _expect(tracker, char, form.named)
    char = yield from space(char, tracker.hold)
    tracker.name_call("".join(name))
    keys: set[str] = set()

    def end(word: str) -> None:
        if word == close:
            tracker.argument("", "}" if keys else "{}")
            tracker.end_arguments()
            tracker.close_call()

    while True:
        found: list[str] = []
        char = yield from _word(tracker, char, form.key, close, found=found, on_end=end)
        if found[0] == close:
            return char
        key = ""
        while char and char != form.value[0]:
            key += char
            tracker.markup(char)
            char = yield
        for part in form.value.split("\n"):
            char = yield from space(char, tracker.markup)
            char = yield from _word(tracker, char, part, *filter(None, [form.json]), found=found)
        if key in keys:
            raise NotACallError(char)
        tracker.argument("", f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        if not keys:
            tracker.begin_arguments(streamed=True)
        keys.add(key)
        char = yield from _tag_value(tracker, char, form, key, {form.value: True, form.json: False}.get(found[-1]))
        char = yield from space(char, tracker.markup)


_IN_TAG = re.compile(r"[^<\n]+")


def _tag_value(tracker: Tracker, char: str, form: TagForm, key: str, text: bool | None) -> Scan:
    """A value up to and with its end, see `TagValue`.

    `text`: whether its tag calls it one, which decides where the schema does not.
    """
    parameters = tracker.parameters()
    kinds = kinds_of(argument_schema(parameters, key), parameters)
    if form.json and text is not None:
        kinds = (kinds & TEXT if text else kinds - TEXT) or kinds
    value = TagValue(kinds)
    tracker.argument("", value.feed(""))

    def put(written: str) -> None:
        tracker.argument(written, value.feed(written))

    if form.line and char == "\n":
        tracker.markup(char)
        char = yield
    ends = (form.end, "\n" + form.end) if form.line else (form.end,)
    run, held = Run(_IN_TAG, put), ""
    while True:
        if not char:
            raise NotACallError(char, held)
        held += char
        if held in ends:
            break
        while not any(end.startswith(held) for end in ends):
            put(held[0])
            held = held[1:]
        char = yield (run if not held else None)
    tracker.markup(held)
    tracker.argument("", value.end())
    return (yield)


# Formats.


def _objects(tracker: Tracker, char: str, close: str) -> Scan:
    """Calls as objects, with white space between them, up to and with `close`."""
    char = yield from space(char, tracker.hold)
    char = yield from _object(tracker, char)
    char = yield from space(char, tracker.hold)
    while char == "{":
        char = yield from _object(tracker, char)
        char = yield from space(char, tracker.hold)
    return (yield from _closing(tracker, char, close))


def _hermes(tracker: Tracker, char: str) -> Scan:
    """``<tool_call>{...}</tool_call>``; several objects in one pair of markers pass."""
    return _objects(tracker, char, "</tool_call>")


def _minimax(tracker: Tracker, char: str) -> Scan:
    """``<tool_calls>`` and an object a line, up to ``</tool_calls>``."""
    return _objects(tracker, char, "</tool_calls>")


def _deepseek_call(tracker: Tracker, char: str) -> Scan:
    """``name<｜tool▁sep｜>{...}``, or the name behind a type, and then a block of JSON."""
    name: list[str] = []
    char = yield from _name(tracker, char, name)
    char = yield from _expect(tracker, char, "<｜tool▁sep｜>")
    char = yield from space(char, tracker.hold)
    block = char != "{"
    if block:
        name.clear()
        char = yield from _name(tracker, char, name)
        char = yield from space(char, tracker.hold)
        char = yield from _expect(tracker, char, "```json")
        char = yield from space(char, tracker.hold)
    char = yield from _named(tracker, char, "".join(name))
    char = yield from space(char, tracker.hold)
    if block:
        char = yield from _expect(tracker, char, "```")
        char = yield from space(char, tracker.hold)
    return (yield from _expect(tracker, char, "<｜tool▁call▁end｜>"))


def _dsml_call(tracker: Tracker, char: str) -> Scan:
    """``<｜DSML｜invoke name="name">`` and its parameters."""
    return _tagged(tracker, char, _DSML, _DSML.close)


_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def _kimi_call(tracker: Tracker, char: str) -> Scan:
    """``functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>``; the id is what the template writes."""
    written: list[str] = []
    char = yield from space(char, tracker.hold)
    char = yield from _name(tracker, char, written)
    char = yield from space(char, tracker.hold)
    char = yield from _expect(tracker, char, "<|tool_call_argument_begin|>")
    char = yield from space(char, tracker.hold)
    found = _KIMI_ID.fullmatch("".join(written))
    char = yield from _named(tracker, char, found[1] if found else "", "".join(written))
    char = yield from space(char, tracker.hold)
    return (yield from _expect(tracker, char, "<|tool_call_end|>"))


def _qwen3_coder_call(tracker: Tracker, char: str) -> Scan:
    """``<function=name>`` and its parameters."""
    return _tagged(tracker, char, _QWEN, _QWEN.close)


def _glm(tracker: Tracker, char: str) -> Scan:
    """``name`` and its arguments, each with a tag for its key and one for its value."""
    return _tagged(tracker, char, TAGS[ToolFormat.GLM], "</tool_call>")


def _minimax_m2_call(tracker: Tracker, char: str) -> Scan:
    """``<invoke name="name">`` and its parameters."""
    return _tagged(tracker, char, _MINIMAX, _MINIMAX.close)


def _harmony(tracker: Tracker, char: str) -> Scan:
    """``<|channel|>commentary to=functions.name`` and the rest of the message."""
    char = yield from _name(tracker, char, [])
    return (yield from _harmony_addressed(tracker, char, in_channel=True))


def _harmony_started(tracker: Tracker, char: str) -> Scan:
    """``<|start|>assistant`` before either of the two."""
    char = yield from _expect(tracker, char, "assistant")
    if char != "<":
        return (yield from _harmony_addressed(tracker, char))
    char = yield from _expect(tracker, char, "<|channel|>")
    return (yield from _harmony(tracker, char))


def _harmony_addressed(tracker: Tracker, char: str, in_channel: bool = False) -> Scan:
    """``to=functions.name``, its channel where that stands behind it, and a message of JSON up to ``<|call|>``.

    That ends a reply; should another message follow, it may be a call as well.
    """
    name: list[str] = []
    char = yield from space(char, tracker.hold)
    char = yield from _expect(tracker, char, "to=")
    char = yield from _name(tracker, char, name)
    if not in_channel:
        char = yield from _expect(tracker, char, "<|channel|>")
        char = yield from _name(tracker, char, [])
    found: list[str] = []
    while found != ["<|message|>"]:  # what may stand before it is the type of the content
        found.clear()
        char = yield from space(char, tracker.hold)
        char = yield from _name(tracker, char, [])
        char = yield from space(char, tracker.hold)
        char = yield from _word(tracker, char, "<|constrain|>", "<|message|>", found=found)
    char = yield from space(char, tracker.hold)
    called = "".join(name).removeprefix("functions.")
    if called and (char == "<" or not (char or tracker.cut)):  # nothing in the message: no arguments
        tracker.name_call(called)
        tracker.set_arguments("{}")
        tracker.close_call()
    else:
        char = yield from _named(tracker, char, called)
    char = yield from space(char, tracker.hold)
    char = yield from _word(tracker, char, "<|call|>", "<|start|>", found=found)
    if found[-1] == "<|call|>":
        tracker.end_markup()
        return char
    tracker.begin_call()
    return (yield from _harmony_started(tracker, char))


def _llama4_marked(tracker: Tracker, char: str) -> Scan:
    """Objects in ``<|python_start|>`` and ``<|python_end|>``."""
    return _objects(tracker, char, "<|python_end|>")


def _llama3(tracker: Tracker, char: str) -> Scan:
    """``{"name": ..., "parameters": ...}``, more after ``;`` or a comma."""
    char = yield from space(char, tracker.hold)
    char = yield from _object(tracker, char)
    while True:
        while char in SPACE or char in (";", ","):
            tracker.hold(char)
            char = yield
        if char != "{":
            raise NotACallError(char)  # what stands between calls is text where none follows
        char = yield from _object(tracker, char)


def _llama3_function(tracker: Tracker, char: str) -> Scan:
    """``<function=name>{...}</function>``."""
    name: list[str] = []
    char = yield from _name(tracker, char, name)
    char = yield from _expect(tracker, char, ">")
    char = yield from space(char, tracker.hold)
    char = yield from _named(tracker, char, "".join(name))
    return (yield from _closing(tracker, char, "</function>"))


def _mistral(tracker: Tracker, char: str) -> Scan:
    """``[TOOL_CALLS][{...}, ...]``, or ``[TOOL_CALLS]name{...}`` with ``[CALL_ID]id`` and ``[ARGS]`` in between."""
    char = yield from space(char, tracker.hold)
    if char == "[":
        return (yield from _list(tracker, char, _object))
    name: list[str] = []
    char = yield from _name(tracker, char, name)
    while char == "[":
        tag = ""
        while char and char != "]" and len(tag) < len("[CALL_ID]"):
            tag += char
            tracker.hold(char)
            char = yield
        char = yield from _expect(tracker, char, "]")
        if tag == "[CALL_ID":
            char = yield from _name(tracker, char, [])
        elif tag != "[ARGS":
            raise NotACallError(char)
    char = yield from space(char, tracker.hold)
    return (yield from _named(tracker, char, "".join(name)))


def _pythonic(tracker: Tracker, char: str) -> Scan:
    """``[f(a=1), g(b="x")]``; a list without a call in it is no call."""
    return _list(tracker, char, _python_call)


def _pythonic_marked(tracker: Tracker, char: str) -> Scan:
    """``<|python_start|>[f(a=1), g(b="x")]<|python_end|>``."""
    char = yield from space(char, tracker.hold)
    char = yield from _pythonic(tracker, char)
    return (yield from _closing(tracker, char, "<|python_end|>"))


_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def _python_call(tracker: Tracker, char: str) -> Scan:
    """One call up to its closing parenthesis; only then it is known to be one."""
    if char:
        tracker.begin_call()
    name = ""
    while char in ("_", ".", "-") or char.isalnum():
        name += char
        tracker.hold(char)
        char = yield
    if char != "(" or not name:
        raise NotACallError(char)
    tracker.begin_call(name)
    source: list[str] = []
    closers: list[str] = []
    stand_ins: dict[str, str] = {}  # by the keyword that each stands for
    begun = 0  # where the argument at hand begins in `source`; -1: its name is read
    while True:
        if char in ("'", '"'):
            char = yield from _python_string(tracker, char, source)
            continue
        if not char:
            raise NotACallError(char)
        if char in _BRACKETS:
            closers.append(_BRACKETS[char])
        elif char in (")", "]", "}") and closers.pop() != char:
            raise NotACallError(char)
        if char == "=" and len(closers) == 1 and begun >= 0:
            keyword = "".join(source[begun:]).strip()
            if keyword.isidentifier():  # Python refuses some names, and changes others
                source[begun:] = [stand_ins.setdefault(keyword, f"_{len(stand_ins)}")]
            begun = -1
        source.append(char)
        tracker.hold(char)
        if not closers:
            break
        if len(closers) == 1 and char in ("(", ","):
            begun = len(source)
        char = yield
    arguments = keyword_arguments("f" + "".join(source), {stand_in: word for word, stand_in in stand_ins.items()})
    if arguments is None:
        raise NotACallError((yield))
    tracker.set_arguments(arguments)
    tracker.name_call(name)
    tracker.close_call()
    return (yield)


_IN_PYTHON_STRING = re.compile(r"""[^'"\\]+""")


def _python_string(tracker: Tracker, char: str, source: list[str]) -> Scan:
    """A string in single or double quotes."""

    def put(text: str) -> None:
        source.append(text)
        tracker.hold(text)

    run = Run(_IN_PYTHON_STRING, put)
    quote = char
    put(char)
    char = yield run
    while char != quote:
        if char == "\\":
            put(char)
            char = yield
        if not char:
            raise NotACallError(char)
        put(char)
        char = yield run
    put(char)
    return (yield)


_QWEN, _MINIMAX, _DSML = (
    TAGS[format] for format in (ToolFormat.QWEN3_CODER, ToolFormat.MINIMAX_M2, ToolFormat.DEEPSEEK_V32)
)
_DEEPSEEK = Reader(_sections("<｜tool▁calls▁begin｜>", _deepseek_call, "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"))
_LLAMA3 = Reader({"<|python_tag|>": _llama3, "<function=": _llama3_function}, bare={"{": _llama3})

READERS: Mapping[ToolFormat, Reader] = {
    ToolFormat.HERMES: Reader({"<tool_call>": _hermes}),
    ToolFormat.LLAMA3: _LLAMA3,
    ToolFormat.LLAMA3_FUNCTION: _LLAMA3,
    ToolFormat.MISTRAL: Reader({"[TOOL_CALLS]": _mistral}),
    ToolFormat.PYTHONIC: Reader({"<|python_start|>": _pythonic_marked}, bare={"[": _pythonic}, closers=b")"),
    ToolFormat.LLAMA4: Reader({"<|python_start|>": _llama4_marked}, bare={"{": _llama3}),
    ToolFormat.DEEPSEEK_V3: _DEEPSEEK,
    ToolFormat.DEEPSEEK_V31: _DEEPSEEK,
    ToolFormat.DEEPSEEK_V32: Reader(
        _sections("<｜DSML｜function_calls>", _dsml_call, _DSML.open, "</｜DSML｜function_calls>"), closers=b">"
    ),
    ToolFormat.KIMI_K2: Reader(
        _sections("<|tool_calls_section_begin|>", _kimi_call, "<|tool_call_begin|>", "<|tool_calls_section_end|>")
    ),
    ToolFormat.QWEN3_CODER: Reader(
        _sections("<tool_call>", _qwen3_coder_call, _QWEN.open, "</tool_call>"), closers=b">"
    ),
    ToolFormat.GLM: Reader({"<tool_call>": _glm}, closers=b">"),
    ToolFormat.MINIMAX: Reader({"<tool_calls>": _minimax}),
    ToolFormat.MINIMAX_M2: Reader(
        _sections("<minimax:tool_call>", _minimax_m2_call, _MINIMAX.open, "</minimax:tool_call>"), closers=b">"
    ),
    ToolFormat.HARMONY: Reader(
        {"<|channel|>": _harmony, "<|start|>": _harmony_started}, bare={"t": _harmony_addressed}
    ),
}
