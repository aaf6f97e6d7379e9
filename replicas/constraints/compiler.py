"""From what a request asks of its reply to a matcher: grammars are compiled once and kept, bounded.

Used by the text side, away from the engine's thread; who may compile, and when, is said by `threads`. A schema that
cannot be followed is an error naming its field.
"""

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

from holdfast.replicas.constraints import library
from holdfast.replicas.constraints.calls import Forms, forms_of
from holdfast.replicas.constraints.lark import Grammar
from holdfast.replicas.constraints.library import GrammarError, Grammars
from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.constraints.replies import reply_grammar
from holdfast.replicas.constraints.rules import ReplyRule, Schema, ToolRule
from holdfast.replicas.constraints.vocabulary import Vocabulary
from holdfast.replicas.errors import ErrorInfo, HoldfastError, InvalidRequestError, error_of
from holdfast.replicas.text.formats import ToolFormat

_ANY_OBJECT = {"type": "object"}
_LONGEST = 2**18  # characters of a rule's key: what it takes to compile grows with them

_Key: TypeAlias = tuple[str, ...]
_Grammar: TypeAlias = Future[Matcher | ErrorInfo]


class NotCompiledError(Exception):
    """There is no grammar yet. `making` ends when another thread has compiled it; None: nobody has begun, and an event
    loop's thread must not. `field` is the request's that asks for it.
    """

    def __init__(self, field: str, making: _Grammar | None) -> None:
        super().__init__(field)
        self.field = field
        self.making = making


class Compiler:
    """Matchers for one model; the last `entries` grammars are kept, and refusals as well. Any thread may call it.

    `vocabulary` is called when the first request needs it: it reads every token. `compiled`: how many grammars were
    compiled, or tried.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], tool_format: ToolFormat, entries: int) -> None:
        self._make_vocabulary = vocabulary
        self._tool_format = tool_format
        self._entries = entries
        self._lock = threading.Lock()  # of the table; nobody compiles or waits under it
        self._known: OrderedDict[_Key, _Grammar] = OrderedDict()
        self._reading = threading.Lock()  # of the vocabulary and what is made of it, once
        self.compiled = 0

    def matcher(self, rule: ReplyRule) -> Matcher:
        """A matcher at the beginning of a reply under `rule`.

        A new grammar is compiled on the caller's thread, for milliseconds as a rule; a hostile schema takes minutes.
        Nobody waits here: NotCompiledError while another thread compiles the same grammar, and on an event loop's
        thread for a new one. Raises InvalidRequestError naming the field: a schema that cannot be followed or is too
        long, calls that the model cannot write, or no library to follow anything with.
        """
        key = _key_of(rule)
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
        return result.copy()

    def _add(self, key: _Key) -> _Grammar:
        """A grammar in the making, in the table. Call it under the lock."""
        found: _Grammar = Future()
        found.set_running_or_notify_cancel()  # one of those who wait may be cancelled, the grammar is made
        self._known[key] = found
        self.compiled += 1
        if len(self._known) > self._entries:
            self._known.popitem(last=False)
        return found

    def _settle(self, key: _Key, found: _Grammar, rule: ReplyRule) -> None:
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
    def _grammars(self) -> Grammars:
        return Grammars(self._vocabulary)

    def _compile(self, rule: ReplyRule) -> Matcher:
        cause = field_of(rule)
        if not library.AVAILABLE:
            raise InvalidRequestError(f"'{cause}' needs the package llguidance, which is not installed", cause)
        with self._reading:
            if not self._vocabulary.exact:
                why = "the model's tokens are not bytes of text"
                raise InvalidRequestError(f"'{cause}' is not supported: {why}", cause)
            grammars, forms = self._grammars, self._forms
        if rule.calls == "required" and forms is None:
            raise InvalidRequestError("'tool_choice': the model knows no tool calls", "tool_choice")
        try:
            return grammars.compile(reply_grammar(rule, forms))
        except (GrammarError, ValueError) as error:
            lenient = self._without_what_fails(rule, error)
        try:
            return grammars.compile(reply_grammar(lenient, forms))
        except (GrammarError, ValueError) as error:  # the others are too large together
            raise InvalidRequestError(f"'{cause}': {error}", cause) from error

    def _without_what_fails(self, rule: ReplyRule, error: Exception) -> ReplyRule:
        """`rule` with any object for the arguments of tools that are not strict and fail; raises for the others."""
        if rule.json is not None and (why := self._complaint(rule.json)):
            raise InvalidRequestError(f"Invalid schema in '{rule.json.field}': {why}", rule.json.field)
        tools: list[ToolRule] = []
        for tool in rule.tools:
            why = self._complaint(tool.arguments, keywords=self._keywords)
            if why and tool.arguments.strict:
                field = tool.arguments.field
                raise InvalidRequestError(f"Invalid schema for function '{tool.name}' in '{field}': {why}", field)
            arguments = replace(tool.arguments, content=_ANY_OBJECT) if why else tool.arguments
            tools.append(replace(tool, arguments=arguments))
        if [tool.arguments for tool in tools] == [tool.arguments for tool in rule.tools]:
            cause = field_of(rule)  # each schema is fine alone: together they are too large
            raise InvalidRequestError(f"'{cause}': {error}", cause)
        return replace(rule, tools=tuple(tools))

    @property
    def _keywords(self) -> bool:
        return self._forms is not None and self._forms.first.keywords

    def _complaint(self, schema: Schema, keywords: bool = False) -> str:
        """Why `schema` cannot be followed; "" where it can."""
        grammar = Grammar()
        try:
            rule = grammar.keywords("body", schema) if keywords else grammar.json("body", schema)
            self._grammars.compile(f"start: {rule}\n{grammar.text}")
        except (GrammarError, ValueError) as error:
            return str(error)
        return ""


def field_of(rule: ReplyRule) -> str:
    """The request's field that asks for the rule, for errors that are not about a schema."""
    if rule.json is not None:
        return "response_format"
    if rule.calls == "required":
        return "tool_choice"
    strict: Sequence[ToolRule] = [tool for tool in rule.tools if tool.arguments.strict]
    return strict[0].arguments.field.removesuffix("parameters") + "strict" if strict else "tools"


def _key_of(rule: ReplyRule) -> _Key:
    """Equal for rules that mean the same grammar, and whose errors name the same fields.

    Raises InvalidRequestError for a rule that is too long.
    """
    key = rule.key
    schemas = [tool.arguments for tool in rule.tools] + ([rule.json] if rule.json is not None else [])
    if len(key) > _LONGEST:
        sizes = {schema.field: len(json.dumps(schema.content, default=dict)) for schema in schemas}
        largest = max(sizes, key=lambda field: sizes[field])
        field = largest if sizes[largest] > _LONGEST // 2 else "tools"
        raise InvalidRequestError(f"'{field}' is too long to be followed: at most {_LONGEST} characters of JSON", field)
    return key, *(schema.field for schema in schemas)


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
