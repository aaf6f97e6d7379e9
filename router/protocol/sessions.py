"""`/v1/sessions`: bodies and replies. What is asked of a session becomes a turn, like any other generation request."""

import re
import time
from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from pydantic import Field

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
from holdfast.router.protocol.body import Body, decode, validate
from holdfast.router.protocol.completions import MAX_LOGPROBS
from holdfast.router.protocol.errors import api_error
from holdfast.router.protocol.messages import Messages, Tool, Tools, check_tools, plain_messages, plain_tools
from holdfast.router.protocol.turn import (
    ClaimedIds,
    GenerationBody,
    TokenId,
    Turn,
    build_sampling,
    build_turn,
    check_length,
    check_tokens,
    find_model,
)
from holdfast.router.protocol.usage import usage_object

SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
NOBODY = ClaimedIds(None, None, None)
NO_PROGRAM = ("program_id", "previous_response_id", "prompt_cache_key", "program_end")  # the session is the program
NO_SALT = ("cache_salt",)  # it has its history
NO_STREAM = ("stream", "stream_options", "fresh_draw")  # nobody waits for the answer
KINDS = ("text", "tokens", "messages")

SessionId = Annotated[str, Field(pattern=f"^{SESSION_ID.pattern}$")]


class Content(Body):
    """What comes next in a session: one of these."""

    text: Annotated[str, Field(min_length=1)] | None = None
    tokens: Annotated[list[TokenId], Field(min_length=1)] | None = None
    messages: Messages | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class OpenBody(Content):
    """What a session begins with may be left out."""

    model: str
    id: SessionId | None = None
    tools: Tools = Field(default_factory=list)


class AppendBody(Content):
    pass


class QuestionBody(Content, GenerationBody):
    """`max_tokens` has to be given; the fields that name a program are refused."""


class QueryBody(QuestionBody):
    keep: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class ForkBody(Body):
    id: SessionId | None = None


def read_open(raw: bytes, models: Sequence[ModelCard], made: str) -> Turn:
    """The turn that opens a session, called `made` where it has no name. Raises as `read_completion`."""
    body = validate(OpenBody, decode(raw))
    card = find_model(body.model, models)
    check_tools(body.tools)
    if body.tools and body.messages is None:
        raise InvalidRequestError("'tools' are only allowed with 'messages'", "tools")
    given = any(getattr(body, kind) is not None for kind in KINDS)
    prompt = content(body, card, body.tools) if given else RawPrompt(())
    return _fed(card, prompt, SessionTurn(body.id or made, opens=True))


def read_append(raw: bytes, models: Sequence[ModelCard], session_id: str) -> Turn:
    """The turn that appends to a session. Raises as `read_completion`."""
    card = models[0]
    return _fed(card, content(validate(AppendBody, decode(raw)), card), SessionTurn(session_id))


def read_query(raw: bytes, models: Sequence[ModelCard], session_id: str) -> Turn:
    """The turn that asks a session. Raises as `read_completion`."""
    body = _asked(QueryBody, raw, models, (*NO_PROGRAM, *NO_SALT))
    card = find_model(body.model, models)
    sampling = build_sampling(body, card, body.logprobs, body.max_tokens, "max_tokens")
    turn = build_turn(body, content(body, card), card, sampling)
    return _of_session(turn, SessionTurn(session_id, body.keep))


def read_question(raw: bytes, models: Sequence[ModelCard], question_id: str) -> Question:
    """The question that is to stand with a session. Raises as `read_completion`."""
    body = _asked(QuestionBody, raw, models, (*NO_PROGRAM, *NO_SALT, *NO_STREAM))
    card = find_model(body.model, models)
    sampling = build_sampling(body, card, None, body.max_tokens, "max_tokens")
    turn = build_turn(body, content(body, card), card, sampling)
    return Question(question_id, turn.prompt, turn.sampling, turn.stop)


def read_fork(raw: bytes) -> str | None:
    """How the new session is to be called, if it says so; an empty body says nothing."""
    return validate(ForkBody, decode(raw or b"{}")).id


def content(body: Content, card: ModelCard, tools: Sequence[Tool] = ()) -> ChatPrompt | RawPrompt:
    """What `body` has of text, tokens and messages. Raises InvalidRequestError unless that is one of them."""
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


# ---- replies ----


def opened_reply(session_id: str, created: int, model: str, answer: Answer) -> bytes:
    return orjson.dumps(
        {
            "id": session_id,
            "object": "session",
            "created": created,
            "model": model,
            "tokens": answer.usage.prompt,
            "usage": usage_object(answer.usage),
        }
    )


def appended_reply(session_id: str, answer: Answer) -> bytes:
    told = {"id": session_id, "object": "session.append", "tokens": answer.usage.prompt}
    return orjson.dumps({**told, "usage": usage_object(answer.usage)})


def session_reply(state: SessionState, model: str) -> bytes:
    return orjson.dumps(_session(state, model))


def sessions_reply(states: Sequence[SessionState], model: str, limit: int) -> bytes:
    """The first `limit` of them."""
    data = [_session(state, model) for state in states[:limit]]
    return orjson.dumps({"object": "list", "data": data, "has_more": len(states) > limit})


def closed_reply(session_id: str) -> bytes:
    return orjson.dumps({"id": session_id, "object": "session.deleted", "deleted": True})


def question_reply(state: SessionState, question_id: str) -> bytes:
    """Raises UnknownQuestionError for a question that the session does not have."""
    for each in state.questions:
        if each.question.question_id == question_id:
            return orjson.dumps(_question(each, state))
    raise UnknownQuestionError(f"the session has no question {question_id!r}", "question_id")


def questions_reply(state: SessionState) -> bytes:
    return orjson.dumps({"object": "list", "data": [_question(each, state) for each in state.questions]})


def question_removed_reply(question_id: str) -> bytes:
    return orjson.dumps({"id": question_id, "object": "session.question.deleted", "deleted": True})


def _session(state: SessionState, model: str) -> dict[str, Any]:
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


def _question(found: QuestionState, state: SessionState) -> dict[str, Any]:
    answer, prompt = found.answer, found.question.prompt
    asked = {"messages": list(prompt.messages)} if isinstance(prompt, ChatPrompt) else _raw(prompt)
    told = None
    if answer is not None:
        told = {"text": answer.text or "", "finish_reason": answer.reason, "usage": usage_object(answer.usage)}
    return {
        "id": found.question.question_id,
        "object": "session.question",
        "session_id": state.session_id,
        **asked,
        "max_tokens": found.question.sampling.max_tokens,
        "answer": told,
        "append": found.seen,
        "appends": state.appends,
        "up_to_date": answer is not None and found.seen == state.appends,
        "age_s": round(found.age_s, 3) if answer is not None else None,
        "error": orjson.loads(api_error(found.error).body)["error"] if found.error else None,
    }


def _raw(prompt: RawPrompt) -> dict[str, Any]:
    return {"text": prompt.content} if isinstance(prompt.content, str) else {"tokens": list(prompt.content)}


# ---- parts ----


def _fed(card: ModelCard, prompt: ChatPrompt | RawPrompt, session: SessionTurn) -> Turn:
    return _of_session(Turn(card, prompt, Sampling(max_tokens=0), (), False, False, NOBODY), session)


def _asked(model: type[QuestionBody], raw: bytes, models: Sequence[ModelCard], refused: Sequence[str]) -> Any:
    body = validate(model, {"model": models[0].name, **decode(raw)})
    for name in refused:
        if name in body.model_fields_set:
            raise InvalidRequestError(f"'{name}' is not for sessions", name)
    if body.max_tokens is None:
        raise InvalidRequestError("Missing required parameter: 'max_tokens'", "max_tokens")
    return body


def _of_session(turn: Turn, session: SessionTurn) -> Turn:
    try:
        check_length(turn)
    except ContextLengthError as error:
        field = "messages" if isinstance(turn.prompt, ChatPrompt) else next(iter(_raw(turn.prompt)))
        raise ContextLengthError(error.message, field) from None
    return Turn(
        turn.model,
        turn.prompt,
        turn.sampling,
        turn.stop,
        turn.stream,
        turn.include_usage,
        turn.ids,
        session=session,
        priority=turn.priority,
    )
