"""What the grammars of tool calls are put together from: text up to a marker, markup, a call as a JSON object."""

import json
import re
from collections.abc import Callable
from functools import lru_cache

from holdfast.replicas.text.scanning import ESCAPES, NotACallError, Put, Run, Scan, json_string, json_value, space
from holdfast.replicas.text.tracker import NO_ARGUMENTS, Tracker

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
