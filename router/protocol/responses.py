"""`/v1/responses`: its request body, the chat prompt that its items become, and the response object.

Chat is the inner form: items become messages, so a conversation has the same prompt whichever API it comes by. Events
are in `response_events`, what is kept between requests in `stored_responses`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, Tag, WithJsonSchema, with_config
from typing_extensions import TypedDict  # pydantic takes typing's own only from Python 3.12 on

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import ChatPrompt, ModelCard, Usage
from holdfast.router.protocol.body import (
    MOST_MESSAGES,
    MOST_TOOLS,
    MOST_WORDS,
    NULL_IS_ABSENT,
    Body,
    Unknown,
    decode,
    one_or_many,
    validate,
    word,
)
from holdfast.router.protocol.declared_tools import (
    DeclaredTools,
    custom_arguments,
    is_custom,
    is_function,
    is_namespace,
)
from holdfast.router.protocol.fields import FieldNames
from holdfast.router.protocol.kv_hints import KvHints, check_ranges, read_hints
from holdfast.router.protocol.messages import Parameters, ToolName, check_tools, left_out, system_text
from holdfast.router.protocol.output import (
    EFFORTS,
    JsonObjectFormat,
    TextFormat,
    json_output,
    template_arguments,
    tool_choice,
)
from holdfast.router.protocol.turn import FLEX, GenerationBody, Turn, build_sampling, build_turn

OPEN = ConfigDict(strict=True, extra="allow")
MAX_TOP_LOGPROBS = 20
ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
CALLS = frozenset({"function_call", "custom_tool_call"})
TRIGGER = "compaction_trigger"
SUMMARY = "Summary of the conversation so far:\n"
SUMMARISE = (
    "Summarise this conversation for whoever goes on with it without having seen it: what was asked, what was done and "
    "found, which files, names and values matter, what is decided, and what is left. Answer with the summary only."
)

Content: TypeAlias = Annotated[
    Annotated[str, Tag("one")]
    | Annotated[Annotated[list[dict[str, Any]], Field(max_length=MOST_MESSAGES)], Tag("many")],
    Discriminator(one_or_many),
]
_PART = {
    "type": "object",
    "properties": {"type": {"enum": sorted(TEXT_PARTS)}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Texts: TypeAlias = Annotated[
    Content, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]})
]


@with_config(OPEN)
class MessageItem(TypedDict):
    type: NotRequired[Literal["message"]]
    role: Literal["user", "assistant", "system", "developer"]
    content: NotRequired[Texts]  # of an assistant alone: see `input_items`


@with_config(OPEN)
class FunctionCallItem(TypedDict):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: str
    namespace: NotRequired[str]
    arguments: str


@with_config(OPEN)
class CustomCallItem(TypedDict):
    type: Literal["custom_tool_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: str
    namespace: NotRequired[str]
    input: str


@with_config(OPEN)
class CallOutputItem(TypedDict):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Texts


@with_config(OPEN)
class ReasoningItem(TypedDict):
    """`encrypted_content` is what we have given out, or a foreign server's, which is not read."""

    type: Literal["reasoning"]
    content: NotRequired[list[dict[str, Any]]]
    encrypted_content: NotRequired[str]


@with_config(OPEN)
class CompactionItem(TypedDict):
    type: Literal["compaction", "compaction_summary"]
    encrypted_content: str


@with_config(OPEN)
class TriggerItem(TypedDict):
    """The last item of a request that asks for a compaction of all before it."""

    type: Literal["compaction_trigger"]


@with_config(OPEN)
class ReferenceItem(TypedDict):
    type: NotRequired[Literal["item_reference"]]
    id: str


KINDS: Mapping[str, str] = {
    "message": "a message",
    "function_call": "a call",
    "custom_tool_call": "a custom call",
    "function_call_output": "an output",
    "custom_tool_call_output": "an output",
    "reasoning": "thoughts",
    "compaction": "a compaction",
    "compaction_summary": "a compaction",
    "compaction_trigger": "a trigger",
    "item_reference": "a reference",
}


def _kind(item: object) -> str:
    """Discriminates items. Those of types that are not known are kept and not shown to the model."""
    if not isinstance(item, Mapping):
        return "another"
    kind = item.get("type") or ("message" if "role" in item else "item_reference" if set(item) == {"id"} else "")
    return KINDS.get(kind, "another") if isinstance(kind, str) else "another"


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("a message")]
    | Annotated[FunctionCallItem, Tag("a call")]
    | Annotated[CustomCallItem, Tag("a custom call")]
    | Annotated[CallOutputItem, Tag("an output")]
    | Annotated[ReasoningItem, Tag("thoughts")]
    | Annotated[CompactionItem, Tag("a compaction")]
    | Annotated[TriggerItem, Tag("a trigger")]
    | Annotated[ReferenceItem, Tag("a reference")]
    | Annotated[dict[str, Any], Tag("another")],
    Discriminator(_kind),
    NULL_IS_ABSENT,
]


@with_config(OPEN)
class FunctionTool(TypedDict):
    type: Literal["function"]
    name: ToolName
    description: NotRequired[str | None]
    parameters: NotRequired[Parameters | None]
    strict: NotRequired[bool | None]


@with_config(OPEN)
class GrammarFormat(TypedDict):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


@with_config(OPEN)
class CustomTool(TypedDict):
    """A tool whose input is text, and no JSON."""

    type: Literal["custom"]
    name: ToolName
    description: NotRequired[str | None]
    format: NotRequired[Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None]


def _tool_kind(tool: object) -> str:
    return "a function" if is_function(tool) else "a custom tool" if is_custom(tool) else "another"


OneTool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("a function")]
    | Annotated[CustomTool, Tag("a custom tool")]
    | Annotated[dict[str, Any], Tag("another")],
    Discriminator(_tool_kind),
]


@with_config(OPEN)
class NamespaceTool(TypedDict):
    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1)]
    description: NotRequired[str | None]
    tools: Annotated[list[OneTool], Field(max_length=MOST_TOOLS)]


ResponseTool: TypeAlias = Annotated[
    Annotated[OneTool, Tag("one")] | Annotated[NamespaceTool, Tag("a namespace")],
    Discriminator(lambda tool: "a namespace" if is_namespace(tool) else "one"),
]


@with_config(OPEN)
class JsonSchemaFormat(TypedDict):
    type: Literal["json_schema"]
    name: str
    schema: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class TextField(Body):
    """`verbosity` changes nothing: no model that is served knows it."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] = Field(
        default_factory=lambda: TextFormat(type="text")
    )
    verbosity: str | None = None


class ResponsesBody(GenerationBody):
    """What a client may send. What is about bills and users changes nothing and is told back; of `reasoning` the chat
    template is told the `effort`.
    """

    input: Annotated[
        Annotated[str, Tag("one")] | Annotated[Annotated[list[Item], Field(max_length=MOST_MESSAGES)], Tag("many")],
        Discriminator(one_or_many),
    ] = Field(default_factory=list)
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MOST_TOOLS)] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None  # of built-in tools, of which there are none
    text: Annotated[TextField, NULL_IS_ABSENT] = Field(default_factory=TextField)
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    include: list[str] = Field(default_factory=list)
    truncation: Literal["auto", "disabled"] = "disabled"
    reasoning: dict[str, Any] | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] = Field(
        default_factory=dict
    )
    store: bool = True
    background: bool = False
    user: str | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    kv_hints: KvHints | None = None  # as in a chat; messages are those that items become


def read_input(raw: bytes, model: str) -> ResponsesBody:
    """A request whose prompt is to be counted; `model` is meant where it names none. Raises as `read_responses`."""
    return _checked(validate(ResponsesBody, {"model": model, **decode(raw)}))


def read_responses(raw: bytes) -> ResponsesBody:
    """A request body, checked as far as it can be without what it goes on with. Raises InvalidRequestError."""
    return _checked(validate(ResponsesBody, decode(raw)))


def _checked(body: ResponsesBody) -> ResponsesBody:
    if body.background:
        raise InvalidRequestError("'background' is not supported; only false is accepted", "background")
    if body.max_tokens is not None:
        message = "Unrecognized request argument supplied: max_tokens (did you mean 'max_output_tokens'?)"
        raise InvalidRequestError(message, "max_tokens")
    if not body.input and body.previous_response_id is None:
        raise InvalidRequestError("Missing required parameter: 'input'", "input")
    return body


def input_items(body: ResponsesBody, unique: str) -> list[dict[str, Any]]:
    """The request's own items, each with a type and an id, as they are kept and shown.

    Raises InvalidRequestError for a type or an id that is no text, and for a message without content. An assistant's
    counts as empty.
    """
    given: Sequence[Mapping[str, Any]] = (
        [{"type": "message", "role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    )
    items = []
    for index, item in enumerate(given):
        kept: dict[str, Any] = {**item}
        kept.setdefault("type", "message" if "role" in kept else "item_reference" if "id" in kept else "unknown")
        if kept["type"] == "message" and "content" not in kept:
            if kept["role"] != "assistant":
                field = f"input.{index}.content"
                raise InvalidRequestError(f"Missing required parameter: '{field}'", field)
            kept["content"] = ""
        if kept["type"] == "message" and isinstance(kept["content"], str):
            part = "output_text" if kept["role"] == "assistant" else "input_text"
            more: dict[str, Any] = {"annotations": []} if kept["role"] == "assistant" else {}
            kept["content"] = [{"type": part, "text": kept["content"], **more}]
        if kept["type"] == "message":
            kept.setdefault("status", "completed")
        for name in ("type", "id"):
            if not isinstance(kept.get(name, ""), str):
                field = f"input.{index}.{name}"
                raise InvalidRequestError(f"'{field}' must be a string", field)
        kept.setdefault("id", f"{PREFIXES.get(kept['type'], 'item')}_{unique}_in{index}")
        items.append(kept)
    return items


def compacts(own: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a request asks for a compaction, by its last item. Raises InvalidRequestError for one before others."""
    for index, item in enumerate(own[:-1]):
        if item["type"] == TRIGGER:
            message = f"'input.{index}': a {TRIGGER} must be the last item"
            raise InvalidRequestError(message, f"input.{index}")
    return bool(own) and own[-1]["type"] == TRIGGER


def compacted(items: Sequence[dict[str, Any]], compaction: dict[str, Any]) -> list[dict[str, Any]]:
    """What stands for `items` from then on: what users said, and the summary of it all."""
    said = [item for item in items if item["type"] == "message" and item.get("role") == "user"]
    return [*said, compaction]


def _of(kind: Any, *more: str) -> frozenset[str]:
    """The fields that are known of an item: those that are read, and those that clients send back as we told them."""
    return frozenset({*kind.__annotations__, "id", "status", *more})


_OF_ITEM: Mapping[str, frozenset[str]] = {
    "a message": _of(MessageItem, "phase"),
    "a call": _of(FunctionCallItem),
    "a custom call": _of(CustomCallItem),
    "an output": _of(CallOutputItem),
    "thoughts": _of(ReasoningItem, "summary"),
    "a compaction": _of(CompactionItem),
    "a trigger": _of(TriggerItem),
    "a reference": _of(ReferenceItem),
}
_OF_PART = frozenset({"type", "text", "refusal", "annotations", "logprobs"})
_OF_TOOL, _OF_CUSTOM = frozenset(FunctionTool.__annotations__), frozenset(CustomTool.__annotations__)
_OF_NAMESPACE = frozenset(NamespaceTool.__annotations__)
_OF_FORMAT = frozenset({*JsonSchemaFormat.__annotations__, "description"})
_OF_REASONING = frozenset({"effort", "summary", "generate_summary"})


def unknown_fields(body: ResponsesBody) -> set[str]:
    """The fields of items, parts, functions and the like that are not known, each by its path without numbers."""
    unknown = Unknown()
    for item in body.input if isinstance(body.input, list) else ():
        kind = _kind(item)
        if kind not in _OF_ITEM:
            continue  # it is left out as a whole, by its type
        unknown.look(item, _OF_ITEM[kind], "input")
        for name in ("content", "output"):
            parts = item.get(name)
            for part in parts if isinstance(parts, list) else ():
                unknown.look(part, _OF_PART, f"input.{name}")
    for tool in body.tools:
        _look_into(tool, "tools", unknown)
    unknown.look(body.text.format, _OF_FORMAT, "text.format")
    unknown.look(body.reasoning or {}, _OF_REASONING, "reasoning")
    return unknown.found


def _look_into(tool: Mapping[str, Any], where: str, unknown: Unknown) -> None:
    if is_namespace(tool):
        unknown.look(tool, _OF_NAMESPACE, where)
        for each in tool["tools"]:
            _look_into(each, f"{where}.tools", unknown)
    elif is_function(tool) or is_custom(tool):
        unknown.look(tool, _OF_TOOL if is_function(tool) else _OF_CUSTOM, where)


PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}


@dataclass(frozen=True, slots=True)
class Translated:
    """A conversation's messages and `tools`, the types of items that were left out, and the messages' `fields`."""

    messages: list[dict[str, Any]]
    skipped: tuple[str, ...]
    tools: DeclaredTools
    fields: list[str]


def chat_messages(
    history: Sequence[Mapping[str, Any]],
    own: Sequence[Mapping[str, Any]],
    instructions: str | None,
    reveal: Callable[[str], str | None],
    tools: DeclaredTools | None = None,
) -> Translated:
    """The messages that items stand for: what a model said between two messages of others is one of its own.

    `reveal` reads an `encrypted_content`; None: it cannot, ValueError: that is another tenant's. Raises
    InvalidRequestError that names the item.
    """
    # A reference that was stored has the id of what it refers to, and would lead to itself.
    known = {item["id"]: item for item in history if "id" in item and item["type"] != "item_reference"}
    tools = tools or DeclaredTools()
    reader = _ItemReader(reveal, known, tools)
    fields: list[str] = []
    if instructions:
        reader.messages.append({"role": "system", "content": system_text(instructions)})
        fields.append("instructions")
    for item in history:
        reader.read(item, "previous_response_id")
    fields += ["previous_response_id"] * (len(reader.messages) - len(fields))
    for index, item in enumerate(own):
        reader.read(item, f"input.{index}")
        fields += [f"input.{index}"] * (len(reader.messages) - len(fields))
    if not reader.messages:
        raise InvalidRequestError("'input' has no item that a model can read", "input")
    return Translated(reader.messages, tuple(dict.fromkeys(reader.skipped)), tools, fields)


class _ItemReader:
    """Reads items one after the other."""

    def __init__(
        self, reveal: Callable[[str], str | None], known: Mapping[str, Mapping[str, Any]], tools: DeclaredTools
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        self._reveal = reveal
        self._tools = tools
        self._known = known
        self._calls: set[str] = set()
        self._own: dict[str, Any] | None = None  # the assistant's message that may still grow

    def read(self, item: Mapping[str, Any], where: str) -> None:
        kind: str = item["type"]
        if kind == "item_reference":
            known = self._known.get(item["id"])
            if known is None:
                raise InvalidRequestError(f"'{where}.id': no earlier item is {item['id']!r}", f"{where}.id")
            self.read(known, where)
        elif kind == "message":
            self._message(item, where)
        elif kind in CALLS:
            self._call(item, kind)
        elif kind.removesuffix("_output") in CALLS:
            self._output(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind == TRIGGER:
            pass  # what it asks for is asked at the end of the messages
        elif kind.startswith("compaction"):
            summary = self._revealed(item, where)
            if summary is None:
                field = f"{where}.encrypted_content"
                raise InvalidRequestError(f"'{field}' was not made by this server, or its key is gone", field)
            self._others({"role": "user", "content": SUMMARY + summary})
        else:
            self.skipped.append(word(kind))

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role, text = item["role"], _text(item["content"], f"{where}.content")
        if role != "assistant":
            if role in ("system", "developer"):
                role, text = "system", system_text(text)
            self._others({"role": role, "content": text})
            return
        own = self._own
        if own is None or own["content"] is not None or "tool_calls" in own:
            own = self._begin()
        own["content"] = text

    def _call(self, item: Mapping[str, Any], kind: str) -> None:
        own = self._own or self._begin()
        arguments = item["arguments"] if kind == "function_call" else custom_arguments(item["input"])
        function = {"name": self._tools.shown(item["name"], item.get("namespace", "")), "arguments": arguments}
        own.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
        self._calls.add(item["call_id"])

    def _output(self, item: Mapping[str, Any], where: str) -> None:
        call_id = item["call_id"]
        if call_id not in self._calls:
            message = f"No tool call found for function call output with call_id {call_id}."
            raise InvalidRequestError(message, f"{where}.call_id")
        text = self._result(item["output"], f"{where}.output")
        self._others({"role": "tool", "content": text, "tool_call_id": call_id})

    def _result(self, output: str | Sequence[Mapping[str, Any]], where: str) -> str:
        """The text of a tool's output; a note stands for each part of it that is no text."""
        if isinstance(output, str):
            return output
        parts = []
        for part in output:
            kind = part.get("type")
            if kind not in TEXT_PARTS and kind != "refusal":
                self.skipped.append(word(kind))
                part = {"type": "text", "text": left_out(kind)}
            parts.append(part)
        return _text(parts, where)

    def _revealed(self, item: Mapping[str, Any], where: str) -> str | None:
        try:
            return self._reveal(item["encrypted_content"])
        except ValueError:
            field = f"{where}.encrypted_content"
            raise InvalidRequestError(f"'{field}' was made for another tenant", field) from None

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        text = "".join(str(part.get("text", "")) for part in item.get("content") or ())
        if not text and "encrypted_content" in item:
            text = self._revealed(item, where) or ""
        if text:
            self._begin()["reasoning_content"] = text

    def _begin(self) -> dict[str, Any]:
        self._own = {"role": "assistant", "content": None}
        self.messages.append(self._own)
        return self._own

    def _others(self, message: dict[str, Any]) -> None:
        self._own = None
        self.messages.append(message)


def _text(content: str | Sequence[Mapping[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type")
        kind = kind if isinstance(kind, str) else None
        text = part.get("text") if kind in TEXT_PARTS else part.get("refusal") if kind == "refusal" else None
        if not isinstance(text, str):
            field = f"{where}.{index}"
            raise InvalidRequestError(f"'{field}': {kind!r} is not supported; content is text", field)
        texts.append(text)
    return "\n".join(texts)


def responses_turn(body: ResponsesBody, translated: Translated, card: ModelCard) -> tuple[Turn, tuple[str, ...]]:
    """The turn, and all that was left out. Raises InvalidRequestError or ContextLengthError, naming the field."""
    declared = translated.tools
    tools = [each.function() for each in declared.tools]
    whole = isinstance(body.input, str)  # one message, and no item
    messages = ["input" if whole and each.startswith("input.") else each for each in translated.fields]
    schemas = ["format.definition" if each.custom else "parameters" for each in declared.tools]
    fields = FieldNames(_BEGINNINGS, [each.field for each in declared.tools], messages, schemas)
    try:
        check_tools(tools)
        choice = tool_choice(_chat_choice(body.tool_choice, declared), [each.shown for each in declared.tools])
    except InvalidRequestError as error:
        raise fields.error(error) from None
    prompt = ChatPrompt(
        messages=translated.messages,
        tools=tuple(tools),
        tool_choice=choice.mode,
        parallel_tool_calls=body.parallel_tool_calls,
        template_kwargs=template_arguments(body.chat_template_kwargs, _effort(body)),
        forced_tool=choice.forced,
        allowed_tools=choice.allowed,
        output=json_output(_chat_format(body.text)),
    )
    wanted = body.top_logprobs if body.top_logprobs or LOGPROBS in body.include else None
    sampling = build_sampling(body, card, wanted, body.max_output_tokens, "max_output_tokens")
    hints = read_hints(body.kv_hints)
    check_ranges(hints, len(prompt.messages))
    turn = replace(build_turn(body, prompt, card, sampling), hints=hints, fields=fields)
    # The response that it goes on with names the program itself (`Exchange.program`).
    turn = replace(turn, ids=replace(turn.ids, previous_response_id=None))
    left_out = (*declared.skipped, *translated.skipped, *sorted(unknown_fields(body)), *turn.skipped)
    return turn, tuple(dict.fromkeys(left_out))[:MOST_WORDS]


_BEGINNINGS: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""What fields of a chat completion are called here."""


def _effort(body: ResponsesBody) -> str | None:
    """How much is to be thought. Raises InvalidRequestError for a word that is not known."""
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and effort not in EFFORTS:
        message = f"Invalid value for 'reasoning.effort': {effort!r} is not one of {', '.join(EFFORTS)}"
        raise InvalidRequestError(message, "reasoning.effort")
    return effort


def compaction_turn(body: ResponsesBody, translated: Translated, card: ModelCard) -> tuple[Turn, tuple[str, ...]]:
    """The turn in which the model sums its conversation up: no calls, no form."""
    asked = [*translated.messages, {"role": "user", "content": SUMMARISE}]
    plain = body.model_copy(update={"tool_choice": "none", "text": TextField()})
    return responses_turn(plain, replace(translated, messages=asked), card)


def response_object(body: ResponsesBody, reply_id: str, created: int) -> dict[str, Any]:
    """The response before its first item."""
    return {
        "id": reply_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "safety_identifier": body.safety_identifier,
        "service_tier": FLEX if body.service_tier == FLEX else "default",
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": _told_format(body.text), "verbosity": body.text.verbosity or "medium"},
        "tool_choice": body.tool_choice,
        "tools": [_told_tool(tool) for tool in body.tools],
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "truncation": body.truncation,
        "usage": None,
        "user": body.user,
        "metadata": body.metadata,
    }


def response_usage(usage: Usage) -> dict[str, Any]:
    """Token counts. What was not cached has been written to the cache."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.prompt - usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def _chat_choice(given: str | Mapping[str, Any], tools: DeclaredTools) -> str | Mapping[str, Any]:
    """`tool_choice` as chat has it. Raises InvalidRequestError for one that no model here can call."""
    if isinstance(given, str):
        return given
    kind = given.get("type")
    if kind == "allowed_tools":
        return {
            "type": kind,
            "allowed_tools": {"mode": given.get("mode"), "tools": _allowed(given.get("tools"), tools)},
        }
    if kind not in ("function", "custom"):
        raise InvalidRequestError(f"'tool_choice.type': {kind!r} is not supported", "tool_choice.type")
    [chosen] = tools.chosen(given, "tool_choice")
    return _named(chosen)


def _allowed(given: Any, tools: DeclaredTools) -> Any:
    """The functions that may be called. Tools that are skipped where they are declared are skipped here, too, unless
    there are no others.
    """
    if not isinstance(given, list):
        return given
    known = ("function", "custom", "namespace")
    kept = [
        (index, tool) for index, tool in enumerate(given) if isinstance(tool, Mapping) and tool.get("type") in known
    ]
    if not kept:
        return given
    shown = [name for index, tool in kept for name in tools.chosen(tool, f"tool_choice.tools.{index}")]
    return [_named(each) for each in dict.fromkeys(shown)]


def _named(name: str) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _chat_format(text: TextField) -> Any:
    given: Any = text.format
    return {"type": "json_schema", "json_schema": given} if given["type"] == "json_schema" else given


def _told_format(text: TextField) -> Any:
    given: Any = text.format
    return {"description": None, "strict": False, **given} if given["type"] == "json_schema" else given


def _told_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if is_namespace(tool):
        return {"description": "", **tool}
    return {"description": None, "parameters": None, "strict": None, **tool} if is_function(tool) else tool
