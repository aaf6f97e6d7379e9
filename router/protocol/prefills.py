"""`/v1/prefills`: bodies and replies. A prefill is the beginning of a prompt, computed before its end is known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import orjson
from pydantic import Field

from holdfast.replicas.errors import InvalidRequestError
from holdfast.replicas.kv.tags import Hint
from holdfast.replicas.requests import ChatPrompt, ModelCard
from holdfast.router.protocol.body import Body, read
from holdfast.router.protocol.chat import Messages, Tools, check_results, check_tools, plain_messages, plain_tools
from holdfast.router.protocol.kv_hints import KvHints, check_ranges, read_hints
from holdfast.router.protocol.turn import Identifier, ModelName, Name, Turn, find_model


class PrefillBody(Body):
    """`messages` may end in tool calls whose results are not known yet, or in some of their results."""

    model: ModelName
    messages: Messages
    tools: Tools = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    program_id: Identifier | None = None
    cache_salt: Name | None = None
    keep_s: Annotated[float, Field(gt=0)] | None = None
    kv_hints: KvHints | None = None


class ExtendBody(Body):
    """`messages` follow those of the prefill. `kv_hints` replace the prefill's, and name messages of both."""

    messages: Messages
    kv_hints: KvHints | None = None
    keep_s: Annotated[float, Field(gt=0)] | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """A stored prefill. `tokens` of the prompt cannot change, whatever follows; `cached` of them were in the cache.

    Not `complete`: time or cells ran out before all of them were computed. Times are in seconds since the epoch.
    `version` is the version of the stored record, "" for a new one.
    """

    id: str
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    template_kwargs: dict[str, Any]
    program: str
    keep_s: float
    created: int
    expires: int = 0
    replica: str = ""
    tokens: int = 0
    cached: int = 0
    complete: bool = False
    cache_salt: str = ""
    kv_hints: dict[str, Any] | None = None  # as the client sent them
    version: str = ""

    @property
    def prompt(self) -> ChatPrompt:
        return ChatPrompt(self.messages, tuple(self.tools), template_kwargs=self.template_kwargs)

    @property
    def hints(self) -> tuple[Hint, ...]:
        """Raises InvalidRequestError, naming the field."""
        hints = read_hints(None if self.kv_hints is None else KvHints(**self.kv_hints))
        check_ranges(hints, len(self.messages))
        return hints


def read_prefill(raw: bytes, models: Sequence[ModelCard]) -> tuple[PrefillBody, ChatPrompt]:
    """Raises InvalidRequestError or RefusedError."""
    body = read(PrefillBody, raw)
    find_model(body.model, models)
    check_tools(body.tools)
    messages, tools = plain_messages(body.messages), plain_tools(body.tools)
    return body, ChatPrompt(messages, tools, template_kwargs=body.chat_template_kwargs)


def read_extension(raw: bytes) -> tuple[ExtendBody, list[dict[str, Any]]]:
    """The body, and its messages for `check_extension`. Raises InvalidRequestError."""
    body = read(ExtendBody, raw)
    return body, plain_messages(body.messages, go_on=True)


def plain_hints(hints: KvHints | None) -> dict[str, Any] | None:
    return None if hints is None else hints.model_dump()


def check_extension(prefill: Prefill, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidRequestError for a result that answers no call, or a call whose result the prefill has."""
    check_results(prefill.messages, messages)
    answered: set[str] = set()  # calls of the latest assistant message: an id may come again in a later turn
    for earlier in prefill.messages:
        if earlier["role"] == "tool":
            answered.add(earlier["tool_call_id"])
        elif earlier.get("tool_calls"):
            answered.clear()
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            return
        if message["role"] == "tool" and message["tool_call_id"] in answered:
            field = f"messages.{index}.tool_call_id"
            raise InvalidRequestError(f"'{field}': the prefill already has the result of this call", field)


def continued(turn: Turn, prefill: Prefill) -> Turn:
    """`turn` with the messages of its prefill before its own. Raises InvalidRequestError."""
    prompt = turn.prompt
    if not isinstance(prompt, ChatPrompt):
        raise InvalidRequestError("'prefill_id' is only for chat completions", "prefill_id")
    check_extension(prefill, prompt.messages)
    if turn.model.name != prefill.model:
        raise InvalidRequestError(f"'model' must be the prefill's, {prefill.model!r}", "model")
    if turn.cache_salt and turn.cache_salt != prefill.cache_salt:
        raise InvalidRequestError("'cache_salt' must be the prefill's", "cache_salt")
    messages = [*prefill.messages, *prompt.messages]
    check_ranges(turn.hints, len(messages))
    return replace(
        turn,
        cache_salt=prefill.cache_salt,
        prompt=replace(
            prompt,
            messages=messages,
            tools=prompt.tools or tuple(prefill.tools),
            template_kwargs=prompt.template_kwargs or prefill.template_kwargs,
        ),
    )


def prefill_reply(prefill: Prefill, program_id: str) -> bytes:
    return orjson.dumps(
        {
            "id": prefill.id,
            "object": "prefill",
            "created": prefill.created,
            "expires_at": prefill.expires,
            "model": prefill.model,
            "program_id": program_id or None,
            "tokens": prefill.tokens,
            "cached_tokens": prefill.cached,
            "complete": prefill.complete,
        }
    )
