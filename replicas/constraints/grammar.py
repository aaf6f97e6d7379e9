"""What a request asks of its reply, and the grammar that says so in the library's Lark dialect.

A rule is read from the prompt: plain data, equal in its `key` where it means the same. With the forms in which a model
writes its calls it becomes the text of a grammar. Not here: the library, and when a text is compiled (`guidance`,
`compiler`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from holdfast.replicas.config import Guarantee
from holdfast.replicas.requests import ChatPrompt
from holdfast.replicas.text.calls.formats import TAGS, TagForm, ToolFormat
from holdfast.replicas.text.calls.values import TEXT, argument_schema, kinds_of, resolved

Calls: TypeAlias = Literal["none", "auto", "required"]

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


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

    `calls` "auto": calls or JSON; where `json` is None the rule is about the calls in a text. `parallel`: several.
    """

    tools: tuple[ToolRule, ...] = ()
    calls: Calls = "none"
    parallel: bool = True
    json: Schema | None = None

    @property
    def in_text(self) -> bool:
        """Calls stand in a text that is free."""
        return self.calls == "auto" and self.json is None

    @property
    def strict(self) -> bool:
        """Whether some tool has to be followed whatever that takes."""
        return any(tool.arguments.strict for tool in self.tools)

    @property
    def key(self) -> str:
        """Equal for rules that mean the same grammar."""
        tools = [(tool.name, tool.arguments.content, tool.arguments.strict) for tool in self.tools]
        body = self.json and (self.json.content, self.json.strict)
        return json.dumps([tools, self.calls, self.parallel, body], default=dict)


def reply_rule(prompt: ChatPrompt, guarantee: Guarantee = "schema", writes_calls: bool = True) -> ReplyRule | None:
    """What `prompt` asks for; None where the model may write what it likes.

    `guarantee`: what calls that nothing else is asked of are held to: declared names and any arguments, declared names
    and their schemas, or nothing, unless a tool is strict. `writes_calls`: the model has a form for them.
    """
    calls: Calls = "none" if not prompt.tools else prompt.tool_choice
    tools = _tools(prompt) if calls != "none" else ()
    form = prompt.output
    if form is not None and calls != "required":
        body = Schema(form.schema, form.strict, "response_format.json_schema.schema")
        return ReplyRule(tools, calls, prompt.parallel_tool_calls, body)
    if calls == "required":
        return ReplyRule(tools, calls, prompt.parallel_tool_calls and not prompt.forced_tool)
    if not (tools and writes_calls) or (guarantee == "off" and not any(tool.arguments.strict for tool in tools)):
        return None
    rule = ReplyRule(tools, "auto", prompt.parallel_tool_calls)
    return rule if guarantee != "names" else names_alone(rule)


def names_alone(rule: ReplyRule) -> ReplyRule:
    """`rule` with any object for the arguments of tools that are not strict."""
    tools = [
        tool if tool.arguments.strict else replace(tool, arguments=replace(tool.arguments, content=ANY_OBJECT))
        for tool in rule.tools
    ]
    return replace(rule, tools=tuple(tools))


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
    and `after`. `keywords`: the arguments are Python's; `tags`: they stand in these; else they are JSON. `number` is a
    pattern of what stands behind a name, and `header` of all that may stand for `middle`. `alone`: a reply has one
    call. Without an opener `frame` is a pattern of everything up to the arguments of the first call, in whatever style,
    with the name as its group.
    """

    opener: str
    middle: str
    between: str
    before: str = ""
    after: str = ""
    head: str = ""
    tail: str = ""
    keywords: bool = False
    tags: TagForm | None = None
    number: str = ""
    header: str = ""
    alone: bool = False
    frame: str = ""

    @property
    def begins(self) -> str:
        """The first character of calls without an opener."""
        return (self.head + self.before)[0]

    @property
    def restarts(self) -> bool:
        """Each call has an opener of its own."""
        return bool(self.opener) and self.between.strip().startswith(self.opener)

    def until_arguments(self, name: str) -> str:
        """A first call up to its arguments."""
        return f"{self.opener}{self.head}{self.before}{name}{self.middle}"


_OBJECT = '{"name": "'

HERMES = CallForm(
    opener="<tool_call>",
    before="\n" + _OBJECT,
    middle='", "arguments": ',
    after="}\n</tool_call>",
    between="\n<tool_call>",
)
LLAMA3 = CallForm(opener="<|python_tag|>", before=_OBJECT, middle='", "parameters": ', after="}", between="; ")
_TYPE = r'(?:"type"\s*:\s*"function"\s*,\s*)?'
LLAMA3_BARE = replace(
    LLAMA3,
    opener="",
    frame=rf'\{{\s*{_TYPE}"name"\s*:\s*"([^"\\]*)"\s*,\s*{_TYPE}"(?:parameters|arguments)"\s*:\s*',
)
LLAMA3_FUNCTION = CallForm(opener="<function=", middle=">", after="</function>", between="<function=")
MISTRAL_LIST = CallForm(
    opener="[TOOL_CALLS]", head="[", before=_OBJECT, middle='", "arguments": ', after="}", between=", ", tail="]"
)
MISTRAL = CallForm(opener="[TOOL_CALLS]", middle="[ARGS]", between="[TOOL_CALLS]")
PYTHONIC = CallForm(
    opener="", head="[", middle="(", after=")", between=", ", tail="]", keywords=True, frame=r"\[\s*([\w.\-]+)\("
)
PYTHONIC_MARKED = replace(PYTHONIC, opener="<|python_start|>", tail="]<|python_end|>", frame="")
LLAMA4_BARE = replace(LLAMA3_BARE, between="")
LLAMA4 = replace(LLAMA3, opener="<|python_start|>", between="", tail="<|python_end|>")
DEEPSEEK_V31 = CallForm(
    opener="<｜tool▁calls▁begin｜>",
    before="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    after="<｜tool▁call▁end｜>",
    between="",
    tail="<｜tool▁calls▁end｜>",
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V31,
    before=DEEPSEEK_V31.before + "function<｜tool▁sep｜>",
    middle="\n```json\n",
    after="\n```<｜tool▁call▁end｜>",
    between="\n",
)
KIMI_K2 = CallForm(
    opener="<|tool_calls_section_begin|>",
    before="<|tool_call_begin|>functions.",
    number=":[0-9]{1,4}",
    middle="<|tool_call_argument_begin|>",
    after="<|tool_call_end|>",
    between="",
    tail="<|tool_calls_section_end|>",
)
MINIMAX = CallForm(
    opener="<tool_calls>",
    before="\n" + _OBJECT,
    middle='", "arguments": ',
    after="}",
    between="",
    tail="\n</tool_calls>",
)

_TYPED = r"(( |( ?<\|constrain\|>))(json|code))?<\|message\|>"  # what a message has in it
HARMONY = CallForm(
    opener="<|channel|>commentary to=",
    before="functions.",
    middle=" <|constrain|>json<|message|>",
    header=_TYPED,
    between="<|call|><|start|>assistant<|channel|>commentary to=",
    alone=True,
)
HARMONY_STARTED = replace(
    HARMONY,
    opener="<|start|>assistant to=",
    middle="<|channel|>commentary <|constrain|>json<|message|>",
    header=rf"<\|channel\|>(commentary|analysis){_TYPED}",
)
HARMONY_ANALYSIS = replace(HARMONY, opener="<|channel|>analysis to=")


def _tag_form(tool_format: ToolFormat, opener: str, after: str, between: str) -> CallForm:
    tags = TAGS[tool_format]
    return CallForm(opener=opener, middle=tags.named, after=after, between=between, tags=tags)


QWEN3_CODER = replace(
    _tag_form(ToolFormat.QWEN3_CODER, "<tool_call>", "</function>\n</tool_call>", "\n<tool_call>"),
    before="\n<function=",
)
QWEN3_CODER_ALONE = _tag_form(ToolFormat.QWEN3_CODER, "<function=", "</function>", "\n<function=")
GLM = _tag_form(ToolFormat.GLM, "<tool_call>", "</tool_call>", "\n<tool_call>")
MINIMAX_M2 = replace(
    _tag_form(ToolFormat.MINIMAX_M2, "<minimax:tool_call>", "</invoke>", ""),
    before='\n<invoke name="',
    tail="\n</minimax:tool_call>",
)

DEEPSEEK_V32 = replace(
    _tag_form(ToolFormat.DEEPSEEK_V32, "<｜DSML｜function_calls>", "</｜DSML｜invoke>", ""),
    before='\n<｜DSML｜invoke name="',
    tail="\n</｜DSML｜function_calls>",
)

_MARKED = {
    ToolFormat.DEEPSEEK_V32: (DEEPSEEK_V32,),
    ToolFormat.HERMES: (HERMES,),
    ToolFormat.DEEPSEEK_V3: (DEEPSEEK_V3,),
    ToolFormat.DEEPSEEK_V31: (DEEPSEEK_V31,),
    ToolFormat.KIMI_K2: (KIMI_K2,),
    ToolFormat.QWEN3_CODER: (QWEN3_CODER, QWEN3_CODER_ALONE),
    ToolFormat.GLM: (GLM,),
    ToolFormat.MINIMAX: (MINIMAX,),
    ToolFormat.MINIMAX_M2: (MINIMAX_M2,),
}


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of one model: `first` for a reply that begins with calls, `triggered` by their opener in a text.

    A text that begins as `bare` does is calls in that form. `begun`: how the prompt ends, which an opener may go on
    from. A reply that is held to calls or JSON may think before it, from the first text of `thought` to the second,
    with the third behind that; `answer` stands before JSON.
    """

    first: CallForm
    triggered: tuple[CallForm, ...]
    bare: CallForm | None = None
    begun: str = ""
    thought: tuple[str, str, str] | None = None
    answer: str = ""

    @property
    def all(self) -> tuple[CallForm, ...]:
        """Every form that calls in a text may have."""
        return self.triggered if self.bare is None else (*self.triggered, self.bare)


def forms_of(tool_format: ToolFormat, knows: Callable[[str], bool]) -> Forms | None:
    """The forms of `tool_format`; `knows` tells which markers are tokens of the model. None: it has no calls."""
    match tool_format:
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
        case ToolFormat.LLAMA4:
            return Forms(LLAMA4 if knows("<|python_start|>") else LLAMA4_BARE, (LLAMA4,), LLAMA4_BARE)
        case ToolFormat.HARMONY:
            return Forms(
                HARMONY,
                (HARMONY, HARMONY_STARTED, HARMONY_ANALYSIS),
                begun="<|start|>assistant",
                thought=("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"),
                answer="<|channel|>final<|message|>",
            )
        case ToolFormat.NONE:
            return None
        case _:
            forms = _MARKED[tool_format]
            return Forms(forms[0], forms)


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

    def arguments(self, name: str, schema: Schema, form: CallForm) -> str:
        """A rule for the arguments of a call in `form`. Raises ValueError as the others do."""
        if form.keywords:
            return self.keywords(name, schema)
        return self.json(name, schema) if form.tags is None else self.tagged(name, schema, form.tags)

    def keywords(self, name: str, schema: Schema) -> str:
        """A rule for the keyword arguments of a Python call: the properties of `schema`, in its order.

        Their values are JSON, whose words and escapes the reader of such calls takes as Python's. Raises ValueError
        for a schema whose properties cannot be told, and for a required one that is no Python name.
        """
        properties, required = _properties(schema, "keyword arguments")
        if nameless := [key for key in required if key not in properties or not key.isidentifier()]:
            raise ValueError(f"{nameless[0]!r} cannot be a keyword argument")
        values = []
        for index, key in enumerate(key for key in properties if key.isidentifier()):
            rule = self.json(f"{name}_value{index}", _part(schema, properties[key]))
            values.append((literal(f"{key}=") + f" {rule}", key in required))
        return self._sequence(name, values, literal(", "))

    def tagged(self, name: str, schema: Schema, form: TagForm) -> str:
        """A rule for arguments in tags: the properties of `schema`, in its order; with none, whatever there may be.

        Raises ValueError for a schema whose properties cannot be told, and of a strict one for texts that are more than
        of some length, or of a list.
        """
        properties, required = _properties(schema, "arguments in tags")
        if nameless := [key for key in required if key not in properties or not _NAMES.fullmatch(key)]:
            raise ValueError(f"{nameless[0]!r} cannot be an argument in tags")
        values = []
        for index, key in enumerate(key for key in properties if _NAMES.fullmatch(key)):
            value = self._in_tag(f"{name}_value{index}", schema, properties[key], form)
            values.append((f"{_LINE} {_tags(literal(form.key + key), form)} {value}", key in required))
        rule = self._sequence(name, values, "")
        if schema.content.get("additionalProperties", True) is False:
            return rule
        other = self._in_tag(f"{name}_other", schema, argument_schema(schema.content, ""), form)
        key = self.add(f"{name.upper()}_KEY", "/[A-Za-z_][A-Za-z0-9_]{0,63}/")
        return self.add(f"{name}_open", f"{rule} ({_LINE} {_tags(f'{literal(form.key)} {key}', form)} {other})*")

    def _in_tag(self, name: str, schema: Schema, value: Any, form: TagForm) -> str:
        """A rule for one value up to and with its end: a text as it is, else JSON."""
        line = "\n" if form.line else ""
        begin, end = literal(line), literal(line + form.end)
        content = resolved(value, schema.content)
        listed = [content["const"]] if "const" in content else content.get("enum")
        if isinstance(listed, list) and listed:
            texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in listed]
            return self.add(name, *(literal(line + text + line + form.end) for text in texts))
        if not kinds_of(value, schema.content) >= TEXT:
            return self.add(name, f"{begin} {self.json(f'{name}_json', _part(schema, value))} {end}")
        if schema.strict and (unfit := [key for key in ("pattern", "format") if key in content]):
            raise ValueError(f"{unfit[0]} of a text cannot be followed in tags")
        least, most = (content.get(key) for key in ("minLength", "maxLength"))
        counted = isinstance(least, int) or isinstance(most, int)
        times = f"{{{least if isinstance(least, int) else 0},{most if isinstance(most, int) else ''}}}"
        text = self.add(f"{name.upper()}_TEXT", rf"/(.|\n){times if counted else '*'}/")
        until = self.add(f"{name}_until[lazy]", f"{text} {end}")
        return self.add(name, f"{begin} {until}")

    def _sequence(self, name: str, items: Sequence[tuple[str, bool]], comma: str) -> str:
        """`items` in order with `comma` between them, each with whether it must be there. One rule per place and
        whether anything stands before it."""
        for index in range(len(items), -1, -1):
            for begun in (False, True):
                rule = f"{name}_from{index}_{int(begun)}"
                if index == len(items):
                    self.add(rule, '""')
                    continue
                item, needed = items[index]
                taken = f"{comma if begun else ''} {item} {name}_from{index + 1}_1"
                self.add(rule, *([taken] if needed else [taken, f"{name}_from{index + 1}_{int(begun)}"]))
        return self.add(name, f"{name}_from0_0")

    def thought(self, name: str, opener: str, closer: str, behind: str) -> str:
        """A rule for a text between the two, and what stands `behind` it; or for nothing."""
        text = self.add(f"{name.upper()}_TEXT", r"/(.|\n)*/")
        until = self.add(f"{name}_until[lazy]", f"{text} {literal(closer)}")
        return self.add(name, f"({literal(opener)} {until} {literal(behind)})?")

    @property
    def text(self) -> str:
        """The whole grammar."""
        return "\n".join(self._lines) + "\n"


def literal(text: str) -> str:
    """`text` as a terminal; nothing for no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


_LINE = r'("\n")?'
_NAMES = re.compile(r"[A-Za-z0-9_.\-]+")


def _tags(key: str, form: TagForm) -> str:
    """The tags of an argument up to its value, `key` being the first one and its name."""
    value = f" {_LINE} ".join(map(literal, form.value.split("\n")))
    return f"{key} ({value} | {literal(form.json)})" if form.json else f"{key} {value}"


def _properties(schema: Schema, what: str) -> tuple[Mapping[str, Any], Sequence[str]]:
    """The properties of an object and the names of the required ones. Raises ValueError where they cannot be told."""
    content = schema.content
    properties, required = content.get("properties", {}), content.get("required", [])
    if not isinstance(properties, Mapping):
        raise ValueError("'properties' must be an object")
    if not isinstance(required, Sequence) or not all(isinstance(key, str) for key in required):
        raise ValueError("'required' must be a list of names")
    if unfit := [key for key in ("$ref", "anyOf", "allOf", "oneOf", "patternProperties") if key in content]:
        raise ValueError(f"{unfit[0]} at the top level has no meaning for {what}")
    return properties, required


def _part(schema: Schema, value: Any) -> Schema:
    """The schema of one of its values, with the definitions that it may refer to."""
    shared = {key: schema.content[key] for key in ("$defs", "definitions") if key in schema.content}
    return Schema({**(value if isinstance(value, Mapping) else {}), **shared}, schema.strict, schema.field)


class CallRules:
    """Adds the rules of calls to a grammar, each once."""

    def __init__(self, grammar: LarkText, tools: tuple[ToolRule, ...]) -> None:
        self._grammar = grammar
        self._tools = tools
        self._known: dict[CallForm, str] = {}
        self._arguments: dict[tuple[bool, int], str] = {}

    def calls(self, form: CallForm, several: bool) -> str:
        """The rule for calls in `form`, their opener included. Raises ValueError: see `LarkText`."""
        found = self._known.get(form)
        if found is None:
            name = f"calls{len(self._known)}"
            calls = [self._call(form, index) for index in range(len(self._tools))]
            call = self._grammar.add(f"{name}_one", *calls)
            more = f"({literal(form.between)} {call})*" if several and not form.alone else ""
            found = self._grammar.add(name, f"{literal(form.opener + form.head)} {call} {more} {literal(form.tail)}")
            self._known[form] = found
        return found

    def _call(self, form: CallForm, index: int) -> str:
        tool = self._tools[index]
        before, middle, after = literal(form.before + tool.name), literal(form.middle), literal(form.after)
        if form.header:
            middle = f"/{form.header}/"
        elif form.number:
            middle = f"/{form.number}/ {middle}"
        elif not form.tags:
            before, middle = literal(f"{form.before}{tool.name}{form.middle}"), ""
        if form.tags:
            after = f"{_LINE} {after}"
        return f"{before} {middle} {self._arguments_rule(form, index, tool.arguments)} {after}"

    def _arguments_rule(self, form: CallForm, index: int, schema: Schema) -> str:
        key = (form.keywords, index)
        found = self._arguments.get(key)
        if found is None:
            prefix = "keywords" if form.keywords else "arguments"
            found = self._arguments[key] = self._grammar.arguments(f"{prefix}{index}", schema, form)
        return found


def reply_grammar(rule: ReplyRule, forms: Forms | None) -> str:
    """`rule` in the library's Lark dialect: JSON or calls, from the first character of the reply on; or text.

    Of a rule for calls in a text it is what such calls are, from the first character of their opener on; behind those
    that have openers of their own the text may go on. `forms` None: the model writes no calls. Raises ValueError for a
    rule that the forms cannot follow.
    """
    grammar = LarkText()
    starts: list[str] = []
    if rule.json is not None:
        answer = grammar.json("answer", rule.json)
        starts.append(f"{literal(forms.answer)} {answer}" if forms is not None and forms.answer else answer)
    if rule.calls != "none" and rule.tools and forms is not None:
        calls = CallRules(grammar, rule.tools)
        if rule.in_text:
            starts += [calls.calls(form, rule.parallel and not form.restarts) for form in forms.all]
        else:
            starts.append(calls.calls(forms.first, rule.parallel))
    if not starts:
        starts.append(grammar.add("TEXT", r"/(.|\n)*/"))
    start = " | ".join(starts)
    if forms is not None and forms.thought is not None and not rule.in_text:
        start = f"{grammar.thought('thought', *forms.thought)} ({start})"
    return f"start: {start}\n{grammar.text}"
