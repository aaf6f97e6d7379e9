"""`/v1/responses`: items in, the chat prompt that they become, the response object and its events out.

Items become chat messages, so a conversation has the same prompt in every API. What is stored between requests is in
`stored_responses`.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, Union

import orjson
from pydantic import Discriminator, Field, Tag, WithJsonSchema, with_config
from typing_extensions import TypedDict  # pydantic accepts typing's own only from Python 3.12 on

from holdfast.replicas.errors import ErrorInfo, ErrorKind, InvalidRequestError
from holdfast.replicas.requests import (
    ChatPrompt,
    Completed,
    LogprobText,
    ModelCard,
    Piece,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from holdfast.router.protocol.body import (
    MOST_MESSAGES,
    MOST_TOOLS,
    MOST_WORDS,
    NULL_IS_ABSENT,
    OPEN,
    Body,
    Query,
    decode,
    missing,
    text_or,
    validate,
    word,
)
from holdfast.router.protocol.chat import (
    Effort,
    FunctionTool,
    JsonObjectFormat,
    TextFormat,
    ToolChoice,
    ToolName,
    chat_call,
    check_tools,
    json_output,
    left_out,
    mode_or,
    system_text,
    template_arguments,
    tool_choice,
)
from holdfast.router.protocol.declared_tools import (
    CustomInput,
    DeclaredTools,
    custom_arguments,
    is_custom,
    is_function,
    is_namespace,
)
from holdfast.router.protocol.errors import TABLE, FieldNames
from holdfast.router.protocol.replies import DONE, ItemEncoder, OpenItem, scored_tokens
from holdfast.router.protocol.turn import (
    FLEX,
    MAX_LOGPROBS,
    GenerationBody,
    Turn,
    build_sampling,
    build_turn,
)

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

# ---- the request ----


@with_config(OPEN)
class Part(TypedDict):
    """A part of a message or of a tool's output, with the members that clients send back as we sent them."""

    type: NotRequired[Any]
    text: NotRequired[Any]
    refusal: NotRequired[Any]
    annotations: NotRequired[Any]
    logprobs: NotRequired[Any]


_PART = {
    "type": "object",
    "properties": {"type": {"enum": sorted(TEXT_PARTS)}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Texts: Any = Annotated[
    text_or(Annotated[list[Part], Field(max_length=MOST_MESSAGES)]),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}),
]


@with_config(OPEN)
class StoredItem(TypedDict):
    """The members of every item, which clients send back as we sent them."""

    id: NotRequired[Any]
    status: NotRequired[Any]


@with_config(OPEN)
class MessageItem(StoredItem):
    type: NotRequired[Literal["message"]]
    role: Literal["user", "assistant", "system", "developer"]
    content: NotRequired[Texts]  # only an assistant may leave it out: see `input_items`
    phase: NotRequired[Any]


@with_config(OPEN)
class FunctionCallItem(StoredItem):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: str
    namespace: NotRequired[str]
    arguments: str


@with_config(OPEN)
class CustomCallItem(StoredItem):
    type: Literal["custom_tool_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: str
    namespace: NotRequired[str]
    input: str


@with_config(OPEN)
class CallOutputItem(StoredItem):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Texts


@with_config(OPEN)
class ReasoningItem(StoredItem):
    """`encrypted_content` of another server is not read."""

    type: Literal["reasoning"]
    content: NotRequired[list[Part]]
    encrypted_content: NotRequired[str]
    summary: NotRequired[Any]


@with_config(OPEN)
class CompactionItem(StoredItem):
    type: Literal["compaction", "compaction_summary"]
    encrypted_content: str


@with_config(OPEN)
class TriggerItem(StoredItem):
    """The last item of a request that asks for a compaction of all items before it."""

    type: Literal["compaction_trigger"]


@with_config(OPEN)
class ReferenceItem(TypedDict):
    type: NotRequired[Literal["item_reference"]]
    id: str


ITEM_TYPES: Mapping[str, Any] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "custom_tool_call": CustomCallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    "compaction": CompactionItem,
    "compaction_summary": CompactionItem,
    "compaction_trigger": TriggerItem,
    "item_reference": ReferenceItem,
}


def _item_type(item: object) -> str:
    """Discriminates items. Items of unknown types are stored and not shown to the model."""
    if not isinstance(item, Mapping):
        return "another"
    kind = item.get("type") or ("message" if "role" in item else "item_reference" if set(item) == {"id"} else "")
    return kind if isinstance(kind, str) and kind in ITEM_TYPES else "another"


_TAGGED = [Annotated[kind, Tag(name)] for name, kind in {**ITEM_TYPES, "another": dict[str, Any]}.items()]
Item: Any = Annotated[Union[tuple(_TAGGED)], Discriminator(_item_type), NULL_IS_ABSENT]  # noqa: UP007
Input: Any = text_or(Annotated[list[Item], Field(max_length=MOST_MESSAGES)])


@with_config(OPEN)
class FlatFunctionTool(FunctionTool):
    type: Literal["function"]


@with_config(OPEN)
class GrammarFormat(TypedDict):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


@with_config(OPEN)
class CustomTool(TypedDict):
    """A tool whose input is text, not JSON."""

    type: Literal["custom"]
    name: ToolName
    description: NotRequired[str | None]
    format: NotRequired[Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None]


def _tool_kind(tool: object) -> str:
    return "a function" if is_function(tool) else "a custom tool" if is_custom(tool) else "another"


OneTool: TypeAlias = Annotated[
    Annotated[FlatFunctionTool, Tag("a function")]
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
    description: NotRequired[Any]
    schema: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


@with_config(OPEN)
class Reasoning(TypedDict):
    """The chat template gets the `effort`."""

    effort: NotRequired[Effort | None]
    summary: NotRequired[Any]
    generate_summary: NotRequired[Any]


@with_config(OPEN)
class NamedChoice(TypedDict):
    type: Literal["function", "custom"]
    name: str
    namespace: NotRequired[str | None]


@with_config(OPEN)
class AllowedChoice(TypedDict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], Field(min_length=1)]


ResponseChoice: Any = mode_or(NamedChoice | AllowedChoice)


class TextField(Body):
    """`verbosity` changes nothing: no served model knows it."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] = Field(
        default_factory=lambda: TextFormat(type="text")
    )
    verbosity: str | None = None


class ResponsesBody(GenerationBody):
    """Fields about bills and users are only echoed."""

    input: Input = Field(default_factory=list)
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MOST_TOOLS)] = Field(default_factory=list)
    tool_choice: ResponseChoice = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None  # of built-in tools, of which there are none
    text: Annotated[TextField, NULL_IS_ABSENT] = Field(default_factory=TextField)
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    include: list[str] = Field(default_factory=list)
    truncation: Literal["auto", "disabled"] = "disabled"
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] = Field(
        default_factory=dict
    )
    store: bool = True
    background: bool = False
    user: str | None = None
    safety_identifier: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class StoredQuery(Query):
    stream: Literal["false", "0"] = "false"


class ItemsQuery(Query):
    order: Literal["asc", "desc"] = "desc"
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    after: str | None = None


def read_responses(raw: bytes, model: str | None = None) -> ResponsesBody:
    """A request body, checked as far as possible without the stored responses that it continues.

    `model`: the model of a body that names none. Raises InvalidRequestError.
    """
    body = validate(ResponsesBody, {**({"model": model} if model else {}), **decode(raw)})
    if body.background:
        raise InvalidRequestError("'background' is not supported; only false is accepted", "background")
    if not body.input and body.previous_response_id is None:
        raise missing("input")
    return body


def input_items(body: ResponsesBody, unique: str) -> list[dict[str, Any]]:
    """The request's own items as they are stored and shown, each with a type and an id.

    Raises InvalidRequestError for a type or an id that is not a string, and for a message without content; an
    assistant's content counts as empty.
    """
    items: list[dict[str, Any]] = []
    members: Sequence[Mapping[str, Any]] = (
        [{"type": "message", "role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    )
    for index, each in enumerate(members):
        item: dict[str, Any] = {**each}
        item.setdefault("type", "message" if "role" in item else "item_reference" if "id" in item else "unknown")
        for name in ("type", "id"):
            if not isinstance(item.get(name, ""), str):
                path = f"input.{index}.{name}"
                raise InvalidRequestError(f"'{path}' must be a string", path)
        if item["type"] == "message":
            _complete_message(item, f"input.{index}.content")
        item.setdefault("id", f"{PREFIXES.get(item['type'], 'item')}_{unique}_in{index}")
        items.append(item)
    return items


def _complete_message(item: dict[str, Any], path: str) -> None:
    assistant = item["role"] == "assistant"
    if "content" not in item and not assistant:
        raise missing(path)
    content = item.get("content", "")
    if isinstance(content, str):
        part = {"type": "output_text" if assistant else "input_text", "text": content}
        item["content"] = [{**part, "annotations": []} if assistant else part]
    item.setdefault("status", "completed")


def compacts(own: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last item asks for a compaction. Raises InvalidRequestError if an earlier one does."""
    for index, item in enumerate(own[:-1]):
        if item["type"] == TRIGGER:
            message = f"'input.{index}': a {TRIGGER} must be the last item"
            raise InvalidRequestError(message, f"input.{index}")
    return bool(own) and own[-1]["type"] == TRIGGER


def compacted(items: Sequence[dict[str, Any]], compaction: dict[str, Any]) -> list[dict[str, Any]]:
    """The items that replace `items`: the users' messages, and the summary of everything."""
    users = [item for item in items if item["type"] == "message" and item.get("role") == "user"]
    return [*users, compaction]


# ---- the prompt ----

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
class TranslatedItems:
    """A conversation's messages and tools, the item types that were left out, and the field of each message."""

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
) -> TranslatedItems:
    """The messages of a conversation. Adjacent items of the assistant become one message.

    `reveal` decrypts an `encrypted_content`: None if it cannot, ValueError for another tenant's. Raises
    InvalidRequestError that names the item.
    """
    # A stored reference has the id of the item that it refers to, and would lead to itself.
    by_id = {item["id"]: item for item in history if "id" in item and item["type"] != "item_reference"}
    tools = tools or DeclaredTools()
    reader = _ItemReader(reveal, by_id, tools)
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
    return TranslatedItems(reader.messages, tuple(dict.fromkeys(reader.skipped)), tools, fields)


class _ItemReader:
    """Translates one item after the other."""

    def __init__(
        self, reveal: Callable[[str], str | None], by_id: Mapping[str, Mapping[str, Any]], tools: DeclaredTools
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        self._reveal = reveal
        self._tools = tools
        self._by_id = by_id
        self._calls: set[str] = set()
        self._own: dict[str, Any] | None = None  # the assistant's message that may still grow

    def read(self, item: Mapping[str, Any], path: str) -> None:
        kind: str = item["type"]
        if kind == "item_reference":
            referenced = self._by_id.get(item["id"])
            if referenced is None:
                raise InvalidRequestError(f"'{path}.id': no earlier item is {item['id']!r}", f"{path}.id")
            self.read(referenced, path)
        elif kind == "message":
            self._message(item, path)
        elif kind in CALLS:
            self._call(item, kind)
        elif kind.removesuffix("_output") in CALLS:
            self._output(item, path)
        elif kind == "reasoning":
            self._reasoning(item, path)
        elif kind == TRIGGER:
            pass  # `compaction_turn` puts the question at the end
        elif kind.startswith("compaction"):
            summary = self._revealed(item, path)
            if summary is None:
                field_ = f"{path}.encrypted_content"
                raise InvalidRequestError(f"'{field_}' was not made by this server, or its key is gone", field_)
            self._others({"role": "user", "content": SUMMARY + summary})
        else:
            self.skipped.append(word(kind))

    def _message(self, item: Mapping[str, Any], path: str) -> None:
        role, text = item["role"], _text(item["content"], f"{path}.content")
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
        name = self._tools.shown(item["name"], item.get("namespace", ""))
        own.setdefault("tool_calls", []).append(chat_call(item["call_id"], name, arguments))
        self._calls.add(item["call_id"])

    def _output(self, item: Mapping[str, Any], path: str) -> None:
        call_id = item["call_id"]
        if call_id not in self._calls:
            message = f"No tool call found for function call output with call_id {call_id}."
            raise InvalidRequestError(message, f"{path}.call_id")
        text = self._result(item["output"], f"{path}.output")
        self._others({"role": "tool", "content": text, "tool_call_id": call_id})

    def _result(self, output: str | Sequence[Mapping[str, Any]], path: str) -> str:
        """The text of a tool's output, with a note for each part that is not text."""
        if isinstance(output, str):
            return output
        parts = []
        for part in output:
            kind = part.get("type")
            if kind not in TEXT_PARTS and kind != "refusal":
                self.skipped.append(word(kind))
                part = {"type": "text", "text": left_out(kind)}
            parts.append(part)
        return _text(parts, path)

    def _revealed(self, item: Mapping[str, Any], path: str) -> str | None:
        try:
            return self._reveal(item["encrypted_content"])
        except ValueError:
            field_ = f"{path}.encrypted_content"
            raise InvalidRequestError(f"'{field_}' was made for another tenant", field_) from None

    def _reasoning(self, item: Mapping[str, Any], path: str) -> None:
        text = "".join(str(part.get("text", "")) for part in item.get("content") or ())
        if not text and "encrypted_content" in item:
            text = self._revealed(item, path) or ""
        if text:
            self._begin()["reasoning_content"] = text

    def _begin(self) -> dict[str, Any]:
        self._own = {"role": "assistant", "content": None}
        self.messages.append(self._own)
        return self._own

    def _others(self, message: dict[str, Any]) -> None:
        self._own = None
        self.messages.append(message)


def _text(content: str | Sequence[Mapping[str, Any]], path: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type")
        kind = kind if isinstance(kind, str) else None
        text = part.get("text") if kind in TEXT_PARTS else part.get("refusal") if kind == "refusal" else None
        if not isinstance(text, str):
            field_ = f"{path}.{index}"
            raise InvalidRequestError(f"'{field_}': {kind!r} is not supported; content is text", field_)
        texts.append(text)
    return "\n".join(texts)


# ---- the turn ----


def responses_turn(body: ResponsesBody, translated: TranslatedItems, card: ModelCard) -> Turn:
    """The turn of `body`. Raises InvalidRequestError, naming the field."""
    declared = translated.tools
    tools = [each.function() for each in declared.tools]
    one_text = isinstance(body.input, str)
    sources = ["input" if one_text and each.startswith("input.") else each for each in translated.fields]
    schemas = ["format.definition" if each.custom else "parameters" for each in declared.tools]
    fields = FieldNames(_PREFIXES, [each.field for each in declared.tools], sources, schemas)
    try:
        check_tools(tools)
        choice = _choice(body.tool_choice, declared)
    except InvalidRequestError as error:
        raise fields.error(error) from None
    form: Any = body.text.format
    prompt = ChatPrompt(
        messages=translated.messages,
        tools=tuple(tools),
        tool_choice=choice.mode,
        parallel_tool_calls=body.parallel_tool_calls,
        template_kwargs=template_arguments(body.chat_template_kwargs, (body.reasoning or {}).get("effort")),
        forced_tool=choice.forced,
        allowed_tools=choice.allowed,
        output=json_output({"type": "json_schema", "json_schema": form} if form["type"] == "json_schema" else form),
    )
    logprobs = body.top_logprobs if body.top_logprobs or LOGPROBS in body.include else None
    sampling = build_sampling(body, card, body.max_output_tokens, "max_output_tokens", logprobs)
    turn = build_turn(body, prompt, card, sampling)
    skipped = (*declared.skipped, *translated.skipped, *turn.skipped)
    return replace(
        turn,
        # The response that it continues names the program itself (`Exchange.program`).
        ids=replace(turn.ids, previous_response_id=None),
        skipped=tuple(dict.fromkeys(skipped))[:MOST_WORDS],
        fields=fields,
    )


_PREFIXES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def compaction_turn(body: ResponsesBody, translated: TranslatedItems, card: ModelCard) -> Turn:
    """The turn in which the model summarises its conversation, without tool calls and in plain text."""
    messages = [*translated.messages, {"role": "user", "content": SUMMARISE}]
    plain = body.model_copy(update={"tool_choice": "none", "text": TextField()})
    return responses_turn(plain, replace(translated, messages=messages), card)


def _choice(choice: Any, tools: DeclaredTools) -> ToolChoice:
    """The rules for tool calls, by the model's names. Raises InvalidRequestError for a tool that no model can call."""
    if isinstance(choice, str):
        mode: Any = choice
        return tool_choice(mode, [each.shown for each in tools.tools])
    if choice["type"] != "allowed_tools":
        return ToolChoice("required", forced=tools.chosen(choice, "tool_choice")[0])
    names = [
        name
        for index, each in enumerate(choice["tools"])
        if each.get("type") in ("function", "custom", "namespace")  # others are skipped
        for name in tools.chosen(each, f"tool_choice.tools.{index}")
    ]
    if not names:
        raise InvalidRequestError("'tool_choice.tools': no model here can call any of them", "tool_choice.tools")
    return ToolChoice(choice["mode"], allowed=tuple(dict.fromkeys(names)))


# ---- the response object ----


_ECHOED = (
    "instructions max_output_tokens max_tool_calls model parallel_tool_calls previous_response_id prompt_cache_key "
    "safety_identifier store temperature tool_choice top_logprobs top_p presence_penalty frequency_penalty truncation "
    "user metadata"
)
ECHOED = tuple(_ECHOED.split())  # fields that the response has as the request had them


def response_object(body: ResponsesBody, reply_id: str, created: int) -> dict[str, Any]:
    """The response before its first item."""
    form: Any = body.text.format
    if form["type"] == "json_schema":
        form = {"description": None, "strict": False, **form}
    return {
        "id": reply_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "service_tier": FLEX if body.service_tier == FLEX else "default",
        "text": {"format": form, "verbosity": body.text.verbosity or "medium"},
        "tools": [_shown_tool(tool) for tool in body.tools],
        **{name: getattr(body, name) for name in ECHOED},
        "usage": None,
    }


def _shown_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if is_namespace(tool):
        return {"description": "", **tool}
    return {"description": None, "parameters": None, "strict": None, **tool} if is_function(tool) else tool


def response_usage(usage: Usage) -> dict[str, Any]:
    """Token counts. Input that was not cached has been written to the cache."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.prompt - usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


# ---- the events ----

DELTAS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
    "custom_tool_call": "response.custom_tool_call_input.delta",
}


class ResponseEncoder(ItemEncoder):
    """Writes one response as events. `response` is the object at this moment, complete after the last event.

        response.created, response.in_progress
          one item after the other:  output_item.added, its parts and deltas, output_item.done
        response.completed | response.incomplete | response.failed,  then [DONE]

    Every event has the next `sequence_number`. An item is a message, reasoning or a call.

    `shell` is the object before its first item. `conceal` makes the `encrypted_content` of reasoning, if the client
    asked for it. `tools` give calls the names under which they were declared.
    """

    def __init__(
        self,
        shell: dict[str, Any],
        unique: str,
        conceal: Callable[[str], str] | None = None,
        tools: DeclaredTools | None = None,
    ) -> None:
        super().__init__()
        self.response = shell
        self._unique = unique
        self._conceal = conceal
        self._tools = tools or DeclaredTools()
        self._items: list[dict[str, Any]] = []
        self._custom: CustomInput | None = None  # reads the text of the open custom call
        self._sequence = 0
        self._streams = True

    def opening(self) -> bytes:
        return self._event("response.created", response=self.response) + self._event(
            "response.in_progress", response=self.response
        )

    def encode(self, pieces: Iterable[Piece]) -> bytes:
        before = self._sequence
        try:
            return super().encode(pieces)
        except Exception:
            self._sequence = before  # none of these events is sent; the next one ends the stream
            raise

    def whole(self, pieces: Iterable[Piece]) -> bytes:
        """The response in JSON, when it is not streamed."""
        self._streams = False
        self.encode(pieces)
        return orjson.dumps(self.response)

    def not_stored(self, data: bytes) -> bytes:
        """`data`, which ends with the whole response, with `store` false in it."""
        before = self._last()
        self.response = {**self.response, "store": False}
        return data.removesuffix(before) + self._last()

    def _last(self) -> bytes:
        """The whole response as it was sent last."""
        if not self._streams:
            return orjson.dumps(self.response)
        self._sequence -= 1
        return self._event(f"response.{self.response['status']}", response=self.response) + DONE

    def failed(self, error: ErrorInfo) -> bytes:
        # An item that was cut off is not in the output: a client must not continue with it.
        return self._end("failed", error={"code": _code(error.kind), "message": error.message})

    def _begin(self, kind: str) -> bytes:
        index = len(self._items)
        item: dict[str, Any]
        if kind == "text":
            item = {"id": f"msg_{self._unique}_{index}", "type": "message", "status": "in_progress"}
            item |= {"role": "assistant", "content": []}
            part = _text_part("")
        else:
            item = {"id": f"rs_{self._unique}_{index}", "type": "reasoning", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        return self._add(kind, item) + self._of_item("response.content_part.added", content_index=0, part=part)

    def _begin_call(self, piece: ToolCallDelta) -> bytes:
        tool = self._tools.called(piece.name or "")
        self._custom = CustomInput() if tool is not None and tool.custom else None
        item = {
            "id": f"{'fc' if self._custom is None else 'ctc'}_{self._unique}_{len(self._items)}",
            "type": "function_call" if self._custom is None else "custom_tool_call",
            "status": "in_progress",
            "call_id": piece.call_id,
            "name": piece.name if tool is None else tool.name,
            **({"namespace": tool.namespace} if tool is not None and tool.namespace else {}),
            "arguments" if self._custom is None else "input": "",
        }
        return self._add("call", item)

    def _arguments(self, arguments: str) -> bytes:
        text = arguments if self._custom is None else self._custom.feed(arguments)
        return self._delta(text) if text else b""

    def _add(self, kind: str, item: dict[str, Any]) -> bytes:
        self._open = OpenItem(kind, item)
        return self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _delta(self, text: str, logprobs: Sequence[LogprobText] = ()) -> bytes:
        opened = self._open
        assert opened is not None  # an item begins before its deltas
        opened.texts.append(text)
        opened.logprobs.extend(logprobs)
        fields: dict[str, Any] = {} if opened.kind == "call" else {"content_index": 0}
        if opened.kind == "text":
            fields["logprobs"] = scored_tokens(logprobs)
        return self._of_item(DELTAS[opened.item["type"]], **fields, delta=text)

    def _close(self, *, closed: bool = False, cut: bool = False) -> bytes:
        opened = self._open
        if opened is None:
            return b""
        item, events = opened.item, b""
        if opened.kind == "call":
            name = "arguments" if self._custom is None else "input"
            if self._custom is not None and (rest := self._custom.end()):
                events = self._delta(rest)
            text = "".join(opened.texts)
            item = {**item, name: text, "status": "completed" if closed else "incomplete"}
            called = {"name": item["name"]} if self._custom is None else {}
            events += self._of_item(DELTAS[item["type"]].replace(".delta", ".done"), **{name: text}, **called)
        else:
            text = "".join(opened.texts)
            part: dict[str, Any] = {"type": "reasoning_text", "text": text}
            done: dict[str, Any] = {"content_index": 0, "text": text}
            if opened.kind == "text":
                part = _text_part(text, opened.logprobs)
                done["logprobs"] = part["logprobs"]
                item = {**item, "status": "incomplete" if cut else "completed", "content": [part]}
            else:
                concealed = {} if self._conceal is None else {"encrypted_content": self._conceal(text)}
                item = {**item, "content": [part], **concealed}
            events = self._of_item(DELTAS[item["type"]].replace(".delta", ".done"), **done)
            events += self._of_item("response.content_part.done", content_index=0, part=part)
        self._open = None
        self._items.append(item)
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def completed(self, piece: Completed) -> bytes:
        cut = piece.reason == "length"
        # An empty reply is an empty message: clients read the first item.
        begun = b"" if self._items or self._open else self._begin("text")
        events = begun + self._close(cut=cut)
        end = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {"completed_at": int(time.time())}
        return events + self._end("incomplete" if cut else "completed", usage=response_usage(piece.usage), **end)

    def _end(self, status: str, **fields: Any) -> bytes:
        self._open = None
        self.response = {**self.response, "status": status, "output": self._items, **fields}
        return self._event(f"response.{status}", response=self.response) + DONE

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        return self._event(kind, item_id=self._open.item["id"], output_index=len(self._items), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self._streams:
            return b""
        data = orjson.dumps({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class CompactionEncoder(ResponseEncoder):
    """Writes a response whose only item is a compaction: the model's summary, encrypted."""

    def __init__(self, shell: dict[str, Any], unique: str, conceal: Callable[[str], str]) -> None:
        super().__init__(shell, unique)
        self._encrypt = conceal
        self._summary: list[str] = []

    def text(self, piece: TextDelta) -> bytes:
        self._summary.append(piece.text)
        return b""

    def reasoning(self, piece: ReasoningDelta) -> bytes:
        return b""

    def call(self, piece: ToolCallDelta) -> bytes:
        return b""

    def completed(self, piece: Completed) -> bytes:
        summary = self._encrypt("".join(self._summary).strip())
        item = {"id": f"cmp_{self._unique}", "type": "compaction", "encrypted_content": summary}
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=0, item=item)
        return added + self._event("response.output_item.done", output_index=0, item=item) + super().completed(piece)


def _text_part(text: str, logprobs: Iterable[LogprobText] = ()) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": scored_tokens(tuple(logprobs)), "text": text}


def _code(kind: ErrorKind) -> str:
    """The code of an error in a response object: OpenAI has fewer of them than over HTTP."""
    if kind is ErrorKind.OVERLOADED:
        return "rate_limit_exceeded"
    return TABLE[kind].code or "invalid_prompt" if kind in (ErrorKind.INVALID, ErrorKind.TOO_LONG) else "server_error"
