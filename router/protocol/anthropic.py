"""`/v1/messages` (Anthropic): blocks in, the chat prompt that they become, the message and its events out.

An unknown field changes nothing and is reported as skipped: clients send new fields before servers know them.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

import orjson
from pydantic import ConfigDict, Discriminator, Field, Tag, WithJsonSchema, with_config
from typing_extensions import TypedDict

from holdfast.replicas.errors import ErrorInfo, InvalidRequestError
from holdfast.replicas.requests import (
    Answer,
    ChatPrompt,
    Completed,
    Errored,
    JsonOutput,
    ModelCard,
    Piece,
    ReasoningDelta,
    Started,
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
    decode,
    known_fields,
    unknown_fields,
    validate,
    word,
)
from holdfast.router.protocol.chat import (
    ChatBody,
    Effort,
    Parameters,
    Tool,
    ToolName,
    chat_call,
    check_tools,
    left_out,
    system_text,
    tool_choice,
)
from holdfast.router.protocol.completions import CompletionBody
from holdfast.router.protocol.errors import FieldNames, anthropic_error
from holdfast.router.protocol.kv_hints import KvHints
from holdfast.router.protocol.replies import COMMENT
from holdfast.router.protocol.responses import Content, ResponsesBody
from holdfast.router.protocol.turn import (
    MAX_STOPS,
    GenerationBody,
    Identifier,
    ModelName,
    Name,
    PriorityField,
    SamplingBody,
    Seconds,
    Turn,
    build_sampling,
    build_turn,
    with_defaults,
)

DIGITS = bytes(48 if 48 <= byte < 58 else 32 for byte in range(256))  # translates every digit to 0
LONG_INTEGER = b"0" * 19  # an integer of fewer digits fits into 64 bits
ERROR = "Error: "  # begins the result of a tool that failed: chat templates have no field for that


# ---- the request ----


def _blocks(*kinds: dict[str, Any]) -> WithJsonSchema:
    """The schema of content: a text, or blocks of these kinds."""
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
class ToolChoiceParam(TypedDict):
    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[str]
    disable_parallel_tool_use: NotRequired[bool]


@with_config(OPEN)
class Thinking(TypedDict):
    type: str
    budget_tokens: NotRequired[Annotated[int, Field(ge=0)] | None]


@with_config(OPEN)
class OutputFormat(TypedDict):
    type: Literal["json_schema"]
    schema: dict[str, Any]


@with_config(OPEN)
class OutputConfig(TypedDict):
    """The chat template gets the `effort`, as in a chat completion."""

    format: NotRequired[OutputFormat | None]
    effort: NotRequired[Effort | None]


@with_config(OPEN)
class ToolParam(TypedDict):
    name: ToolName
    input_schema: Parameters
    type: NotRequired[Literal["custom"] | None]
    description: NotRequired[str | None]
    strict: NotRequired[bool | None]


def _tool_kind(tool: object) -> str:
    return "a function" if isinstance(tool, Mapping) and tool.get("type") in (None, "custom") else "another"


AnyTool: TypeAlias = Annotated[
    Annotated[ToolParam, Tag("a function")] | Annotated[dict[str, Any], Tag("another")], Discriminator(_tool_kind)
]


class CountBody(Body):
    """The fields of a prompt. `cache_control` changes nothing anywhere: every prompt is cached."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    model: ModelName
    messages: Annotated[list[Annotated[MessageParam, NULL_IS_ABSENT]], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: Annotated[Content, _blocks(_TEXT, _DOCUMENT)] = ""
    tools: Annotated[list[AnyTool], Field(max_length=MOST_TOOLS)] = Field(default_factory=list)
    tool_choice: Annotated[ToolChoiceParam, NULL_IS_ABSENT] = Field(
        default_factory=lambda: ToolChoiceParam(type="auto")
    )
    thinking: Thinking = Field(default_factory=lambda: Thinking(type="disabled"))
    output_config: OutputConfig = Field(default_factory=lambda: OutputConfig())
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class MessagesBody(SamplingBody, CountBody):
    """`max_tokens` may exceed what the context leaves."""

    model_config = CountBody.model_config

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] = Field(
        default_factory=list
    )
    stream: bool = False
    metadata: dict[str, Any] = Field(default_factory=dict)
    service_tier: str | None = None
    priority: PriorityField | None = None
    timeout: Seconds | None = None
    cache_salt: Name | None = None
    program_id: Identifier | None = None
    program_end: bool = False
    fresh_draw: bool = False
    kv_hints: KvHints | None = None  # as in a chat; messages count as they are after the translation


HARMLESS = ("background", "include", "max_tool_calls", "previous_response_id", "prompt_cache_key")
FOREIGN = frozenset({*ChatBody.model_fields, *CompletionBody.model_fields, *ResponsesBody.model_fields})
FOREIGN -= {*MessagesBody.model_fields, *HARMLESS, "stream_options"}
"""Fields that change an answer in the other APIs. They are refused: a client does not expect them to be ignored."""
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
            hint = f" (did you mean '{INSTEAD[name]}'?)" if name in INSTEAD else ""
            raise InvalidRequestError(f"'{name}' is not supported by /v1/messages{hint}", name)
    return body


def read_count(raw: bytes) -> CountBody:
    """The body of `/v1/messages/count_tokens`. Raises InvalidRequestError, naming the field."""
    return validate(CountBody, _decode(raw))


def _decode(raw: bytes) -> dict[str, Any]:
    """As `decode`, with exact integers in `messages`: orjson makes floats of those beyond 64 bits."""
    body = decode(raw)
    if "messages" in body and LONG_INTEGER in raw.translate(DIGITS):
        body["messages"] = json.loads(raw)["messages"]
    return body


# ---- the prompt ----


@dataclass(frozen=True, slots=True)
class TranslatedMessages:
    """A prompt, the fields and types that were left out of it, and the names of its fields in errors."""

    prompt: ChatPrompt
    skipped: tuple[str, ...]
    fields: FieldNames


def chat_prompt(body: CountBody) -> TranslatedMessages:
    """The chat prompt of `body`. Raises InvalidRequestError, naming the field."""
    reader = _BlockReader()
    sources: list[str] = []  # the field of each chat message
    system = "\n".join(_texts(body.system, "system"))
    if system:
        reader.messages.append({"role": "system", "content": system_text(system)})
        sources.append("system")
    for index, message in enumerate(body.messages):
        reader.read(message, f"messages.{index}.content")
        sources += [f"messages.{index}"] * (len(reader.messages) - len(sources))
    if not reader.messages:
        raise InvalidRequestError("'messages' has nothing that a model can read", "messages")
    if body.messages[-1]["role"] == "assistant":
        path = f"messages.{len(body.messages) - 1}"
        raise InvalidRequestError(f"'{path}': the last message must not be the assistant's", f"{path}.role")
    tools, tool_fields, skipped = _tools(body.tools)
    fields = FieldNames(_PREFIXES, tool_fields, sources, "input_schema")
    try:
        check_tools(tools)
        choice = tool_choice(_chat_choice(body.tool_choice), [tool["function"]["name"] for tool in tools])
    except InvalidRequestError as error:
        raise fields.error(error) from None
    form, effort = body.output_config.get("format"), body.output_config.get("effort")
    prompt = ChatPrompt(
        messages=reader.messages,
        tools=tuple(tools),
        tool_choice=choice.mode,
        parallel_tool_calls=not body.tool_choice.get("disable_parallel_tool_use", False),
        template_kwargs={
            "enable_thinking": body.thinking["type"] != "disabled",
            **({} if effort is None else {"reasoning_effort": effort}),
            **body.chat_template_kwargs,
        },
        forced_tool=choice.forced,
        output=JsonOutput(form["schema"], strict=True) if form else None,
        thinking_budget=body.thinking.get("budget_tokens"),
    )
    unknown = sorted(set(unknown_fields({name: getattr(body, name) for name in _KNOWN}, _KNOWN)))
    all_skipped = (*(word(name) for name in body.model_extra or ()), *unknown, *skipped, *reader.skipped)
    return TranslatedMessages(prompt, tuple(dict.fromkeys(all_skipped))[:MOST_WORDS], fields)


_PREFIXES: Mapping[str, str] = {
    "tool_choice.function": "tool_choice",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
}


class _BlockReader:
    """Translates one message after the other; `skipped` are the types of blocks that were left out."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        self._calls: set[str] = set()

    def read(self, message: MessageParam, path: str) -> None:
        content = message.get("content", "")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message["role"] == "assistant":
            self._assistant(blocks, path)
        elif message["role"] == "system":
            text = system_text("\n".join(_texts(content, path)))
            self.messages.append({"role": "system", "content": text})
        else:
            self._user(blocks, path)

    def _user(self, blocks: Sequence[Mapping[str, Any]], path: str) -> None:
        """Results of tools become messages of their own, in the order of the blocks."""
        texts: list[str] = []
        for index, block in enumerate(blocks):
            here = f"{path}.{index}"
            if block.get("type") != "tool_result":
                texts.append(_text(block, here))
                continue
            self._flush(texts)
            call_id = _member(block, "tool_use_id", here)
            if call_id not in self._calls:
                field = f"{here}.tool_use_id"
                raise InvalidRequestError(f"'{field}': no earlier message has a tool_use {call_id!r}", field)
            result = self._result(block.get("content") or "", f"{here}.content")
            if block.get("is_error") is True:
                result = ERROR + result
            self.messages.append({"role": "tool", "content": result, "tool_call_id": call_id})
        self._flush(texts)

    def _result(self, content: Any, path: str) -> str:
        """The text of a tool's result, with a note for each block that is not text."""
        if isinstance(content, list):
            content = [block if _is_text(block) else self._note(block) for block in content]
        return "\n".join(_texts(content, path))

    def _note(self, block: object) -> dict[str, str]:
        kind = block.get("type") if isinstance(block, Mapping) else None
        self.skipped.append(word(kind))
        return {"type": "text", "text": left_out(kind)}

    def _flush(self, texts: list[str]) -> None:
        if texts:
            self.messages.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    def _assistant(self, blocks: Sequence[Mapping[str, Any]], path: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, block in enumerate(blocks):
            kind, here = block.get("type"), f"{path}.{index}"
            if kind == "text":
                texts.append(_text(block, here))
            elif kind == "thinking":
                thoughts.append(_member(block, "thinking", here))
            elif kind == "tool_use":
                calls.append(self._call(block, here))
            else:  # encrypted thoughts, and calls of tools that ran at Anthropic
                self.skipped.append(word(kind))
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        self.messages.append(message)

    def _call(self, block: Mapping[str, Any], path: str) -> dict[str, Any]:
        call_id, name, value = _member(block, "id", path), _member(block, "name", path), block.get("input")
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"'{path}.input' must be an object", f"{path}.input")
        self._calls.add(call_id)
        try:
            arguments = orjson.dumps(value).decode()
        except TypeError:  # an integer beyond 64 bits
            arguments = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return chat_call(call_id, name, arguments)


def _texts(content: str | Sequence[Mapping[str, Any]], path: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequestError(f"'{path}' must be a string or a list of blocks", path)
    return [_text(block, f"{path}.{index}") for index, block in enumerate(content)]


def _is_text(block: object) -> bool:
    """Whether `block` is text or a text document, or should be: `_text` then reports what is wrong in it."""
    if not isinstance(block, Mapping) or block.get("type") != "document":
        return not isinstance(block, Mapping) or block.get("type") == "text"
    source = block.get("source")
    return isinstance(source, Mapping) and source.get("type") == "text"


def _text(block: object, path: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    source = block.get("source") if isinstance(block, Mapping) and kind == "document" else None
    if isinstance(source, Mapping) and source.get("type") == "text":
        return _member(source, "data", f"{path}.source")
    if kind != "text" or not isinstance(block, Mapping):
        raise InvalidRequestError(f"'{path}': {kind!r} is not supported; content is text", f"{path}.type")
    return _member(block, "text", path)


def _member(block: Mapping[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"'{path}.{name}' must be a string", f"{path}.{name}")
    return value


def _chat_choice(choice: ToolChoiceParam) -> str | Mapping[str, Any]:
    if choice["type"] == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return "required" if choice["type"] == "any" else choice["type"]


def _block_fields(block: Mapping[str, Any]) -> dict[str, Any] | None:
    """The known fields of a block; None for a kind that is left out whole, or refused."""
    kind = block.get("type")
    return _BLOCKS.get(kind) if isinstance(kind, str) else None


_BLOCKS: Mapping[str, dict[str, Any]] = {
    "text": dict.fromkeys(("type", "text", "cache_control", "citations")),
    "thinking": dict.fromkeys(("type", "thinking", "signature")),
    "tool_use": dict.fromkeys(("type", "id", "name", "input", "cache_control", "caller")),
    "tool_result": {
        **dict.fromkeys(("type", "tool_use_id", "is_error", "cache_control")),
        "content": _block_fields,
    },
    "document": dict.fromkeys(("type", "source", "cache_control")),
}
_TOOL = {**known_fields(ToolParam), "cache_control": None}
_KNOWN = {
    "system": _block_fields,
    "messages": {"role": None, "content": _block_fields},
    "tools": lambda tool: _TOOL if _tool_kind(tool) == "a function" else None,
    "tool_choice": known_fields(ToolChoiceParam),
    "output_config": {**known_fields(OutputConfig), "format": known_fields(OutputFormat)},
}


# ---- tools ----

CLIENT_TOOL = re.compile(r"(bash|text_editor|memory)_([0-9]{8})")
_NO_UNDO = 20250429  # from this version on the editor has no `undo_edit`, and `insert` has a field of its own
_EDITS = ("view", "create", "str_replace", "insert")
_OF_EDITS = ("path", "view_range", "file_text", "old_str", "new_str", "insert_line")
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "command": {"type": "string", "description": "The command to run"},
    "restart": {"type": "boolean", "description": "True: restart the shell and run nothing"},
    "path": {"type": "string", "description": "Path of the file or directory"},
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "For `view`: the first and the last line, from 1; -1 is the end of the file",
    },
    "file_text": {"type": "string", "description": "For `create`: the content of the file"},
    "old_str": {"type": "string", "description": "For `str_replace`: the text to replace, which the file has once"},
    "new_str": {"type": "string", "description": "For `str_replace`: the text instead"},
    "insert_line": {"type": "integer", "description": "For `insert`: the line to insert after; 0 is the beginning"},
    "insert_text": {"type": "string", "description": "For `insert`: the text to insert"},
    "old_path": {"type": "string", "description": "For `rename`: the present path"},
    "new_path": {"type": "string", "description": "For `rename`: the new path"},
}


def _tools(declared: Sequence[Mapping[str, Any]]) -> tuple[list[Tool], list[str], list[str]]:
    """Tools as chat has them, the field of each, and the types of those that run at Anthropic.

    Raises InvalidRequestError, naming the field.
    """
    tools: list[Tool] = []
    fields: list[str] = []
    skipped: list[str] = []
    for index, tool in enumerate(declared):
        kind = tool.get("type")
        match = CLIENT_TOOL.fullmatch(kind) if isinstance(kind, str) else None
        if match is not None:
            tools.append(_client_tool(match[1], int(match[2]), tool, f"tools.{index}"))
        elif _tool_kind(tool) == "another":
            skipped.append(word(kind))
            continue
        else:
            function: Any = {"name": tool["name"], "parameters": tool["input_schema"]}
            function.update({name: tool[name] for name in ("description", "strict") if tool.get(name)})
            tools.append({"type": "function", "function": function})
        fields.append(f"tools.{index}")
    return tools, fields, skipped


def _client_tool(kind: str, version: int, tool: Mapping[str, Any], path: str) -> Tool:
    """A tool of Anthropic that the client runs, as a function.

    A client declares it by its type alone. Anthropic's models know its arguments; other models need this schema.
    """
    if kind == "bash":
        default, required = "bash", ["command"]
        about, fields = "Run a command in a bash shell that stays open between calls.", _named("command", "restart")
    elif kind == "memory":
        default, required = "memory", ["command"]
        about = "Keep notes between conversations, in files of the directory /memories. Look there before a task."
        fields = _commands((*_EDITS, "delete", "rename"), *_OF_EDITS, "insert_text", "old_path", "new_path")
    else:
        default, required = "str_replace_based_edit_tool", ["command", "path"]
        about = "View, create and edit text files."
        if version >= _NO_UNDO:
            fields = _commands(_EDITS, *_OF_EDITS, "insert_text")
        else:
            fields = _commands((*_EDITS, "undo_edit"), *_OF_EDITS)
            fields["new_str"] = {"type": "string", "description": "For `str_replace` and `insert`: the new text"}
    name = tool.get("name", default)
    if not isinstance(name, str):
        raise InvalidRequestError(f"'{path}.name' must be a string", f"{path}.name")
    parameters = {"type": "object", "properties": fields, "required": required}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def _named(*names: str) -> dict[str, Any]:
    return {name: _FIELDS[name] for name in names}


def _commands(commands: tuple[str, ...], *names: str) -> dict[str, Any]:
    """The fields of a tool with several commands."""
    return {"command": {"type": "string", "enum": list(commands)}, **_named(*names)}


# ---- the turn ----


def messages_turn(body: MessagesBody, translated: TranslatedMessages, card: ModelCard) -> Turn:
    """The turn of `body`. Raises InvalidRequestError, naming the field."""
    user = body.metadata.get("user_id")
    same = (GenerationBody.model_fields.keys() & MessagesBody.model_fields.keys()) - {"kv_hints"}
    plain = GenerationBody(
        **{name: getattr(body, name) for name in same if name in body.model_fields_set},
        stop=body.stop_sequences,
        prompt_cache_key=user if isinstance(user, str) and len(user) <= 256 else None,
        kv_hints=body.kv_hints,
    )
    plain = with_defaults(plain, card)
    turn = build_turn(plain, translated.prompt, card, build_sampling(plain, card, body.max_tokens))
    return replace(turn, fields=translated.fields, skipped=translated.skipped)


# ---- the reply ----


def message_object(reply_id: str, model: str, answer: Answer, most: int) -> dict[str, Any]:
    """The whole message; `most` is the request's `max_tokens`. A call that was cut off is left out."""
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": signature(answer.reasoning)})
    if answer.text:
        content.append({"type": "text", "text": answer.text})
    closed = [call for call in answer.tool_calls if call.closed]
    for call in closed:
        arguments = orjson.Fragment(call.arguments)  # a parser would make floats of long integers
        content.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments})
    why = ending(answer.reason, answer.stop, called=bool(closed), usage=answer.usage, most=most)
    return {**empty_message(reply_id, model), "content": content, **why, "usage": message_usage(answer.usage)}


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
    """Why a message ended. `called`: at least one of its calls is complete."""
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
    """Token counts. `input_tokens` are those that were not read from the cache."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def signature(thoughts: str) -> str:
    """The signature of a thinking block. Nobody checks it, but some clients drop blocks without one."""
    return "hf1." + blake2b(thoughts.encode("utf-8", "replace"), digest_size=16).hexdigest()


# ---- the events ----

DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


@dataclass(slots=True)
class OpenBlock:
    """The block that is being written: its events up to the delta itself, and the text of its thoughts."""

    kind: str
    delta_open: bytes
    thoughts: str = ""


class AnthropicEncoder:
    """Writes one message as events.

        message_start (how many tokens the prompt has), ping
          one block after the other:  content_block_start, its deltas, content_block_stop
        message_delta (why it ended, usage), message_stop;  or error

    A block is text, thinking or a call. A call that stops can be run. The parts that are the same in every delta of a
    block are made once, so that a token costs one JSON string and one join.
    """

    def __init__(self, reply_id: str, model: str, most: int) -> None:
        self._message = empty_message(reply_id, model)
        self._most = most
        self._index = 0
        self._open: OpenBlock | None = None
        self._called = False
        self._started = False

    def opening(self) -> bytes:
        return b""  # the first event has the prompt's tokens, which are not known yet

    def encode(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join([self._piece(piece) for piece in pieces])

    def silence(self) -> bytes:
        return PING if self._started else COMMENT

    def failed(self, error: ErrorInfo) -> bytes:
        return b"event: error\ndata: " + anthropic_error(error).body + b"\n\n"

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, Errored):
            return self.failed(piece.error)
        start = b"" if self._started else self._start(piece)
        if isinstance(piece, TextDelta) and piece.text:
            return start + self._within("text", {"text": ""}) + self._delta(piece.text)
        if isinstance(piece, ReasoningDelta) and piece.text:
            start += self._within("thinking", {"thinking": "", "signature": ""})
            assert self._open is not None
            self._open.thoughts += piece.text
            return start + self._delta(piece.text)
        if isinstance(piece, ToolCallDelta):
            return start + self._call(piece)
        return start + self._completed(piece) if isinstance(piece, Completed) else start

    def _start(self, piece: Piece) -> bytes:
        self._started = True
        usage = Usage(piece.prompt, piece.cached) if isinstance(piece, Started) else Usage()
        return _event("message_start", message={**self._message, "usage": message_usage(usage)}) + PING

    def _call(self, piece: ToolCallDelta) -> bytes:
        events = b""
        if piece.name is not None:
            events = self._close() + self._begin("tool_use", {"id": piece.call_id, "name": piece.name, "input": {}})
        if piece.arguments:
            events += self._delta(piece.arguments)
        if piece.closed:
            self._called = True
            events += self._close()
        return events

    def _within(self, kind: str, block: dict[str, Any]) -> bytes:
        """Open a block of this kind unless one is open."""
        if self._open is not None and self._open.kind == kind:
            return b""
        return self._close() + self._begin(kind, block)

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        type_, field = DELTAS[kind]
        same = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
        self._open = OpenBlock(kind, same % (self._index, type_.encode(), field.encode()))
        return _event("content_block_start", index=self._index, content_block={"type": kind, **block})

    def _delta(self, text: str) -> bytes:
        assert self._open is not None  # a block begins before its deltas
        return self._open.delta_open + orjson.dumps(text) + b"}}\n\n"

    def _close(self) -> bytes:
        """The end of the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return b""
        events = b""
        if block.kind == "thinking":
            delta = {"type": "signature_delta", "signature": signature(block.thoughts)}
            events = _event("content_block_delta", index=self._index, delta=delta)
        self._index += 1
        return events + _event("content_block_stop", index=self._index - 1)

    def _completed(self, piece: Completed) -> bytes:
        why = ending(piece.reason, piece.stop, called=self._called, usage=piece.usage, most=self._most)
        end = _event("message_delta", delta=why, usage=message_usage(piece.usage))
        return self._close() + end + _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


PING = _event("ping")
