"""`/v1/chat/completions`: its request body, the turn it becomes, and the whole reply. Chunks are in `streaming`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import orjson
from pydantic import Field

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.requests import Answer, ChatPrompt, ModelCard
from holdfast.router.protocol.body import MOST_WORDS, decode, validate
from holdfast.router.protocol.kv_hints import KvHints, check_ranges, read_hints
from holdfast.router.protocol.messages import (
    Messages,
    Tools,
    check_tools,
    plain_messages,
    plain_tools,
    unknown_fields,
)
from holdfast.router.protocol.output import (
    Effort,
    ResponseFormat,
    TextFormat,
    json_output,
    template_arguments,
    tool_choice,
)
from holdfast.router.protocol.turn import (
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
from holdfast.router.protocol.usage import chat_logprobs, usage_object

MAX_TOP_LOGPROBS = 20


class ChatBody(GenerationBody):
    """What a client may send; `max_tokens` is the old name of `max_completion_tokens`."""

    messages: Messages
    tools: Tools = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: ResponseFormat = Field(default_factory=lambda: TextFormat(type="text"))
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: Effort | None = None
    thinking_budget: Annotated[int, Field(ge=0)] | None = None  # Qwen's: tokens of a block of thinking
    include_reasoning: bool = True  # vLLM's and OpenRouter's; false: what is thought is left out of the answer
    n: Choices = 1
    prefill_id: Identifier | None = None  # ours: `messages` come after those of this handle
    kv_hints: KvHints | None = None  # vLLM's: what parts of the prompt are worth in the cache


def read_chat(raw: bytes, models: Sequence[ModelCard]) -> Turn:
    """The turn that a request body asks for. Raises InvalidRequestError, ContextLengthError or RefusedError."""
    body = validate(ChatBody, decode(raw))
    return check_length(chat_turn(body, find_model(body.model, models)))


def chat_turn(body: ChatBody, card: ModelCard) -> Turn:
    """The turn `body` asks for. Raises InvalidRequestError or ContextLengthError, naming the field."""
    body = with_defaults(body, card)
    max_tokens, max_field = _max_tokens(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("'top_logprobs' is only allowed with 'logprobs': true", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    check_tools(body.tools)
    choice = tool_choice(body.tool_choice, [tool["function"]["name"] for tool in body.tools])
    prompt = ChatPrompt(
        messages=plain_messages(body.messages, go_on=body.prefill_id is not None),
        tools=plain_tools(body.tools),
        tool_choice=choice.mode,
        parallel_tool_calls=body.parallel_tool_calls,
        template_kwargs=template_arguments(body.chat_template_kwargs, body.reasoning_effort),
        forced_tool=choice.forced,
        allowed_tools=choice.allowed,
        output=json_output(body.response_format),
        thinking_budget=body.thinking_budget,
    )
    turn = build_turn(body, prompt, card, build_sampling(body, card, logprobs, max_tokens, max_field))
    hints = read_hints(body.kv_hints)
    if body.prefill_id is None:
        check_ranges(hints, len(body.messages))
    unknown = [*sorted(unknown_fields(body.messages, body.tools)), *turn.skipped]
    turn = replace(
        turn,
        prefill_id=body.prefill_id or "",
        hints=hints,
        skipped=tuple(unknown[:MOST_WORDS]),
        thoughts=body.include_reasoning,
    )
    return several(turn, [prompt], body.n) if body.n > 1 else turn


def chat_reply(
    reply_id: str,
    created: int,
    model: str,
    answer: Answer,
    others: Sequence[Answer] = (),
    thoughts: bool = True,
) -> bytes:
    """The `chat.completion` object in JSON. `created` is in seconds since the epoch.

    `others` are the choices after the first; the usage of all of them is that of `answer`. Without `thoughts` they are
    left out, and counted.
    """
    return orjson.dumps(
        {
            "id": reply_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [_choice(index, each, thoughts) for index, each in enumerate((answer, *others))],
            "usage": usage_object(answer.usage),
        }
    )


def _choice(index: int, answer: Answer, thoughts: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning and thoughts:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(answer.logprobs) if answer.logprobs else None,
        "finish_reason": answer.reason,
    }


def _max_tokens(body: ChatBody) -> tuple[int | None, str]:
    if body.max_completion_tokens is None:
        return body.max_tokens, "max_tokens"
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequestError("'max_tokens' and 'max_completion_tokens' contradict each other", "max_tokens")
    return body.max_completion_tokens, "max_completion_tokens"
