"""`/v1/sessions`: bodies and replies. An operation of a session becomes a turn, like any other generation request."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

import orjson
from pydantic import ConfigDict, Field

from holdfast.replicas.errors import ContextLengthError, InvalidRequestError, UnknownQuestionError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import (
    Answer,
    ChatPrompt,
    ModelCard,
    Question,
    QuestionState,
    RawPrompt,
    SessionState,
    SessionTurn,
)
from holdfast.router.protocol.body import Body, Query, decode, read, validate
from holdfast.router.protocol.chat import Messages, Tool, Tools, check_tools, plain_messages, plain_tools
from holdfast.router.protocol.completions import Logprobs, Text, Tokens
from holdfast.router.protocol.errors import api_error
from holdfast.router.protocol.replies import usage_object
from holdfast.router.protocol.turn import (
    ModelName,
    QuestionFields,
    ReplyFields,
    Turn,
    build_sampling,
    build_turn,
    check_length,
    check_tokens,
    find_model,
    read_stops,
)

SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
KINDS = ("text", "tokens", "messages")
Operation: TypeAlias = Literal["open", "append", "query"]

SessionId = Annotated[str, Field(pattern=f"^{SESSION_ID.pattern}$")]
MaxTokens = Annotated[int, Field(ge=1)]


class Content(Body):
    """New content of a session: exactly one of `text`, `tokens` and `messages`."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": [kind]} for kind in KINDS]})

    text: Text | None = None
    tokens: Tokens | None = None
    messages: Messages | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class OpenBody(Content):
    """A session may begin empty."""

    model_config = ConfigDict(json_schema_extra={})

    model: ModelName
    id: SessionId | None = None
    tools: Tools = Field(default_factory=list)


class AppendBody(Content):
    pass


class QueryBody(Content, ReplyFields):
    max_tokens: MaxTokens
    keep: bool = False
    logprobs: Logprobs | None = None


class QuestionBody(Content, QuestionFields):
    max_tokens: MaxTokens


class ForkBody(Body):
    id: SessionId | None = None


class SessionsQuery(Query):
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


def read_open(raw: bytes, models: Sequence[ModelCard], default_id: str) -> Turn:
    """The turn that opens a session. Raises as `read_completion`."""
    body = read(OpenBody, raw)
    card = find_model(body.model, models)
    check_tools(body.tools)
    if body.tools and body.messages is None:
        raise InvalidRequestError("'tools' are only allowed with 'messages'", "tools")
    empty = all(getattr(body, kind) is None for kind in KINDS)
    prompt = RawPrompt(()) if empty else content(body, card, body.tools)
    return _checked(Turn(card, prompt, Sampling(max_tokens=0), session=SessionTurn(body.id or default_id, opens=True)))


def read_append(raw: bytes, models: Sequence[ModelCard], session_id: str) -> Turn:
    """The turn that appends to a session. Raises as `read_completion`."""
    prompt = content(read(AppendBody, raw), models[0])
    return _checked(Turn(models[0], prompt, Sampling(max_tokens=0), session=SessionTurn(session_id)))


def read_query(raw: bytes, models: Sequence[ModelCard], session_id: str) -> Turn:
    """The turn that queries a session. Raises as `read_completion`."""
    body = validate(QueryBody, {"model": models[0].name, **decode(raw)})
    card = find_model(body.model, models)
    sampling = build_sampling(body, card, body.max_tokens, logprobs=body.logprobs)
    turn = build_turn(body, content(body, card), card, sampling)
    return _checked(replace(turn, session=SessionTurn(session_id, body.keep)))


READERS: Mapping[Operation, Callable[[bytes, Sequence[ModelCard], str], Turn]] = {
    "open": read_open,
    "append": read_append,
    "query": read_query,
}


def read_question(raw: bytes, models: Sequence[ModelCard], question_id: str) -> Question:
    """A standing question. Raises as `read_completion`."""
    body = validate(QuestionBody, {"model": models[0].name, **decode(raw)})
    card = find_model(body.model, models)
    sampling = build_sampling(body, card, body.max_tokens)
    return Question(question_id, content(body, card), sampling, read_stops(body.stop))


def read_fork(raw: bytes) -> str | None:
    """The id of the new session, if the body has one. The body may be empty."""
    return read(ForkBody, raw or b"{}").id


def content(body: Content, card: ModelCard, tools: Sequence[Tool] = ()) -> ChatPrompt | RawPrompt:
    """The content of `body`. Raises InvalidRequestError unless there is exactly one."""
    if sum(getattr(body, kind) is not None for kind in KINDS) != 1:
        raise InvalidRequestError("Give one of 'text', 'tokens' and 'messages'", "text")
    if body.messages is None and body.chat_template_kwargs:
        raise InvalidRequestError("'chat_template_kwargs' is only allowed with 'messages'", "chat_template_kwargs")
    if body.messages is not None:
        return ChatPrompt(plain_messages(body.messages), plain_tools(tools), template_kwargs=body.chat_template_kwargs)
    if body.tokens is not None:
        check_tokens(body.tokens, card, "tokens")
        return RawPrompt(tuple(body.tokens))
    return RawPrompt(body.text or "")


def _checked(turn: Turn) -> Turn:
    """`turn`. Raises ContextLengthError, naming the field, for content that cannot fit."""
    try:
        return check_length(turn)
    except ContextLengthError as error:
        field = "messages" if isinstance(turn.prompt, ChatPrompt) else next(iter(_raw(turn.prompt)))
        raise ContextLengthError(error.message, field) from None


def _raw(prompt: RawPrompt) -> dict[str, Any]:
    return {"text": prompt.content} if isinstance(prompt.content, str) else {"tokens": list(prompt.content)}


# ---- replies ----


def opened_reply(session_id: str, created: int, model: str, answer: Answer) -> bytes:
    head = {"id": session_id, "object": "session", "created": created, "model": model}
    return orjson.dumps({**head, "tokens": answer.usage.prompt, "usage": usage_object(answer.usage)})


def appended_reply(session_id: str, answer: Answer) -> bytes:
    head = {"id": session_id, "object": "session.append", "tokens": answer.usage.prompt}
    return orjson.dumps({**head, "usage": usage_object(answer.usage)})


def session_object(state: SessionState, model: str) -> dict[str, Any]:
    now = time.time()
    return {
        "id": state.session_id,
        "object": "session",
        "created": int(now - state.age_s),
        "expires": int(now + state.expires_s),
        "model": model,
        "replica": state.replica_id,
        "tokens": state.tokens,
        "appends": state.appends,
        "busy": state.busy,
        "questions": [each.question.question_id for each in state.questions],
    }


def question_reply(state: SessionState, question_id: str) -> bytes:
    """Raises UnknownQuestionError for a question that the session does not have."""
    for each in state.questions:
        if each.question.question_id == question_id:
            return orjson.dumps(question_object(each, state))
    raise UnknownQuestionError(f"the session has no question {question_id!r}", "question_id")


def question_object(question: QuestionState, state: SessionState) -> dict[str, Any]:
    answer, prompt = question.answer, question.question.prompt
    text = {"messages": list(prompt.messages)} if isinstance(prompt, ChatPrompt) else _raw(prompt)
    reply = None
    if answer is not None:
        reply = {"text": answer.text or "", "finish_reason": answer.reason, "usage": usage_object(answer.usage)}
    return {
        "id": question.question.question_id,
        "object": "session.question",
        "session_id": state.session_id,
        **text,
        "max_tokens": question.question.sampling.max_tokens,
        "answer": reply,
        "append": question.seen,
        "appends": state.appends,
        "up_to_date": answer is not None and question.seen == state.appends,
        "age_s": round(question.age_s, 3) if answer is not None else None,
        "error": orjson.loads(api_error(question.error).body)["error"] if question.error else None,
    }
