"""`/v1/messages` (Anthropic): blocks in, the chat prompt that they become, the message and its events out.

An unknown field changes nothing and is reported as skipped: clients send new fields before servers know them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from hashlib import blake2b
from itertools import groupby
from operator import or_
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, get_args

import orjson
from pydantic import ConfigDict, Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from holdfast.replicas.errors import ErrorInfo, InvalidRequestError
from holdfast.replicas.requests import (
    Answer,
    ChatPrompt,
    Completed,
    Errored,
    JsonOutput,
    LogprobText,
    ModelCard,
    Piece,
    Started,
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
    text_or,
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
from holdfast.router.protocol.replies import COMMENT, ItemEncoder, OpenItem
from holdfast.router.protocol.responses import ResponsesBody
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


@with_config(OPEN)
class TextBlock(TypedDict):
    type: Literal["text"]
    text: str
    cache_control: NotRequired[Any]
    citations: NotRequired[Any]


@with_config(OPEN)
class TextSource(TypedDict):
    type: Literal["text"]
    data: str
    media_type: NotRequired[Any]


@with_config(OPEN)
class DocumentBlock(TypedDict):
    """A document of plain text."""

    type: Literal["document"]
    source: TextSource
    cache_control: NotRequired[Any]


@with_config(OPEN)
class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: NotRequired[Any]


@with_config(OPEN)
class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: NotRequired[Any]
    caller: NotRequired[Any]


_MANY = Field(max_length=MOST_MESSAGES)


def _blocks(*kinds: Any, others: bool = False) -> Any:
    """Content: a text, or blocks of these kinds. With `others` also blocks that no model here can read."""
    block: Any
    if not others:
        block = Annotated[reduce(or_, kinds), Field(discriminator="type")]
        return text_or(Annotated[list[block], _MANY])
    by_type = {get_args(kind.__annotations__["type"])[0]: kind for kind in kinds}
    tagged = [Annotated[kind, Tag(name)] for name, kind in {**by_type, "another": dict[str, Any]}.items()]

    def kind_of(block: object) -> str:
        kind = block.get("type") if isinstance(block, Mapping) else None
        source = block.get("source") if isinstance(block, Mapping) else None
        reads = kind != "document" or (isinstance(source, Mapping) and source.get("type") == "text")
        return kind if isinstance(kind, str) and kind in by_type and reads else "another"

    block = Annotated[reduce(or_, tagged), Discriminator(kind_of)]
    return text_or(Annotated[list[block], _MANY])


ResultContent: Any = _blocks(TextBlock, DocumentBlock, others=True) | None


@with_config(OPEN)
class ToolResultBlock(TypedDict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: NotRequired[ResultContent]
    is_error: NotRequired[Any]
    cache_control: NotRequired[Any]


UserContent: Any = _blocks(TextBlock, DocumentBlock, ToolResultBlock)
AssistantContent: Any = _blocks(TextBlock, ThinkingBlock, ToolUseBlock, others=True)
SystemContent: Any = _blocks(TextBlock, DocumentBlock)


@with_config(OPEN)
class UserParam(TypedDict):
    role: Literal["user"]
    content: UserContent


@with_config(OPEN)
class AssistantParam(TypedDict):
    role: Literal["assistant"]
    content: NotRequired[AssistantContent]


@with_config(OPEN)
class SystemParam(TypedDict):
    role: Literal["system"]
    content: SystemContent


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
    cache_control: NotRequired[Any]


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
    system: SystemContent = ""
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
    if system := _text(body.system):
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
    all_skipped = (*body.skipped, *skipped, *reader.skipped)
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
        content: Any = message.get("content", "")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message["role"] == "assistant":
            self._assistant(blocks)
        elif message["role"] == "system":
            self.messages.append({"role": "system", "content": system_text(_text(content))})
        else:
            self._user(blocks, path)

    def _user(self, blocks: Sequence[Mapping[str, Any]], path: str) -> None:
        """Results of tools become messages of their own, in the order of the blocks."""
        for results, group in groupby(enumerate(blocks), lambda each: each[1]["type"] == "tool_result"):
            if results:
                for index, block in group:
                    self._result(block, f"{path}.{index}")
            else:
                self.messages.append({"role": "user", "content": _text([block for _, block in group])})

    def _result(self, block: Mapping[str, Any], path: str) -> None:
        """The text of a tool's result, with a note for each block that is not text."""
        call_id: str = block["tool_use_id"]
        content: Any = block.get("content") or ""
        if call_id not in self._calls:
            field = f"{path}.tool_use_id"
            raise InvalidRequestError(f"'{field}': no earlier message has a tool_use {call_id!r}", field)
        texts = [content] if isinstance(content, str) else []
        for part in content if not texts else ():
            text = _block_text(part)
            if text is None:
                self.skipped.append(word(part.get("type")))
                text = left_out(part.get("type"))
            texts.append(text)
        text = (ERROR if block.get("is_error") is True else "") + "\n".join(texts)
        self.messages.append({"role": "tool", "content": text, "tool_call_id": call_id})

    def _assistant(self, blocks: Sequence[Mapping[str, Any]]) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for block in blocks:
            kind = block.get("type")
            if kind == "text":
                texts.append(block["text"])
            elif kind == "thinking":
                thoughts.append(block["thinking"])
            elif kind == "tool_use":
                calls.append(self._call(block))
            else:  # encrypted thoughts, and calls of tools that ran at Anthropic
                self.skipped.append(word(kind))
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        self.messages.append(message)

    def _call(self, block: Mapping[str, Any]) -> dict[str, Any]:
        self._calls.add(block["id"])
        try:
            arguments = orjson.dumps(block["input"]).decode()
        except TypeError:  # an integer beyond 64 bits
            arguments = json.dumps(block["input"], ensure_ascii=False, separators=(",", ":"))
        return chat_call(block["id"], block["name"], arguments)


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of blocks, each on a line of its own."""
    return content if isinstance(content, str) else "\n".join(_block_text(block) or "" for block in content)


def _block_text(block: Mapping[str, Any]) -> str | None:
    """The text of a block; None for a kind that has none."""
    if block.get("type") == "text":
        return str(block["text"])
    source = block.get("source")
    if isinstance(source, Mapping) and block.get("type") == "document" and source.get("type") == "text":
        return str(source["data"])
    return None


def _chat_choice(choice: ToolChoiceParam) -> Any:
    if choice["type"] == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return "required" if choice["type"] == "any" else choice["type"]


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
    undo = kind == "text_editor" and version < _NO_UNDO
    default, description, commands, names, required = {
        "bash": (
            "bash",
            "Run a command in a bash shell that stays open between calls.",
            (),
            ("command", "restart"),
            ["command"],
        ),
        "memory": (
            "memory",
            "Keep notes between conversations, in files of the directory /memories. Look there before a task.",
            (*_EDITS, "delete", "rename"),
            (*_OF_EDITS, "insert_text", "old_path", "new_path"),
            ["command"],
        ),
        "text_editor": (
            "str_replace_based_edit_tool",
            "View, create and edit text files.",
            (*_EDITS, "undo_edit") if undo else _EDITS,
            _OF_EDITS if undo else (*_OF_EDITS, "insert_text"),
            ["command", "path"],
        ),
    }[kind]
    name = tool.get("name", default)
    if not isinstance(name, str):
        raise InvalidRequestError(f"'{path}.name' must be a string", f"{path}.name")
    command = {"command": {"type": "string", "enum": list(commands)}} if commands else {}
    fields = {**command, **{each: _FIELDS[each] for each in names}}
    if undo:
        fields["new_str"] = {"type": "string", "description": "For `str_replace` and `insert`: the new text"}
    parameters = {"type": "object", "properties": fields, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


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
    stop_reason = ending(answer.reason, answer.stop, called=bool(closed), usage=answer.usage, most=most)
    return {**empty_message(reply_id, model), "content": content, **stop_reason, "usage": message_usage(answer.usage)}


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
        stop_reason = "max_tokens" if usage.completion >= most else "model_context_window_exceeded"
    elif stop:
        stop_reason = "stop_sequence"
    else:
        stop_reason = "tool_use" if called else "end_turn"
    return {"stop_reason": stop_reason, "stop_sequence": stop or None}


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

DELTAS = {  # the type of a delta, and the name of its text
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class AnthropicEncoder(ItemEncoder):
    """Writes one message as events.

        message_start (how many tokens the prompt has), ping
          one block after the other:  content_block_start, its deltas, content_block_stop
        message_delta (why it ended, usage), message_stop;  or error

    A block is text, thinking or a call. A call that stops can be run.
    """

    def __init__(self, reply_id: str, model: str, most: int) -> None:
        super().__init__()
        self._message = empty_message(reply_id, model)
        self._most = most
        self._index = 0
        self._called = False
        self._started = False

    def silence(self) -> bytes:
        return PING if self._started else COMMENT

    def failed(self, error: ErrorInfo) -> bytes:
        return b"event: error\ndata: " + anthropic_error(error).body + b"\n\n"

    def piece(self, piece: Piece) -> bytes:
        """The first event has the prompt's tokens, which only the first piece has."""
        if self._started or isinstance(piece, Errored):
            return super().piece(piece)
        self._started = True
        usage = Usage(piece.prompt, piece.cached) if isinstance(piece, Started) else Usage()
        start = _event("message_start", message={**self._message, "usage": message_usage(usage)}) + PING
        return start + super().piece(piece)

    def _begin(self, kind: str) -> bytes:
        if kind == "text":
            return self._add(kind, {"type": "text", "text": ""})
        return self._add(kind, {"type": "thinking", "thinking": "", "signature": ""})

    def _begin_call(self, piece: ToolCallDelta) -> bytes:
        return self._add("call", {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": {}})

    def _add(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open = OpenItem(kind, block)
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, text: str, logprobs: Sequence[LogprobText] = ()) -> bytes:
        assert self._open is not None  # a block begins before its deltas
        if self._open.kind == "reasoning":
            self._open.texts.append(text)
        kind, name = DELTAS[self._open.kind]
        return _event("content_block_delta", index=self._index, delta={"type": kind, name: text})

    def _close(self, *, closed: bool = False) -> bytes:
        block, self._open = self._open, None
        self._called |= closed
        if block is None:
            return b""
        events = b""
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": signature("".join(block.texts))}
            events = _event("content_block_delta", index=self._index, delta=delta)
        self._index += 1
        return events + _event("content_block_stop", index=self._index - 1)

    def completed(self, piece: Completed) -> bytes:
        stop_reason = ending(piece.reason, piece.stop, called=self._called, usage=piece.usage, most=self._most)
        end = _event("message_delta", delta=stop_reason, usage=message_usage(piece.usage))
        return self._close() + end + _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


PING = _event("ping")
