"""The shapes of all events of streams, as `/openapi.json` tells them. Encoders write them; tests hold each to these.

What they name is always there, but for `NotRequired`; nothing else is.
"""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import Discriminator, Field, with_config
from typing_extensions import TypedDict

from holdfast.router.protocol.messages import CLOSED
from holdfast.router.protocol.replies import (
    AnthropicError,
    ChatScores,
    CompletionScores,
    Error,
    MessageUsage,
    OutputCall,
    OutputCompaction,
    OutputCustomCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    Reason,
    ReasoningText,
    ResponseReply,
    ScoredToken,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    Usage,
)

# ---- chat completions and completions ----


@with_config(CLOSED)
class CalledDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


@with_config(CLOSED)
class ToolCallDelta(TypedDict):
    """The first of a call has its id, type and name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledDelta


@with_config(CLOSED)
class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


@with_config(CLOSED)
class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatScores | None
    finish_reason: Reason | None


@with_config(CLOSED)
class ClosedCall(TypedDict):
    """The call of this index is whole."""

    tool_call_closed: int


@with_config(CLOSED)
class StageTimes(TypedDict):
    """Milliseconds, and how many tokens were drafted and accepted, where any were."""

    queue_ms: NotRequired[float]
    prefill_ms: NotRequired[float]
    decode_ms: NotRequired[float]
    drafted: NotRequired[int]
    accepted: NotRequired[int]


@with_config(CLOSED)
class ChatChunk(TypedDict):
    """`usage` where `stream_options` asked for it: null but in the last chunk, which has no choices, and `timing`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    timing: NotRequired[StageTimes]
    holdfast: NotRequired[ClosedCall]


@with_config(CLOSED)
class CompletionChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionScores | None
    finish_reason: Reason | None


@with_config(CLOSED)
class CompletionChunk(TypedDict):
    """`usage` and `timing` as of a chat completion's chunks."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]
    timing: NotRequired[StageTimes]


# ---- messages ----


@with_config(CLOSED)
class BegunMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: Annotated[list[Any], Field(max_length=0)]
    stop_reason: None
    stop_sequence: None
    usage: MessageUsage


@with_config(CLOSED)
class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: BegunMessage


@with_config(CLOSED)
class Ping(TypedDict):
    type: Literal["ping"]


@with_config(CLOSED)
class BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: TextBlock | ThinkingBlock | ToolUseBlock


@with_config(CLOSED)
class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


@with_config(CLOSED)
class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


@with_config(CLOSED)
class SignatureDelta(TypedDict):
    type: Literal["signature_delta"]
    signature: str


@with_config(CLOSED)
class InputDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


@with_config(CLOSED)
class BlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextDelta | ThinkingDelta | SignatureDelta | InputDelta, Discriminator("type")]


@with_config(CLOSED)
class BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


@with_config(CLOSED)
class MessageEnding(TypedDict):
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None


@with_config(CLOSED)
class MessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: MessageEnding
    usage: MessageUsage


@with_config(CLOSED)
class MessageStop(TypedDict):
    type: Literal["message_stop"]


# ---- responses ----


@with_config(CLOSED)
class ResponseState(TypedDict):
    """The first two events and the last one have the response as it stands."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    sequence_number: int
    response: ResponseReply


@with_config(CLOSED)
class ItemState(TypedDict):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputMessage | OutputReasoning | OutputCall | OutputCustomCall | OutputCompaction


@with_config(CLOSED)
class PartState(TypedDict):
    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


@with_config(CLOSED)
class OutputTextDelta(TypedDict):
    type: Literal["response.output_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ScoredToken]


@with_config(CLOSED)
class OutputTextDone(TypedDict):
    type: Literal["response.output_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ScoredToken]


@with_config(CLOSED)
class ReasoningTextDelta(TypedDict):
    type: Literal["response.reasoning_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str


@with_config(CLOSED)
class ReasoningTextDone(TypedDict):
    type: Literal["response.reasoning_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str


@with_config(CLOSED)
class ArgumentsDelta(TypedDict):
    type: Literal["response.function_call_arguments.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


@with_config(CLOSED)
class ArgumentsDone(TypedDict):
    type: Literal["response.function_call_arguments.done"]
    sequence_number: int
    item_id: str
    output_index: int
    arguments: str
    name: str


@with_config(CLOSED)
class CustomInputDelta(TypedDict):
    type: Literal["response.custom_tool_call_input.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


@with_config(CLOSED)
class CustomInputDone(TypedDict):
    type: Literal["response.custom_tool_call_input.done"]
    sequence_number: int
    item_id: str
    output_index: int
    input: str


ChatEvent: TypeAlias = ChatChunk | Error
CompletionEvent: TypeAlias = CompletionChunk | Error
MessageEvent: TypeAlias = Annotated[
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | AnthropicError,
    Discriminator("type"),
]
ResponseEvent: TypeAlias = Annotated[
    ResponseState
    | ItemState
    | PartState
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone,
    Discriminator("type"),
]
