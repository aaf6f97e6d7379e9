"""The rule that a reply follows, and the text of its grammar in llguidance's Lark dialect.

`reply_rule` reads a request, `forms_of` names the forms in which the model writes calls, and `reply_grammar` writes the
grammar of both. A grammar has one of two styles:

- plain, for a reply that is drawn under masks from its first character on: one text for one value, with properties in
  the schema's order, as `json.dumps` and chat templates write it;
- free, for calls inside free text: every spelling that models use (order of properties, white space, escapes), so that
  a valid call stays as the model wrote it.

llguidance's own compiler of JSON schemas takes the parts of a schema that are not understood here, in plain style.
Not here: compiling the text (`compiler`) and following it (`guidance`).
"""

import json
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, Literal, TypeAlias

from holdfast.replicas.config import Guarantee
from holdfast.replicas.requests import ChatPrompt
from holdfast.replicas.text.calls.formats import QUOTE, TAGS, TagForm, ToolFormat
from holdfast.replicas.text.calls.tracker import as_json
from holdfast.replicas.text.calls.values import (
    ANNOTATIONS,
    INTEGER,
    MOST_NESTED,
    NUMBER,
    alternatives,
    argument_schema,
    family,
)

SHOWN = 40  # characters of a pattern in an error
DEEPEST = 32  # levels of nested schemas that are read here
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

# ---- schemas ----

Path: TypeAlias = tuple[str | int, ...]

_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTED = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_ONE = frozenset({"items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "additionalItems"})
_CONDITIONS = frozenset({"not", "if", "then", "else", "contains", "propertyNames"})  # of values described elsewhere


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """A JSON schema, and the request's field that holds it. Unless `strict`, what cannot be followed is left out."""

    content: Mapping[str, Any]
    strict: bool
    field: str

    def part(self, node: Any) -> "Schema":
        """The schema of one of its values, with the definitions that it may refer to."""
        shared = {key: self.content[key] for key in ("$defs", "definitions") if key in self.content}
        return replace(self, content={**(node if isinstance(node, Mapping) else {}), **shared})


def subschemas(node: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """The schemas directly below `node`, with their places."""
    for key, value in node.items():
        if key in _NAMED and isinstance(value, Mapping):
            yield from (((key, name), inner) for name, inner in value.items())
        elif key in _LISTED and isinstance(value, (list, tuple)):
            yield from (((key, index), inner) for index, inner in enumerate(value))
        elif key in _ONE or key in _CONDITIONS:
            yield (key,), value


def with_subschemas(node: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """A copy of `node` with `change(keyword, schema)` in place of each schema directly below it."""
    copied = dict(node)
    for (key, *place), inner in subschemas(node):
        name = str(key)
        if not place:
            copied[name] = change(name, inner)
            continue
        if copied[name] is node[name]:
            copied[name] = dict(node[name]) if isinstance(node[name], Mapping) else list(node[name])
        copied[name][place[0]] = change(name, inner)
    return copied


def without_annotations(schema: Any, depth: int = DEEPEST) -> Any:
    """`schema` without what only people read, down to `depth`. It allows the same values."""
    if not depth or not isinstance(schema, Mapping):
        return schema
    read = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    return with_subschemas(read, lambda _, inner: without_annotations(inner, depth - 1))


def malformed(node: Any) -> str:
    """The error in a schema itself; "" if it has none."""
    if not isinstance(node, Mapping):
        return ""
    if isinstance(node.get("required"), str):
        return "'required' must be a list of names"
    if "const" in node and "enum" in node and not alternatives({key: node[key] for key in ("const", "enum")}, {}):
        return "'const' is none of the values of 'enum'"
    return ""


# ---- what a request asks for ----

Calls: TypeAlias = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True, eq=False)
class ToolRule:
    """A tool that may be called, and the schema of its arguments."""

    name: str
    arguments: Schema


@dataclass(frozen=True, eq=False)
class ReplyRule:
    """A reply is calls of `tools`, or `json`, or text.

    `calls` "auto": calls or `json`; without `json`, free text that may have calls in it. `parallel`: several calls.
    """

    tools: tuple[ToolRule, ...] = ()
    calls: Calls = "none"
    parallel: bool = True
    json: Schema | None = None

    @property
    def in_text(self) -> bool:
        """Calls stand in free text."""
        return self.calls == "auto" and self.json is None

    @property
    def strict(self) -> bool:
        """Some tool's schema must be followed in full."""
        return any(tool.arguments.strict for tool in self.tools)

    @property
    def schemas(self) -> list[Schema]:
        """The schemas of arguments, and of JSON."""
        return [tool.arguments for tool in self.tools] + ([self.json] if self.json is not None else [])

    @cached_property
    def key(self) -> str:
        """Equal for rules that have the same grammar."""
        tools = [(tool.name, tool.arguments.content, tool.arguments.strict) for tool in self.tools]
        body = self.json and (self.json.content, self.json.strict)
        return json.dumps([tools, self.calls, self.parallel, body], default=dict)

    @cached_property
    def fields(self) -> str:
        """The request's fields that hold its schemas."""
        return "\n".join(schema.field for schema in self.schemas)


def reply_rule(prompt: ChatPrompt, guarantee: Guarantee = "schema", writes_calls: bool = True) -> ReplyRule | None:
    """The rule that `prompt` asks for; None if the reply is free.

    `guarantee` is for calls in free text: "names" holds them to declared names and any object, "schema" to their
    schemas too, "off" to nothing unless a tool is strict. `writes_calls`: the model has a format for calls.
    """
    calls: Calls = "none" if not prompt.tools else prompt.tool_choice
    tools = _tools(prompt) if calls != "none" else ()
    if (output := prompt.output) is not None and calls != "required":
        body = Schema(without_annotations(output.schema), output.strict, "response_format.json_schema.schema")
        return ReplyRule(tools, calls, prompt.parallel_tool_calls, body)
    if calls == "required":
        return ReplyRule(tools, calls, prompt.parallel_tool_calls and not prompt.forced_tool)
    rule = ReplyRule(tools, "auto", prompt.parallel_tool_calls)
    if not (tools and writes_calls) or (guarantee == "off" and not rule.strict):
        return None
    return rule if guarantee != "names" else names_alone(rule)


def names_alone(rule: ReplyRule) -> ReplyRule:
    """`rule` with any object as the arguments of the tools that are not strict."""

    def loose(tool: ToolRule) -> ToolRule:
        return tool if tool.arguments.strict else replace(tool, arguments=replace(tool.arguments, content=ANY_OBJECT))

    return replace(rule, tools=tuple(map(loose, rule.tools)))


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
    """Parameters that list their properties and say nothing of others have no others, since none are documented.

    A required property that is not listed is documented by its name, and may have any value.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    if properties is None or _OPEN.intersection(schema):
        return schema
    if isinstance(properties, Mapping) and isinstance(required, list):
        unlisted: dict[str, Any] = {key: {} for key in required if isinstance(key, str) and key not in properties}
        schema = {**schema, "properties": {**properties, **unlisted}}
    return {**schema, "additionalProperties": False}


# ---- how models write values ----

_PAIR = r"[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # two halves of one character
_WHOLE = r"[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}"


def _sorted_as(item: tuple[str, Any]) -> str:
    """The order in which templates sort the members of an object."""
    return item[0].lower()


@dataclass(frozen=True, slots=True)
class Dialect:
    """How values are written. `strings`: patterns of a string, with `{}` for the number of its characters. `words`: the
    constants that are no texts and no numbers. The first of each is the plain one. `bare`: keys have no quotes, strings
    are texts between two `QUOTE`, and plain style has no white space and sorted keys.
    """

    name: str
    strings: tuple[str, ...]
    words: Mapping[Any, tuple[str, ...]]
    bare: bool = False

    def spelled(self, constant: Any, free: bool) -> Sequence[str]:
        """Texts of a constant that is no object and no list, unless `bare`; not `free`: the plain one."""
        if constant is None or isinstance(constant, bool):
            return self.words[constant][: None if free else 1]
        if self.bare and isinstance(constant, str | list | dict):
            return (self._bare(constant),)
        plain = _text_of(constant)
        if not free:
            return (plain,)
        python = "'" + plain[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"
        # Python's own surrogates are none of JSON's.
        other = python if isinstance(constant, str) and len(self.strings) > 1 else json.dumps(constant)
        return tuple(dict.fromkeys((plain, other)))

    def keys(self, name: str, free: bool) -> Sequence[str]:
        """Texts of a key."""
        return (name,) if self.bare and re.fullmatch(_BARE_KEY, name) else self.spelled(name, free)

    def _bare(self, value: Any) -> str:
        if isinstance(value, dict):
            members = (
                f"{self.keys(key, False)[0]}:{self._bare(each)}" for key, each in sorted(value.items(), key=_sorted_as)
            )
            return f"{{{','.join(members)}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self._bare, value))}]"
        if isinstance(value, str) and QUOTE in value:
            raise ValueError(f"a text with {QUOTE} in it cannot be written")
        return f"{QUOTE}{value}{QUOTE}" if isinstance(value, str) else self.spelled(value, False)[0]


_BARE_KEY = r'[^:,<>{}\[\]"\s]+( +[^:,<>{}\[\]"\s]+)*'
_PYTHONS = {True: ("true", "True"), False: ("false", "False"), None: ("null", "None")}
_JSON_STRING = rf'"([^"\\\x00-\x1f]|\\["\\\/bfnrt]|\\u({_WHOLE}|{_PAIR})){{}}"'
_PYTHON_STRING = rf"""Q([^Q\\\x00-\x1f]|\\["'\\bfnrt]|\\u({_WHOLE})){{}}Q"""
JSON = Dialect("json", (_JSON_STRING,), {True: ("true",), False: ("false",), None: ("null",)})
TAGGED = Dialect("tagged", (_JSON_STRING,), _PYTHONS)  # a value that stands alone: its reader takes Python's words
PYTHON = Dialect("python", tuple(_PYTHON_STRING.replace("Q", quote) for quote in "\"'"), _PYTHONS)
GEMMA4 = Dialect("gemma4", (), _PYTHONS, bare=True)

# ---- how models write calls ----

_OBJECT = '{"name": "'
_ARGUMENTS = '", "arguments": '


@dataclass(frozen=True, slots=True)
class CallForm:
    """One way in which a model's chat template writes calls, one of those that `text.calls` reads.

        opener head call (between call)* tail       call = before NAME number middle ARGUMENTS after

    Arguments stand in `tags`, or are an object in `dialect`, in Python the keyword arguments. `number`, `aside` and
    `header` are patterns: of what follows a name, of what may follow it as well, and of everything that may stand in
    place of `middle`. A `{}` in `middle` is the name again.
    `alone`: a reply has one call. `tight`: no white space may follow the opener. Without an opener, `frame` is a
    pattern of everything before the arguments of the first call, in any spelling, with the name as its group.
    """

    opener: str
    before: str
    middle: str
    after: str
    between: str
    tail: str = ""
    head: str = ""
    dialect: Dialect = JSON
    tags: TagForm | None = None
    number: str = ""
    aside: str = ""
    header: str = ""
    alone: bool = False
    tight: bool = False
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
        return f"{self.opener}{self.head}{self.before}{name}{self.behind(name)}"

    def behind(self, name: str) -> str:
        """`middle` behind `name`."""
        return self.middle.replace("{}", name)


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of one model: `first`, or `other`, for a reply that must begin with calls, `triggered` by their openers
    in a text.

    A text that begins like `bare` is calls in that form. `begun`: the end of the prompt, from which an opener may go
    on. `thought`: the beginning and the end of thinking before a reply that must be calls or JSON, and the text behind
    it. `answer` stands before JSON.
    """

    first: CallForm
    triggered: tuple[CallForm, ...]
    bare: CallForm | None = None
    begun: str = ""
    thought: tuple[str, str, str] | None = None
    answer: str = ""
    other: CallForm | None = None

    @property
    def all(self) -> tuple[CallForm, ...]:
        """Every form of calls in a text."""
        return self.triggered if self.bare is None else (*self.triggered, self.bare)

    def over_when_complete(self, parallel: bool) -> bool:
        """Calls in a text that may end at some token never go on behind it."""
        return self.bare is None and all(form.restarts or form.alone or form.tail or not parallel for form in self.all)


def _marked(*forms: CallForm) -> Forms:
    return Forms(forms[0], forms)


def _in_tags(tags: TagForm) -> CallForm:
    before = "\n" + tags.open if tags.open else ""
    if tags.together:
        return CallForm(tags.begin, before, tags.named, tags.close, "", "\n" + tags.finish, tags=tags)
    after = f"{tags.close}\n{tags.finish}" if tags.close else tags.finish
    return CallForm(tags.begin, before, tags.named, after, "\n" + tags.begin, tags=tags)


def _section(form: CallForm, opener: str = "") -> Forms:
    """`form`, and its calls with `opener` alone, without the markers around all of them: they are read as well."""
    opener, after = (form.tags.open, form.tags.close) if form.tags is not None else (opener, form.after)
    before = form.before.strip().removeprefix(opener)
    single = replace(form, opener=opener, before=before, after=after, between="\n" + opener, tail="", tight=True)
    return _marked(form, single)


_TYPE = r'(?:"type"\s*:\s*"function"\s*,\s*)?'
_LLAMA3 = CallForm("<|python_tag|>", _OBJECT, '", "parameters": ', "}", "; ")
_LLAMA3_FRAME = rf'\{{\s*{_TYPE}"name"\s*:\s*"([^"\\]*)"\s*,\s*{_TYPE}"(?:parameters|arguments)"\s*:\s*'
_LLAMA3_BARE = replace(_LLAMA3, opener="", frame=_LLAMA3_FRAME)
_LLAMA3_FUNCTION = CallForm("<function=", "", ">", "</function>", "<function=", tight=True)
_LLAMA4 = CallForm("<|python_start|>", _OBJECT, '", "parameters": ', "}", "", "<|python_end|>")
_LLAMA4_BARE = replace(_LLAMA3_BARE, between="")
_MISTRAL = CallForm("[TOOL_CALLS]", "", "[ARGS]", "", "[TOOL_CALLS]", aside=r"\[CALL_ID\][A-Za-z0-9_\-]{1,64}")
_MISTRAL_LIST = CallForm("[TOOL_CALLS]", _OBJECT, _ARGUMENTS, "}", ", ", "]", head="[")
_PYTHONIC = CallForm("", "", "(", ")", ", ", "]", head="[", dialect=PYTHON, frame=r"\[\s*([\w.\-]+)\(")
_PYTHONIC_MARKED = replace(_PYTHONIC, opener="<|python_start|>", tail="]<|python_end|>", frame="")
_DEEPSEEK_CALL, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_V31 = CallForm(
    *("<｜tool▁calls▁begin｜>", _DEEPSEEK_CALL, "<｜tool▁sep｜>", _DEEPSEEK_END, "", "<｜tool▁calls▁end｜>")
)
_DEEPSEEK_V3 = replace(
    _DEEPSEEK_V31,
    before=_DEEPSEEK_CALL + "function<｜tool▁sep｜>",
    middle="\n```json\n",
    after="\n```" + _DEEPSEEK_END,
    between="\n",
)
_KIMI_CALL, _KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
_KIMI_K2 = CallForm(
    "<|tool_calls_section_begin|>",
    *(_KIMI_CALL + "functions.", _KIMI_ARGUMENTS, "<|tool_call_end|>", "", "<|tool_calls_section_end|>"),
    number=":[0-9]{1,4}",
)
_TYPED = r"(( |( ?<\|constrain\|>))(json|code))?<\|message\|>"  # of a message of Harmony
_HARMONY = CallForm(
    "<|channel|>commentary to=",
    *("functions.", " <|constrain|>json<|message|>", "", "<|call|><|start|>assistant<|channel|>commentary to="),
    header=_TYPED,
    alone=True,
    tight=True,
)
_HARMONY_STARTED = replace(
    _HARMONY,
    opener="<|start|>assistant to=",
    middle="<|channel|>commentary <|constrain|>json<|message|>",
    header=rf"<\|channel\|>(commentary|analysis){_TYPED}",
)
_GEMMA4 = CallForm("<|tool_call>", "call:", "", "<tool_call|>", "<|tool_call>", dialect=GEMMA4)
_MUSE = _in_tags(TAGS[ToolFormat.MUSE])
_MUSE_MESSAGE = replace(
    _MUSE,
    opener=" to=",
    before="",
    middle='<|message|><atem:function_calls>\n<atem:invoke name="{}">',
    after="</atem:invoke>\n</atem:function_calls>",
    between="<|eom|><|start|>assistant to=",
    tail="",
)

_FORMS: Mapping[ToolFormat, Forms] = {
    **{
        tool_format: _section(_in_tags(tags)) if tags.open else _marked(_in_tags(tags))
        for tool_format, tags in TAGS.items()
    },
    ToolFormat.HERMES: _marked(CallForm("<tool_call>", "\n" + _OBJECT, _ARGUMENTS, "}\n</tool_call>", "\n<tool_call>")),
    ToolFormat.LLAMA3: Forms(_LLAMA3_BARE, (_LLAMA3, _LLAMA3_FUNCTION), _LLAMA3_BARE),
    ToolFormat.LLAMA3_FUNCTION: Forms(_LLAMA3_FUNCTION, (_LLAMA3_FUNCTION, _LLAMA3), _LLAMA3_BARE),
    ToolFormat.LLAMA4: Forms(_LLAMA4_BARE, (_LLAMA4,), _LLAMA4_BARE),
    ToolFormat.MISTRAL: _marked(_MISTRAL_LIST, _MISTRAL),
    ToolFormat.PYTHONIC: Forms(_PYTHONIC, (_PYTHONIC_MARKED,), _PYTHONIC),
    ToolFormat.DEEPSEEK_V3: _section(_DEEPSEEK_V3, _DEEPSEEK_CALL),
    ToolFormat.DEEPSEEK_V31: _section(_DEEPSEEK_V31, _DEEPSEEK_CALL),
    ToolFormat.KIMI_K2: _section(_KIMI_K2, _KIMI_CALL),
    ToolFormat.MINIMAX: _marked(CallForm("<tool_calls>", "\n" + _OBJECT, _ARGUMENTS, "}", "", "\n</tool_calls>")),
    ToolFormat.GEMMA4: _marked(_GEMMA4),
    ToolFormat.MUSE: replace(
        _section(_MUSE),
        first=_MUSE_MESSAGE,
        thought=(" to=self<|message|>", "<|eom|>", "<|start|>assistant"),
        answer=" to=user<|message|>",
    ),
    ToolFormat.HARMONY: Forms(
        _HARMONY,
        (_HARMONY, _HARMONY_STARTED, replace(_HARMONY, opener="<|channel|>analysis to=")),
        begun="<|start|>assistant",
        thought=("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"),
        answer="<|channel|>final<|message|>",
        other=replace(_HARMONY_STARTED, opener=" to="),  # as the template writes it
    ),
}
_WITH_TOKEN: Mapping[ToolFormat, tuple[str, Forms]] = {  # if a marker is a token of the model
    ToolFormat.LLAMA4: ("<|python_start|>", Forms(_LLAMA4, (_LLAMA4,), _LLAMA4_BARE)),
    ToolFormat.MISTRAL: ("[ARGS]", _marked(_MISTRAL, _MISTRAL_LIST)),
    ToolFormat.PYTHONIC: ("<|python_start|>", Forms(_PYTHONIC_MARKED, (_PYTHONIC_MARKED,), _PYTHONIC)),
}


def forms_of(tool_format: ToolFormat, knows: Callable[[str], bool]) -> Forms | None:
    """The forms of `tool_format`. `knows`: a text is one token of the model. None: the model writes no calls."""
    marker, forms = _WITH_TOKEN.get(tool_format, ("", None))
    return forms if forms is not None and knows(marker) else _FORMS.get(tool_format)


# ---- the text of a grammar ----

_TEXT = r"/(.|\n)*/"

# Blanks, or line ends and an indentation: a reply under masks must not go on with white space for long.
_SOME_SPACE = r"([ \t]{1,2}|[ \t]{0,2}(\r?\n){1,2}[ \t]{0,24})"
_SPACE = _SOME_SPACE + "?"
_TERMINALS = {  # plain, free
    "OPEN": (r"\{", r"\{" + _SPACE),
    "CLOSE": (r"\}", _SPACE + r"\}"),
    "OPEN_LIST": (r"\[", r"\[" + _SPACE),
    "CLOSE_LIST": (r"\]", _SPACE + r"\]"),
    "COLON": (": ", f"{_SPACE}:{_SPACE}"),
    "COMMA": (", ", f"{_SPACE},{_SPACE}"),
    "IS": ("=", f"{_SPACE}={_SPACE}"),
    "TIGHT_COLON": (":", f"{_SPACE}:{_SPACE}"),
    "TIGHT_COMMA": (",", f"{_SPACE},{_SPACE}"),
    "SPACE": ("", _SOME_SPACE),
    "INTEGER": (INTEGER, INTEGER),
    "NUMBER": (NUMBER, NUMBER),
    "KEY": (r'"([^"\\\x00-\x1f]|\\["\\bfnrt])*"',) * 2,
    "TIGHT_KEY": (_BARE_KEY,) * 2,
}
_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',  # others could spell half a surrogate pair
}


_text_of = json.JSONEncoder(ensure_ascii=False).encode
_key_of = json.JSONEncoder(default=dict).encode  # equal for schemas that say the same in the same order


class Grammar:
    """The rules of a grammar as they are written, one a line. Equal ones are written once."""

    def __init__(self, free: bool) -> None:
        self.free = free
        self.depth = 0  # of the value that is being written
        self.known: dict[Hashable, str] = {}  # names of rules, by what they are rules of
        self._lines: list[str] = []
        self._numbers = count()

    def name(self, prefix: str) -> str:
        """A name that no rule has. Terminals have upper case."""
        return f"{prefix}{next(self._numbers)}"

    def add(self, name: str, *alternatives: str) -> str:
        """A rule with these right-hand sides; returns its name. One with "::" in its name has a parameter."""
        self._lines.append(f"{name}: {' | '.join(alternatives)}")
        return name.partition("[")[0]

    def once(self, prefix: str, *alternatives: str) -> str:
        """The rule with these right-hand sides."""
        key = (prefix, *alternatives)
        if key not in self.known:
            name, bracket, rest = prefix.partition("[")
            self.known[key] = self.add(self.name(name) + bracket + rest, *alternatives)
        return self.known[key]

    def terminal(self, name: str, dialect: Dialect = JSON) -> str:
        """One of `_TERMINALS`."""
        name = f"TIGHT_{name}" if dialect.bare else name
        return self.once(name, f"/{_TERMINALS[name][self.free]}/")

    @property
    def space(self) -> str:
        """White space or none, which is all that there is in plain style."""
        return f"{self.terminal('SPACE')}?" if self.free else ""

    def json(self, schema: Schema) -> str:
        """A rule for the values of `schema` that llguidance makes, in plain style."""
        style = {**_STYLE, "lenient": not schema.strict}
        return self.once("json", "%json " + json.dumps({**_bounded(schema.content), "x-guidance": style}))

    def text(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._lines, ""])


def literal(text: str) -> str:
    """`text` as a terminal; nothing for no text."""
    return _text_of(text) if text else ""


def escaped(text: str) -> str:
    """A pattern of nothing but `text`."""
    return re.escape(text).replace("/", r"\/")


# ---- numbers and nesting that every client can read, in llguidance's JSON ----

_MOST = {"integer": 10**18 - 1, "number": 10**15}  # llguidance has to know both limits of a range, in 64 bits
_LEAST_PART = 1e-10  # of a number with a range, which llguidance writes with any number of digits otherwise
_ANY = "x-any-"  # definitions of any value, by how deep it may be nested
_DEEPEST_ANY = 16
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def _limits(node: Mapping[str, Any]) -> list[float]:
    """The limits of a number in `node`."""
    values = (node.get(key) for key in _LOW + _HIGH)
    return [limit for limit in values if isinstance(limit, (int, float)) and limit is not True]


def _number_limits(node: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The limits that a number of `node` lacks."""
    most, limits = _MOST[kind], _limits(node)
    missing: dict[str, Any] = {}
    if node.keys().isdisjoint(_LOW) and all(limit > -most for limit in limits):
        missing["minimum"] = -most
    if node.keys().isdisjoint(_HIGH) and all(limit < most for limit in limits):
        missing["maximum"] = most
    if kind == "number" and "multipleOf" not in node:
        missing["multipleOf"] = _LEAST_PART
    return missing


def _beyond(node: Mapping[str, Any], kind: str) -> str:
    """A pattern of the numbers of `node` that `_number_limits` excludes; "" if there are none."""
    if "multipleOf" in node or any(abs(limit) > _MOST[kind] for limit in _limits(node)):
        return ""
    least = len(str(_MOST["integer"] + 1 if kind == "integer" else _MOST["number"]))
    digits = f"[1-9][0-9]{{{least - 1},39}}" + (r"(\.[0-9]{1,10})?" if kind == "number" else "")
    if node.keys().isdisjoint(_HIGH):
        return f"-?{digits}" if node.keys().isdisjoint(_LOW) else digits
    return f"-{digits}" if node.keys().isdisjoint(_LOW) else ""


def _any_value(level: int) -> Mapping[str, Any]:
    """Any value that is nested `level` deep at most."""
    scalars = [{"type": ["string", "boolean", "null"]}, {"type": "number", **_number_limits({}, "number")}]
    inner = {"$ref": f"#/$defs/{_ANY}{level - 1}"}
    nested = [{"type": "array", "items": inner}, {"type": "object", "additionalProperties": inner}]
    return {"anyOf": [*scalars, *nested] if level else scalars}


_ANY_VALUES = {f"{_ANY}{level}": _any_value(level) for level in range(_DEEPEST_ANY + 1)}
_ANYTHING = {"$ref": f"#/$defs/{_ANY}{_DEEPEST_ANY}"}


def _bounded(root: Mapping[str, Any]) -> Mapping[str, Any]:
    """`root` with limits to the digits of numbers, and to the nesting of values of which it says nothing."""
    bounded: dict[str, Any] = _bound(root)
    if f"#/$defs/{_ANY}" in _key_of(bounded):
        own = bounded.get("$defs", {})
        bounded["$defs"] = {**own, **_ANY_VALUES} if isinstance(own, Mapping) else own
    return bounded


def _bound(node: Any, depth: int = DEEPEST, whole: bool = True) -> Any:
    """`node` bounded. Not `whole`: other schemas hold for the same value, and may describe what this one does not."""
    if node is True or node == {}:
        return _ANYTHING if whole else node
    if wrong := malformed(node):
        raise ValueError(wrong)
    if not isinstance(node, Mapping) or not depth or "const" in node or "enum" in node:
        return node

    def inner(key: str, part: Any) -> Any:
        alone = key not in ("anyOf", "oneOf") or node.keys() <= {key, "$defs", "definitions"}
        return part if key in _CONDITIONS else _bound(part, depth - 1, alone and key not in ("$defs", "allOf"))

    bound = with_subschemas(node, inner)
    if "$ref" in node:
        return bound
    combined = not node.keys().isdisjoint(("allOf", "anyOf", "oneOf", "not", "if"))
    types = node.get("type", [] if combined else ["number"])
    kinds = {types} if isinstance(types, str) else set(types) if isinstance(types, (list, tuple)) else set()
    if kinds & {"integer", "number"}:
        bound |= _number_limits(node, "number" if "number" in kinds else "integer")
    if whole and not combined:
        if "array" in kinds and node.keys().isdisjoint(("items", "prefixItems")):
            bound["items"] = _ANYTHING
        if "object" in kinds and node.keys().isdisjoint(("additionalProperties", "unevaluatedProperties")):
            bound["additionalProperties"] = _ANYTHING
    return bound


# ---- values ----

_LIMITS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_READ: Mapping[str, frozenset[str]] = {  # keywords that are understood here
    "string": frozenset({"minLength", "maxLength"}),
    "integer": _LIMITS,
    "number": _LIMITS,
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "boolean": frozenset(),
    "null": frozenset(),
}


def value(g: Grammar, schema: Schema, node: Any, dialect: Dialect = JSON) -> str:
    """A rule for the values of `node`, a part of `schema`. Raises ValueError for one that no value follows."""
    if node is False:
        raise ValueError("a required value allows no value")
    if node is True or not isinstance(node, Mapping) or not node:
        return _anything(g, dialect)
    if wrong := malformed(node):
        raise ValueError(wrong)
    schema_key = _key_of(node)
    refers = '"$ref"' in schema_key
    key = (dialect.name, schema.strict, schema_key, refers and _key_of(schema.content))
    if key not in g.known:
        name = g.known[key] = g.name("v")  # now: a value may hold others of its own schema
        g.depth += 1
        options = alternatives(node, schema.content) if g.depth <= DEEPEST else ()
        rules = [_understood(g, schema, each, dialect) or _left(g, schema, each, dialect, refers) for each in options]
        g.depth -= 1
        g.add(name, *rules or [_left(g, schema, {} if dialect.bare else node, dialect, refers)])
    return g.known[key]


def _left(g: Grammar, schema: Schema, node: Mapping[str, Any], dialect: Dialect, refers: bool) -> str:
    """A rule that llguidance makes. It only knows JSON: for other dialects, keywords not understood are left out."""
    if not dialect.bare:
        return g.json(schema.part(node) if refers else replace(schema, content=node))
    read = {"type", "enum"} if "enum" in node else {"type", *_READ[node["type"]]} if node else set()
    if schema.strict:
        unread = min(node.keys() - read, default="its limits") if node else "a schema without a value"
        raise ValueError(f"{unread} cannot be followed in this format of calls")
    if not node:
        return _anything(g, dialect)
    readable = {key: value for key, value in node.items() if key in read}
    return _understood(g, schema, readable, dialect) or _understood(g, schema, {"type": node["type"]}, dialect)


def _understood(g: Grammar, schema: Schema, node: Mapping[str, Any], dialect: Dialect) -> str:
    """The right-hand side of one of `alternatives`; "" where it is not understood."""
    kind, keywords = node["type"], {key: part for key, part in node.items() if key != "type"}
    if keywords.keys() == {"enum"} and (dialect.bare or kind not in ("object", "array")):
        return _constants(g, dialect, *keywords["enum"])
    if keywords.keys() - _READ[kind]:
        return ""
    match kind:
        case "string":
            times = _times(keywords, "minLength", "maxLength")
            return _string(g, dialect, times) if times else ""
        case "boolean":
            return _constants(g, dialect, True, False)
        case "null":
            return _constants(g, dialect, None)
        case "object":
            return _object(g, schema, keywords, dialect)
        case "array":
            return _list(g, schema, keywords, dialect)
    if not keywords:
        return g.terminal(kind.upper())
    more = _beyond(keywords, kind)
    return g.json(replace(schema, content=node)) + (f" | {g.once('BEYOND', f'/{more}/')}" if more else "")


def _constants(g: Grammar, dialect: Dialect, *constants: Any) -> str:
    """Any of `constants`; free in any spelling."""
    return _either([text for each in constants for text in dialect.spelled(each, g.free)])


def _either(texts: Sequence[str]) -> str:
    return " | ".join(map(_text_of, texts))


def _times(node: Mapping[str, Any], least: str, most: str, less: int = 0) -> str:
    """How many of something `node` allows, minus `less`, as patterns and rules write it; "" where that is no number."""
    low, high = node.get(least, 0), node.get(most)
    counts = [low] if high is None else [low, high]
    if any(type(number) is not int or number < 0 for number in counts) or sorted(counts) != counts:
        return ""
    low = max(low - less, 0)
    return "*" if not low and high is None else f"{{{low},{'' if high is None else high - less}}}"


def _string(g: Grammar, dialect: Dialect, times: str = "*") -> str:
    if dialect.bare:
        text = g.once("TEXT", f"/(.|\\n){times}/ & ~/(.|\\n)*{escaped(QUOTE)}(.|\\n)*/")
        return g.once("STRING", f"{literal(QUOTE)} {text} {literal(QUOTE)}")
    return g.once("STRING", *(f"/{each.replace('{}', times)}/" for each in dialect.strings[: None if g.free else 1]))


def _object(g: Grammar, schema: Schema, keywords: Mapping[str, Any], dialect: Dialect) -> str:
    properties, required = keywords.get("properties", {}), keywords.get("required", [])
    others = keywords.get("additionalProperties", True)
    if wrong := malformed(keywords):
        raise ValueError(wrong)
    if not (isinstance(properties, Mapping) and isinstance(required, Sequence) and isinstance(others, (bool, Mapping))):
        return ""
    if not all(isinstance(key, str) and key in properties for key in required):
        return ""
    colon, comma, any_key = (g.terminal(name, dialect) for name in ("COLON", "COMMA", "KEY"))
    items = [
        (f"({_either(dialect.keys(key, g.free))}) {colon} {value(g, schema, part, dialect)}", key in required)
        for key, part in sorted(properties.items(), key=_sorted_as if dialect.bare else lambda _: "")
        if part is not False or key in required
    ]
    other = ""
    if others is not False:  # keys with no escapes, which could spell one that is listed
        listed = "|".join(escaped(dialect.keys(key, False)[0]) for key in sorted(properties))
        name = g.once("OTHER", f"{any_key} & ~/({listed})/") if listed else any_key
        other = f"{name} {colon} {value(g, schema, others, dialect)}"
    return f"{g.terminal('OPEN')} {members(g, items, comma, g.terminal('CLOSE'), other)}"


def _list(g: Grammar, schema: Schema, keywords: Mapping[str, Any], dialect: Dialect) -> str:
    begin, end, comma = g.terminal("OPEN_LIST"), g.terminal("CLOSE_LIST"), g.terminal("COMMA", dialect)
    items, most = keywords.get("items", True), keywords.get("maxItems")
    if not _times(keywords, "minItems", "maxItems") or items is False:
        return ""
    if most == 0:
        return f"{begin} {end}"
    item = value(g, schema, items, dialect)
    more = f"({comma} {item}){_times(keywords, 'minItems', 'maxItems', less=1)}" if most != 1 else ""
    return f"{begin} {item} {more} {end}" if keywords.get("minItems") else f"{begin} ({item} {more})? {end}"


def _anything(g: Grammar, dialect: Dialect) -> str:
    """Any value, nested to some depth."""
    if (key := ("anything", dialect.name)) not in g.known:
        scalars = [_string(g, dialect), g.terminal("NUMBER"), _constants(g, dialect, *dialect.words)]
        comma, member = (
            g.terminal("COMMA", dialect),
            f"{g.terminal('KEY', dialect)} {g.terminal('COLON', dialect)}",
        )
        inner = g.once("any", *scalars)
        for _ in range(MOST_NESTED):
            pairs = f"{g.terminal('OPEN')} ({member} {inner} ({comma} {member} {inner})*)? {g.terminal('CLOSE')}"
            items = f"{g.terminal('OPEN_LIST')} ({inner} ({comma} {inner})*)? {g.terminal('CLOSE_LIST')}"
            inner = g.once("any", *scalars, pairs, items)
        g.known[key] = inner
    return g.known[key]


Member: TypeAlias = tuple[str, bool]
"""The right-hand side of a member of an object, and whether it is required."""

_MOST_MEMBERS = 60  # of an object in any order: each has one of the 64 bits that llguidance counts with


def members(g: Grammar, items: Sequence[Member], comma: str, end: str, other: str = "") -> str:
    """`items`, each once at most, with `comma` between them and `end` behind the last. The required ones are there.

    `other`: a member that may come any number of times. In order where the style is plain or there are too many.
    """
    if not g.free or len(items) > _MOST_MEMBERS:
        return _in_order(g, items, comma, end, other)
    if not items and not other:
        return end
    name = g.name("m")
    ordered = sorted(items, key=lambda item: not item[1])
    needed = sum(required for _, required in items)
    ends = end + (f" %if is_ones([0:{needed}])" if needed else "")
    first, rest, one = f"{name}_first", f"{name}_rest" if comma else f"{name}_first", f"{name}_one"
    each = [f"{text} {rest}::set_bit({bit}) %if bit_clear({bit})" for bit, (text, _) in enumerate(ordered)]
    g.add(f"{one}::_", *each, *([f"{other} {rest}::_"] if other else []))
    g.add(f"{first}::_", ends, f"{one}::_")
    if comma:
        left = "" if other else f" %if not(is_ones([0:{len(items)}]))"  # or nothing could follow the comma
        g.add(f"{rest}::_", ends, f"{comma} {one}::_{left}")
    return f"{first}::0x0"


def _in_order(g: Grammar, items: Sequence[Member], comma: str, end: str, other: str) -> str:
    first = next((index for index, (_, required) in enumerate(items) if required), None)
    rest = f"({comma} {other})* {end}" if other else end
    if first is not None:  # which has a comma on both sides
        before = "".join(f"({text} {comma})? " for text, _ in items[:first])
        after = "".join(
            f"{comma} {text} " if required else f"({comma} {text})? " for text, required in items[first + 1 :]
        )
        return f"{before}{items[first][0]} {after}{rest}"
    options = [f"{other} {rest}"] if other else []
    for text, _ in reversed(items):
        rest = g.once("m", rest)
        options.append(f"{text} {rest}")
        rest = f"({comma} {text})? {rest}"
    return f"({' | '.join([*options, end])})"


# ---- arguments ----

_ARGUMENT = re.compile(r'[^\s<>"]+')  # a name that can stand in a tag
_OTHER_ARGUMENT = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


def arguments(g: Grammar, schema: Schema, form: CallForm) -> str:
    """A rule for arguments of `schema` in `form`.

    Raises ValueError for properties that cannot be told or named, and for strict values that cannot be followed.
    """
    if form.dialect is not PYTHON and form.tags is None:
        return value(g, schema, schema.content, form.dialect)
    if (key := (schema, form.dialect.name, form.tags)) not in g.known:
        g.known[key] = g.name("arguments")
        g.add(g.known[key], _keywords(g, schema) if form.tags is None else _tagged(g, schema, form.tags))
    return g.known[key]


def _properties(schema: Schema, what: str, is_name: Callable[[str], Any]) -> list[tuple[str, Any, bool]]:
    """The properties of an object that have names, and whether they are required."""
    properties, required = schema.content.get("properties", {}), schema.content.get("required", [])
    if not isinstance(properties, Mapping):
        raise ValueError("'properties' must be an object")
    if (
        malformed(schema.content)
        or not isinstance(required, Sequence)
        or any(not isinstance(key, str) for key in required)
    ):
        raise ValueError("'required' must be a list of names")
    for key in ("$ref", "anyOf", "allOf", "oneOf", "patternProperties"):
        if key in schema.content:
            raise ValueError(f"{key} at the top level has no meaning for {what}")
    for key in required:
        if key not in properties or not is_name(key):
            raise ValueError(f"{key!r} cannot be one of {what}")
    return [(key, part, key in required) for key, part in properties.items() if is_name(key)]


def _keywords(g: Grammar, schema: Schema) -> str:
    properties = _properties(schema, "keyword arguments", str.isidentifier)
    items = [
        (f"{literal(key)} {g.terminal('IS')} {value(g, schema, part, PYTHON)}", required)
        for key, part, required in properties
    ]
    return members(g, items, g.terminal("COMMA"), '""')


def _tagged(g: Grammar, schema: Schema, form: TagForm) -> str:
    properties = _properties(schema, "arguments in tags", _ARGUMENT.fullmatch)
    items: list[Member] = []
    for key, part, required in properties:
        try:
            items.append((_argument(g, schema, literal(key), part, form), required))
        except ValueError as error:
            raise ValueError(f"argument {key!r}: {error}") from error
    other = ""
    if schema.content.get("additionalProperties", True) is not False:
        but = f" & ~/({'|'.join(escaped(key) for key, _, _ in properties)})/" if properties else ""
        name = g.once("NAME", _OTHER_ARGUMENT + but)
        other = _argument(g, schema, name, argument_schema(schema.content, ""), form)
    return members(g, items, "", '""', other)


def _argument(g: Grammar, schema: Schema, name: str, part: Any, form: TagForm) -> str:
    """An argument with its tags. Some formats say in the tag whether its value is a text."""
    schema_key, content = _key_of(part), schema.content
    key = ("argument", form, schema.strict, schema_key, '"$ref"' in schema_key and _key_of(content))
    if key not in g.known:
        options = alternatives(part, content)
        if not options:
            raise ValueError("it has no value, or too many alternatives")
        texts = [each for each in options if each["type"] == "string"]
        rest = [each for each in options if each["type"] != "string"]
        begin = f" {g.space or _LINE} ".join(map(literal, form.value.split("\n")))
        if form.json and texts and rest:
            other = f"{literal(form.json)} {_in_tag(g, schema, (), rest, form)}"
            g.known[key] = f"({begin} {_in_tag(g, schema, texts, (), form)} | {other})"
        else:
            begin = f"({begin} | {literal(form.json)})" if form.json else begin
            g.known[key] = f"{begin} {_in_tag(g, schema, texts, rest, form)}"
    return f"{g.space or _LINE} {literal(form.key)} {name} {g.known[key]}"


Options: TypeAlias = Sequence[Mapping[str, Any]]


def _in_tag(g: Grammar, schema: Schema, texts: Options, rest: Options, form: TagForm) -> str:
    """A rule for one of `texts` as it is, or a value of `rest` in JSON, up to and with the end of its tag.

    A lexer cannot go back, so everything without brackets is one terminal. A text that begins as an object or a list
    does is refused where only some objects or lists are allowed.
    """
    line, end = literal("\n" if form.line else ""), literal(form.end)

    def in_json(options: Options) -> str:
        return f"{value(g, schema, {'anyOf': [*options]}, TAGGED)} {g.space if g.free else line} {end}"

    terminals, beside = _in_text(schema, texts, rest) if texts else ([], _Beside())
    if not terminals:  # or no text can be told from the other values
        return g.once("tag", f"{g.space if g.free else line} {in_json(rest)}")
    within = "" if terminals == [_TEXT] else f" & ~/(.|\\n)*{escaped(form.end)}(.|\\n)*/"
    text = g.once("TEXT", f"({' | '.join(terminals)}){within}")
    before, after = line, literal("\n" + form.end if form.line else form.end)
    # The reader takes a line end on either side for no part of the text.
    lines = form.line and g.free and not any(each.get("minLength") for each in texts if "enum" not in each)
    if beside.json:
        may_end, after = (" /\\n?/", end) if lines else ("", after)
        text = g.once("APART", f"({text}{may_end}) & ~/({'|'.join(beside.begins)})/")
    elif lines:
        text, before, after = g.once("LINES", f"/\\n?/ {text} /\\n?/"), "", end
    until = g.once("until[lazy]", f"{text} {after}")
    return g.once("tag", f"{before} ({until} | {in_json(beside.json)})" if beside.json else f"{before} {until}")


_LINE = r'("\n")?'  # between tags in plain style
_BLANK = r"[ \t\r\n]*"
_WORDS = {True: "[tT]rue", False: "[fF]alse", None: "null|None"}
_ANY_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?"
_VALUE_BEGINS = r"[\]\[\{\"0-9\-]|[tT]rue|[fF]alse|null|None"
_BEGINS = {
    "boolean": "",
    "null": "",
    "number": rf"{_BLANK}[0-9\-](.|\n)*",
    # White space before a bracket ends the text at once: the bracket would be read as a part of both.
    "object": rf"[ \t\r\n]+\{{(.|\n)*|\{{{_BLANK}[\"\}}](.|\n)*",
    "array": rf"[ \t\r\n]+\[(.|\n)*|\[{_BLANK}({_VALUE_BEGINS})(.|\n)*",
}


def _in_text(schema: Schema, texts: Options, rest: Options) -> tuple[list[str], "_Beside"]:
    """Terminals for `texts` and for those of `rest` that have no brackets. Raises ValueError where a strict text must
    be more than of some length, or one of a list.
    """
    lengths, listed = dict[str, None](), dict[str, None]()
    for each in texts:
        if schema.strict and (unfit := sorted(each.keys() - {"type", "enum", "minLength", "maxLength"})):
            subject = f"the pattern {str(each['pattern'])[:SHOWN]!r}" if "pattern" in each else unfit[0]
            raise ValueError(f"{subject} of a text cannot be followed in tags")
        times = _times(each, "minLength", "maxLength")
        if schema.strict and not times:
            raise ValueError("no text has the required length")
        times = times or "*"
        if "enum" not in each:
            lengths[times] = None
        else:
            fits = re.compile(rf"(.|\n){times}")
            listed |= {text: None for text in each["enum"] if fits.fullmatch(text)}
    beside = _beside(rest, schema.strict, any_text="*" in lengths)
    kinds = frozenset(each["type"] for each in (*texts, *rest))
    kinds |= {"integer"} if "number" in kinds else set()
    words = [text for text in listed if as_json(text, kinds) == json.dumps(text, ensure_ascii=False)]
    rule = " | ".join(rf"/(.|\n){times}/" for times in lengths)
    if beside.taken and rule:
        rule = f"({rule}) & ~/{_BLANK}({'|'.join(beside.taken)}){_BLANK}/"
    return [*([rule] if rule else []), *beside.terminals, *(literal(word) or "/(x){0}/" for word in words)], beside


@dataclass(slots=True)
class _Beside:
    """How values that may stand in place of a text are told from texts.

    `terminals`: values without brackets. A text that matches one of `taken` is such a value. One that matches one of
    `begins` is refused: the alternatives in `json`, which have rules of their own, begin so.
    """

    terminals: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    begins: list[str] = field(default_factory=list)
    json: list[Mapping[str, Any]] = field(default_factory=list)


def _beside(options: Options, strict: bool, any_text: bool) -> _Beside:
    """`any_text`: any text may stand beside `options`, also one that is read as one of them."""
    result = _Beside()
    for kind, begins in _BEGINS.items():
        of_kind = [each for each in options if family(each["type"]) == kind]
        free = any(map(_is_free, of_kind))
        if not of_kind or (free and any_text):
            continue
        listed = [constant for each in of_kind for constant in each.get("enum", ())]
        limited = [each for each in of_kind if each.keys() - {"type", "enum"} and not _is_free(each)]
        if kind in ("object", "array") or (kind == "number" and strict and limited and not free):
            result.json += of_kind
            result.begins.append(begins)
        elif kind == "number":
            if free or limited:
                whole = all(each["type"] == "integer" for each in of_kind if _is_free(each) or not strict)
                result.terminals.append(f"/{INTEGER if whole else NUMBER}/")
            result.terminals += (literal(json.dumps(constant)) for constant in listed)
        elif strict and limited:
            raise ValueError(f"{min(limited[0].keys() - {'type', 'enum'})} of a {kind} cannot be followed in tags")
        else:
            every = [True, False] if kind == "boolean" else [None]
            words = every if free or limited else listed
            result.terminals += (f"/{_WORDS[word]}/" for word in dict.fromkeys(words))
            result.taken += [] if free else ["|".join(_WORDS[word] for word in every)]
        result.taken += [] if free or kind != "number" else [_ANY_NUMBER]
    return result


def _is_free(option: Mapping[str, Any]) -> bool:
    """Whether every value of its type follows it."""
    return all(key == "type" or value is True or value == {} for key, value in option.items())


# ---- calls and replies ----

_MOST_BEFORE_NAME = 16  # tools whose arguments may stand before the name that tells which tool it is


def calls(g: Grammar, form: CallForm, tools: Sequence[ToolRule], several: bool) -> str:
    """A rule for calls in `form`, their opener included. Raises ValueError as `arguments`."""
    inside = g.space if form.opener and not form.tight else ""
    call = g.once("call", *_call(g, form, tools))
    more = f"({_between(g, form)} {call})*" if several and not form.alone else ""
    begin = f"{literal(form.opener)} {inside} {_spaced(g, form.head)}"
    return g.once("calls", f"{begin} {call} {more} {_spaced(g, form.tail)}")


def _call(g: Grammar, form: CallForm, tools: Sequence[ToolRule]) -> list[str]:
    bodies = [arguments(g, tool.arguments, form) for tool in tools]
    if g.free and form.is_object:
        return _objects(g, form, [(tool.name, body) for tool, body in zip(tools, bodies, strict=True)])
    may = "?" if g.free else ""
    number = f"(/{form.number}/){may}" if form.number else ""
    aside = f"(/{form.aside}/)?" if form.aside and g.free else ""
    inside, outside = ("", g.space or _LINE) if form.tags else (g.space, g.space)
    named = " | ".join(
        f"{literal(tool.name)} {number} {aside} {_behind(g, form, tool.name)} {inside} {body}"
        for tool, body in zip(tools, bodies, strict=True)
    )
    return [f"{_spaced(g, form.before)} ({named}) {outside if form.after else ''} {_spaced(g, form.after)}"]


def _behind(g: Grammar, form: CallForm, name: str) -> str:
    return f"/{form.header}/" if form.header else _spaced(g, form.behind(name))


def _objects(g: Grammar, form: CallForm, named: Sequence[tuple[str, str]]) -> list[str]:
    """Free calls that are objects: name and arguments in any order, and the type that says that they are functions."""
    colon, comma, begin, end = map(g.terminal, ("COLON", "COMMA", "OPEN", "CLOSE"))
    lead, after = _spaced(g, form.before.removesuffix(_OBJECT)), _spaced(g, form.after.removeprefix("}"))
    type_ = f'("\\"type\\"" {colon} "\\"function\\"" {comma})?'
    name_key, key = f'"\\"name\\"" {colon}', f'("\\"arguments\\"" | "\\"parameters\\"") {colon}'
    pairs = [(literal(json.dumps(name, ensure_ascii=False)), body) for name, body in named]
    orders = [f"{name_key} ({' | '.join(f'{name} {comma} {type_} {key} {body}' for name, body in pairs)})"]
    if len(pairs) <= _MOST_BEFORE_NAME:
        orders.append(f"{key} ({' | '.join(f'{body} {comma} {type_} {name_key} {name}' for name, body in pairs)})")
    return [f"{lead} {begin} {type_} {order} {end} {after}" for order in orders]


def _spaced(g: Grammar, text: str) -> str:
    """`text`; free with any white space where it has a line end, and around a bracket of a list."""
    if not g.free:
        return literal(text)
    if text == "[":
        return g.terminal("OPEN_LIST")
    if text.startswith("]"):
        return f"{g.terminal('CLOSE_LIST')} {g.space if text[1:] else ''} {literal(text[1:])}"
    return f" {g.space} ".join(map(literal, text.split("\n")))


def _between(g: Grammar, form: CallForm) -> str:
    """The text between two calls; free where the end of the last one is written."""
    if g.free and form.tail and form.between.strip() in ("", ","):
        return g.terminal("COMMA") if form.between.strip() else g.space
    if form.tags is not None and form.restarts:  # some of the family write no line end there
        return f"{_LINE} {literal(form.between.lstrip())}"
    return literal(form.between)


def schema_grammar(schema: Schema, form: CallForm | None, free: bool) -> str:
    """A grammar of arguments in `form` alone, or of JSON without one. Raises ValueError as `arguments`."""
    g = Grammar(free)
    if form is None:
        return g.text(value(g, schema, schema.content))
    return g.text(arguments(g, schema, form))


_BEHIND = "\x00"
"""Stands behind calls that nothing follows, and is never written. Trap: llguidance takes as long to find that nothing
may follow as to read a short call.
"""


def reply_grammar(rule: ReplyRule, forms: Forms | None) -> str:
    """The grammar of a reply under `rule`, in llguidance's Lark dialect. `forms` None: the model writes no calls.

    For calls in a text it is the grammar of such calls alone, from the first character of their opener on. Raises
    ValueError for a rule that the forms cannot follow.
    """
    g = Grammar(free=rule.in_text)
    starts: list[str] = []
    if rule.json is not None:
        starts.append(f"{literal(forms.answer if forms is not None else '')} {value(g, rule.json, rule.json.content)}")
    if rule.calls != "none" and rule.tools and forms is not None:
        if rule.in_text:
            starts += [calls(g, form, rule.tools, rule.parallel and not form.restarts) for form in forms.all]
        else:
            forced = (forms.first, forms.other) if forms.other is not None else (forms.first,)
            starts += [calls(g, form, rule.tools, rule.parallel) for form in forced]
    start = " | ".join(starts or [g.once("TEXT", _TEXT)])
    if rule.in_text and forms is not None and forms.over_when_complete(rule.parallel):
        start = f"({start}) {g.once('BEHIND', literal(_BEHIND))}?"
    if not rule.in_text and forms is not None and forms.thought is not None:
        opener, closer, behind = map(literal, forms.thought)
        thought = g.once("until[lazy]", f"{g.once('TEXT', _TEXT)} {closer}")
        start = f"({opener} {thought} {behind})? ({start})"
    return g.text(start)
