"""`/v1/messages`: Anthropic's request body, the chat prompt that its blocks become, and the message object.

Chat is the inner form, so a conversation has the same prompt whichever API it comes by. A field that is not known
changes nothing and is told as left out: clients send new ones before servers know them. Events are in `anthropic`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

import orjson
from pydantic import ConfigDict, Discriminator, Field, Tag, WithJsonSchema, with_config
from typing_extensions import TypedDict

from holdfast.replicas.errors import ErrorInfo, ErrorKind, HoldfastError, InvalidRequestError
from holdfast.replicas.requests import Answer, ChatPrompt, JsonOutput, ModelCard, Usage
from holdfast.router.protocol.body import (
    MOST_MESSAGES,
    MOST_TOOLS,
    MOST_WORDS,
    NULL_IS_ABSENT,
    Body,
    Unknown,
    decode,
    validate,
    word,
)
from holdfast.router.protocol.chat import ChatBody
from holdfast.router.protocol.client_tools import client_tool, is_client_tool
from holdfast.router.protocol.completions import CompletionBody
from holdfast.router.protocol.errors import ApiError, api_error
from holdfast.router.protocol.fields import FieldNames
from holdfast.router.protocol.kv_hints import KvHints, check_ranges, read_hints
from holdfast.router.protocol.messages import Parameters, Tool, ToolName, check_tools, left_out, system_text
from holdfast.router.protocol.output import Effort, tool_choice
from holdfast.router.protocol.responses import OPEN, Content, ResponsesBody
from holdfast.router.protocol.turn import (
    MAX_STOPS,
    AskedPriority,
    GenerationBody,
    Identifier,
    SamplingBody,
    Turn,
    build_sampling,
    build_turn,
    with_defaults,
)

LONG_INTEGER = re.compile(rb"\d{19}")  # one of fewer digits has room in 64 bits
ERROR = "Error: "  # what the result of a tool that failed begins with: no chat template has a field for it
TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's names of errors, by status; other ones of a request are the first, of a server `api_error`."""


def _blocks(*kinds: dict[str, Any]) -> WithJsonSchema:
    """How the document shows content: a text, or blocks of these kinds."""
    blocks = [
        {
            "type": "object",
            "properties": {"type": {"const": kind["type"]}, **kind["has"], "cache_control": {"type": "object"}},
            "required": ["type", *kind["has"]],
        }
        for kind in kinds
    ]
    return WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": blocks}}]})


_STRING = {"type": "string"}
_TEXT = {"type": "text", "has": {"text": _STRING}}
_SOURCE = {"type": "object", "properties": {"type": {"const": "text"}, "data": _STRING}, "required": ["type", "data"]}
_DOCUMENT = {"type": "document", "has": {"source": _SOURCE}}
_RESULT = {"type": "tool_result", "has": {"tool_use_id": _STRING, "content": _STRING}}
_THINKING = {"type": "thinking", "has": {"thinking": _STRING}}
_USE = {"type": "tool_use", "has": {"id": _STRING, "name": _STRING, "input": {"type": "object"}}}


@with_config(OPEN)
class UserParam(TypedDict):
    role: Literal["user"]
    content: Annotated[Content, _blocks(_TEXT, _DOCUMENT, _RESULT)]


@with_config(OPEN)
class AssistantParam(TypedDict):
    role: Literal["assistant"]
    content: NotRequired[Annotated[Content, _blocks(_TEXT, _THINKING, _USE)]]


@with_config(OPEN)
class SystemParam(TypedDict):
    role: Literal["system"]
    content: Annotated[Content, _blocks(_TEXT, _DOCUMENT)]


MessageParam: TypeAlias = Annotated[UserParam | AssistantParam | SystemParam, Field(discriminator="role")]


@with_config(OPEN)
class Choice(TypedDict):
    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[str]
    disable_parallel_tool_use: NotRequired[bool]


@with_config(OPEN)
class Thinking(TypedDict):
    type: str
    budget_tokens: NotRequired[Annotated[int, Field(ge=0)] | None]


@with_config(OPEN)
class JsonFormat(TypedDict):
    type: Literal["json_schema"]
    schema: dict[str, Any]


@with_config(OPEN)
class OutputConfig(TypedDict):
    """The chat template is told the `effort`, as in a chat completion."""

    format: NotRequired[JsonFormat | None]
    effort: NotRequired[Effort | None]


@with_config(OPEN)
class CustomTool(TypedDict):
    name: ToolName
    input_schema: Parameters
    type: NotRequired[Literal["custom"] | None]
    description: NotRequired[str | None]
    strict: NotRequired[bool | None]


def _tool_kind(tool: object) -> str:
    own = isinstance(tool, Mapping) and tool.get("type") in (None, "custom")
    return "a function" if own else "another"


AnyTool: TypeAlias = Annotated[
    Annotated[CustomTool, Tag("a function")] | Annotated[dict[str, Any], Tag("another")], Discriminator(_tool_kind)
]


class CountBody(Body):
    """What a prompt is made of. `cache_control`, wherever it stands, changes nothing: all of a prompt is cached."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    model: str
    messages: Annotated[list[Annotated[MessageParam, NULL_IS_ABSENT]], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: Annotated[Content, _blocks(_TEXT, _DOCUMENT)] = ""
    tools: Annotated[list[AnyTool], Field(max_length=MOST_TOOLS)] = Field(default_factory=list)
    tool_choice: Annotated[Choice, NULL_IS_ABSENT] = Field(default_factory=lambda: Choice(type="auto"))
    thinking: Thinking = Field(default_factory=lambda: Thinking(type="disabled"))
    output_config: OutputConfig = Field(default_factory=lambda: OutputConfig())
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class MessagesBody(SamplingBody, CountBody):
    """What a client may send besides. `max_tokens` is at most what the context leaves."""

    model_config = CountBody.model_config

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] = Field(
        default_factory=list
    )
    stream: bool = False
    metadata: dict[str, Any] = Field(default_factory=dict)
    service_tier: str | None = None
    priority: AskedPriority | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    program_id: Identifier | None = None
    program_end: bool = False
    kv_hints: KvHints | None = None  # as in a chat; messages are those that blocks become


HARMLESS = ("background", "include", "max_tool_calls", "previous_response_id", "prompt_cache_key")
FOREIGN = frozenset({*ChatBody.model_fields, *CompletionBody.model_fields, *ResponsesBody.model_fields})
FOREIGN -= {*MessagesBody.model_fields, *HARMLESS, "stream_options"}
"""Fields that change an answer in other formats: whoever sends one here does not mean it to be passed over."""
INSTEAD: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "stop": "stop_sequences",
    "instructions": "system",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning": "thinking",
}


def read_messages(raw: bytes) -> MessagesBody:
    """Raises InvalidRequestError, naming the field."""
    body = validate(MessagesBody, _decode(raw))
    for name in body.model_extra or ():
        if name in FOREIGN:
            meant = f" (did you mean '{INSTEAD[name]}'?)" if name in INSTEAD else ""
            raise InvalidRequestError(f"'{name}' is not supported by /v1/messages{meant}", name)
    return body


def read_count(raw: bytes) -> CountBody:
    """The body of `/v1/messages/count_tokens`. Raises InvalidRequestError, naming the field."""
    return validate(CountBody, _decode(raw))


def _decode(raw: bytes) -> dict[str, Any]:
    """As `decode`, but integers in `messages` are exact: orjson makes floats of those beyond 64 bits."""
    body = decode(raw)
    if "messages" in body and LONG_INTEGER.search(raw):
        body["messages"] = json.loads(raw)["messages"]
    return body


# ---- the prompt ----


@dataclass(frozen=True, slots=True)
class Translated:
    """A prompt, the fields and types of tools and blocks that were left out of it, and what errors call its fields."""

    prompt: ChatPrompt
    skipped: tuple[str, ...]
    fields: FieldNames


def chat_prompt(body: CountBody) -> Translated:
    """The prompt that `body` stands for. Raises InvalidRequestError, naming the field."""
    reader = _BlockReader()
    messages: list[str] = []  # the field that each message of the chat comes from
    system = "\n".join(_texts(body.system, "system"))
    if system:
        reader.messages.append({"role": "system", "content": system_text(system)})
        messages.append("system")
    for index, message in enumerate(body.messages):
        reader.read(message, f"messages.{index}")
        messages += [f"messages.{index}"] * (len(reader.messages) - len(messages))
    if not reader.messages:
        raise InvalidRequestError("'messages' has nothing that a model can read", "messages")
    if body.messages[-1]["role"] == "assistant":
        where = f"messages.{len(body.messages) - 1}"
        raise InvalidRequestError(f"'{where}': a reply that is begun by its request is not supported", f"{where}.role")
    tools, tool_fields, skipped = _tools(body.tools)
    fields = FieldNames(_BEGINNINGS, tool_fields, messages, "input_schema")
    given = body.tool_choice
    try:
        check_tools(tools)
        choice = tool_choice(_chat_choice(given), [tool["function"]["name"] for tool in tools])
    except InvalidRequestError as error:
        raise fields.error(error) from None
    format_ = body.output_config.get("format")
    prompt = ChatPrompt(
        messages=reader.messages,
        tools=tuple(tools),
        tool_choice=choice.mode,
        parallel_tool_calls=not given.get("disable_parallel_tool_use", False),
        template_kwargs=_template_arguments(body),
        forced_tool=choice.forced,
        output=JsonOutput(format_["schema"], strict=True) if format_ else None,
        thinking_budget=body.thinking.get("budget_tokens"),
    )
    unknown = [*(word(name) for name in body.model_extra or ()), *sorted(_unknown_fields(body))]
    return Translated(prompt, tuple(dict.fromkeys((*unknown, *skipped, *reader.skipped)))[:MOST_WORDS], fields)


_BEGINNINGS: Mapping[str, str] = {
    "tool_choice.function": "tool_choice",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
}
"""What fields of a chat completion are called here."""


def _template_arguments(body: CountBody) -> Mapping[str, Any]:
    """What the chat template is told, unless the client says otherwise."""
    effort = body.output_config.get("effort")
    told = {} if effort is None else {"reasoning_effort": effort}
    return {"enable_thinking": body.thinking["type"] != "disabled", **told, **body.chat_template_kwargs}


_OF_MESSAGE = frozenset({"role", "content"})
_OF_BLOCK: Mapping[str, frozenset[str]] = {
    "text": frozenset({"type", "text", "cache_control", "citations"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
    "document": frozenset({"type", "source", "cache_control"}),
}
_OF_TOOL = frozenset({*CustomTool.__annotations__, "cache_control"})
_OF_CHOICE = frozenset(Choice.__annotations__)
_OF_CONFIG, _OF_FORMAT = frozenset(OutputConfig.__annotations__), frozenset(JsonFormat.__annotations__)


def _unknown_fields(body: CountBody) -> set[str]:
    """The fields of messages, blocks, tools and the like that are not known, each by its path without numbers."""
    unknown = Unknown()
    _look_into(body.system, "system", unknown)
    for message in body.messages:
        unknown.look(message, _OF_MESSAGE, "messages")
        _look_into(message.get("content"), "messages.content", unknown)
    for tool in body.tools:
        if _tool_kind(tool) == "a function":
            unknown.look(tool, _OF_TOOL, "tools")
    unknown.look(body.tool_choice, _OF_CHOICE, "tool_choice")
    unknown.look(body.output_config, _OF_CONFIG, "output_config")
    unknown.look(body.output_config.get("format") or {}, _OF_FORMAT, "output_config.format")
    return unknown.found


def _look_into(blocks: object, where: str, unknown: Unknown) -> None:
    for block in blocks if isinstance(blocks, list) else ():
        kind = block.get("type") if isinstance(block, Mapping) else None
        if isinstance(kind, str) and kind in _OF_BLOCK:  # else it is left out by its type, or refused
            unknown.look(block, _OF_BLOCK[kind], where)
            _look_into(block.get("content"), f"{where}.content", unknown)


class _BlockReader:
    """Reads messages one after the other."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        self._calls: set[str] = set()

    def read(self, message: MessageParam, where: str) -> None:
        content, where = message.get("content", ""), f"{where}.content"
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message["role"] == "assistant":
            self._assistant(blocks, where)
        elif message["role"] == "system":
            text = system_text("\n".join(_texts(content, where)))
            self.messages.append({"role": "system", "content": text})
        else:
            self._user(blocks, where)

    def _user(self, blocks: Sequence[Mapping[str, Any]], where: str) -> None:
        """Results of tools are messages of their own, in the order of the blocks."""
        said: list[str] = []
        for index, block in enumerate(blocks):
            if block.get("type") != "tool_result":
                said.append(_text(block, f"{where}.{index}"))
                continue
            self._say(said)
            call_id = _member(block, "tool_use_id", f"{where}.{index}")
            if call_id not in self._calls:
                field = f"{where}.{index}.tool_use_id"
                raise InvalidRequestError(f"'{field}': no earlier message has a tool_use {call_id!r}", field)
            result = self._result(block.get("content") or "", f"{where}.{index}.content")
            if block.get("is_error") is True:
                result = ERROR + result
            self.messages.append({"role": "tool", "content": result, "tool_call_id": call_id})
        self._say(said)

    def _result(self, content: Any, where: str) -> str:
        """The text of a tool's result; a note stands for each block in it that is no text."""
        if isinstance(content, list):
            content = [block if _is_text(block) else self._note(block) for block in content]
        return "\n".join(_texts(content, where))

    def _note(self, block: object) -> dict[str, str]:
        kind = block.get("type") if isinstance(block, Mapping) else None
        self.skipped.append(word(kind))
        return {"type": "text", "text": left_out(kind)}

    def _say(self, said: list[str]) -> None:
        if said:
            self.messages.append({"role": "user", "content": "\n".join(said)})
            said.clear()

    def _assistant(self, blocks: Sequence[Mapping[str, Any]], where: str) -> None:
        said: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, block in enumerate(blocks):
            kind, here = block.get("type"), f"{where}.{index}"
            if kind == "text":
                said.append(_text(block, here))
            elif kind == "thinking":
                thoughts.append(_member(block, "thinking", here))
            elif kind == "tool_use":
                calls.append(self._call(block, here))
            else:  # thoughts that cannot be read, and tools that ran elsewhere
                self.skipped.append(word(kind))
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(said) if said or not calls else None}
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        self.messages.append(message)

    def _call(self, block: Mapping[str, Any], where: str) -> dict[str, Any]:
        call_id, name = _member(block, "id", where), _member(block, "name", where)
        given = block.get("input")
        if not isinstance(given, Mapping):
            raise InvalidRequestError(f"'{where}.input' must be an object", f"{where}.input")
        self._calls.add(call_id)
        try:
            arguments = orjson.dumps(given).decode()
        except TypeError:  # an integer beyond 64 bits
            arguments = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}


def _texts(content: str | Sequence[Mapping[str, Any]], where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequestError(f"'{where}' must be a string or a list of blocks", where)
    return [_text(block, f"{where}.{index}") for index, block in enumerate(content)]


def _is_text(block: object) -> bool:
    """Whether `block` is text, or should be: what is wrong in it is an error then."""
    if not isinstance(block, Mapping) or block.get("type") != "document":
        return not isinstance(block, Mapping) or block.get("type") == "text"
    source = block.get("source")
    return isinstance(source, Mapping) and source.get("type") == "text"


def _text(block: object, where: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    source = block.get("source") if isinstance(block, Mapping) and kind == "document" else None
    if isinstance(source, Mapping) and source.get("type") == "text":
        return _member(source, "data", f"{where}.source")
    if kind != "text" or not isinstance(block, Mapping):
        raise InvalidRequestError(f"'{where}': {kind!r} is not supported; content is text", f"{where}.type")
    return _member(block, "text", where)


def _member(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"'{where}.{name}' must be a string", f"{where}.{name}")
    return value


def _tools(given: Sequence[Mapping[str, Any]]) -> tuple[list[Tool], list[str], list[str]]:
    """Tools as chat has them, the field of each, and the types of those that run at Anthropic.

    Raises InvalidRequestError, naming the field.
    """
    tools: list[Tool] = []
    fields: list[str] = []
    skipped: list[str] = []
    for index, tool in enumerate(given):
        if is_client_tool(tool):
            if not isinstance(tool.get("name", ""), str):
                raise InvalidRequestError(f"'tools.{index}.name' must be a string", f"tools.{index}.name")
            tools.append(client_tool(tool))
        elif _tool_kind(tool) == "another":
            skipped.append(word(tool.get("type")))
            continue
        else:
            function: Any = {"name": tool["name"], "parameters": tool["input_schema"]}
            function.update({name: tool[name] for name in ("description", "strict") if tool.get(name)})
            tools.append({"type": "function", "function": function})
        fields.append(f"tools.{index}")
    return tools, fields, skipped


def _chat_choice(given: Choice) -> str | Mapping[str, Any]:
    if given["type"] == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}
    return "required" if given["type"] == "any" else given["type"]


def messages_turn(body: MessagesBody, translated: Translated, card: ModelCard) -> Turn:
    """The turn that is asked for. Raises InvalidRequestError, naming the field."""
    user = body.metadata.get("user_id")
    given = {name: getattr(body, name) for name in SamplingBody.model_fields if name in body.model_fields_set}
    plain = GenerationBody(
        model=body.model,
        **given,
        stop=body.stop_sequences,
        stream=body.stream,
        program_id=body.program_id,
        prompt_cache_key=user if isinstance(user, str) and len(user) <= 256 else None,
        program_end=body.program_end,
        priority=body.priority,
        timeout=body.timeout,
        service_tier=body.service_tier,
        cache_salt=body.cache_salt,
    )
    plain = with_defaults(plain, card)
    sampling = build_sampling(plain, card, None, body.max_tokens, "max_tokens")
    hints = read_hints(body.kv_hints)
    check_ranges(hints, len(translated.prompt.messages))
    return replace(build_turn(plain, translated.prompt, card, sampling), hints=hints, fields=translated.fields)


# ---- the answer ----


def message_object(reply_id: str, model: str, answer: Answer, most: int) -> dict[str, Any]:
    """The whole message. A call that was cut is left out: its input is no object. `most` tokens were asked for."""
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": signature(answer.reasoning)})
    if answer.text:
        content.append({"type": "text", "text": answer.text})
    for call in answer.tool_calls:
        if call.closed:
            # As they are: a parser would make floats of long integers.
            given = orjson.Fragment(call.arguments)
            content.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": given})
    return {
        **empty_message(reply_id, model),
        "content": content,
        **ending(
            answer.reason,
            answer.stop,
            called=any(call.closed for call in answer.tool_calls),
            usage=answer.usage,
            most=most,
        ),
        "usage": message_usage(answer.usage),
    }


def empty_message(reply_id: str, model: str) -> dict[str, Any]:
    """The message before its first block."""
    return {
        "id": reply_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": message_usage(Usage()),
    }


def ending(reason: str, stop: str, *, called: bool, usage: Usage, most: int) -> dict[str, Any]:
    """Why a message has ended. `called`: calls have closed in it, though perhaps not all of them."""
    if reason == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if reason == "length":
        why = "max_tokens" if usage.completion >= most else "model_context_window_exceeded"
    elif stop:
        why = "stop_sequence"
    else:
        why = "tool_use" if called else "end_turn"
    return {"stop_reason": why, "stop_sequence": stop or None}


def message_usage(usage: Usage) -> dict[str, Any]:
    """Token counts, each input token in one of three: read from the cache, written to it, neither."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def signature(thoughts: str) -> str:
    """What stands below a thinking block. Clients send it back, and some drop blocks without; nobody checks it."""
    return "hf1." + blake2b(thoughts.encode("utf-8", "replace"), digest_size=16).hexdigest()


def anthropic_error(error: HoldfastError | ErrorInfo) -> ApiError:
    """What a client is told about `error`, in Anthropic's shape."""
    answer = api_error(error)
    kind = TYPES.get(answer.status) or ("api_error" if answer.status >= 500 else TYPES[400])
    # By these words clients know that they have to make a conversation shorter.
    message = f"prompt is too long: {error.message}" if error.kind is ErrorKind.TOO_LONG else error.message
    body = {"type": "error", "error": {"type": kind, "message": message}}
    return replace(answer, body=orjson.dumps(body))
