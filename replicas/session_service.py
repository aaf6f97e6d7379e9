"""Sessions of one replica as an asyncio service: data comes in as it arrives, questions cost only their own tokens.

Text is tokenized piece by piece, as it is given: nothing is put around it, and its special tokens count. What a session
is to begin with, a chat or whatever the model expects in front, is given to `open` as a prompt.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from holdfast.replicas.bridge import Bridge
from holdfast.replicas.errors import InvalidRequestError, UnavailableError, error_of
from holdfast.replicas.events import (
    CloseSession,
    Event,
    Failed,
    Finished,
    ForkSession,
    OpenSession,
    Rejected,
    Request,
    Sampling,
    Submit,
    Usage,
)
from holdfast.replicas.requests import ChatPrompt, GenerateRequest, Piece, RawPrompt
from holdfast.replicas.text.conversation import TextSide
from holdfast.replicas.tokens import TokenIds


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A request is a query of this session; `keep`: question and answer become part of its history."""

    session_id: str
    keep: bool = True


NO_SESSION = SessionTurn("")


class Stream(Protocol):
    """`Service.stream`."""

    def __call__(self, request: GenerateRequest, turn: SessionTurn) -> AsyncGenerator[tuple[Piece, ...], None]: ...


class SessionService:
    """Open, feed, ask, fork and close sessions, by id within a scope (a tenant).

    Every call raises a HoldfastError: InvalidRequestError naming `session_id` for a session that is not open,
    ContextLengthError where its history would become too long, OverloadedError where sessions are too many, or their
    cells with those that operations in flight may come to keep. What raises leaves the history as it was.
    """

    def __init__(self, bridge: Bridge, text: TextSide, stream: Stream) -> None:
        self._bridge = bridge
        self._text = text
        self._stream = stream
        self._numbers = count()

    async def open(self, session_id: str, prompt: ChatPrompt | RawPrompt | None = None, *, scope: str = "") -> Usage:
        """Begin a session, with a prompt to start from; returns once that is computed."""
        tokens = self._text.encode(prompt, scope).tokens if prompt is not None else None
        await self._run(OpenSession(self._request_id(), session_id, scope))
        return Usage() if tokens is None else await self._append(session_id, tokens, scope)

    async def append(self, session_id: str, content: str | Sequence[int], *, scope: str = "") -> Usage:
        """Compute text or token ids into a session's cells; returns once that is done. Calls may overlap: in order."""
        return await self._append(session_id, self._continuation(content), scope)

    def query(
        self, session_id: str, request: GenerateRequest, *, keep: bool = True
    ) -> AsyncGenerator[tuple[Piece, ...], None]:
        """The reply to a raw prompt that goes on from the session's history, as `Service.stream` gives it.

        Sees every append made before it. `max_tokens` has to be given. Errors come as the last piece.
        """
        if not isinstance(request.prompt, RawPrompt):
            raise InvalidRequestError("a query of a session is text or token ids", "prompt")
        if request.sampling.max_tokens < 0:
            raise InvalidRequestError("a query of a session says how many tokens it may have", "max_tokens")
        tokens = self._continuation(request.prompt.content).tolist()
        return self._stream(replace(request, prompt=RawPrompt(tokens)), SessionTurn(session_id, keep))

    async def fork(self, session_id: str, child_id: str, *, scope: str = "") -> None:
        """Open `child_id` with the history that `session_id` has after the operations made before. Copies nothing."""
        await self._run(ForkSession(self._request_id(), session_id, child_id, scope))

    async def close(self, session_id: str, *, scope: str = "") -> None:
        """Let a session go; operations that are not over are aborted."""
        await self._run(CloseSession(self._request_id(), session_id, scope))

    async def _append(self, session_id: str, tokens: TokenIds, scope: str) -> Usage:
        submit = Submit(self._request_id(), tokens, Sampling(max_tokens=0), scope, session_id=session_id)
        return (await self._run(submit)).usage

    async def _run(self, request: Request) -> Finished:
        last: Event | None = None
        async with aclosing(self._bridge.run(request)) as steps:
            async for events in steps:
                last = events[-1]
        if isinstance(last, Finished):
            return last
        if isinstance(last, Rejected | Failed):
            raise error_of(last.error)
        raise UnavailableError("the session was closed meanwhile", "session_id")

    def _continuation(self, content: str | Sequence[int]) -> TokenIds:
        """Ids of what comes in the middle of a text: none are put around it."""
        if isinstance(content, str):
            content = self._text.tokenizer.backend_tokenizer.encode(content, add_special_tokens=False).ids
        return self._text.encode(RawPrompt(content)).tokens

    def _request_id(self) -> str:
        return f"session-operation-{next(self._numbers)}"
