"""One grammar per tool call format, as generators over characters (see `scanning`).

Markers in prose are prose: only what follows a marker decides whether it began a call.
"""

from collections.abc import Callable, Mapping

from holdfast.replicas.text.formats import OPENERS, ToolFormat
from holdfast.replicas.text.productions import arguments, call_array, call_object, closing, expect, prose, skip
from holdfast.replicas.text.pythonic import call_list
from holdfast.replicas.text.scanning import SPACE, NotACallError, Scan
from holdfast.replicas.text.tracker import Tracker

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
