"""`/v1/chat/completions`: messages and tools in, the turn that they become, the reply and its chunks out.

Chat is the inner form: completions, responses and Anthropic's messages become the same prompt. Shapes are typed
dictionaries, so that validation returns dictionaries and copies nothing. Content is text. Unknown fields of a message
change nothing: clients send back what they got and add fields of their own.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, with_config
from typing_extensions import TypedDict  # pydantic accepts typing's own only from Python 3.12 on

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import (
    Answer,
    ChatPrompt,
    JsonOutput,
    ModelCard,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from holdfast.router.protocol.body import (
    CLOSED,
    MOST_MESSAGES,
    MOST_TOOLS,
    NULL_IS_ABSENT,
    OPEN,
    read,
    text_or,
    word,
)
from holdfast.router.protocol.replies import ChunkEncoder, chat_logprobs, closed_choice, whole_reply
from holdfast.router.protocol.turn import (
    MAX_LOGPROBS,
    Choices,
    GenerationBody,
    Identifier,
    Turn,
    build_sampling,
    build_turn,
    check_length,
    find_model,
    several,
    with_defaults,
)

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# The first line of Claude Code's system prompt, and the values in it that differ between requests.
_BILLING = "x-anthropic-billing-header:"
_BILLING_LINE = re.compile(f"^{_BILLING}.*$", re.MULTILINE)
_NONCE = re.compile(r"\b(cch|cc_version)=[^;\s]*")


# ---- messages ----


@with_config(OPEN)
class TextPart(TypedDict):
    type: Literal["text"]
    text: str


@with_config(OPEN)
class RefusalPart(TypedDict):
    """A refusal by one of OpenAI's models; to a template it is text."""

    type: Literal["refusal"]
    refusal: str


@with_config(OPEN)
class OtherPart(TypedDict):
    """A part of a tool's result that is not text, for example an image."""

    type: str


def _result_part(part: object) -> str:
    return "text" if isinstance(part, Mapping) and part.get("type") == "text" else "another"


AssistantPart: TypeAlias = Annotated[TextPart | RefusalPart, Field(discriminator="type"), NULL_IS_ABSENT]
ResultPart: TypeAlias = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[OtherPart, Tag("another")],
    Discriminator(_result_part),
    NULL_IS_ABSENT,
]
_MANY = Field(max_length=MOST_MESSAGES)
Content: Any = text_or(Annotated[list[Annotated[TextPart, NULL_IS_ABSENT]], _MANY])
AssistantContent: Any = text_or(Annotated[list[AssistantPart], _MANY])
ResultContent: Any = text_or(Annotated[list[ResultPart], _MANY])


@with_config(OPEN)
class FunctionCall(TypedDict):
    """`parsed_arguments` is a client's parse of our text; it is not read."""

    name: str
    arguments: str
    parsed_arguments: NotRequired[Any]


@with_config(OPEN)
class CallMessage(TypedDict):
    """A tool call of an assistant message. Clients that keep streamed deltas send `index` back."""

    id: Annotated[str, Field(min_length=1)]
    function: Annotated[FunctionCall, NULL_IS_ABSENT]
    type: NotRequired[Literal["function"]]
    index: NotRequired[int]


@with_config(OPEN)
class SystemMessage(TypedDict):
    role: Literal["system", "developer"]
    content: Content
    name: NotRequired[str]


@with_config(OPEN)
class UserMessage(TypedDict):
    role: Literal["user"]
    content: Content
    name: NotRequired[str]


@with_config(OPEN)
class AssistantMessage(TypedDict):
    """The fields that a template reads, and those that other servers' messages have.

    `reasoning` and `reasoning_details` (OpenRouter) and `thinking_blocks` (LiteLLM) count as `reasoning_content`.
    """

    role: Literal["assistant"]
    content: NotRequired[AssistantContent]
    tool_calls: NotRequired[list[Annotated[CallMessage, NULL_IS_ABSENT]]]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[Any]
    reasoning_details: NotRequired[Any]
    thinking_blocks: NotRequired[Any]
    refusal: NotRequired[str]
    annotations: NotRequired[list[Any]]
    parsed: NotRequired[Any]


@with_config(OPEN)
class ToolMessage(TypedDict):
    role: Literal["tool"]
    content: ResultContent
    tool_call_id: str
    name: NotRequired[str]


Message: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role"), NULL_IS_ABSENT
]
Messages: TypeAlias = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]


def plain_messages(messages: Sequence[Mapping[str, Any]], *, go_on: bool = False) -> list[dict[str, Any]]:
    """`messages` as a template reads them: text parts joined, empty and foreign fields left out.

    `go_on`: they follow messages that this function does not get. Otherwise raises as `check_results`.
    """
    plain = [_assistant(message) if message["role"] == "assistant" else _other(message) for message in messages]
    if not go_on:
        check_results((), plain)
    return plain


def check_results(before: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidRequestError for a tool message that answers no earlier call, among `messages` or in `before`."""
    calls = {call["id"] for message in before for call in message.get("tool_calls") or ()}
    for index, message in enumerate(messages):
        calls.update(call["id"] for call in message.get("tool_calls") or ())
        if message["role"] == "tool" and message["tool_call_id"] not in calls:
            field, call_id = f"messages.{index}.tool_call_id", message["tool_call_id"]
            raise InvalidRequestError(f"'{field}': no earlier assistant message has a tool call {call_id!r}", field)


def _assistant(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    content = message.get("content")
    if content is None:
        content = message.get("refusal")
    if content is None and not calls:
        content = ""
    plain: dict[str, Any] = {"role": "assistant", "content": None if content is None else _text(content)}
    if calls:
        plain["tool_calls"] = [chat_call(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls]
    if message.get("name") is not None:
        plain["name"] = message["name"]
    if reasoning := _reasoning(message):
        plain["reasoning_content"] = reasoning
    return plain


def chat_call(call_id: str | None, name: str, arguments: str) -> dict[str, Any]:
    """A tool call of an assistant message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _reasoning(message: Mapping[str, Any]) -> str:
    """The reasoning of an assistant message, under whichever name a server gave it."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(text := message.get(name), str) and text:
            return text
    for name in ("reasoning_details", "thinking_blocks"):
        parts = message.get(name)
        mappings = [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
        members = ("text", "summary", "thinking")
        texts = [part[key] for part in mappings for key in members if isinstance(part.get(key), str)]
        if any(texts):
            return "".join(texts)
    return ""


def _other(message: Mapping[str, Any]) -> dict[str, Any]:
    role = message["role"]
    text = _text(message["content"])
    if role in ("system", "developer"):
        role, text = "system", system_text(text)
    plain = {"role": role, "content": text}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            plain[name] = message[name]
    return plain


def _text(content: str | Sequence[Mapping[str, str]]) -> str:
    if isinstance(content, str):
        return content
    kinds = ("text", "refusal")
    return "\n".join(part[part["type"]] if part["type"] in kinds else left_out(part["type"]) for part in content)


def system_text(text: str) -> str:
    """A system prompt without the values of Claude Code's billing line: with them no two prompts share a prefix."""
    return _BILLING_LINE.sub(lambda line: _NONCE.sub(r"\1=", line[0]), text) if _BILLING in text else text


def left_out(kind: object) -> str:
    """The note in place of a part of a tool's result that is not text; `kind` is the part's type."""
    name = word(kind).removeprefix("input_").removesuffix("_url")
    return f"[{name} left out: this model reads only text]"


# ---- tools ----


def _without_null_keywords(parameters: Any) -> Any:
    """`parameters` without `properties` and `required` that are null. For other keywords null may be the value."""
    if not isinstance(parameters, dict):
        return parameters
    optional = ("properties", "required")
    return {name: value for name, value in parameters.items() if value is not None or name not in optional}


Parameters: TypeAlias = Annotated[
    dict[str, Any],
    BeforeValidator(_without_null_keywords),
    WithJsonSchema(
        {
            "type": "object",
            "description": "A JSON schema of type object",
            "properties": {
                "type": {"const": "object"},
                "properties": {"type": "object"},
                "required": {"type": "array", "items": {"type": "string"}},
            },
        }
    ),
]
ToolName: TypeAlias = Annotated[str, WithJsonSchema({"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"})]


@with_config(OPEN)
class FunctionTool(TypedDict):
    """The arguments of a `strict` tool follow `parameters`."""

    name: ToolName
    description: NotRequired[str | None]
    parameters: NotRequired[Parameters | None]
    strict: NotRequired[bool | None]


@with_config(OPEN)
class Tool(TypedDict):
    type: Literal["function"]
    function: FunctionTool


Tools: TypeAlias = Annotated[list[Tool], Field(max_length=MOST_TOOLS)]


def plain_tools(tools: Sequence[Tool]) -> tuple[Mapping[str, Any], ...]:
    """`tools` without unknown fields, which a template would show to the model."""
    return tuple(_plain_tool(tool) for tool in tools)


def _plain_tool(tool: Tool) -> Mapping[str, Any]:
    function = tool["function"]
    if tool.keys() <= Tool.__annotations__.keys() and function.keys() <= FunctionTool.__annotations__.keys():
        return tool
    fields = {name: value for name, value in function.items() if name in FunctionTool.__annotations__}
    return {"type": "function", "function": fields}


def check_name(name: str, path: str) -> None:
    """Raises InvalidRequestError for a tool name, the value of field `path`, that is not well formed."""
    if not TOOL_NAME.fullmatch(name):
        raise InvalidRequestError(f"Invalid '{path}': {name!r} is not [a-zA-Z0-9_-]{{1,64}}", path)


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises InvalidRequestError unless names are well formed and unique and parameters describe an object."""
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        function, path = tool["function"], f"tools.{index}.function"
        name = function["name"]
        check_name(name, f"{path}.name")
        if name in seen:
            raise InvalidRequestError(f"'{path}.name': there are two tools named {name!r}", f"{path}.name")
        seen.add(name)
        _check_parameters(function.get("parameters") or {}, f"{path}.parameters")


def _check_parameters(parameters: Mapping[str, Any], path: str) -> None:
    """Checks the keywords that every reader of tools uses. Deeper faults matter only when a reply must follow them."""
    if parameters.get("type", "object") != "object":
        raise InvalidRequestError(f"'{path}' must be a JSON schema of type 'object'", path)
    if not isinstance(parameters.get("properties", {}), dict):
        raise InvalidRequestError(f"'{path}.properties' must be an object of JSON schemas", f"{path}.properties")
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidRequestError(f"'{path}.required' must be a list of names", f"{path}.required")


# ---- which tools may be called, and the form of the reply ----

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Mode: TypeAlias = Literal["auto", "none", "required"]


@with_config(OPEN)
class FunctionName(TypedDict):
    name: str


@with_config(OPEN)
class FunctionChoice(TypedDict):
    type: Literal["function"]
    function: FunctionName


@with_config(OPEN)
class AllowedTools(TypedDict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1)]


@with_config(OPEN)
class AllowedChoice(TypedDict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def mode_or(named: Any) -> Any:
    """The type of a `tool_choice`: a mode, or one of the objects `named`, which differ by their field `type`."""
    return Annotated[
        Annotated[Mode, Tag("mode")] | Annotated[Annotated[named, Field(discriminator="type")], Tag("named")],
        Discriminator(lambda value: "mode" if isinstance(value, str) else "named"),
    ]


ToolChoiceField: Any = mode_or(FunctionChoice | AllowedChoice)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The rules for tool calls. `forced`: the tool that must be called; `allowed`: those that may be, () for all."""

    mode: Mode
    forced: str = ""
    allowed: tuple[str, ...] = ()


@with_config(CLOSED)
class TextFormat(TypedDict):
    type: Literal["text"]


@with_config(CLOSED)
class JsonObjectFormat(TypedDict):
    type: Literal["json_object"]


@with_config(CLOSED)
class JsonSchema(TypedDict):
    """`name` and `description` change nothing: no template shows them to the model."""

    name: Annotated[str, Field(pattern=re.compile(f"^{TOOL_NAME.pattern}$"))]
    description: NotRequired[str | None]
    schema: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


@with_config(CLOSED)
class JsonSchemaFormat(TypedDict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat: TypeAlias = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def json_output(form: ResponseFormat) -> JsonOutput | None:
    """The JSON that a reply must be; None for text. A format without a schema means any object."""
    if form["type"] == "text":
        return None
    if form["type"] == "json_object":
        return JsonOutput({"type": "object"})
    body = form["json_schema"]
    return JsonOutput(body.get("schema") or {"type": "object"}, bool(body.get("strict")))


def tool_choice(value: Mode | FunctionChoice | AllowedChoice, declared: Sequence[str]) -> ToolChoice:
    """The rules for calls of the tools named `declared`. Raises InvalidRequestError, naming the field."""
    if isinstance(value, str):
        if value == "required" and not declared:
            raise InvalidRequestError("'tool_choice': 'required' is only allowed with 'tools'", "tool_choice")
        return ToolChoice(value)
    if value["type"] == "function":
        return ToolChoice("required", forced=_declared_name(value, declared, "tool_choice"))
    path, chosen = "tool_choice.allowed_tools.tools", value["allowed_tools"]
    names = [_declared_name(each, declared, f"{path}.{index}") for index, each in enumerate(chosen["tools"])]
    return ToolChoice(chosen["mode"], allowed=tuple(dict.fromkeys(names)))


def _declared_name(choice: FunctionChoice, declared: Sequence[str], path: str) -> str:
    name, field = choice["function"]["name"], f"{path}.function.name"
    if name not in declared:
        raise InvalidRequestError(f"'{field}': no tool is named {name!r}", field)
    return name


def template_arguments(kwargs: Mapping[str, Any], effort: str | None) -> Mapping[str, Any]:
    """Arguments of the chat template: `effort` by the two names that templates use, unless `kwargs` has them."""
    if effort is None:
        return kwargs
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **kwargs}


# ---- the request ----


class ChatBody(GenerationBody):
    """`max_tokens` is the old name of `max_completion_tokens`."""

    messages: Messages
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoiceField = "auto"
    parallel_tool_calls: bool = True
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: ResponseFormat = Field(default_factory=lambda: TextFormat(type="text"))
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: Effort | None = None
    thinking_budget: Annotated[int, Field(ge=0)] | None = None  # Qwen's: the most tokens of a block of reasoning
    include_reasoning: bool = True  # vLLM's and OpenRouter's; false leaves the reasoning out of the answer
    n: Choices = 1
    prefill_id: Identifier | None = None  # ours: `messages` follow those of this prefill


def read_chat(raw: bytes, models: Sequence[ModelCard]) -> Turn:
    """The turn of a request body. Raises InvalidRequestError, ContextLengthError or RefusedError."""
    body = read(ChatBody, raw)
    return check_length(chat_turn(body, find_model(body.model, models)))


def chat_turn(body: ChatBody, card: ModelCard) -> Turn:
    """The turn of `body`. Raises InvalidRequestError, naming the field."""
    body = with_defaults(body, card)
    max_tokens, max_field = _max_tokens(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("'top_logprobs' is only allowed with 'logprobs': true", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    check_tools(body.tools)
    choice = tool_choice(body.tool_choice, [tool["function"]["name"] for tool in body.tools])
    prefilled = body.prefill_id is not None
    prompt = ChatPrompt(
        messages=plain_messages(body.messages, go_on=prefilled),
        tools=plain_tools(body.tools),
        tool_choice=choice.mode,
        parallel_tool_calls=body.parallel_tool_calls,
        template_kwargs=template_arguments(body.chat_template_kwargs, body.reasoning_effort),
        forced_tool=choice.forced,
        allowed_tools=choice.allowed,
        output=json_output(body.response_format),
        thinking_budget=body.thinking_budget,
    )
    sampling = build_sampling(body, card, max_tokens, max_field, logprobs)
    turn = build_turn(body, prompt, card, sampling, prefilled=prefilled)
    turn = replace(turn, prefill_id=body.prefill_id or "", thoughts=body.include_reasoning)
    return several(turn, [prompt], body.n) if body.n > 1 else turn


def _max_tokens(body: ChatBody) -> tuple[int | None, str]:
    if body.max_completion_tokens is None:
        return body.max_tokens, "max_tokens"
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequestError("'max_tokens' and 'max_completion_tokens' contradict each other", "max_tokens")
    return body.max_completion_tokens, "max_completion_tokens"


# ---- the reply ----


def chat_reply(
    reply_id: str,
    created: int,
    model: str,
    answer: Answer,
    others: Sequence[Answer] = (),
    thoughts: bool = True,
) -> bytes:
    """The `chat.completion` object in JSON. `others` are the choices after the first; `answer` has the usage of all.

    Without `thoughts` the reasoning is left out; its tokens count.
    """
    choices = [
        closed_choice(index, each, chat_logprobs(each.logprobs), message=_message(each, thoughts))
        for index, each in enumerate((answer, *others))
    ]
    return whole_reply("chat.completion", reply_id, created, model, choices, answer.usage)


def _message(answer: Answer, thoughts: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning and thoughts:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [chat_call(call.call_id, call.name, call.arguments) for call in answer.tool_calls]
    return message


class ChatEncoder(ChunkEncoder):
    """Writes `chat.completion.chunk`: the role, then reasoning, text and tool-call deltas, then the reason.

    A client may run a tool call before the reply ends: the chunk that closes the call has its index in
    `holdfast.tool_call_closed`. Without `thoughts` the reasoning is left out.
    """

    KIND = "chat.completion.chunk"
    LAST: ClassVar = {"delta": {}}

    def __init__(self, *head: Any, thoughts: bool = True) -> None:
        super().__init__(*head)
        self._thoughts = thoughts

    def opening(self) -> bytes:
        return self.chunk(None, None, delta={"role": "assistant", "content": "", "refusal": None})

    def text(self, piece: TextDelta) -> bytes:
        if not piece.text and not piece.logprobs:
            return b""
        return self.chunk(chat_logprobs(piece.logprobs), None, delta={"content": piece.text})

    def reasoning(self, piece: ReasoningDelta) -> bytes:
        return self.chunk(None, None, delta={"reasoning_content": piece.text}) if self._thoughts else b""

    def call(self, piece: ToolCallDelta) -> bytes:
        call: dict[str, Any] = {"index": piece.index, "function": {"arguments": piece.arguments}}
        if piece.name is not None:
            call = {"index": piece.index, **chat_call(piece.call_id, piece.name, piece.arguments)}
        closed = {"holdfast": {"tool_call_closed": piece.index}} if piece.closed else None
        return self.chunk(None, None, closed, delta={"tool_calls": [call]})
