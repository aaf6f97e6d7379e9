"""From a rule to a matcher. A grammar is compiled once, away from the event loop and the engine's thread, and kept.

A schema that cannot be followed is an error that names its field. A schema that takes long to compile keeps only those
waiting that need it: a process tries it first and is ended if that takes too long.
"""

import asyncio
import atexit
import copy
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from holdfast.replicas.constraints import trial
from holdfast.replicas.constraints.grammar import (
    ANY_OBJECT,
    SHOWN,
    CallForm,
    Forms,
    Path,
    ReplyRule,
    Schema,
    forms_of,
    malformed,
    names_alone,
    reply_grammar,
    schema_grammar,
    subschemas,
)
from holdfast.replicas.constraints.guidance import (
    AVAILABLE,
    LIMITS,
    CallBan,
    CallGuard,
    CallWatch,
    GrammarError,
    GuidedMatcher,
    Vocabulary,
)
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
GUARANTEE = "tools"  # the field of calls that are guaranteed, and not asked for
LONGEST_S = 5  # of processor time that a grammar may take to compile: long ones take two or three
_LONGEST_KEY = 2**18  # characters of a rule's key: what it takes to compile grows with them

_Making: TypeAlias = Future[Matcher | ErrorInfo]
Found = TypeVar("Found")


class NotCompiledError(Exception):
    """There is no grammar yet. `making` ends when another thread has compiled it; None: nobody has begun, and an event
    loop's thread must not. `field` is the request's field that asks for it.
    """

    def __init__(self, field: str, making: _Making | None) -> None:
        super().__init__(field)
        self.field = field
        self.making = making


class Compiler:
    """Matchers for one model. Any thread may call it.

    The last `entries` grammars are kept, and so are refusals. `vocabulary` is called once, with the first request that
    needs it: it reads every token. `compiled`: how many grammars were compiled, or tried.
    """

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], tool_format: ToolFormat, entries: int = MOST_GRAMMARS
    ) -> None:
        self._make_vocabulary = vocabulary
        self._tool_format = tool_format
        self._entries = entries
        self._lock = threading.Lock()  # of the table; nobody compiles or waits under it
        self._known: OrderedDict[tuple[str, ...], _Making] = OrderedDict()
        self._reading = threading.Lock()  # of the vocabulary
        self.compiled = 0

    def prepare(self) -> None:
        """Read the vocabulary, which takes seconds if it is large, and start a process that tries grammars."""
        if AVAILABLE:
            self._calls()
            complaint('start: "a"', _PART_S)

    @property
    def vocabulary(self) -> Vocabulary:
        return self._read()[0]

    def matcher(self, rule: ReplyRule, scope: str = "") -> Matcher:
        """A matcher at the beginning of a reply under `rule`.

        Each `scope` (a tenant) has its own grammars: a known grammar would tell what others have asked for. A new one
        is compiled on the caller's thread, in milliseconds as a rule. Nobody waits here: raises NotCompiledError while
        another thread compiles the same grammar, and for a new one on an event loop's thread. Raises
        InvalidRequestError, naming the field, for a schema that cannot be followed or is too long, for calls that the
        model cannot write, and without llguidance.
        """
        whole, rule = rule, _shortened(rule)
        key = (scope, rule.key, rule.fields)
        with self._lock:
            making = self._known.get(key)
            if making is not None and making.done() and not making.exception() and _used_up(making.result()):
                making = None
            new = making is None and not _on_event_loop()
            if new:
                making = self._known[key] = Future()
                making.set_running_or_notify_cancel()  # who waits may be cancelled; the grammar is made
                self.compiled += 1
                if len(self._known) > self._entries:
                    self._known.popitem(last=False)
            elif making is not None:
                self._known.move_to_end(key)
        if making is None or not (new or making.done()):
            raise NotCompiledError(field_of(rule), making)
        if new:
            try:
                making.set_result(self._compile(rule))
            except HoldfastError as refused:
                making.set_result(refused.info)
            except BaseException as failure:  # who waits is told; the next request tries again
                with self._lock:
                    self._known.pop(key, None)
                making.set_exception(failure)
        result = making.result()
        if isinstance(result, ErrorInfo):
            raise error_of(result)
        matcher = result.copy()
        if isinstance(matcher, CallGuard):
            matcher.loose = matcher.loose or rule is not whole
        return matcher

    def without_calls(self, names: frozenset[str]) -> Matcher | None:
        """A matcher of a text in which no call of the tools `names` begins. None: the model writes no calls, or its
        tokens are not bytes of text. Raises NotCompiledError on an event loop's thread before the vocabulary is read.
        """
        if "_watch" not in self.__dict__ and _on_event_loop():
            raise NotCompiledError("tool_choice", None)
        watch = self._calls()
        return CallBan(watch, names) if watch is not None and watch.vocabulary.exact else None

    def _read(self) -> tuple[Vocabulary, Forms | None]:
        with self._reading:
            return self._model

    def _calls(self) -> CallWatch | None:
        with self._reading:
            return self._watch

    @cached_property
    def _model(self) -> tuple[Vocabulary, Forms | None]:
        vocabulary = self._make_vocabulary()
        return vocabulary, forms_of(self._tool_format, vocabulary.knows)

    @cached_property
    def _watch(self) -> CallWatch | None:
        vocabulary, forms = self._model
        return CallWatch(forms, vocabulary) if forms is not None else None

    def _compile(self, rule: ReplyRule) -> Matcher:
        cause = field_of(rule)
        if not AVAILABLE:
            raise InvalidRequestError(f"'{cause}' needs the package llguidance, which is not installed", cause)
        vocabulary, forms = self._read()
        if not vocabulary.exact:
            raise InvalidRequestError(f"'{cause}' is not supported: the model's tokens are not bytes of text", cause)
        if rule.calls == "required" and forms is None:
            why = "the model's format of calls is not known; set engine.tool_format or engine.chat_template"
            raise InvalidRequestError(f"'tool_choice': {why}", "tool_choice")
        matcher, loose = _followed(vocabulary, forms, rule)
        watch = self._calls() if rule.in_text else None
        if forms is None or watch is None:
            return matcher
        over = forms.over_when_complete(rule.parallel)
        return CallGuard(matcher, watch, frozenset(tool.name for tool in rule.tools), rule.strict, over, loose)


def _used_up(result: Matcher | ErrorInfo) -> bool:
    return isinstance(result, (GuidedMatcher, CallGuard)) and result.used_up


def _followed(vocabulary: Vocabulary, forms: Forms | None, rule: ReplyRule) -> tuple[GuidedMatcher, bool]:
    """A matcher of `rule`, or of as much of it as can be followed where it is not strict; and whether that is less."""

    def compiled(rule: ReplyRule) -> GuidedMatcher:
        lark = reply_grammar(rule, forms)
        if why := complaint(lark, LONGEST_S):
            raise GrammarError(why)
        return vocabulary.compile(lark)

    try:
        return compiled(rule), False
    except (GrammarError, ValueError) as error:
        failure = error
    try:
        return compiled(_loosened(rule, forms, failure)), True
    except (InvalidRequestError, GrammarError, ValueError) as error:
        if rule.in_text and not rule.strict:  # nobody has asked for it: the names are held
            return compiled(names_alone(rule)), True
        if isinstance(error, InvalidRequestError):
            raise
        raise _too_large(rule, error) from error


def _too_large(rule: ReplyRule, error: Exception) -> InvalidRequestError:
    """Each schema can be followed alone, and together they cannot."""
    cause = field_of(rule)
    return InvalidRequestError(f"'{cause}': {error}", cause)


def field_of(rule: ReplyRule) -> str:
    """The request's field that asks for the rule, for errors that are not about a schema."""
    if rule.json is not None:
        return "response_format"
    if rule.calls == "required":
        return "tool_choice"
    strict = [tool.arguments.field for tool in rule.tools if tool.arguments.strict]
    return strict[0].removesuffix("parameters") + "strict" if strict else GUARANTEE


def _shortened(rule: ReplyRule) -> ReplyRule:
    """`rule`; one that is too long, and that nobody has asked for, is left with the names.

    Raises InvalidRequestError for another one that is too long.
    """
    if len(rule.key) > _LONGEST_KEY and rule.in_text and not rule.strict:
        rule = names_alone(rule)
    if len(rule.key) > _LONGEST_KEY:
        size, field = max((len(json.dumps(each.content, default=dict)), each.field) for each in rule.schemas)
        field = field if size > _LONGEST_KEY // 2 else "tools"
        most = f"at most {_LONGEST_KEY} characters of JSON"
        raise InvalidRequestError(f"'{field}' is too long to be followed: {most}", field)
    return rule


# ---- parts of a schema that cannot be followed ----

_PART_S = 2  # of processor time, for one part
_TRIES, _LONG_TRY = 2000, 400  # of parts of all schemas of a rule; one that takes too long counts as many
_MOST_LEFT_OUT = 16  # keywords of a schema


class _Search:
    """Tries parts of schemas: so many, and not for so long, so that nothing depends on what else runs."""

    def __init__(self) -> None:
        self._left = _TRIES

    @property
    def over(self) -> bool:
        return self._left <= 0

    def complaint(self, schema: Schema, form: CallForm | None = None, free: bool = False) -> str:
        """Why `schema` cannot be followed, as JSON or as arguments in `form`; "" if it can."""
        try:
            why = complaint(schema_grammar(schema, form, free), _PART_S)
        except ValueError as error:
            why = str(error)
        self._left -= _LONG_TRY if why == TOO_LONG else 1
        return why

    def fitting(self, schema: Schema, form: CallForm | None, free: bool, of: str, why: str) -> Schema:
        """`schema` if it can be followed in `form`, else what remains of it. `why` it cannot be, if that is known.

        Raises InvalidRequestError for one that is strict, and for a malformed one that somebody has asked for.
        """
        original = schema
        for _ in range(_MOST_LEFT_OUT):
            why = why or self.complaint(schema, form, free)
            if not why:
                return schema
            path, part, why = self._culprit(schema, why)
            if schema.strict or (malformed(part) and not free):
                place = ".".join(map(str, path))
                place_text = f" at {place!r}" if place else ""
                raise InvalidRequestError(f"Invalid schema{of} in '{schema.field}'{place_text}: {why}", schema.field)
            if self.over:
                break
            schema, why = self._without(schema, path), ""
        return replace(original, content=ANY_OBJECT if of else {})

    def _culprit(self, schema: Schema, why: str) -> tuple[Path, Any, str]:
        """The place of the innermost part of `schema` that cannot be followed, that part, and why it cannot.

        A pattern is named if the part could be followed without it.
        """
        path: Path = ()
        part: Any = schema.content
        inner = list(subschemas(part))
        while inner and not self.over:
            place, node = inner.pop(0)
            if isinstance(node, Mapping) and (complains := self.complaint(schema.part(node))):
                path, part, why = (*path, *place), node, complains
                inner = list(subschemas(part))
        pattern, rest = part.get("pattern"), {key: value for key, value in part.items() if key != "pattern"}
        if isinstance(pattern, str) and "the pattern" not in why and not self.complaint(schema.part(rest)):
            why = f"the pattern {pattern[:SHOWN]!r} cannot be followed: {why}"
        return path, part, why

    def _without(self, schema: Schema, path: Path) -> Schema:
        """`schema` without one keyword of the part at `path`: the first without which the part can be followed. If
        there is none the part keeps its type, or nothing.
        """
        content: Any = copy.deepcopy(schema.content)
        holder, node = None, content
        for step in path:
            holder, node = node, node[step]
        rests = [{key: value for key, value in node.items() if key != each} for each in node if each != "type"]
        rests += [{"type": node["type"]}] if "type" in node and len(node) > 1 else []
        rest = next((rest for rest in rests if not self.over and not self.complaint(schema.part(rest))), {})
        if holder is None:
            return replace(schema, content=rest)
        holder[path[-1]] = rest
        return replace(schema, content=content)


def _loosened(rule: ReplyRule, forms: Forms | None, error: Exception) -> ReplyRule:
    """`rule` without the keywords that cannot be followed.

    Raises InvalidRequestError for a strict schema, saying which part of it cannot be followed, and for schemas that are
    too large together.
    """
    search, form = _Search(), forms.first if forms is not None else None
    known = str(error) if len(rule.schemas) == 1 else ""  # of a schema that is alone, this was just found
    json_ = rule.json and search.fitting(rule.json, None, rule.in_text, "", known)
    tools = []
    for tool in rule.tools:
        of = f" for function '{tool.name}'"
        tools.append(replace(tool, arguments=search.fitting(tool.arguments, form, rule.in_text, of, known)))
    if json_ is rule.json and all(new.arguments is old.arguments for new, old in zip(tools, rule.tools, strict=True)):
        raise _too_large(rule, error)
    return replace(rule, tools=tuple(tools), json=json_)


# ---- processes that try grammars ----

TOO_LONG = "it takes too long to compile"
_SLOW_S = 1.0  # a grammar that takes longer gives way to others
_NICE_PROCESS, _NICE_THREAD = 5, 19
_IDLE = 4  # processes that are kept


class Trials:
    """Processes that try grammars, each one at a time. Any thread may ask, and none waits for another."""

    def __init__(self, limits: Mapping[str, int | bool]) -> None:
        self._limits = json.dumps(limits)
        self._idle: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        atexit.register(self.close)

    def complaint(self, lark: str, seconds: int) -> str:
        """Why llguidance does not take `lark`, in its words, or `TOO_LONG` after `seconds` of processor time; "" if it
        takes it.
        """
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None or process.poll() is not None:
            process = self._begin()
        answer, slow = None, False
        try:
            answer, slow = _answer(process, json.dumps([lark, seconds]))
        finally:
            with self._lock:
                keep = answer is not None and not slow and len(self._idle) < _IDLE
                if keep:
                    self._idle.append(process)
            if not keep:
                _end(process)
        return TOO_LONG if answer is None else answer

    def close(self) -> None:
        """End the processes that wait. Another one begins with the next grammar."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            _end(process)

    def _begin(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-I", trial.__file__, self._limits, *filter(None, sys.path)]
        pipe = subprocess.PIPE
        # A session of its own: an interrupt from the terminal is its owner's to handle, whose end it sees.
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)


def _answer(process: "subprocess.Popen[str]", line: str) -> tuple[str | None, bool]:
    """The answer of a process to `line`, and whether it took long. None: the process has ended, by itself when it has
    had its processor time: how long that takes depends on what else runs, and refuses nothing.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    if not process.stdout.readline():
        return None, False  # it says when it is ready
    with suppress(BrokenPipeError):
        process.stdin.write(line + "\n")
        process.stdin.flush()
    waits = select.poll()
    waits.register(process.stdout, select.POLLIN | select.POLLHUP)
    if slow := not waits.poll(_SLOW_S * 1000):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICE_PROCESS)
    answer = process.stdout.readline()
    return str(json.loads(answer)) if answer else None, slow


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


_TRIALS = Trials(LIMITS)


def complaint(lark: str, seconds: int) -> str:
    """Why the grammar `lark` is not taken, or takes longer than `seconds`; "" if it is. Any thread may ask."""
    found = _TRIALS.complaint(lark, seconds)
    return str(GrammarError(found)) if found else ""


# ---- threads that compile ----

TIMEOUT_S = 30.0  # the longest schema that is taken compiles in seconds
_PATIENCE_S = 3.0  # of a reply that may do without its grammar, since nobody has asked for it
_THREADS = 4
_OF_TENANT = 2  # threads at a time, so that one slow grammar does not hold up the tenant's next
_SLOW_THREADS = 16  # that have given their places to others
_NAME = "holdfast-grammar"
_GRACE_S = 5.0  # for threads that compile when the process ends


def leave_event_loop(prompt: ChatPrompt) -> None:
    """Raises NotCompiledError on an event loop's thread: the rule of `prompt` is read on another one."""
    if _on_event_loop():
        strict = any(tool.get("function", tool).get("strict") for tool in prompt.tools)
        field = "response_format" if prompt.output is not None else "tool_choice"
        free = prompt.output is None and prompt.tool_choice != "required" and not strict
        raise NotCompiledError(GUARANTEE if free else field, None)


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class CompilerThreads:
    """Threads that do nothing but compile, so that only requests with a new grammar wait for them.

    A hostile schema takes seconds until its trial is ended. So a tenant has few threads, and a thread that takes long
    gives its place to the next one. Nobody waits for ever, and the end of the process waits for seconds only. Used from
    one event loop. `timeout_s`: how long a request waits for a place and its grammar.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(_THREADS)
        self._of_tenant: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._n_slow = 0
        self._closed = False

    async def run(self, ask: Callable[[], Found], scope: str | None = None) -> Found:
        """The result of `ask`, or its error: at once where it knows the grammar, else from a thread that compiles it.

        `scope` is the tenant; None is another one each time. A request for a grammar in the making waits for it without
        a thread. A caller that is cancelled before its turn leaves the queue. Raises UnavailableError once closed, and
        OverloadedError after `timeout_s`, while the compilation goes on. A guarantee that nobody has asked for (field
        "tools") has less time.
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
        """Refuse the requests that wait for a thread, each at its turn. Do not wait for threads that compile."""
        self._closed = True

    async def _on_thread(self, ask: Callable[[], Found], scope: str | None) -> Found:
        own, loop = asyncio.Semaphore(_OF_TENANT), asyncio.get_running_loop()
        own = own if scope is None else self._of_tenant.setdefault(scope, own)
        result: Future[Found] = Future()
        result.set_running_or_notify_cancel()  # who waits may be cancelled; the thread goes on
        with ExitStack() as held, ExitStack() as place:
            await own.acquire()  # first, so that a tenant has few requests in the queue of all
            held.callback(own.release)
            await self._places.acquire()
            place.callback(self._places.release)
            self._check()
            kept = place.pop_all()
            held.callback(kept.close)
            leave = held.pop_all().close

        def work() -> None:
            try:
                result.set_result(ask())
            except BaseException as failure:
                result.set_exception(failure)
            with suppress(RuntimeError):  # the event loop may be closed by now
                loop.call_soon_threadsafe(leave)

        thread = threading.Thread(target=work, name=_NAME, daemon=True)
        thread.start()
        loop.call_later(_SLOW_S, self._give_way, kept, thread)
        return await asyncio.wrap_future(result)

    def _give_way(self, place: ExitStack, thread: threading.Thread) -> None:
        """A thread that still compiles leaves its place to others, which go first from now on, unless many have."""
        if not thread.is_alive() or self._n_slow == _SLOW_THREADS:
            return
        place.close()
        self._n_slow += 1
        place.callback(self._end_slow)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, _NICE_THREAD)

    def _end_slow(self) -> None:
        self._n_slow -= 1

    def _check(self) -> None:
        if self._closed:
            raise UnavailableError("the engine is not running")


@atexit.register
def _let_end() -> None:
    """Trap: a thread that comes out of llguidance while the interpreter is taken down crashes the process. Grammars
    that take seconds are waited for; those that take minutes will not be ready so soon.
    """
    until = time.monotonic() + _GRACE_S
    for thread in threading.enumerate():
        if thread.name == _NAME:
            thread.join(max(0.0, until - time.monotonic()))
