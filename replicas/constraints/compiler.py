"""From what a request asks of its reply to a matcher: grammars are compiled once and kept, bounded.

Used by the text side, away from the engine's thread. A schema that cannot be followed is an error naming its field.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from holdfast.replicas.constraints import library
from holdfast.replicas.constraints.calls import Forms, forms_of
from holdfast.replicas.constraints.lark import Grammar
from holdfast.replicas.constraints.library import GrammarError, Grammars
from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.constraints.replies import reply_grammar
from holdfast.replicas.constraints.rules import ReplyRule, Schema, ToolRule
from holdfast.replicas.constraints.vocabulary import Vocabulary
from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.text.formats import ToolFormat

_ANY_OBJECT = {"type": "object"}


class Compiler:
    """Matchers for one model; the last `entries` grammars are kept. Any thread may call it.

    `vocabulary` is called when the first request needs it: it reads every token.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], tool_format: ToolFormat, entries: int) -> None:
        self._make_vocabulary = vocabulary
        self._tool_format = tool_format
        self._entries = entries
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Matcher] = OrderedDict()
        self.compiled = 0

    def matcher(self, rule: ReplyRule) -> Matcher:
        """A matcher at the beginning of a reply under `rule`.

        Raises InvalidRequestError naming the field: a schema that cannot be followed, calls that the model cannot
        write, or no library to follow anything with.
        """
        key = rule.key
        with self._lock:
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = self._compile(rule)
                self.compiled += 1
                if len(self._known) > self._entries:
                    self._known.popitem(last=False)
            else:
                self._known.move_to_end(key)
        return found.copy()

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
        if not self._vocabulary.exact:
            raise InvalidRequestError(f"'{cause}' is not supported: the model's tokens are not bytes of text", cause)
        if rule.calls == "required" and self._forms is None:
            raise InvalidRequestError("'tool_choice': the model knows no tool calls", "tool_choice")
        try:
            return self._grammars.compile(reply_grammar(rule, self._forms))
        except (GrammarError, ValueError) as error:
            lenient = self._without_what_fails(rule, error)
            return self._grammars.compile(reply_grammar(lenient, self._forms))

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
