"""One replica as an asyncio service: text in, text out. No Ray: the benchmarks and tests use it as it stands."""

import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Protocol

import numpy as np

from holdfast.replicas.bridge import Bridge
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.constraints.compiler import CompilerThreads
from holdfast.replicas.engine import Engine
from holdfast.replicas.errors import (
    ErrorInfo,
    ErrorKind,
    HoldfastError,
    InvalidRequestError,
    UnavailableError,
    error_of,
)
from holdfast.replicas.events import (
    Aborted,
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
    Timing,
    Tokens,
    TurnEnded,
    Usage,
)
from holdfast.replicas.model.runner import LoadedRunner, load_runner
from holdfast.replicas.requests import (
    Answer,
    ChatPrompt,
    Completed,
    Errored,
    Fold,
    GenerateRequest,
    ModelCard,
    Piece,
    RawPrompt,
    ReplyReason,
)
from holdfast.replicas.retention.latency import Called, called
from holdfast.replicas.seed import prompt_seed
from holdfast.replicas.stats import TextStats
from holdfast.replicas.text.conversation import Encoded, TextSide
from holdfast.replicas.text.reply import Reply
from holdfast.replicas.types import TokenIds

# ---- One submission of a request, and the next where a call of an undeclared tool has to be written again.
#
# The second one goes on from the tokens that are kept, with the noise and the penalties of the first: but for what its
# grammar forbids it draws what the first would have drawn. There is no third: only declared tools get through.


@dataclass(slots=True)
class Spent:
    """Seconds of the text side, of all submissions of a request."""

    render_s: float = 0.0
    validate_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """`earlier` is how the withdrawn submission ended."""

    submit: Submit
    reply: Reply
    earlier: Finished | None = None
    spent: Spent = field(default_factory=Spent)

    def again(self, ended: Finished, reply: Callable[[], Reply]) -> "Attempt | None":
        """What to submit next, with a new reader from `reply`; None where the reply stands as it is."""
        rewrite = self.reply.rewrite
        if rewrite is None:
            return None
        sampling = self.submit.sampling
        if sampling.seed is None and sampling.temperature > 0:
            sampling = replace(sampling, seed=prompt_seed(self.submit.tokens))
        submit = replace(
            self.submit,
            tokens=np.concatenate((self.submit.tokens, np.array(rewrite.tokens, np.int32))),
            sampling=replace(sampling, max_tokens=sampling.max_tokens - len(rewrite.tokens)),
            matcher=rewrite.matcher,
            n_generated=len(rewrite.tokens),
        )
        fresh = reply()
        fresh.feed(rewrite.tokens, rewrite.logprobs)  # the client has what comes out
        return Attempt(submit, fresh, ended, self.spent)

    def usage(self, ended: Finished) -> Usage:
        """Of the reply as the client has it: tokens that were withdrawn are not in it."""
        first = self.earlier or ended
        reply = self.reply
        return Usage(first.usage.prompt, first.usage.cached, reply.completion_tokens, reply.reasoning_tokens)

    def timing(self, ended: Finished) -> Timing:
        first = (self.earlier or ended).timing
        end, spent = ended.timing.finished, self.spent
        return Timing(first.arrived, first.scheduled, first.first_token, end, spent.render_s, spent.validate_s)


# ---- Sessions of one replica as an asyncio service: data comes in as it arrives, questions cost only their own
# tokens.
#
# Text is tokenized piece by piece, as it is given: nothing is put around it, and its special tokens count. What a
# session
# is to begin with, a chat or whatever the model expects in front, is given to `open` as a prompt.


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


_ABORTED = ErrorInfo(ErrorKind.UNAVAILABLE, "the request was aborted")


class Service:
    """Text side and engine of one model, joined. Create it on the event loop that uses it."""

    def __init__(self, engine: Engine, text: TextSide, card: ModelCard) -> None:
        self.engine = engine
        self.card = card
        self._text = text
        self._bridge = Bridge(engine)
        self._compiling = CompilerThreads()
        self.notice = self._bridge.notice  # what the cluster knows of programs and tools
        self.sessions = SessionService(self._bridge, text, self.stream)

    @classmethod
    def load(cls, config: EngineConfig) -> "Service":
        """Load the model and start the engine's thread. Takes seconds; raises ConfigError."""
        loaded = _in_passing(lambda: load_runner(config))
        engine = Engine(loaded.config, loaded.runner, loaded.eos, loaded.vocabulary, cost=loaded.cost)
        text = TextSide(loaded.tokenizer, loaded.config, loaded.config.tool_format, loaded.eos)
        card = ModelCard(loaded.config.served_name, loaded.config.context_length, loaded.vocabulary)
        return cls(engine, text, card)

    @property
    def alive(self) -> bool:
        return self._bridge.alive

    @property
    def n_live(self) -> int:
        return self._bridge.n_live

    @property
    def text_stats(self) -> TextStats:
        return self._text.stats

    async def close(self) -> None:
        self._compiling.close()
        self._text.close()
        await self._bridge.close()

    async def tokenize(self, prompt: ChatPrompt | RawPrompt) -> list[int]:
        """The prompt's token ids, as `generate` would compute them. Raises InvalidRequestError."""
        tokens: list[int] = (await self._text.encoded(prompt)).tokens.tolist()
        return tokens

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return self._text.detokenize(tokens)

    async def stream(
        self, request: GenerateRequest, turn: SessionTurn = NO_SESSION
    ) -> AsyncGenerator[tuple[Piece, ...], None]:
        """The reply as it is made: what each step adds, the last piece being `Completed` or `Errored`.

        Closing the generator early aborts the request.
        """
        try:
            began = time.perf_counter()
            encoded = await self._text.encoded(request.prompt, request.scope, request.program_id)
            spent = Spent(render_s=time.perf_counter() - began)
            attempt: Attempt | None = await self._first(request, encoded, turn, spent)
            while attempt is not None:
                async with aclosing(self._bridge.run(attempt.submit)) as steps:
                    async for events in steps:
                        pieces = tuple(piece for event in events for piece in self._pieces(request, attempt, event))
                        if pieces:
                            yield pieces
                attempt = self._next(request, encoded, attempt, events[-1])
        except HoldfastError as error:
            yield (_errored(request, error.info),)

    async def generate(self, request: GenerateRequest) -> Answer | Errored:
        """The whole reply at once. Cancelling the call aborts the request."""
        fold = Fold()
        async with aclosing(self.stream(request)) as stream:
            async for pieces in stream:
                fold.add(pieces)
        return fold.answer() or fold.error()

    async def _first(self, request: GenerateRequest, encoded: Encoded, turn: SessionTurn, spent: Spent) -> Attempt:
        limits = await self._compiling.run(partial(self._text.constraints, request.prompt), request.scope)
        submit = replace(
            self._submit(request, encoded.tokens),
            matcher=self._text.after_thinking(request, encoded, limits.matcher),
            session_id=turn.session_id,
            keep=turn.keep,
        )
        return Attempt(submit, self._text.reply(request, encoded, limits.declared), spent=spent)

    def _next(self, request: GenerateRequest, encoded: Encoded, attempt: Attempt, ended: Event) -> Attempt | None:
        """What is submitted after an attempt that `ended`; None: the reply is complete, or has failed."""
        if not isinstance(ended, Finished):
            return None
        again = attempt.again(ended, lambda: self._text.reply(request, encoded))
        self._text.rewritten += again is not None
        return again

    def _submit(self, request: GenerateRequest, tokens: TokenIds) -> Submit:
        sampling = request.sampling
        if sampling.max_tokens == -1:
            sampling = replace(sampling, max_tokens=self._room(len(tokens)))
        if sampling.seed is None and sampling.temperature > 0 and not self.engine.config.prompt_seed:
            sampling = replace(sampling, seed=secrets.randbits(64))  # here, so that a rewritten reply goes on with it
        return Submit(
            request.request_id,
            tokens,
            sampling,
            request.scope,
            request.program_id,
            request.program_arrival,
            self._text.skeletons(request.prompt) if self.engine.config.speculation.skeleton else None,
            program_turns=request.program_turns,
            answered_turns=request.answered_turns,
            program_end=request.program_end,
            weight=request.weight,
        )

    def _room(self, n_prompt: int) -> int:
        """Tokens a completion may have where the request does not say: what the context and the cache leave."""
        config = self.engine.config
        return max(1, min(config.context_length, config.cells - 2 * config.page_size) - n_prompt)

    def _pieces(self, request: GenerateRequest, attempt: Attempt, event: Event) -> list[Piece]:
        reply = attempt.reply
        if isinstance(event, Tokens):
            if reply.done:
                return []  # drawn after the text had ended, before the engine heard of it
            began = time.perf_counter()
            pieces: list[Piece] = list(reply.feed(event.tokens, event.logprobs))
            attempt.spent.validate_s += time.perf_counter() - began
            if reply.done:
                self._text.stopped += reply.calls_done
                drawn = reply.completion_tokens - attempt.submit.n_generated
                self._bridge.stop(event.request_id, drawn)
            return pieces
        if isinstance(event, Finished):
            if reply.rewrite is not None:
                return []
            tail, reason = reply.finish(event.reason)
            reply.remember()
            waits_for = _called(request, reply, reason)
            if request.program_id:
                self.notice(_turn_ended(request, waits_for))
            return [*tail, Completed(reason, attempt.usage(event), attempt.timing(event), waits_for)]
        if isinstance(event, Aborted):
            return [Errored(_ABORTED, event.usage)]
        return [_errored(request, event.error)]


def _in_passing(load: Callable[[], LoadedRunner]) -> LoadedRunner:
    """Load in a thread that is gone afterwards, and with it the team of OpenMP threads that torch gave it.

    While more such threads live than there are cores, those of the engine sleep wherever they wait for each other, and
    its steps took up to 1.7 times as long.
    """
    loaded: Future[LoadedRunner] = Future()

    def work() -> None:
        try:
            loaded.set_result(load())
        except BaseException as error:
            loaded.set_exception(error)

    thread = threading.Thread(target=work, name="loading", daemon=True)  # Ctrl-C need not wait for it
    thread.start()
    result = loaded.result()
    thread.join()
    return result


def _errored(request: GenerateRequest, error: ErrorInfo) -> Errored:
    """The end of a failed reply. The engine calls every input a prompt; a chat's client knows it as messages."""
    if error.field == "prompt" and isinstance(request.prompt, ChatPrompt):
        error = replace(error, field="messages")
    return Errored(error)


def _called(request: GenerateRequest, reply: Reply, reason: ReplyReason) -> Called:
    """What a finished reply called."""
    tools = isinstance(request.prompt, ChatPrompt) and bool(request.prompt.tools)
    text = "" if tools else reply.content
    cut = reason == "length" or reply.unfinished
    return called(reply.calls, text, interface=tools, cut=cut, ends=request.program_end)


def _turn_ended(request: GenerateRequest, found: Called) -> TurnEnded:
    return TurnEnded(
        request.request_id,
        request.scope,
        request.program_id,
        found.tools,
        found.last,
        turn=request.program_turns + 1,
        answered_turns=request.answered_turns,
    )
