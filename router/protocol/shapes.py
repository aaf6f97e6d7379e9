"""The shapes of all answers and of the events of streams, as `/openapi.json` shows them.

The code that writes answers does not use these types. Tests and the fuzzer compare answers with them. An object has the
fields that stand here and no others. As in TypeScript, a field with a question mark may be absent, and a quoted type is
a constant.
"""

from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import ConfigDict, Discriminator, with_config
from typing_extensions import TypedDict

CLOSED = ConfigDict(strict=True, extra="forbid")
Object: TypeAlias = dict[str, Any]


def shape(name: str, fields: str, description: str = "") -> Any:
    """The type of an object with these fields, `name: type`, separated by semicolons; `about` is its description."""
    members: dict[str, Any] = {}
    for each in fields.split(";"):
        member, _, kind = (part.strip() for part in each.partition(":"))
        if kind.startswith("'") or kind in ("True", "False"):
            kind = f"Literal[{kind.replace(' |', ',')}]"
        members[member.rstrip("?")] = NotRequired[kind] if member.endswith("?") else kind
    result: Any = TypedDict(name, members)  # type: ignore[misc]
    result.__doc__ = description
    return with_config(CLOSED)(result)


def by_type(*kinds: Any) -> Any:
    """The type of one of these objects, which differ by their field `type`."""
    return Annotated[reduce(or_, kinds), Discriminator("type")]


# ---- errors ----

ErrorBody = shape("ErrorBody", "message: str; type: str; param: str | None; code: str | None")
Error = shape("Error", "error: ErrorBody")
AnthropicErrorBody = shape("AnthropicErrorBody", "type: str; message: str")
AnthropicError = shape("AnthropicError", "type: 'error'; error: AnthropicErrorBody")

# ---- chat completions and completions ----

Reason: TypeAlias = Literal["stop", "length", "tool_calls"]
CachedTokens = shape("CachedTokens", "cached_tokens: int")
ReasoningTokens = shape("ReasoningTokens", "reasoning_tokens: int")
Usage = shape(
    "Usage",
    """prompt_tokens: int; completion_tokens: int; total_tokens: int; prompt_tokens_details: CachedTokens;
    completion_tokens_details?: ReasoningTokens""",
)
TokenScore = shape("TokenScore", "token: str; logprob: float | None; bytes: list[int]")
ScoredToken = shape(
    "ScoredToken", "token: str; logprob: float | None; bytes: list[int]; top_logprobs: list[TokenScore]"
)
ChatScores = shape("ChatScores", "content: list[ScoredToken]; refusal: None")
CalledFunction = shape("CalledFunction", "name: str; arguments: str")
ToolCall = shape("ToolCall", "id: str; type: 'function'; function: CalledFunction")
AssistantReply = shape(
    "AssistantReply",
    """role: 'assistant'; content: str | None; refusal: None; reasoning_content?: str;
    tool_calls?: list[ToolCall]""",
)
ChatChoice = shape(
    "ChatChoice", "index: int; message: AssistantReply; logprobs: ChatScores | None; finish_reason: Reason"
)
ChatCompletion = shape(
    "ChatCompletion",
    "id: str; object: 'chat.completion'; created: int; model: str; choices: list[ChatChoice]; usage: Usage",
)
CompletionScores = shape(
    "CompletionScores",
    """tokens: list[str]; token_logprobs: list[float | None]; top_logprobs: list[dict[str, float] | None];
    text_offset: list[int]""",
)
CompletionChoice = shape(
    "CompletionChoice", "index: int; text: str; logprobs: CompletionScores | None; finish_reason: Reason"
)
Completion = shape(
    "Completion",
    "id: str; object: 'text_completion'; created: int; model: str; choices: list[CompletionChoice]; usage: Usage",
)

CalledDelta = shape("CalledDelta", "name?: str; arguments: str")
ToolCallDelta = shape(
    "ToolCallDelta",
    "index: int; id?: str; type?: 'function'; function: CalledDelta",
    "The first one of a call has its id, type and name.",
)
ChatDelta = shape(
    "ChatDelta",
    """role?: 'assistant'; content?: str; refusal?: None; reasoning_content?: str;
    tool_calls?: list[ToolCallDelta]""",
)
ChatChunkChoice = shape(
    "ChatChunkChoice", "index: int; delta: ChatDelta; logprobs: ChatScores | None; finish_reason: Reason | None"
)
ClosedCall = shape("ClosedCall", "tool_call_closed: int", "The call of this index is complete.")
StageTimes = shape(
    "StageTimes",
    "queue_ms?: float; prefill_ms?: float; decode_ms?: float; drafted?: int; accepted?: int",
    "Milliseconds, and how many tokens were drafted and accepted, if any were.",
)
END = "usage?: Usage | None; timing?: StageTimes"
ABOUT_END = "`stream_options` asks for `usage`: null except in the last chunk, which has no choices, and has `timing`."
ChatChunk = shape(
    "ChatChunk",
    f"""id: str; object: 'chat.completion.chunk'; created: int; model: str; choices: list[ChatChunkChoice]; {END};
    holdfast?: ClosedCall""",
    ABOUT_END,
)
CompletionChunkChoice = shape(
    "CompletionChunkChoice",
    "index: int; text: str; logprobs: CompletionScores | None; finish_reason: Reason | None",
)
CompletionChunk = shape(
    "CompletionChunk",
    f"id: str; object: 'text_completion'; created: int; model: str; choices: list[CompletionChunkChoice]; {END}",
    ABOUT_END,
)
ChatEvent = ChatChunk | Error
CompletionEvent = CompletionChunk | Error

# ---- messages ----

TextBlock = shape("TextBlock", "type: 'text'; text: str")
ThinkingBlock = shape("ThinkingBlock", "type: 'thinking'; thinking: str; signature: str")
ToolUseBlock = shape("ToolUseBlock", "type: 'tool_use'; id: str; name: str; input: Object")
Block = TextBlock | ThinkingBlock | ToolUseBlock
ThinkingTokens = shape("ThinkingTokens", "thinking_tokens: int")
MessageUsage = shape(
    "MessageUsage",
    """input_tokens: int; cache_creation_input_tokens: int; cache_read_input_tokens: int; output_tokens: int;
    output_tokens_details: ThinkingTokens""",
)
StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
MESSAGE = "id: str; type: 'message'; role: 'assistant'; model: str; content: list[Block]; usage: MessageUsage"
MessageReply = shape("MessageReply", f"{MESSAGE}; stop_reason: StopReason; stop_sequence: str | None")
StartedMessage = shape("StartedMessage", f"{MESSAGE}; stop_reason: None; stop_sequence: None", "It has no content yet.")
InputTokens = shape("InputTokens", "input_tokens: int")
MessageEnding = shape("MessageEnding", "stop_reason: StopReason; stop_sequence: str | None")
BlockChange = by_type(
    shape("TextDelta", "type: 'text_delta'; text: str"),
    shape("ThinkingDelta", "type: 'thinking_delta'; thinking: str"),
    shape("SignatureDelta", "type: 'signature_delta'; signature: str"),
    shape("InputDelta", "type: 'input_json_delta'; partial_json: str"),
)
MessageEvent = by_type(
    shape("MessageStart", "type: 'message_start'; message: StartedMessage"),
    shape("Ping", "type: 'ping'"),
    shape("BlockStart", "type: 'content_block_start'; index: int; content_block: Block"),
    shape("BlockDelta", "type: 'content_block_delta'; index: int; delta: BlockChange"),
    shape("BlockStop", "type: 'content_block_stop'; index: int"),
    shape("MessageDelta", "type: 'message_delta'; delta: MessageEnding; usage: MessageUsage"),
    shape("MessageStop", "type: 'message_stop'"),
    AnthropicError,
)

# ---- responses ----

OutputText = shape("OutputText", "type: 'output_text'; annotations: list[Any]; logprobs: list[ScoredToken]; text: str")
ReasoningText = shape("ReasoningText", "type: 'reasoning_text'; text: str")
CALL = "id: str; status: str; call_id: str; name: str; namespace?: str"
OutputItem = by_type(
    shape("OutputMessage", "id: str; type: 'message'; status: str; role: 'assistant'; content: list[OutputText]"),
    shape(
        "OutputReasoning",
        """id: str; type: 'reasoning'; summary: list[Any]; content: list[ReasoningText];
        encrypted_content?: str""",
    ),
    shape("OutputCall", f"type: 'function_call'; {CALL}; arguments: str"),
    shape("OutputCustomCall", f"type: 'custom_tool_call'; {CALL}; input: str"),
    shape("OutputCompaction", "id: str; type: 'compaction'; encrypted_content: str"),
)
InputDetails = shape("InputDetails", "cached_tokens: int; cache_write_tokens: int")
ResponseUsage = shape(
    "ResponseUsage",
    """input_tokens: int; input_tokens_details: InputDetails; output_tokens: int;
    output_tokens_details: ReasoningTokens; total_tokens: int""",
)
ResponseError = shape("ResponseError", "code: str; message: str")
IncompleteReason = shape("IncompleteReason", "reason: str")
ResponseReply = shape(
    "ResponseReply",
    """id: str; object: 'response'; created_at: int; completed_at: int | None;
    status: 'in_progress' | 'completed' | 'incomplete' | 'failed'; background: False; error: ResponseError | None;
    incomplete_details: IncompleteReason | None; instructions: str | None; max_output_tokens: int | None;
    max_tool_calls: int | None; model: str; output: list[OutputItem]; parallel_tool_calls: bool;
    previous_response_id: str | None; prompt_cache_key: str | None; reasoning: Object; safety_identifier: str | None;
    service_tier: 'default' | 'flex'; store: bool; temperature: float; text: Object; tool_choice: str | Object;
    tools: list[Object]; top_logprobs: int; top_p: float; presence_penalty: float; frequency_penalty: float;
    truncation: 'auto' | 'disabled'; usage: ResponseUsage | None; user: str | None; metadata: dict[str, str]""",
    "`in_progress` only in the first events of a stream.",
)
CompactionReply = shape(
    "CompactionReply",
    "id: str; object: 'response.compaction'; created_at: int; output: list[Object]; usage: ResponseUsage",
)
CountedInput = shape("CountedInput", "object: 'response.input_tokens'; input_tokens: int")
ItemPage = shape(
    "ItemPage", "object: 'list'; data: list[Object]; first_id: str | None; last_id: str | None; has_more: bool"
)
ITEM = "sequence_number: int; item_id: str; output_index: int"
PART = f"{ITEM}; content_index: int"
ResponseEvent = by_type(
    shape(
        "ResponseState",
        """type: 'response.created' | 'response.in_progress' | 'response.completed' | 'response.incomplete' |
        'response.failed'; sequence_number: int; response: ResponseReply""",
        "The first two events and the last one have the response as it is then.",
    ),
    shape(
        "ItemState",
        """type: 'response.output_item.added' | 'response.output_item.done'; sequence_number: int;
        output_index: int; item: OutputItem""",
    ),
    shape(
        "PartState",
        f"""type: 'response.content_part.added' | 'response.content_part.done'; {PART};
        part: OutputText | ReasoningText""",
    ),
    shape("OutputTextDelta", f"type: 'response.output_text.delta'; {PART}; delta: str; logprobs: list[ScoredToken]"),
    shape("OutputTextDone", f"type: 'response.output_text.done'; {PART}; text: str; logprobs: list[ScoredToken]"),
    shape("ReasoningTextDelta", f"type: 'response.reasoning_text.delta'; {PART}; delta: str"),
    shape("ReasoningTextDone", f"type: 'response.reasoning_text.done'; {PART}; text: str"),
    shape("ArgumentsDelta", f"type: 'response.function_call_arguments.delta'; {ITEM}; delta: str"),
    shape("ArgumentsDone", f"type: 'response.function_call_arguments.done'; {ITEM}; arguments: str; name: str"),
    shape("CustomInputDelta", f"type: 'response.custom_tool_call_input.delta'; {ITEM}; delta: str"),
    shape("CustomInputDone", f"type: 'response.custom_tool_call_input.done'; {ITEM}; input: str"),
)

# ---- prefills, sessions, programs ----

Deleted = shape("Deleted", "id: str; object: str; deleted: True", "`object` names the kind of what was deleted.")
PrefillReply = shape(
    "PrefillReply",
    """id: str; object: 'prefill'; created: int; expires_at: int; model: str; program_id: str | None; tokens: int;
    cached_tokens: int; complete: bool""",
)
HeartbeatReply = shape("HeartbeatReply", "id: str; object: 'program.heartbeat'; within_s: float")
SessionReply = shape(
    "SessionReply",
    """id: str; object: 'session'; created: int; expires: int; model: str; replica: str; tokens: int; appends: int;
    busy: bool; questions: list[str]""",
)
SessionList = shape("SessionList", "object: 'list'; data: list[SessionReply]; has_more: bool")
SessionOpened = shape(
    "SessionOpened", "id: str; object: 'session'; created: int; model: str; tokens: int; usage: Usage"
)
SessionAppended = shape("SessionAppended", "id: str; object: 'session.append'; tokens: int; usage: Usage")
QuestionAnswer = shape("QuestionAnswer", "text: str; finish_reason: Reason; usage: Usage")
QuestionReply = shape(
    "QuestionReply",
    """id: str; object: 'session.question'; session_id: str; messages?: list[Object]; text?: str; tokens?: list[int];
    max_tokens: int; answer: QuestionAnswer | None; append: int; appends: int; up_to_date: bool;
    age_s: float | None; error: ErrorBody | None""",
    "The question is one of `messages`, `text` and `tokens`.",
)
QuestionList = shape("QuestionList", "object: 'list'; data: list[QuestionReply]")
LATENCY = """count: int; mean_s: float; std_s: float; p50_s: float | None; p90_s: float | None; p99_s: float | None"""
Latency = shape("Latency", LATENCY)
ToolsLatency = shape("ToolsLatency", f"tools: list[str]; {LATENCY}")
LatencyList = shape("LatencyList", "object: 'list'; data: list[ToolsLatency]; overall: Latency")

# ---- models and tokens ----

TokenizeReply = shape("TokenizeReply", "count: int; max_model_len: int; tokens: list[int]; token_strs: None")
DetokenizeReply = shape("DetokenizeReply", "prompt: str")
ModelReply = shape("ModelReply", "id: str; object: 'model'; created: int; owned_by: str; max_model_len: int")
ModelList = shape("ModelList", "object: 'list'; data: list[ModelReply]")
AnthropicModel = shape(
    "AnthropicModel",
    "type: 'model'; id: str; display_name: str; created_at: str; max_input_tokens: int; max_tokens: int",
)
AnthropicModelList = shape(
    "AnthropicModelList", "data: list[AnthropicModel]; has_more: False; first_id: str | None; last_id: str | None"
)
AnyModelList = ModelList | AnthropicModelList
AnyModel = ModelReply | AnthropicModel

# ---- tenants and usage ----

Limits: TypeAlias = dict[str, float | None]
Source: TypeAlias = Literal["configuration", "redis"]
ScopeName: TypeAlias = Literal["infer", "usage", "operate"]
ClassName: TypeAlias = Literal["interactive", "batch"]
UsagePeriod = shape(
    "UsagePeriod",
    """period: str; requests: int; input: int; cached: int; output: int; drawn: int; drafted: int; units: float;
    outcomes: dict[str, int]""",
)
UsageSums = shape("UsageSums", "tenant: str; limits: Limits; periods: list[UsagePeriod]")
UsageOfOne = shape("UsageOfOne", "tenant: str; periods: list[UsagePeriod]")
UsageOfAll = shape("UsageOfAll", "tenants: list[UsageOfOne]")
KeyRow = shape(
    "KeyRow", "id: str; source: Source; scopes: list[ScopeName]; expires: float | None; last_used: float | None"
)
TenantCacheRow = shape("TenantCacheRow", "enabled: bool; ttl_s: float | None; bytes: int | None")
TenantRow = shape(
    "TenantRow",
    """name: str; source: Source; weight: float; limits: Limits; cache: TenantCacheRow; operator: bool;
    priority: ClassName; priorities: list[ClassName]; prompt_seed: bool; keys?: list[KeyRow]""",
)
TenantList = shape("TenantList", "tenants: list[TenantRow]")
KeyMade = shape("KeyMade", "name: str; key: str; key_id: str; scopes: list[ScopeName]; expires: float | None")

# ---- the server ----

StatusReply = shape(
    "StatusReply",
    """version: str; router: str; time: float; up_s: float; store: 'ok' | 'degraded'; replicas: list[Object];
    tenants: list[Object]; at_tools: int; programs: list[Object]""",
)
LiveReply = shape(
    "LiveReply",
    """router: str; version: str; time: float; started: float; tenant: str; operator: bool; number: int;
    left_out: bool; fields: dict[str, list[str]]; live: list[list[Any]]; ended: list[list[Any]];
    tenants: list[Object]; looked_s: float; replicas: list[Object]""",
)
Target = shape("Target", "targets: list[str]; labels: dict[str, str]")
TargetList = list[Target]  # type: ignore[valid-type]
HealthReply = shape("HealthReply", "status: 'ok'")
VersionReply = shape("VersionReply", "version: str")
