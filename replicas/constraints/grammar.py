"""What a request asks of its reply, and the grammar that says so in the library's Lark dialect.

A rule is read from the prompt: plain data, equal in its `key` where it means the same. With the forms in which a model
writes its calls it becomes the text of a grammar. Not here: the library, and when a text is compiled (`guidance`,
`compiler`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from holdfast.replicas.requests import ChatPrompt
from holdfast.replicas.text.calls.formats import ToolFormat

Calls: TypeAlias = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """A JSON schema and the request's field that holds it. Not `strict`: what the library lacks is left out."""

    content: Mapping[str, Any]
    strict: bool
    field: str


@dataclass(frozen=True, slots=True, eq=False)
class ToolRule:
    """A tool that may be called, and what its arguments look like."""

    name: str
    arguments: Schema


@dataclass(frozen=True, slots=True, eq=False)
class ReplyRule:
    """A reply is calls of `tools`, or `json`, or text.

    `calls` "auto": text or calls as the model likes, where `json` is None; else calls or JSON. `parallel`: several.
    """

    tools: tuple[ToolRule, ...] = ()
    calls: Calls = "none"
    parallel: bool = True
    json: Schema | None = None

    @property
    def key(self) -> str:
        """Equal for rules that mean the same grammar."""
        tools = [(tool.name, tool.arguments.content, tool.arguments.strict) for tool in self.tools]
        body = self.json and (self.json.content, self.json.strict)
        return json.dumps([tools, self.calls, self.parallel, body], default=dict)


def reply_rule(prompt: ChatPrompt) -> ReplyRule | None:
    """What `prompt` asks for; None where the model may write what it likes.

    A strict tool the model may call is enough: from the marker of a call on its name and arguments follow the rule.
    """
    calls: Calls = "none" if not prompt.tools else prompt.tool_choice
    tools = _tools(prompt) if calls != "none" else ()
    form = prompt.output
    if form is not None and calls != "required":
        body = Schema(form.schema, form.strict, "response_format.json_schema.schema")
        return ReplyRule(tools, calls, prompt.parallel_tool_calls, body)
    if calls == "required":
        return ReplyRule(tools, calls, prompt.parallel_tool_calls and not prompt.forced_tool)
    if any(tool.arguments.strict for tool in tools):
        return ReplyRule(tools, "auto", prompt.parallel_tool_calls)
    return None


def declared_rule(prompt: ChatPrompt) -> ReplyRule:
    """Text and calls as the model likes, but calls of declared tools only."""
    return ReplyRule(_tools(prompt), "auto", prompt.parallel_tool_calls)


def _tools(prompt: ChatPrompt) -> tuple[ToolRule, ...]:
    rules = []
    for index, tool in enumerate(prompt.tools):
        function = tool.get("function", tool)
        name = function.get("name")
        if not isinstance(name, str) or (prompt.forced_tool and name != prompt.forced_tool):
            continue
        schema = {"type": "object", **_closed(function.get("parameters") or {"properties": {}})}
        rules.append(ToolRule(name, Schema(schema, bool(function.get("strict")), f"tools.{index}.function.parameters")))
    return tuple(rules)


_OPEN = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "anyOf", "allOf", "oneOf"}
)


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters that list their properties and say nothing of others have no others: none are documented."""
    if "properties" in schema and not _OPEN.intersection(schema):
        return {**schema, "additionalProperties": False}
    return schema


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model's chat template writes calls, one way of those that the readers in `text.calls` take.

    Calls are `opener` `head` call (`between` call)* `tail`, and a call is `before` its name, `middle`, its arguments
    and `after`. `keywords`: the arguments are Python's, else JSON.
    """

    opener: str
    middle: str
    between: str
    before: str = ""
    after: str = ""
    head: str = ""
    tail: str = ""
    keywords: bool = False


_OBJECT = '{"name": "'

HERMES = CallForm(
    opener="<tool_call>",
    before="\n" + _OBJECT,
    middle='", "arguments": ',
    after="}\n</tool_call>",
    between="\n<tool_call>",
)
LLAMA3 = CallForm(opener="<|python_tag|>", before=_OBJECT, middle='", "parameters": ', after="}", between="; ")
LLAMA3_BARE = replace(LLAMA3, opener="")
LLAMA3_FUNCTION = CallForm(opener="<function=", middle=">", after="</function>", between="<function=")
MISTRAL_LIST = CallForm(
    opener="[TOOL_CALLS]", head="[", before=_OBJECT, middle='", "arguments": ', after="}", between=", ", tail="]"
)
MISTRAL = CallForm(opener="[TOOL_CALLS]", middle="[ARGS]", between="[TOOL_CALLS]")
PYTHONIC = CallForm(opener="", head="[", middle="(", after=")", between=", ", tail="]", keywords=True)
PYTHONIC_MARKED = replace(PYTHONIC, opener="<|python_start|>", tail="]<|python_end|>")


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of one model: `first` for a reply that begins with calls, `triggered` by their opener in a text.

    A text that begins as `bare` does is calls in that form.
    """

    first: CallForm
    triggered: tuple[CallForm, ...]
    bare: CallForm | None = None


def forms_of(tool_format: ToolFormat, knows: Callable[[str], bool]) -> Forms | None:
    """The forms of `tool_format`; `knows` tells which markers are tokens of the model. None: it has no calls."""
    match tool_format:
        case ToolFormat.HERMES:
            return Forms(HERMES, (HERMES,))
        case ToolFormat.LLAMA3:
            return Forms(LLAMA3_BARE, (LLAMA3, LLAMA3_FUNCTION), LLAMA3_BARE)
        case ToolFormat.LLAMA3_FUNCTION:
            return Forms(LLAMA3_FUNCTION, (LLAMA3_FUNCTION, LLAMA3), LLAMA3_BARE)
        case ToolFormat.MISTRAL:
            form = MISTRAL if knows("[ARGS]") else MISTRAL_LIST
            return Forms(form, (form,))
        case ToolFormat.PYTHONIC:
            first = PYTHONIC_MARKED if knows("<|python_start|>") else PYTHONIC
            return Forms(first, (PYTHONIC_MARKED,), PYTHONIC)
        case ToolFormat.NONE:
            return None


_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',  # others could spell half a surrogate pair
}


class LarkText:
    """Rules of a grammar as they are written, one a line.

    JSON is written as `json.dumps` does, which is how chat templates write it: one text for one value, and no room for
    white space without end.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, *alternatives: str) -> str:
        """A rule with these right-hand sides; returns its name."""
        self._lines.append(f"{name}: {' | '.join(alternatives)}")
        return name.partition("[")[0]

    def json(self, name: str, schema: Schema) -> str:
        """A rule for the values of `schema`."""
        style = _STYLE if schema.strict else {**_STYLE, "lenient": True}
        return self.add(name, "%json " + json.dumps({**schema.content, "x-guidance": style}))

    def keywords(self, name: str, schema: Schema) -> str:
        """A rule for the keyword arguments of a Python call: the properties of `schema`, in its order.

        Their values are JSON, whose words and escapes the reader of such calls takes as Python's. Raises ValueError
        for a schema whose properties cannot be told, and for a required one that is no Python name.
        """
        content = schema.content
        properties, required = content.get("properties", {}), content.get("required", [])
        if not isinstance(properties, Mapping):
            raise ValueError("'properties' must be an object")
        if not isinstance(required, Sequence) or not all(isinstance(key, str) for key in required):
            raise ValueError("'required' must be a list of names")
        if unfit := [key for key in ("$ref", "anyOf", "allOf", "oneOf", "patternProperties") if key in content]:
            raise ValueError(f"{unfit[0]} at the top level has no meaning for keyword arguments")
        if nameless := [key for key in required if key not in properties or not key.isidentifier()]:
            raise ValueError(f"{nameless[0]!r} cannot be a keyword argument")
        shared = {key: content[key] for key in ("$defs", "definitions") if key in content}
        names = [key for key in properties if key.isidentifier()]
        values = []
        for index, key in enumerate(names):
            value = properties[key] if isinstance(properties[key], Mapping) else {}
            rule = self.json(f"{name}_value{index}", Schema({**value, **shared}, schema.strict, schema.field))
            values.append((literal(f"{key}=") + f" {rule}", key in required))
        return self._sequence(name, values)

    def _sequence(self, name: str, items: Sequence[tuple[str, bool]]) -> str:
        """`items` in order with commas between them, each with whether it must be there. One rule per place and
        whether anything stands before it."""
        for index in range(len(items), -1, -1):
            for begun in (False, True):
                rule = f"{name}_from{index}_{int(begun)}"
                if index == len(items):
                    self.add(rule, '""')
                    continue
                item, needed = items[index]
                taken = f"{literal(', ') if begun else ''} {item} {name}_from{index + 1}_1"
                self.add(rule, *([taken] if needed else [taken, f"{name}_from{index + 1}_{int(begun)}"]))
        return self.add(name, f"{name}_from0_0")

    @property
    def text(self) -> str:
        """The whole grammar."""
        return "\n".join(self._lines) + "\n"


def literal(text: str) -> str:
    """`text` as a terminal; nothing for no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


class CallRules:
    """Adds the rules of calls to a grammar, each once."""

    def __init__(self, grammar: LarkText, tools: tuple[ToolRule, ...], parallel: bool) -> None:
        self._grammar = grammar
        self._tools = tools
        self._parallel = parallel
        self._known: dict[CallForm, str] = {}
        self._arguments: dict[tuple[bool, int], str] = {}

    def after_opener(self, form: CallForm) -> str:
        """The rule for everything after `form`'s opener, to the end of the reply. Raises ValueError: see `LarkText`."""
        found = self._known.get(form)
        if found is None:
            name = f"calls{len(self._known)}"
            calls = [self._call(form, index) for index in range(len(self._tools))]
            call = self._grammar.add(f"{name}_one", *calls)
            more = f"({literal(form.between)} {call})*" if self._parallel else ""
            found = self._grammar.add(name, f"{literal(form.head)} {call} {more} {literal(form.tail)}")
            self._known[form] = found
        return found

    def _call(self, form: CallForm, index: int) -> str:
        tool = self._tools[index]
        before, after = literal(f"{form.before}{tool.name}{form.middle}"), literal(form.after)
        return f"{before} {self._arguments_rule(form.keywords, index, tool.arguments)} {after}"

    def _arguments_rule(self, keywords: bool, index: int, schema: Schema) -> str:
        found = self._arguments.get((keywords, index))
        if found is None:
            if keywords:
                found = self._grammar.keywords(f"keywords{index}", schema)
            else:
                found = self._grammar.json(f"arguments{index}", schema)
            self._arguments[keywords, index] = found
        return found


_TEXT = r"/(.|\n)*/"
_SPACE = r" \t\r\n"


def reply_grammar(rule: ReplyRule, forms: Forms | None) -> str:
    """`rule` in the library's Lark dialect: JSON, calls, or text in which the opener of a form begins calls.

    In a text the grammar waits: nothing is asked of it until it has spelled an opener. After calls there is no more
    text, because the reader of calls would end the reply there. `forms` None: the model writes no calls. Raises
    ValueError for a rule that the forms cannot follow.
    """
    grammar = LarkText()
    starts: list[str] = []
    if rule.json is not None:
        starts.append(grammar.json("answer", rule.json))
    if rule.calls != "none" and rule.tools and forms is not None:
        calls = CallRules(grammar, rule.tools, rule.parallel)
        if rule.calls == "required" or rule.json is not None:
            starts.append(f"{literal(forms.first.opener)} {calls.after_opener(forms.first)}")
        else:
            starts += _text_or_calls(grammar, calls, forms)
    if not starts:
        starts.append(grammar.add("TEXT", _TEXT))
    return f"start: {' | '.join(starts)}\n{grammar.text}"


def _text_or_calls(grammar: LarkText, calls: CallRules, forms: Forms) -> list[str]:
    starts: list[str] = []
    text = _TEXT
    if forms.bare is not None:  # white space may stand before calls without an opener, as after thinking
        start = (forms.bare.head + forms.bare.before)[0]
        starts.append(f"{grammar.add('SPACE', rf'/[{_SPACE}]*/')} {calls.after_opener(forms.bare)}")
        text = rf"/[{_SPACE}]*([^{_SPACE}\{start}](.|\n)*)?/"
    grammar.add("TEXT", text)
    starts.append("TEXT")
    for index, form in enumerate(forms.triggered):
        head = grammar.add(f"head{index}[lazy]", f"TEXT {literal(form.opener)}")
        starts.append(f"{head} {calls.after_opener(form)}")
    return starts
