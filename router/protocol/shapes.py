"""The shapes of all answers and of the events of streams, as `/openapi.json` shows them.

The code that writes answers does not use these types. Tests and the fuzzer compare answers with them. An object has the
fields that stand here and no others; `optional` ones may be absent.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import ConfigDict, Discriminator, with_config
from typing_extensions import TypedDict

CLOSED = ConfigDict(strict=True, extra="forbid")
Fields: TypeAlias = Mapping[Any, str]  # the names of the fields of each type, separated by spaces


def shape(name: str, fields: Fields, optional: Fields | None = None, about: str = "") -> Any:
    """The type of an object with these fields; `about` is its description."""
    members = {each: kind for kind, names in fields.items() for each in names.split()}
    members |= {each: NotRequired[kind] for kind, names in (optional or {}).items() for each in names.split()}
    made: Any = TypedDict(name, members)  # type: ignore[misc]
    made.__doc__ = about
    return with_config(CLOSED)(made)


def many(kind: Any) -> Any:
    """The type of a list."""
    return list[kind]


def by_type(*kinds: Any) -> Any:
    """The type of one of these objects, which differ by their field `type`."""
    union = kinds[0]
    for each in kinds[1:]:
        union = union | each
    return Annotated[union, Discriminator("type")]


TEXT_OR_NULL, NUMBER_OR_NULL = str | None, float | None
OBJECT = dict[str, Any]
COUNTS = dict[str, int]

# ---- errors ----

ErrorBody = shape("ErrorBody", {str: "message type", TEXT_OR_NULL: "param code"})
Error = shape("Error", {ErrorBody: "error"})
AnthropicError = shape(
    "AnthropicError", {Literal["error"]: "type", shape("AnthropicErrorBody", {str: "type message"}): "error"}
)

# ---- chat completions and completions ----

Reason: TypeAlias = Literal["stop", "length", "tool_calls"]
ReasoningTokens = shape("ReasoningTokens", {int: "reasoning_tokens"})
Usage = shape(
    "Usage",
    {
        int: "prompt_tokens completion_tokens total_tokens",
        shape("CachedTokens", {int: "cached_tokens"}): "prompt_tokens_details",
    },
    {ReasoningTokens: "completion_tokens_details"},
)
TokenScore = shape("TokenScore", {str: "token", NUMBER_OR_NULL: "logprob", many(int): "bytes"})
ScoredToken = shape(
    "ScoredToken", {str: "token", NUMBER_OR_NULL: "logprob", many(int): "bytes", many(TokenScore): "top_logprobs"}
)
ChatScores = shape("ChatScores", {many(ScoredToken): "content", None: "refusal"})
ToolCall = shape(
    "ToolCall",
    {str: "id", Literal["function"]: "type", shape("CalledFunction", {str: "name arguments"}): "function"},
)
AssistantReply = shape(
    "AssistantReply",
    {Literal["assistant"]: "role", TEXT_OR_NULL: "content", None: "refusal"},
    {str: "reasoning_content", many(ToolCall): "tool_calls"},
)
ChatChoice = shape(
    "ChatChoice", {int: "index", AssistantReply: "message", ChatScores | None: "logprobs", Reason: "finish_reason"}
)
ChatCompletion = shape(
    "ChatCompletion",
    {
        str: "id model",
        Literal["chat.completion"]: "object",
        int: "created",
        many(ChatChoice): "choices",
        Usage: "usage",
    },
)
CompletionScores = shape(
    "CompletionScores",
    {
        many(str): "tokens",
        many(NUMBER_OR_NULL): "token_logprobs",
        many(dict[str, float] | None): "top_logprobs",
        many(int): "text_offset",
    },
)
CompletionChoice = shape(
    "CompletionChoice",
    {int: "index", str: "text", CompletionScores | None: "logprobs", Reason: "finish_reason"},
)
Completion = shape(
    "Completion",
    {
        str: "id model",
        Literal["text_completion"]: "object",
        int: "created",
        many(CompletionChoice): "choices",
        Usage: "usage",
    },
)

ToolCallDelta = shape(
    "ToolCallDelta",
    {int: "index", shape("CalledDelta", {str: "arguments"}, {str: "name"}): "function"},
    {str: "id", Literal["function"]: "type"},
    "The first one of a call has its id, type and name.",
)
ChatDelta = shape(
    "ChatDelta",
    {},
    {
        Literal["assistant"]: "role",
        str: "content reasoning_content",
        None: "refusal",
        many(ToolCallDelta): "tool_calls",
    },
)
ChatChunkChoice = shape(
    "ChatChunkChoice",
    {int: "index", ChatDelta: "delta", ChatScores | None: "logprobs", Reason | None: "finish_reason"},
)
StageTimes = shape(
    "StageTimes",
    {},
    {float: "queue_ms prefill_ms decode_ms", int: "drafted accepted"},
    "Milliseconds, and how many tokens were drafted and accepted, if any were.",
)
END: Fields = {Usage | None: "usage", StageTimes: "timing"}
ABOUT_END = "`stream_options` asks for `usage`: null except in the last chunk, which has no choices, and has `timing`."
ChatChunk = shape(
    "ChatChunk",
    {str: "id model", Literal["chat.completion.chunk"]: "object", int: "created", many(ChatChunkChoice): "choices"},
    {**END, shape("ClosedCall", {int: "tool_call_closed"}, None, "The call of this index is complete."): "holdfast"},
    ABOUT_END,
)
CompletionChunkChoice = shape(
    "CompletionChunkChoice",
    {int: "index", str: "text", CompletionScores | None: "logprobs", Reason | None: "finish_reason"},
)
CompletionChunk = shape(
    "CompletionChunk",
    {str: "id model", Literal["text_completion"]: "object", int: "created", many(CompletionChunkChoice): "choices"},
    END,
    ABOUT_END,
)
ChatEvent = ChatChunk | Error
CompletionEvent = CompletionChunk | Error

# ---- messages ----

TextBlock = shape("TextBlock", {Literal["text"]: "type", str: "text"})
ThinkingBlock = shape("ThinkingBlock", {Literal["thinking"]: "type", str: "thinking signature"})
ToolUseBlock = shape("ToolUseBlock", {Literal["tool_use"]: "type", str: "id name", OBJECT: "input"})
Block = TextBlock | ThinkingBlock | ToolUseBlock
MessageUsage = shape(
    "MessageUsage",
    {
        int: "input_tokens cache_creation_input_tokens cache_read_input_tokens output_tokens",
        shape("ThinkingTokens", {int: "thinking_tokens"}): "output_tokens_details",
    },
)
StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
MESSAGE: Fields = {
    str: "id model",
    Literal["message"]: "type",
    Literal["assistant"]: "role",
    many(Block): "content",
    MessageUsage: "usage",
}
MessageReply = shape("MessageReply", {**MESSAGE, StopReason: "stop_reason", TEXT_OR_NULL: "stop_sequence"})
StartedMessage = shape("StartedMessage", {**MESSAGE, None: "stop_reason stop_sequence"}, None, "It has no content yet.")
InputTokens = shape("InputTokens", {int: "input_tokens"})

BlockChange = by_type(
    shape("TextDelta", {Literal["text_delta"]: "type", str: "text"}),
    shape("ThinkingDelta", {Literal["thinking_delta"]: "type", str: "thinking"}),
    shape("SignatureDelta", {Literal["signature_delta"]: "type", str: "signature"}),
    shape("InputDelta", {Literal["input_json_delta"]: "type", str: "partial_json"}),
)
MessageEvent = by_type(
    shape("MessageStart", {Literal["message_start"]: "type", StartedMessage: "message"}),
    shape("Ping", {Literal["ping"]: "type"}),
    shape("BlockStart", {Literal["content_block_start"]: "type", int: "index", Block: "content_block"}),
    shape("BlockDelta", {Literal["content_block_delta"]: "type", int: "index", BlockChange: "delta"}),
    shape("BlockStop", {Literal["content_block_stop"]: "type", int: "index"}),
    shape(
        "MessageDelta",
        {
            Literal["message_delta"]: "type",
            shape("MessageEnding", {StopReason: "stop_reason", TEXT_OR_NULL: "stop_sequence"}): "delta",
            MessageUsage: "usage",
        },
    ),
    shape("MessageStop", {Literal["message_stop"]: "type"}),
    AnthropicError,
)

# ---- responses ----

OutputText = shape(
    "OutputText",
    {Literal["output_text"]: "type", many(Any): "annotations", many(ScoredToken): "logprobs", str: "text"},
)
ReasoningText = shape("ReasoningText", {Literal["reasoning_text"]: "type", str: "text"})
OutputItem = by_type(
    shape(
        "OutputMessage",
        {Literal["message"]: "type", str: "id status", Literal["assistant"]: "role", many(OutputText): "content"},
    ),
    shape(
        "OutputReasoning",
        {Literal["reasoning"]: "type", str: "id", many(Any): "summary", many(ReasoningText): "content"},
        {str: "encrypted_content"},
    ),
    shape(
        "OutputCall",
        {Literal["function_call"]: "type", str: "id status call_id name arguments"},
        {str: "namespace"},
    ),
    shape(
        "OutputCustomCall",
        {Literal["custom_tool_call"]: "type", str: "id status call_id name input"},
        {str: "namespace"},
    ),
    shape("OutputCompaction", {Literal["compaction"]: "type", str: "id encrypted_content"}),
)
ResponseUsage = shape(
    "ResponseUsage",
    {
        int: "input_tokens output_tokens total_tokens",
        shape("InputDetails", {int: "cached_tokens cache_write_tokens"}): "input_tokens_details",
        ReasoningTokens: "output_tokens_details",
    },
)
ResponseReply = shape(
    "ResponseReply",
    {
        str: "id model",
        Literal["response"]: "object",
        int: "created_at top_logprobs",
        int | None: "completed_at max_output_tokens max_tool_calls",
        Literal["in_progress", "completed", "incomplete", "failed"]: "status",
        Literal[False]: "background",
        shape("ResponseError", {str: "code message"}) | None: "error",
        shape("IncompleteReason", {str: "reason"}) | None: "incomplete_details",
        TEXT_OR_NULL: "instructions previous_response_id prompt_cache_key safety_identifier user",
        many(OutputItem): "output",
        bool: "parallel_tool_calls store",
        OBJECT: "reasoning text",
        Literal["default", "flex"]: "service_tier",
        float: "temperature top_p presence_penalty frequency_penalty",
        str | OBJECT: "tool_choice",
        many(OBJECT): "tools",
        Literal["auto", "disabled"]: "truncation",
        ResponseUsage | None: "usage",
        dict[str, str]: "metadata",
    },
    None,
    "`in_progress` only in the first events of a stream.",
)
CompactionReply = shape(
    "CompactionReply",
    {
        str: "id",
        Literal["response.compaction"]: "object",
        int: "created_at",
        many(OBJECT): "output",
        ResponseUsage: "usage",
    },
)
CountedInput = shape("CountedInput", {Literal["response.input_tokens"]: "object", int: "input_tokens"})
ItemPage = shape(
    "ItemPage",
    {Literal["list"]: "object", many(OBJECT): "data", TEXT_OR_NULL: "first_id last_id", bool: "has_more"},
)

ITEM: Fields = {str: "item_id", int: "sequence_number output_index"}
PART: Fields = {str: "item_id", int: "sequence_number output_index content_index"}
SCORED: Fields = {many(ScoredToken): "logprobs"}
ResponseEvent = by_type(
    shape(
        "ResponseState",
        {
            Literal[
                "response.created",
                "response.in_progress",
                "response.completed",
                "response.incomplete",
                "response.failed",
            ]: "type",
            int: "sequence_number",
            ResponseReply: "response",
        },
        None,
        "The first two events and the last one have the response as it is then.",
    ),
    shape(
        "ItemState",
        {
            Literal["response.output_item.added", "response.output_item.done"]: "type",
            int: "sequence_number output_index",
            OutputItem: "item",
        },
    ),
    shape(
        "PartState",
        {
            **PART,
            Literal["response.content_part.added", "response.content_part.done"]: "type",
            OutputText | ReasoningText: "part",
        },
    ),
    shape(
        "OutputTextDelta",
        {**PART, **SCORED, Literal["response.output_text.delta"]: "type", str: "item_id delta"},
    ),
    shape("OutputTextDone", {**PART, **SCORED, Literal["response.output_text.done"]: "type", str: "item_id text"}),
    shape("ReasoningTextDelta", {**PART, Literal["response.reasoning_text.delta"]: "type", str: "item_id delta"}),
    shape("ReasoningTextDone", {**PART, Literal["response.reasoning_text.done"]: "type", str: "item_id text"}),
    shape("ArgumentsDelta", {**ITEM, Literal["response.function_call_arguments.delta"]: "type", str: "item_id delta"}),
    shape(
        "ArgumentsDone",
        {**ITEM, Literal["response.function_call_arguments.done"]: "type", str: "item_id arguments name"},
    ),
    shape("CustomInputDelta", {**ITEM, Literal["response.custom_tool_call_input.delta"]: "type", str: "item_id delta"}),
    shape("CustomInputDone", {**ITEM, Literal["response.custom_tool_call_input.done"]: "type", str: "item_id input"}),
)

# ---- prefills, sessions, programs ----

Deleted = shape(
    "Deleted", {str: "id object", Literal[True]: "deleted"}, None, "`object` names the kind of what was deleted."
)
PrefillReply = shape(
    "PrefillReply",
    {
        str: "id model",
        Literal["prefill"]: "object",
        int: "created expires_at tokens cached_tokens",
        TEXT_OR_NULL: "program_id",
        bool: "complete",
    },
)
HeartbeatReply = shape("HeartbeatReply", {str: "id", Literal["program.heartbeat"]: "object", float: "within_s"})
SessionReply = shape(
    "SessionReply",
    {
        str: "id model replica",
        Literal["session"]: "object",
        int: "created expires tokens appends",
        bool: "busy",
        many(str): "questions",
    },
)
SessionList = shape("SessionList", {Literal["list"]: "object", many(SessionReply): "data", bool: "has_more"})
SessionOpened = shape(
    "SessionOpened", {str: "id model", Literal["session"]: "object", int: "created tokens", Usage: "usage"}
)
SessionAppended = shape(
    "SessionAppended", {str: "id", Literal["session.append"]: "object", int: "tokens", Usage: "usage"}
)
QuestionAnswer = shape("QuestionAnswer", {str: "text", Reason: "finish_reason", Usage: "usage"})
QuestionReply = shape(
    "QuestionReply",
    {
        str: "id session_id",
        Literal["session.question"]: "object",
        int: "max_tokens append appends",
        QuestionAnswer | None: "answer",
        bool: "up_to_date",
        NUMBER_OR_NULL: "age_s",
        ErrorBody | None: "error",
    },
    {many(OBJECT): "messages", str: "text", many(int): "tokens"},
    "The question is one of `messages`, `text` and `tokens`.",
)
QuestionList = shape("QuestionList", {Literal["list"]: "object", many(QuestionReply): "data"})
LATENCY: Fields = {int: "count", float: "mean_s std_s", NUMBER_OR_NULL: "p50_s p90_s p99_s"}
LatencyList = shape(
    "LatencyList",
    {
        Literal["list"]: "object",
        many(shape("ToolsLatency", {**LATENCY, many(str): "tools"})): "data",
        shape("Latency", LATENCY): "overall",
    },
)

# ---- models and tokens ----

TokenizeReply = shape("TokenizeReply", {int: "count max_model_len", many(int): "tokens", None: "token_strs"})
DetokenizeReply = shape("DetokenizeReply", {str: "prompt"})
ModelReply = shape("ModelReply", {str: "id owned_by", Literal["model"]: "object", int: "created max_model_len"})
ModelList = shape("ModelList", {Literal["list"]: "object", many(ModelReply): "data"})
AnthropicModel = shape(
    "AnthropicModel",
    {Literal["model"]: "type", str: "id display_name created_at", int: "max_input_tokens max_tokens"},
)
AnthropicModelList = shape(
    "AnthropicModelList",
    {many(AnthropicModel): "data", Literal[False]: "has_more", TEXT_OR_NULL: "first_id last_id"},
)
AnyModelList = ModelList | AnthropicModelList
AnyModel = ModelReply | AnthropicModel

# ---- tenants and usage ----

UsagePeriod = shape(
    "UsagePeriod",
    {str: "period", int: "requests input cached output drawn drafted", float: "units", COUNTS: "outcomes"},
)
LIMITS = dict[str, float | None]
UsageSums = shape("UsageSums", {str: "tenant", LIMITS: "limits", many(UsagePeriod): "periods"})
UsageOfOne = shape("UsageOfOne", {str: "tenant", many(UsagePeriod): "periods"})
UsageOfAll = shape("UsageOfAll", {many(UsageOfOne): "tenants"})
Source: TypeAlias = Literal["configuration", "redis"]
ScopeName: TypeAlias = Literal["infer", "usage", "operate"]
ClassName: TypeAlias = Literal["interactive", "batch"]
KeyRow = shape("KeyRow", {str: "id", Source: "source", many(ScopeName): "scopes", NUMBER_OR_NULL: "expires last_used"})
TenantRow = shape(
    "TenantRow",
    {
        str: "name",
        Source: "source",
        float: "weight",
        LIMITS: "limits",
        shape("TenantCacheRow", {bool: "enabled", NUMBER_OR_NULL: "ttl_s", int | None: "bytes"}): "cache",
        bool: "operator prompt_seed",
        ClassName: "priority",
        many(ClassName): "priorities",
    },
    {many(KeyRow): "keys"},
)
TenantList = shape("TenantList", {many(TenantRow): "tenants"})
KeyMade = shape("KeyMade", {str: "name key key_id", many(ScopeName): "scopes", NUMBER_OR_NULL: "expires"})

# ---- the server ----

StatusReply = shape(
    "StatusReply",
    {
        str: "version router",
        float: "time up_s",
        Literal["ok", "degraded"]: "store",
        many(OBJECT): "replicas tenants programs",
        int: "at_tools",
    },
)
LiveReply = shape(
    "LiveReply",
    {
        str: "router version tenant",
        float: "time started looked_s",
        bool: "operator left_out",
        int: "number",
        dict[str, list[str]]: "fields",
        many(many(Any)): "live ended",
        many(OBJECT): "tenants replicas",
    },
)
TargetList = many(shape("Target", {many(str): "targets", dict[str, str]: "labels"}))
HealthReply = shape("HealthReply", {Literal["ok"]: "status"})
VersionReply = shape("VersionReply", {str: "version"})
