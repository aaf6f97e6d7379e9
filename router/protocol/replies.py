"""The shapes of all answers, as `/openapi.json` tells them. Nothing is made of these: tests hold the answers to them.

What they name is always there, but for `NotRequired`; nothing else is.
"""

from typing import Any, Literal, NotRequired, TypeAlias

from pydantic import with_config
from typing_extensions import TypedDict

from holdfast.router.protocol.messages import CLOSED

# ---- errors ----


@with_config(CLOSED)
class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


@with_config(CLOSED)
class Error(TypedDict):
    error: ErrorBody


@with_config(CLOSED)
class AnthropicErrorBody(TypedDict):
    type: str
    message: str


@with_config(CLOSED)
class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorBody


# ---- chat completions and completions ----


@with_config(CLOSED)
class CachedTokens(TypedDict):
    cached_tokens: int


@with_config(CLOSED)
class ReasoningTokens(TypedDict):
    reasoning_tokens: int


@with_config(CLOSED)
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[ReasoningTokens]


@with_config(CLOSED)
class TokenScore(TypedDict):
    token: str
    logprob: float | None
    bytes: list[int]


@with_config(CLOSED)
class ScoredToken(TypedDict):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[TokenScore]


@with_config(CLOSED)
class ChatScores(TypedDict):
    content: list[ScoredToken]
    refusal: None


@with_config(CLOSED)
class CalledFunction(TypedDict):
    name: str
    arguments: str


@with_config(CLOSED)
class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


@with_config(CLOSED)
class AssistantReply(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


Reason: TypeAlias = Literal["stop", "length", "tool_calls"]


@with_config(CLOSED)
class ChatChoice(TypedDict):
    index: int
    message: AssistantReply
    logprobs: ChatScores | None
    finish_reason: Reason


@with_config(CLOSED)
class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


@with_config(CLOSED)
class CompletionScores(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@with_config(CLOSED)
class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionScores | None
    finish_reason: Reason


@with_config(CLOSED)
class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


# ---- messages ----


@with_config(CLOSED)
class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


@with_config(CLOSED)
class ThinkingBlock(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


@with_config(CLOSED)
class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


@with_config(CLOSED)
class ThinkingTokens(TypedDict):
    thinking_tokens: int


@with_config(CLOSED)
class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


@with_config(CLOSED)
class MessageReply(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


@with_config(CLOSED)
class InputTokens(TypedDict):
    input_tokens: int


# ---- responses ----


@with_config(CLOSED)
class OutputText(TypedDict):
    type: Literal["output_text"]
    annotations: list[Any]
    logprobs: list[ScoredToken]
    text: str


@with_config(CLOSED)
class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: str
    role: Literal["assistant"]
    content: list[OutputText]


@with_config(CLOSED)
class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


@with_config(CLOSED)
class OutputReasoning(TypedDict):
    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: NotRequired[str]


@with_config(CLOSED)
class OutputCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: str
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


@with_config(CLOSED)
class OutputCustomCall(TypedDict):
    id: str
    type: Literal["custom_tool_call"]
    status: str
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


@with_config(CLOSED)
class OutputCompaction(TypedDict):
    id: str
    type: Literal["compaction"]
    encrypted_content: str


@with_config(CLOSED)
class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


@with_config(CLOSED)
class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


@with_config(CLOSED)
class Why(TypedDict):
    reason: str


@with_config(CLOSED)
class ResponseError(TypedDict):
    code: str
    message: str


@with_config(CLOSED)
class ResponseReply(TypedDict):
    """It is `in_progress` only in the first events of a stream."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: Why | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall | OutputCustomCall | OutputCompaction]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default", "flex"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


@with_config(CLOSED)
class CompactionReply(TypedDict):
    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage


@with_config(CLOSED)
class CountedInput(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


@with_config(CLOSED)
class ItemPage(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


# ---- prefills, sessions, programs ----


@with_config(CLOSED)
class Deleted(TypedDict):
    """`object` says of what kind it was."""

    id: str
    object: str
    deleted: Literal[True]


@with_config(CLOSED)
class PrefillReply(TypedDict):
    id: str
    object: Literal["prefill"]
    created: int
    expires_at: int
    model: str
    program_id: str | None
    tokens: int
    cached_tokens: int
    complete: bool


@with_config(CLOSED)
class HeartbeatReply(TypedDict):
    id: str
    object: Literal["program.heartbeat"]
    within_s: float


@with_config(CLOSED)
class SessionReply(TypedDict):
    id: str
    object: Literal["session"]
    created: int
    expires: int
    model: str
    replica: str
    tokens: int
    appends: int
    busy: bool
    questions: list[str]


@with_config(CLOSED)
class SessionList(TypedDict):
    object: Literal["list"]
    data: list[SessionReply]
    has_more: bool


@with_config(CLOSED)
class SessionOpened(TypedDict):
    id: str
    object: Literal["session"]
    created: int
    model: str
    tokens: int
    usage: Usage


@with_config(CLOSED)
class SessionAppended(TypedDict):
    id: str
    object: Literal["session.append"]
    tokens: int
    usage: Usage


@with_config(CLOSED)
class QuestionAnswer(TypedDict):
    text: str
    finish_reason: Reason
    usage: Usage


@with_config(CLOSED)
class QuestionReply(TypedDict):
    """One of `messages`, `text` and `tokens` is what was asked."""

    id: str
    object: Literal["session.question"]
    session_id: str
    messages: NotRequired[list[dict[str, Any]]]
    text: NotRequired[str]
    tokens: NotRequired[list[int]]
    max_tokens: int
    answer: QuestionAnswer | None
    append: int
    appends: int
    up_to_date: bool
    age_s: float | None
    error: ErrorBody | None


@with_config(CLOSED)
class QuestionList(TypedDict):
    object: Literal["list"]
    data: list[QuestionReply]


@with_config(CLOSED)
class Latency(TypedDict):
    count: int
    mean_s: float
    std_s: float
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


@with_config(CLOSED)
class ToolsLatency(Latency):
    tools: list[str]


@with_config(CLOSED)
class LatencyList(TypedDict):
    object: Literal["list"]
    data: list[ToolsLatency]
    overall: Latency


# ---- the rest ----


@with_config(CLOSED)
class TokenizeReply(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None


@with_config(CLOSED)
class DetokenizeReply(TypedDict):
    prompt: str


@with_config(CLOSED)
class ModelReply(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


@with_config(CLOSED)
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelReply]


@with_config(CLOSED)
class AnthropicModel(TypedDict):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


@with_config(CLOSED)
class AnthropicModelList(TypedDict):
    data: list[AnthropicModel]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


AnyModelList: TypeAlias = ModelList | AnthropicModelList
AnyModel: TypeAlias = ModelReply | AnthropicModel


# ---- tenants and usage ----


@with_config(CLOSED)
class UsagePeriod(TypedDict):
    period: str
    requests: int
    input: int
    cached: int
    output: int
    drawn: int
    drafted: int
    units: float
    outcomes: dict[str, int]


@with_config(CLOSED)
class UsageSums(TypedDict):
    tenant: str
    limits: dict[str, float | None]
    periods: list[UsagePeriod]


@with_config(CLOSED)
class UsageOfOne(TypedDict):
    tenant: str
    periods: list[UsagePeriod]


@with_config(CLOSED)
class UsageOfAll(TypedDict):
    tenants: list[UsageOfOne]


@with_config(CLOSED)
class KeyRow(TypedDict):
    id: str
    source: Literal["configuration", "redis"]
    scopes: list[Literal["infer", "usage", "operate"]]
    expires: float | None
    last_used: float | None


@with_config(CLOSED)
class TenantCacheRow(TypedDict):
    enabled: bool
    ttl_s: float | None
    bytes: int | None


@with_config(CLOSED)
class TenantRow(TypedDict):
    name: str
    source: Literal["configuration", "redis"]
    weight: float
    limits: dict[str, float | None]
    cache: TenantCacheRow
    operator: bool
    priority: Literal["interactive", "batch"]
    priorities: list[Literal["interactive", "batch"]]
    prompt_seed: bool
    keys: NotRequired[list[KeyRow]]


@with_config(CLOSED)
class TenantList(TypedDict):
    tenants: list[TenantRow]


@with_config(CLOSED)
class KeyMade(TypedDict):
    name: str
    key: str
    key_id: str
    scopes: list[Literal["infer", "usage", "operate"]]
    expires: float | None


@with_config(CLOSED)
class StatusReply(TypedDict):
    version: str
    router: str
    time: float
    up_s: float
    store: Literal["ok", "degraded"]
    replicas: list[dict[str, Any]]
    tenants: list[dict[str, Any]]
    at_tools: int
    programs: list[dict[str, Any]]


@with_config(CLOSED)
class LiveReply(TypedDict):
    router: str
    version: str
    time: float
    started: float
    tenant: str
    operator: bool
    number: int
    left_out: bool
    fields: dict[str, list[str]]
    live: list[list[Any]]
    ended: list[list[Any]]
    tenants: list[dict[str, Any]]
    looked_s: float
    replicas: list[dict[str, Any]]


@with_config(CLOSED)
class Target(TypedDict):
    targets: list[str]
    labels: dict[str, str]


TargetList: TypeAlias = list[Target]


@with_config(CLOSED)
class HealthReply(TypedDict):
    status: Literal["ok"]


@with_config(CLOSED)
class VersionReply(TypedDict):
    version: str
