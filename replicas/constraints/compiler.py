"""From what a request asks of its reply to a matcher: a grammar is compiled once, on a thread of its own, and kept.

Used by the text side, away from the engine's thread. A schema that cannot be followed is an error naming its field; one
that takes long to compile keeps only those waiting who need it.
"""

import asyncio
import atexit
import copy
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakValueDictionary

from holdfast.replicas.constraints.grammar import (
    ANY_OBJECT,
    CallForm,
    Forms,
    ReplyRule,
    ToolRule,
    forms_of,
    names_alone,
    reply_grammar,
    schema_grammar,
)
from holdfast.replicas.constraints.guard import CallBan, CallGuard, CallWatch
from holdfast.replicas.constraints.guidance import (
    AVAILABLE,
    GrammarCompiler,
    GrammarError,
    GuidedMatcher,
    Vocabulary,
    complaint,
)
from holdfast.replicas.constraints.lark import Schema
from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.errors import (
    ErrorInfo,
    HoldfastError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    error_of,
)
from holdfast.replicas.requests import ChatPrompt
from holdfast.replicas.text.calls.formats import ToolFormat

MOST_GRAMMARS = 64  # kept at a time; all turns of an agent use one or two
TIMEOUT_S = 30.0  # the longest schema that is taken compiles in seconds
_THREADS = 2
_SLOW_S = 1.0  # a grammar that takes longer was written to, as a rule: it gives its place to the next one
_SLOW_THREADS = 16  # that many of them go on beside, two of a tenant
_NICE = 19  # of a thread whose grammar takes long
_NAME = "holdfast-grammar"
_PATIENCE_S = 3.0  # of a reply that may do without its grammar, since nobody has asked for it
_GRACE_S = 5.0  # for threads that compile when the process ends

GUARANTEE = "tools"  # the field of calls that are guaranteed, and not asked for
_LONGEST = 2**18  # characters of a rule's key: what it takes to compile grows with them

_Key: TypeAlias = tuple[str, ...]
_Making: TypeAlias = Future[Matcher | ErrorInfo]
Found = TypeVar("Found")


class NotCompiledError(Exception):
    """There is no grammar yet. `making` ends when another thread has compiled it; None: nobody has begun, and an event
    loop's thread must not. `field` is the request's that asks for it.
    """

    def __init__(self, field: str, making: _Making | None) -> None:
        super().__init__(field)
        self.field = field
        self.making = making


class Compiler:
    """Matchers for one model; the last `entries` grammars are kept, and refusals as well. Any thread may call it.

    `vocabulary` is called when the first request needs it: it reads every token. `compiled`: how many grammars were
    compiled, or tried.
    """

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], tool_format: ToolFormat, entries: int = MOST_GRAMMARS
    ) -> None:
        self._make_vocabulary = vocabulary
        self._tool_format = tool_format
        self._entries = entries
        self._lock = threading.Lock()  # of the table; nobody compiles or waits under it
        self._known: OrderedDict[_Key, _Making] = OrderedDict()
        self._reading = threading.Lock()  # of the vocabulary and what is made of it, once
        self.compiled = 0

    def prepare(self) -> None:
        """Read the vocabulary now, which takes seconds for a large one, and not with the first request."""
        if AVAILABLE:
            self._read(watch=True)
            complaint('start: "a"', _PART_S)  # the process of the first trial begins

    def matcher(self, rule: ReplyRule, scope: str = "") -> Matcher:
        """A matcher at the beginning of a reply under `rule`.

        Each `scope` (a tenant) has its own grammars: that one is known would tell who asks what others have asked for.
        A new grammar is compiled on the caller's thread, for milliseconds as a rule; a hostile schema takes seconds.
        Nobody waits here: NotCompiledError while another thread compiles the same grammar, and on an event loop's
        thread for a new one. Raises InvalidRequestError naming the field: a schema that cannot be followed or is too
        long, calls that the model cannot write, or no library to follow anything with.
        """
        whole, (rule, key) = rule, _key_of(rule)
        key = (scope, *key)
        with self._lock:
            found = self._known.get(key)
            new = found is None and not _on_event_loop()
            if new:
                found = self._add(key)
            elif found is not None:
                self._known.move_to_end(key)
        if found is None or not (new or found.done()):
            raise NotCompiledError(field_of(rule), found)
        if new:
            self._settle(key, found, rule)
        result = found.result()
        if isinstance(result, ErrorInfo):
            raise error_of(result)
        matcher = result.copy()
        if isinstance(matcher, CallGuard):
            matcher.loose = matcher.loose or rule is not whole
        return matcher

    def without_calls(self, names: frozenset[str]) -> Matcher | None:
        """A matcher of a text in which no call of the tools `names` begins; None where the model writes none, or its
        tokens are not bytes of text. Raises NotCompiledError on an event loop's thread before the vocabulary is read.
        """
        if "_watch" not in self.__dict__:
            if _on_event_loop():
                raise NotCompiledError("tool_choice", None)
            with self._reading:
                if not self._vocabulary.exact or self._forms is None:
                    return None
                _ = self._watch
        return CallBan(self._watch, names)

    def _add(self, key: _Key) -> _Making:
        """A grammar in the making, in the table. Call it under the lock."""
        found: _Making = Future()
        found.set_running_or_notify_cancel()  # one of those who wait may be cancelled, the grammar is made
        self._known[key] = found
        self.compiled += 1
        if len(self._known) > self._entries:
            self._known.popitem(last=False)
        return found

    def _settle(self, key: _Key, found: _Making, rule: ReplyRule) -> None:
        """Compile the grammar that others may wait for."""
        try:
            found.set_result(self._compile(rule))
        except HoldfastError as refused:
            found.set_result(refused.info)
        except BaseException as failure:  # who waits hears of it; the next request tries again
            with self._lock:
                self._known.pop(key, None)
            found.set_exception(failure)

    @cached_property
    def _forms(self) -> Forms | None:
        return forms_of(self._tool_format, self._vocabulary.knows)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._make_vocabulary()

    @cached_property
    def _watch(self) -> CallWatch:
        assert self._forms is not None  # no rule is about calls in a text otherwise
        return CallWatch.of(self._forms, self._vocabulary)

    @cached_property
    def _library(self) -> GrammarCompiler:
        return GrammarCompiler(self._vocabulary)

    def _compile(self, rule: ReplyRule) -> Matcher:
        cause = field_of(rule)
        if not AVAILABLE:
            raise InvalidRequestError(f"'{cause}' needs the package llguidance, which is not installed", cause)
        if (read := self._read(rule.in_text)) is None:
            why = "the model's tokens are not bytes of text"
            raise InvalidRequestError(f"'{cause}' is not supported: {why}", cause)
        library, forms, watch = read
        if rule.calls == "required" and forms is None:
            why = "how the model writes calls is not known; engine.tool_format or engine.chat_template tells it"
            raise InvalidRequestError(f"'tool_choice': {why}", "tool_choice")
        matcher, loose = self._made(library, forms, rule)
        if watch is None or forms is None:
            return matcher
        over = forms.over_when_complete(rule.parallel)
        return CallGuard(matcher, watch, frozenset(tool.name for tool in rule.tools), rule.strict, over, loose)

    def _read(self, watch: bool) -> tuple[GrammarCompiler, Forms | None, CallWatch | None] | None:
        """What every grammar is compiled with, read once; None where no grammar can be followed."""
        with self._reading:
            if not self._vocabulary.exact:
                return None
            forms = self._forms
            return self._library, forms, self._watch if watch and forms is not None else None

    def _made(self, library: GrammarCompiler, forms: Forms | None, rule: ReplyRule) -> tuple[GuidedMatcher, bool]:
        """The matcher of a rule, or of as much of it as can be followed where it is not strict, and whether that is
        less.
        """
        try:
            return library.compile(reply_grammar(rule, forms)), False
        except (GrammarError, ValueError) as error:
            failure = error
        if rule.in_text and not rule.strict:  # nobody has asked for it: any refusal ends with the names
            with suppress(InvalidRequestError, GrammarError, ValueError):
                return library.compile(reply_grammar(_loosened(rule, forms, failure), forms)), True
            return library.compile(reply_grammar(names_alone(rule), forms)), True
        try:
            return library.compile(reply_grammar(_loosened(rule, forms, failure), forms)), True
        except (GrammarError, ValueError) as error:  # the others are too large together
            cause = field_of(rule)
            raise InvalidRequestError(f"'{cause}': {error}", cause) from error


# ---- what cannot be followed ----

_SEARCH_S = 10.0  # for what of a schema cannot be followed
_PART_S = 2  # of processor time, for a part of it
_MOST_LEFT_OUT = 16  # keywords of a schema
_ONE_SCHEMA = ("items", "additionalProperties", "not", "contains", "propertyNames")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_Path: TypeAlias = tuple[str | int, ...]


def _loosened(rule: ReplyRule, forms: Forms | None, error: Exception) -> ReplyRule:
    """`rule` without the keywords that cannot be followed.

    Raises InvalidRequestError for a strict schema, saying what of it cannot, and for schemas that are too large
    together.
    """
    form = forms.first if forms is not None else None
    until = time.monotonic() + _SEARCH_S
    known = str(error) if len(rule.schemas) == 1 else ""  # of a schema that is alone, this has just been found out
    json_ = rule.json and _fitting(rule.json, None, rule.in_text, "", known, until)
    tools = []
    for tool in rule.tools:
        of = f" for function '{tool.name}'"
        tools.append(replace(tool, arguments=_fitting(tool.arguments, form, rule.in_text, of, known, until)))
    if json_ is rule.json and all(new.arguments is old.arguments for new, old in zip(tools, rule.tools, strict=True)):
        cause = field_of(rule)  # each schema is fine alone: together they are too large
        raise InvalidRequestError(f"'{cause}': {error}", cause)
    return replace(rule, tools=tuple(tools), json=json_)


def _fitting(schema: Schema, form: CallForm | None, free: bool, of: str, known: str, until: float) -> Schema:
    """`schema` where it can be followed in `form`, else what remains of it without what cannot. `known`: why not."""
    given = schema
    for _ in range(_MOST_LEFT_OUT):
        why, known = known or _complaint(schema, form, free), ""
        if not why:
            return schema
        path, said = _culprit(schema, why, until)
        if schema.strict:
            where = ".".join(map(str, path))
            message = f"Invalid schema{of} in '{schema.field}'{where and f' at {where!r}'}: {said}"
            raise InvalidRequestError(message, schema.field)
        if time.monotonic() > until:
            break
        schema = replace(schema, content=_without(schema, path, until))
    return replace(given, content=ANY_OBJECT if of else {})


def _complaint(schema: Schema, form: CallForm | None = None, free: bool = False, seconds: int = _PART_S) -> str:
    """Why `schema` cannot be followed, of an answer or of arguments in `form`; "" where it can."""
    try:
        return complaint(schema_grammar(schema, form, free), seconds)
    except ValueError as error:
        return str(error)


def _culprit(schema: Schema, why: str, until: float) -> tuple[_Path, str]:
    """The innermost part of `schema` that cannot be followed, and why."""
    path: _Path = ()
    part: Any = schema.content
    while time.monotonic() < until:
        for place, inner in _parts(part):
            if isinstance(inner, Mapping) and (said := _complaint(schema.part(inner))):
                path, part, why = (*path, *place), inner, said
                break
        else:
            break
    return path, why


def _parts(node: Mapping[str, Any]) -> Iterator[tuple[_Path, Any]]:
    """The schemas in a schema, and where they are."""
    for key, value in node.items():
        if key in _NAMED and isinstance(value, Mapping):
            yield from (((key, name), inner) for name, inner in value.items())
        elif key in _LISTED and isinstance(value, Sequence):
            yield from (((key, index), inner) for index, inner in enumerate(value))
        elif key in _ONE_SCHEMA:
            yield (key,), value


def _without(schema: Schema, path: _Path, until: float) -> Mapping[str, Any]:
    """The content of `schema` without the keyword at `path` that cannot be followed."""
    if not path:
        return _kept(schema, schema.content, until)
    content: Any = copy.deepcopy(schema.content)
    holder = content
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = _kept(schema, holder[path[-1]], until)
    return cast(Mapping[str, Any], content)


def _kept(schema: Schema, node: Mapping[str, Any], until: float) -> Mapping[str, Any]:
    """`node` without one keyword, the first without which it can be followed; else its type alone, or nothing of it."""
    for key in node:
        if key != "type" and time.monotonic() < until:
            rest = {other: value for other, value in node.items() if other != key}
            if not _complaint(schema.part(rest)):
                return rest
    alone = {"type": node["type"]} if "type" in node else {}
    return {} if alone == node or _complaint(schema.part(alone)) else alone


def field_of(rule: ReplyRule) -> str:
    """The request's field that asks for the rule, for errors that are not about a schema."""
    if rule.json is not None:
        return "response_format"
    if rule.calls == "required":
        return "tool_choice"
    strict: Sequence[ToolRule] = [tool for tool in rule.tools if tool.arguments.strict]
    return strict[0].arguments.field.removesuffix("parameters") + "strict" if strict else GUARANTEE


def _key_of(rule: ReplyRule) -> tuple[ReplyRule, _Key]:
    """The rule that is compiled, and a key that is equal where that means the same grammar, with errors that name the
    same fields. One that is too long, and that nobody has asked for, is left with the names.

    Raises InvalidRequestError for another one that is too long.
    """
    key = rule.key
    if len(key) > _LONGEST and rule.in_text and not rule.strict:
        rule = names_alone(rule)
        key = rule.key
    if len(key) > _LONGEST:
        sizes = {schema.field: len(json.dumps(schema.content, default=dict)) for schema in rule.schemas}
        largest = max(sizes, key=lambda field: sizes[field])
        field = largest if sizes[largest] > _LONGEST // 2 else "tools"
        raise InvalidRequestError(f"'{field}' is too long to be followed: at most {_LONGEST} characters of JSON", field)
    return rule, (key, rule.fields)


def leave_event_loop(prompt: ChatPrompt) -> None:
    """Raises NotCompiledError on an event loop's thread: what `prompt` asks for is read on another one."""
    if _on_event_loop():
        strict = any(tool.get("function", tool).get("strict") for tool in prompt.tools)
        asked = "response_format" if prompt.output is not None else "tool_choice"
        free = prompt.output is None and prompt.tool_choice != "required" and not strict
        raise NotCompiledError(GUARANTEE if free else asked, None)


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class CompilerThreads:
    """Threads that do nothing but compile, so that only requests with a new grammar wait for them.

    A hostile schema takes seconds until its trial is ended. So a tenant has one thread at most beside one that takes
    long; a thread that takes long makes room for others and lets them go first; nobody waits for ever, and the end of
    the process waits for seconds only. Used from one event loop. `timeout_s`: how long a request waits for its grammar,
    its place included.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(_THREADS)
        self._n_slow = 0
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of those who wait or compile
        self._slow: set[str] = set()  # tenants with a slow grammar that has left them their turn
        self._closed = False

    async def run(self, ask: Callable[[], Found], scope: str | None = None) -> Found:
        """What `ask` returns or raises: at once where it knows the grammar, else from a thread that compiles it.

        New grammars of one `scope` (tenant) come one after the other, None being a scope of its own each time;
        whoever asks for one in the making waits for it without a thread. A caller that is cancelled before its turn
        leaves the queue. Raises OverloadedError after `timeout_s`, what was begun going on by itself, and
        UnavailableError once closed. For a guarantee that nobody has asked for (field "tools") less time is given.
        """
        try:
            return ask()
        except NotCompiledError as error:
            missing = error
        timeout_s = min(_PATIENCE_S, self._timeout_s) if missing.field == GUARANTEE else self._timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._check()
                    try:
                        if missing.making is None:
                            return await self._on_thread(ask, scope)
                        await asyncio.wrap_future(missing.making)
                        return ask()
                    except NotCompiledError as error:
                        missing = error
        except TimeoutError:
            why = f"its schema, or others before it, take too long to compile: more than {timeout_s:g} s"
            raise OverloadedError(f"'{missing.field}': {why}", missing.field) from None

    def close(self) -> None:
        """Those that wait for a place are refused at their turn; what is being compiled is not waited for."""
        self._closed = True

    async def _on_thread(self, ask: Callable[[], Found], scope: str | None) -> Found:
        lock = asyncio.Lock() if scope is None else self._turns.setdefault(scope, asyncio.Lock())
        place, turn, room = ExitStack(), ExitStack(), ExitStack()
        place.callback(turn.close)
        place.callback(room.close)
        try:
            await lock.acquire()  # first, so that a tenant has one request at most in the queue of all
            turn.callback(lock.release)
            await self._places.acquire()
            room.callback(self._places.release)
            self._check()
            thread, result = _started(ask, place.close)
        except BaseException:
            place.close()
            raise
        asyncio.get_running_loop().call_later(_SLOW_S, self._make_room, room, turn, thread, scope)
        return await asyncio.wrap_future(result)

    def _make_room(self, room: ExitStack, turn: ExitStack, thread: threading.Thread, scope: str | None) -> None:
        """A thread that still compiles leaves its place among the first, if it finds one among the slow. The first slow
        one of a tenant lets the tenant's next one begin as well.
        """
        if not thread.is_alive() or self._n_slow == _SLOW_THREADS:
            return
        room.close()
        self._n_slow += 1
        room.callback(self._one_slow_less)
        if scope is not None and scope not in self._slow:
            turn.close()
            self._slow.add(scope)
            turn.callback(self._slow.discard, scope)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, _NICE)

    def _one_slow_less(self) -> None:
        self._n_slow -= 1

    def _check(self) -> None:
        if self._closed:
            raise UnavailableError("the engine is not running")


def _started(ask: Callable[[], Found], leave: Callable[[], None]) -> tuple[threading.Thread, Future[Found]]:
    """A thread, and what `ask` will return or raise on it; then comes `leave`, on the event loop of the caller."""
    loop = asyncio.get_running_loop()
    result: Future[Found] = Future()
    result.set_running_or_notify_cancel()  # who waits may be cancelled; the thread goes on

    def work() -> None:
        try:
            result.set_result(ask())
        except BaseException as failure:
            result.set_exception(failure)
        with suppress(RuntimeError):  # the event loop may be closed by now
            loop.call_soon_threadsafe(leave)

    thread = threading.Thread(target=work, name=_NAME, daemon=True)
    thread.start()
    return thread, result


@atexit.register
def _let_end() -> None:
    """Before the interpreter is taken down.

    Trap: a thread that comes out of the library while that happens crashes the process. Grammars that take seconds are
    waited for, and those that take minutes will not be ready so soon.
    """
    until = time.monotonic() + _GRACE_S
    for thread in threading.enumerate():
        if thread.name == _NAME:
            thread.join(max(0.0, until - time.monotonic()))
