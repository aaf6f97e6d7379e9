"""What a request asks of its reply, and the grammar that says so in the library's Lark dialect.

A rule is read from the prompt: plain data, equal in its `key` where it means the same. With the forms in which a model
writes its calls it becomes the text of a grammar. Not here: the library, and when a text is compiled (`guidance`,
`compiler`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from holdfast.replicas.config import Guarantee
from holdfast.replicas.constraints.arguments import ArgumentRules
from holdfast.replicas.constraints.lark import LarkText, Schema, literal, without_annotations
from holdfast.replicas.constraints.spelling import Spelling
from holdfast.replicas.requests import ChatPrompt
from holdfast.replicas.text.calls.formats import TAGS, TagForm, ToolFormat

Calls: TypeAlias = Literal["none", "auto", "required"]

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True, eq=False)
class ToolRule:
    """A tool that may be called, and what its arguments look like."""

    name: str
    arguments: Schema


@dataclass(frozen=True, eq=False)
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

    @cached_property
    def key(self) -> str:
        """Equal for rules that mean the same grammar."""
        tools = [(tool.name, tool.arguments.content, tool.arguments.strict) for tool in self.tools]
        body = self.json and (self.json.content, self.json.strict)
        return json.dumps([tools, self.calls, self.parallel, body], default=dict)

    @cached_property
    def fields(self) -> str:
        """The request's fields that hold its schemas."""
        return "\n".join(schema.field for schema in self.schemas)

    @property
    def schemas(self) -> list[Schema]:
        """Of arguments, and of JSON."""
        return [tool.arguments for tool in self.tools] + ([self.json] if self.json is not None else [])


def reply_rule(prompt: ChatPrompt, guarantee: Guarantee = "schema", writes_calls: bool = True) -> ReplyRule | None:
    """What `prompt` asks for; None where the model may write what it likes.

    `guarantee`: what calls that nothing else is asked of are held to: declared names and any arguments, declared names
    and their schemas, or nothing, unless a tool is strict. `writes_calls`: the model has a form for them.
    """
    calls: Calls = "none" if not prompt.tools else prompt.tool_choice
    tools = _tools(prompt) if calls != "none" else ()
    form = prompt.output
    if form is not None and calls != "required":
        body = Schema(without_annotations(form.schema), form.strict, "response_format.json_schema.schema")
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
        schema = {"type": "object", **_closed(without_annotations(function.get("parameters") or {"properties": {}}))}
        rules.append(ToolRule(name, Schema(schema, bool(function.get("strict")), f"tools.{index}.function.parameters")))
    return tuple(rules)


_OPEN = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "anyOf", "allOf", "oneOf"}
)


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters that list their properties and say nothing of others have no others: none are documented.

    A required one that is not listed is documented by its name, and may be anything.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    if properties is None or _OPEN.intersection(schema):
        return schema
    if isinstance(properties, Mapping) and isinstance(required, list):
        unlisted: dict[str, Any] = {key: {} for key in required if isinstance(key, str) and key not in properties}
        schema = {**schema, "properties": {**properties, **unlisted}}
    return {**schema, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model's chat template writes calls, one way of those that the readers in `text.calls` take.

    Calls are `opener` `head` call (`between` call)* `tail`, and a call is `before` its name, `middle`, its arguments
    and `after`. `keywords`: the arguments are Python's; `tags`: they stand in these; else they are JSON. `number` is a
    pattern of what stands behind a name, `aside` one of what may stand there as well, and `header` of all that may
    stand for `middle`. `alone`: a reply has one call. Without an opener `frame` is a pattern of everything up to the
    arguments of the first call, in whatever style, with the name as its group.
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
    aside: str = ""
    header: str = ""
    alone: bool = False
    frame: str = ""

    @property
    def is_object(self) -> bool:
        """A call is one object of JSON."""
        return self.before.endswith(_OBJECT)

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
MISTRAL = CallForm(
    opener="[TOOL_CALLS]", middle="[ARGS]", between="[TOOL_CALLS]", aside=r"\[CALL_ID\][A-Za-z0-9_\-]{1,64}"
)
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

    def over_when_complete(self, parallel: bool) -> bool:
        """Whether calls in a text that may end at some token go on behind it in no form."""
        return self.bare is None and all(form.restarts or form.alone or form.tail or not parallel for form in self.all)


def forms_of(tool_format: ToolFormat, knows: Callable[[str], bool]) -> Forms | None:
    """The forms of `tool_format`; `knows` tells which markers are tokens of the model. None: it has no calls."""
    match tool_format:
        case ToolFormat.LLAMA3:
            return Forms(LLAMA3_BARE, (LLAMA3, LLAMA3_FUNCTION), LLAMA3_BARE)
        case ToolFormat.LLAMA3_FUNCTION:
            return Forms(LLAMA3_FUNCTION, (LLAMA3_FUNCTION, LLAMA3), LLAMA3_BARE)
        case ToolFormat.MISTRAL:
            first, other = (MISTRAL, MISTRAL_LIST) if knows("[ARGS]") else (MISTRAL_LIST, MISTRAL)
            return Forms(first, (first, other))
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


class CallRules:
    """Adds the rules of calls to a grammar, each once. A free `spelling` is any that their readers take."""

    def __init__(self, grammar: LarkText, tools: tuple[ToolRule, ...], spelling: Spelling) -> None:
        self._grammar = grammar
        self._tools = tools
        self._spelling = spelling
        self._rules = ArgumentRules(grammar, spelling)
        self._known: dict[CallForm, str] = {}
        self._arguments: dict[tuple[bool, int], str] = {}

    def calls(self, form: CallForm, several: bool) -> str:
        """The rule for calls in `form`, their opener included. Raises ValueError: see `ArgumentRules`."""
        found = self._known.get(form)
        if found is None:
            name = f"calls{len(self._known)}"
            spelling = self._spelling
            calls = self._any(form) if spelling.free else [self._call(form, i) for i in range(len(self._tools))]
            call = self._grammar.add(f"{name}_one", *calls)
            between = _between(form, spelling) if spelling.free else literal(form.between)
            more = f"({between} {call})*" if several and not form.alone else ""
            begin, end = literal(form.opener + form.head), literal(form.tail)
            if spelling.free:
                inside = spelling.space if form.opener and not form.opener.endswith("=") else ""
                begin = f"{literal(form.opener)} {inside} {_spaced(form.head, spelling)}"
                end = _spaced(form.tail, spelling)
            found = self._known[form] = self._grammar.add(name, f"{begin} {call} {more} {end}")
        return found

    def _call(self, form: CallForm, index: int) -> str:
        """A plain call."""
        tool = self._tools[index]
        before, middle, after = literal(form.before + tool.name), literal(form.middle), literal(form.after)
        if form.header:
            middle = f"/{form.header}/"
        elif form.number:
            middle = f"/{form.number}/ {middle}"
        elif not form.tags:
            before, middle = literal(f"{form.before}{tool.name}{form.middle}"), ""
        if form.tags:
            after = f'("\\n")? {after}'
        return f"{before} {middle} {self._arguments_rule(form, index)} {after}"

    def _any(self, form: CallForm) -> list[str]:
        """Free calls of every tool."""
        free = self._spelling
        arguments = [self._arguments_rule(form, index) for index in range(len(self._tools))]
        names = [tool.name for tool in self._tools]
        if form.is_object:
            return _objects(form, free, names, arguments)
        before, middle, after = (_spaced(text, free) for text in (form.before, form.middle, form.after))
        middle = f"/{form.header}/" if form.header else middle
        inside = "" if form.tags else free.space
        aside = f"(/{form.aside}/)?" if form.aside else ""
        number = f"(/{form.number}/)?" if form.number else ""
        if form.header:
            middle = f"/{form.header}/"
        begins = " | ".join(
            f"{literal(name)} {number} {aside} {middle} {inside} {rule}"
            for name, rule in zip(names, arguments, strict=True)
        )
        return [f"{before} ({begins}) {free.space if after else ''} {after}"]

    def _arguments_rule(self, form: CallForm, index: int) -> str:
        key = (form.keywords, index)
        found = self._arguments.get(key)
        if found is None:
            prefix = "keywords" if form.keywords else "arguments"
            schema = self._tools[index].arguments
            found = self._arguments[key] = self._rules.rule(f"{prefix}{index}", schema, form.keywords, form.tags)
        return found


_MOST_BEFORE_NAME = 16  # tools whose arguments are followed before it is known whose they are


def _objects(form: CallForm, free: Spelling, names: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Calls that are objects: name and arguments in any order, and what says that they are functions."""
    colon, comma, begin, end = (free.terminal(name) for name in ("COLON", "COMMA", "OPEN", "CLOSE"))
    lead, after = _spaced(form.before.removesuffix(_OBJECT), free), _spaced(form.after.removeprefix("}"), free)
    type_ = f'("\\"type\\"" {colon} "\\"function\\"" {comma})?'
    name_key, key = f'"\\"name\\"" {colon}', f'("\\"arguments\\"" | "\\"parameters\\"") {colon}'
    pairs = [(literal(json.dumps(name, ensure_ascii=False)), rule) for name, rule in zip(names, arguments, strict=True)]
    named = " | ".join(f"{name} {comma} {type_} {key} {rule}" for name, rule in pairs)
    calls = [f"{lead} {begin} {type_} {name_key} ({named}) {end} {after}"]
    if len(names) <= _MOST_BEFORE_NAME:
        turned = " | ".join(f"{rule} {comma} {type_} {name_key} {name}" for name, rule in pairs)
        calls.append(f"{lead} {begin} {type_} {key} ({turned}) {end} {after}")
    return calls


def _spaced(text: str, free: Spelling) -> str:
    """`text` with any white space where it has a line end, and around a bracket of a list."""
    parts = [f"{free.space} {literal(part)}" if index else literal(part) for index, part in enumerate(text.split("\n"))]
    spaced = " ".join(parts)
    if text.startswith("]"):
        rest = text.removeprefix("]")
        return f"{free.terminal('CLOSE_LIST')} {free.space if rest else ''} {literal(rest)}"
    return free.terminal("OPEN_LIST") if text == "[" else spaced


def _between(form: CallForm, free: Spelling) -> str:
    """What stands between two calls; where no end is written behind the last one, as it is."""
    if form.tail and not form.between.strip():
        return free.space
    return free.terminal("COMMA") if form.tail and form.between.strip() == "," else literal(form.between)


def schema_grammar(schema: Schema, form: CallForm | None, free: bool) -> str:
    """A grammar of nothing but arguments in `form`, or without one of JSON. Raises ValueError: see `ArgumentRules`."""
    grammar = LarkText()
    spelling = Spelling(grammar, free)
    if form is None:
        return f"start: {spelling.value(schema, schema.content)}\n{grammar.text}"
    rules = ArgumentRules(grammar, spelling)
    return f"start: {rules.rule('body', schema, form.keywords, form.tags)}\n{grammar.text}"


_BEHIND = "\x00"
"""What might follow calls behind which nothing does, and never will. Trap: to find that nothing may follow takes the
library as long as reading all of a short call.
"""


def reply_grammar(rule: ReplyRule, forms: Forms | None) -> str:
    """`rule` in the library's Lark dialect: JSON or calls, from the first character of the reply on; or text.

    Of a rule for calls in a text it is what such calls are, from the first character of their opener on; behind those
    that have openers of their own the text may go on. `forms` None: the model writes no calls. Raises ValueError for a
    rule that the forms cannot follow.
    """
    grammar = LarkText()
    spelling = Spelling(grammar, free=rule.in_text)
    starts: list[str] = []
    if rule.json is not None:
        answer = spelling.value(rule.json, rule.json.content)
        starts.append(f"{literal(forms.answer)} {answer}" if forms is not None and forms.answer else answer)
    if rule.calls != "none" and rule.tools and forms is not None:
        calls = CallRules(grammar, rule.tools, spelling)
        if rule.in_text:
            starts += [calls.calls(form, rule.parallel and not form.restarts) for form in forms.all]
        else:
            starts.append(calls.calls(forms.first, rule.parallel))
    if not starts:
        starts.append(grammar.add("TEXT", r"/(.|\n)*/"))
    start = " | ".join(starts)
    if rule.in_text and forms is not None and forms.over_when_complete(rule.parallel):
        start = f"({start}) {grammar.add('BEHIND', literal(_BEHIND))}?"
    if forms is not None and forms.thought is not None and not rule.in_text:
        start = f"{grammar.thought('thought', *forms.thought)} ({start})"
    return f"start: {start}\n{grammar.text}"
