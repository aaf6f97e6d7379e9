"""One replica as an asyncio service: text in, text out. No Ray: the benchmarks and tests use it as it stands.

`Service.stream` is the way of a request: its prompt in token ids, the limits of its reply, an `Attempt` that the engine
runs, the text of what it draws, and a second attempt where a call has to be written again. An operation of a session
goes the same way: an append is a request that draws nothing. `SessionService` is what else there is of sessions.
"""

from __future__ import annotations

import gc
import json
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Self

import numpy as np

from holdfast.replicas.bridge import Bridge
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.constraints.compiler import GUARANTEE, CompilerThreads
from holdfast.replicas.constraints.matcher import GivenTokens, Matcher
from holdfast.replicas.engine import Engine
from holdfast.replicas.errors import (
    ConfigError,
    ErrorInfo,
    ErrorKind,
    HoldfastError,
    InvalidRequestError,
    OverloadedError,
    SessionExistsError,
    UnavailableError,
    UnknownSessionError,
    error_of,
)
from holdfast.replicas.events import (
    Aborted,
    Event,
    Finished,
    Notice,
    OpenSession,
    Request,
    SessionLog,
    Stop,
    Submit,
    Terminal,
    Tokens,
    TurnEnded,
)
from holdfast.replicas.kv.limits import SHARED
from holdfast.replicas.kv.tags import AHEAD, PRIORITIES, SYSTEM_ROLES, Label, Labels, labels_of
from holdfast.replicas.model.startup import LoadedRunner, load_runner
from holdfast.replicas.plan import Sampling, TokenLogprobs
from holdfast.replicas.questions import Questions
from holdfast.replicas.requests import (
    NO_PROMPT,
    NOTHING_USED,
    AddQuestion,
    Answer,
    AnswerBuilder,
    ChatPrompt,
    CloseSession,
    Completed,
    Errored,
    ForkSession,
    GenerateRequest,
    History,
    ModelCard,
    PartialReply,
    Piece,
    RawPrompt,
    ReadHistory,
    ReadQuestion,
    RemoveQuestion,
    ReplyReason,
    ReplyTokens,
    SessionCall,
    SessionState,
    SessionTurn,
    Started,
    TextDelta,
    Timing,
    ToolCallDelta,
    Usage,
    Work,
)
from holdfast.replicas.retention.latency import Called, called
from holdfast.replicas.seed import prompt_seed
from holdfast.replicas.sessions import SessionFacts
from holdfast.replicas.stats import TextStats
from holdfast.replicas.text.conversation import Constraints, Encoded, TextSide
from holdfast.replicas.text.reply import Reply
from holdfast.replicas.types import NO_TOKENS, TokenIds

_ABORTED = ErrorInfo(ErrorKind.UNAVAILABLE, "the request was aborted")


class Service:
    """Text side and engine of one model, joined. Create it on the event loop that uses it."""

    def __init__(self, engine: Engine, text: TextSide, card: ModelCard) -> None:
        self.engine = engine
        self.card = card
        self._text = text
        self._bridge = Bridge(engine)
        self._compiling = CompilerThreads()
        self._session_operations = count()
        self._n_coming = 0  # requests that are being read
        self.questions = Questions(engine.config, self._stream, engine.session, self.drawn)

    @classmethod
    def load(cls, config: EngineConfig) -> Self:
        """Load the model and start the engine's thread. Takes seconds; raises ConfigError."""
        loaded = _load_in_passing_thread(config)
        text = TextSide(loaded.tokenizer, loaded.config, loaded.config.tool_format, loaded.eos)
        engine = Engine(loaded.config, loaded.runner, text.eos, loaded.vocabulary, cost=loaded.cost)
        text.prepare()
        if loaded.config.shared_preambles:
            engine.share([text.preamble(each, SHARED) for each in read_preambles(loaded.config.shared_preambles)])
        name, context = loaded.config.served_name, loaded.config.context_length
        card = ModelCard(
            name,
            context,
            loaded.vocabulary,
            longest_token=text.longest_token,
            defaults=loaded.defaults,
            tools_as_text=text.renderer.tools_as_text,
        )
        freeze_heap()
        return cls(engine, text, card)

    @property
    def alive(self) -> bool:
        return self._bridge.thread.alive

    @property
    def hung(self) -> bool:
        """Whether a step of the engine seems not to end."""
        return self._bridge.thread.hung

    @property
    def n_live(self) -> int:
        return self._bridge.n_live

    @property
    def text_stats(self) -> TextStats:
        return self._text.stats

    @property
    def sessions(self) -> SessionService:
        return SessionService(self)

    async def close(self) -> None:
        self._compiling.close()
        self._text.close()
        await self.questions.close()
        await self._bridge.close()

    async def drawn(self, request_id: str) -> Usage | None:
        """What was done for a request whose caller has left; None where it is not known here."""
        used = await self._bridge.used(request_id)
        echoed = await self._bridge.used(_of_prompt(request_id))  # it left while its prompt was computed
        return echoed if used is None else used

    def notice(self, notice: Notice) -> None:
        """Tell the engine what the cluster knows of programs and tools."""
        self._bridge.thread.send(notice)

    async def tokenize(self, prompt: ChatPrompt | RawPrompt, scope: str = "") -> list[int]:
        """The prompt's token ids, as `generate` would compute them in this scope. Raises InvalidRequestError."""
        tokens: list[int] = (await self._text.encoded(prompt, scope)).tokens.tolist()
        return tokens

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return self._text.detokenize(tokens)

    async def generate(self, request: GenerateRequest) -> Answer | Errored:
        """The whole reply at once. Cancelling the call aborts the request."""
        builder = AnswerBuilder()
        async with aclosing(self.stream(request)) as stream:
            async for pieces in stream:
                builder.add(pieces)
        return builder.answer() or builder.error()

    async def stream(
        self, request: GenerateRequest, drawing: PartialReply | None = None
    ) -> AsyncGenerator[tuple[Piece, ...], None]:
        """The reply as it is made: what each step adds, the last piece being `Completed` or `Errored`.

        Closing the generator early aborts the request. With the pieces come, into `drawing`, the tokens they are of.
        """
        opens = request.session is not None and request.session.opens
        with self.questions.others():
            async with aclosing(self.sessions.opening(request) if opens else self._stream(request, drawing)) as stream:
                async for pieces in stream:
                    yield pieces

    async def _stream(
        self, request: GenerateRequest, drawing: PartialReply | None = None
    ) -> AsyncGenerator[tuple[Piece, ...], None]:
        spent = Spent()
        try:
            if request.background is not None:
                yield (await _ahead(self._text, self._bridge, request),)
                return
            built, begun, echo = AnswerBuilder(), request.drawn is not None, None
            with self._coming(request) as foreseen:
                began = time.perf_counter()
                if request.session is None:
                    encoded = await self._text.encoded(request.prompt, request.cache_scope, request.program_id)
                    closing = NO_TOKENS
                else:
                    encoded, closing = await self.sessions.part(request, request.session)
                spent.render_s = time.perf_counter() - began
                if not begun:
                    echo = await _echo(self._text, self._bridge, self.card.vocabulary, request, encoded, spent)
                first = await self._first(request, encoded, closing, spent, drawing or PartialReply())
                first = replace(first, submit=replace(first.submit, foreseen=foreseen))
            if request.drawn is not None:
                first, pieces = first.resumed(request.drawn)
                built.add(pieces)
            attempt: Attempt | None = first
            while attempt is not None:
                events_of = self._bridge.run(attempt.submit, attempt.work_before, attempt.reply.may_close)
                async with aclosing(events_of) as steps:
                    async for events in steps:
                        if request.session is not None and attempt.drawing.at is None:
                            attempt.drawing.at = self.sessions.begun_at(request.request_id)
                        for pieces in self._batches(request, attempt, events):
                            if echo is not None:
                                pieces, begun = _with_echo(pieces, echo, begun=begun), True
                            yield pieces
                attempt = self._second(request, encoded, attempt, events[-1])
        except HoldfastError as error:
            yield (_errored(request, error.info, Usage(work=spent.work)),)

    @contextmanager
    def _coming(self, request: GenerateRequest) -> Iterator[bool]:
        """The request is read, and counts as one that comes. Whether that its answer will be in time is settled.

        Raises DeadlineError for what would be refused once it were read, and the step before it over.
        """
        foreseen = False
        if request.foretellable:
            coming = self._bridge.thread.unread + self._n_coming
            foreseen = self.engine.scheduler.admission.foresee(request, request.most_tokens, coming)
        self._n_coming += 1
        try:
            yield foreseen
        finally:
            self._n_coming -= 1

    # ---- the attempts of a request ----

    async def _first(
        self, request: GenerateRequest, encoded: Encoded, closing: TokenIds, spent: Spent, drawing: PartialReply
    ) -> Attempt:
        if request.session is not None:
            # What is asked is in `encoded`, and what is answered is text. The session is the program.
            request = replace(request, prompt=NO_PROMPT, program_id="", program_arrival=0.0)
        limits = await _limits(self._text, self._compiling, request)
        matcher = self._text.after_thinking(request, encoded, limits.matcher)
        drawn = request.drawn.tokens if request.drawn is not None else ()
        if matcher is not None and drawn and matcher.advance(drawn) < len(drawn):
            # There it was not followed: its grammar was not compiled in time.
            matcher, limits = None, replace(limits, matcher=None)
        submit = replace(
            Submit.of(request),
            tokens=encoded.tokens,
            sampling=_sampling(request, self.engine, self._text.eos),
            within_s=request.within_s if request.drawn is None else inf,  # what has begun goes on
            matcher=matcher,
            closing=closing,
            labels=_labels(request, encoded),
        )
        drawing.seed = submit.sampling.seed
        return Attempt(submit, self._text.reply(request, encoded, limits), spent, drawing)

    def _second(self, request: GenerateRequest, encoded: Encoded, first: Attempt, ended: Event) -> Attempt | None:
        """The attempt after one that `ended` with a call to be written again; None where the reply stands as it is.

        There is no third: only declared tools get through the second.
        """
        rewrite = first.reply.rewrite
        if rewrite is None or not isinstance(ended, Finished):
            return None
        self._text.rewritten += 1
        reply = self._text.reply(request, encoded, Constraints(rewrite.matcher))
        reply.feed(rewrite.tokens, rewrite.logprobs)  # the client has what comes out
        first.drawing.withdraw(len(rewrite.tokens))
        submit = first.going_on(rewrite.tokens, rewrite.matcher)
        return Attempt(submit, reply, first.spent, first.drawing, ended)

    def _batches(
        self, request: GenerateRequest, attempt: Attempt, events: Sequence[Event]
    ) -> Iterator[tuple[Piece, ...]]:
        """What the client is told of events: all of it together, but for a call that has closed. A client runs that
        from then on, so it does not wait for what is done at the reply's end, here and in the router.
        """
        pieces: list[Piece] = []
        for event in events:
            if isinstance(event, Finished) and any(isinstance(each, ToolCallDelta) and each.closed for each in pieces):
                attempt.drawing.over = event.reason == "stop"
                yield tuple(pieces)
                pieces = []
            pieces += self._pieces(request, attempt, event)
        if pieces:
            yield tuple(pieces)

    def _pieces(self, request: GenerateRequest, attempt: Attempt, event: Event) -> Sequence[Piece]:
        """What the client is told of an event."""
        if isinstance(event, Tokens):
            return self._read(attempt, event)
        if isinstance(event, Started):
            return (event,)
        if isinstance(event, Finished):
            return self._complete(request, attempt, event)
        if isinstance(event, Aborted):
            return (Errored(_ABORTED, attempt.usage(event)),)
        return (_errored(request, event.error, attempt.usage(event)),)

    def _read(self, attempt: Attempt, drawn: Tokens) -> Sequence[Piece]:
        """The text of drawn tokens; where it ends the reply, the engine is told."""
        reply = attempt.reply
        if reply.done:
            return ()  # drawn after the text had ended, before the engine heard of it
        began = time.perf_counter()
        attempt.drawing.add(drawn.tokens, drawn.logprobs)
        pieces = reply.feed(drawn.tokens, drawn.logprobs)
        attempt.spent.validate_s += time.perf_counter() - began
        if reply.done:
            self._text.stopped += reply.calls_done
            self._bridge.thread.send(Stop(drawn.request_id, reply.completion_tokens - attempt.submit.n_generated))
        return pieces

    def _complete(self, request: GenerateRequest, attempt: Attempt, ended: Finished) -> Sequence[Piece]:
        """The end of a whole reply; nothing where a second attempt follows."""
        reply = attempt.reply
        if reply.rewrite is not None:
            return ()
        tail, reason = reply.finish("stop" if attempt.over else ended.reason)
        reply.remember()
        if request.session is not None:
            usage, timing = attempt.usage(ended), attempt.timing(ended)
            history = self.sessions.told(ended)
            return (*tail, Completed(reason, usage, timing, stop=reply.stop, history=history))
        self._text.empty += reply.empty and isinstance(request.prompt, ChatPrompt)
        found = _called(request, reply, reason)
        if request.program_id:
            self.notice(_turn_ended(request, found))
        return (*tail, Completed(reason, attempt.usage(ended), attempt.timing(ended), found, reply.stop))


async def _limits(text: TextSide, compiling: CompilerThreads, request: GenerateRequest) -> Constraints:
    """What the reply must be. A guarantee that nobody has asked for is left out where it would be waited for."""
    try:
        found = await compiling.run(partial(text.constraints, request.prompt, request.cache_scope), request.scope)
        text.unguarded += found.loose
        return found
    except OverloadedError as error:
        if error.info.field != GUARANTEE:
            raise
    text.unguarded += 1
    return Constraints()


async def _ahead(text: TextSide, bridge: Bridge, request: GenerateRequest) -> Completed | Errored:
    """Compute what the next prompt begins with, without drawing anything."""
    if not isinstance(request.prompt, ChatPrompt):
        raise InvalidRequestError("only a chat can be computed ahead", "prompt")
    encoded = await text.beginning(request.prompt, request.cache_scope, request.program_id)
    submit = replace(
        Submit.of(request), tokens=encoded.tokens, sampling=Sampling(max_tokens=0), labels=_labels(request, encoded)
    )
    ended = await _ran(bridge, submit)
    if isinstance(ended, Finished):
        return Completed(ended.reason, ended.usage, ended.timing)
    return _errored(request, _ABORTED if isinstance(ended, Aborted) else ended.error, ended.usage)


async def _ran(bridge: Bridge, command: Request, logprobs: list[TokenLogprobs] | None = None) -> Terminal:
    """Run a command to its end. Log probabilities are added to `logprobs`."""
    async with aclosing(bridge.run(command)) as steps:
        async for events in steps:
            if logprobs is not None:
                logprobs += [each for event in events if isinstance(event, Tokens) for each in event.logprobs]
    ended = events[-1]
    assert isinstance(ended, Terminal)
    return ended


def _expect_finished(ended: Terminal, aborted: str, field: str | None = None) -> Finished:
    """Raise the error of a command that did not finish."""
    if isinstance(ended, Finished):
        return ended
    raise UnavailableError(aborted, field) if isinstance(ended, Aborted) else error_of(ended.error)


def _of_prompt(request_id: str) -> str:
    """The id under which the log probabilities of a request's prompt are computed."""
    return f"{request_id}/prompt"


async def _echo(
    text: TextSide, bridge: Bridge, vocabulary: int, request: GenerateRequest, encoded: Encoded, spent: Spent
) -> TextDelta | None:
    """The prompt, where the reply begins with it. Its log probabilities are those of a reply that must be it.

    So it is computed like a reply whose every token is forced, verified many at a time, and its cells are in the
    tree for the request itself.
    """
    prompt, wanted = request.prompt, request.sampling.logprobs
    if not isinstance(prompt, RawPrompt) or not prompt.echo:
        return None
    logprobs: list[TokenLogprobs] = []
    if wanted is not None and len(encoded.tokens) > 1:
        given = GivenTokens(encoded.tokens[1:], vocabulary)
        submit = Submit(
            _of_prompt(request.request_id),
            tokens=encoded.tokens[:1],
            sampling=Sampling(max_tokens=len(given), logprobs=wanted, ignore_eos=True),
            scope=request.scope,
            program_arrival=request.program_arrival,
            matcher=given,
            weight=request.weight,
            cells=request.cells,
            priority=request.priority,
            root=request.root or request.program_id,
            cache_salt=request.cache_salt,
        )
        ended = await _ran(bridge, submit, logprobs)
        spent.work += ended.usage.work
        _expect_finished(ended, _ABORTED.message)
    return text.echoed(prompt, encoded, None if wanted is None else logprobs)


@dataclass(slots=True)
class Spent:
    """Seconds of the text side, of all attempts of a request, and other work for it."""

    render_s: float = 0.0
    validate_s: float = 0.0
    work: Work = field(default_factory=Work)  # beside the reply itself: log probabilities of the prompt


@dataclass(frozen=True, slots=True)
class Attempt:
    """One submission of a request and the reader of its reply. `earlier` is how the one before it ended.

    `over`: another replica has drawn all of the reply.
    """

    submit: Submit
    reply: Reply
    spent: Spent
    drawing: PartialReply
    earlier: Finished | None = None
    over: bool = False

    def resumed(self, drawn: ReplyTokens) -> tuple[Attempt, Sequence[Piece]]:
        """This attempt from behind what another replica has drawn of it, and the pieces of that. The matcher is there
        already.
        """
        pieces = self.reply.feed(drawn.tokens, drawn.logprobs)
        submit = self.going_on(drawn.tokens, self.submit.matcher)
        if drawn.seed is not None:
            submit = replace(submit, sampling=replace(submit.sampling, seed=drawn.seed))
        over = drawn.over or self.reply.done  # but for its end, which was lost
        if over:
            submit = replace(submit, sampling=replace(submit.sampling, max_tokens=0))
        self.drawing.seed = submit.sampling.seed
        return replace(self, submit=submit, over=over), pieces

    def going_on(self, drawn: Sequence[int], matcher: Matcher | None) -> Submit:
        """What to submit to go on from these tokens of the reply.

        The noise and the penalties are this attempt's: but for what its grammar forbids it draws what this one would
        have drawn.
        """
        sampling, before = self.submit.sampling, self.submit.n_generated
        prompt = self.submit.tokens[: len(self.submit.tokens) - before]
        if sampling.seed is None and sampling.temperature > 0 and self.submit.session is None:
            sampling = replace(sampling, seed=prompt_seed(prompt))  # of a session's the engine has the history, too
        return replace(
            self.submit,
            tokens=np.concatenate((prompt, np.array(drawn, np.int32))),
            sampling=replace(sampling, max_tokens=sampling.max_tokens + before - len(drawn)),
            matcher=matcher,
            n_generated=len(drawn),
        )

    def usage(self, ended: Terminal) -> Usage:
        """Of the reply as the client has it: tokens that were withdrawn are not in it."""
        first, reply = (self.earlier or ended).usage, self.reply
        work = ended.usage.work + self.work_before
        return Usage(first.prompt, first.cached, reply.completion_tokens, reply.reasoning_tokens, work)

    @property
    def work_before(self) -> Work:
        """What engines did for the request before this attempt."""
        return self.spent.work if self.earlier is None else self.earlier.usage.work + self.spent.work

    def timing(self, ended: Finished) -> Timing:
        """From the first attempt's arrival to the last one's end."""
        first = (self.earlier or ended).timing
        return replace(
            first, finished=ended.timing.finished, render_s=self.spent.render_s, validate_s=self.spent.validate_s
        )


@dataclass(frozen=True, slots=True)
class SessionService:
    """Open, feed, ask, fork and close sessions of a service, by id within a scope (a tenant).

    Data comes in as it arrives, questions cost only their own tokens. Text is tokenized piece by piece, as it is given:
    nothing is put around it, and its special tokens count. Messages are rendered so that what came before stays a
    prefix; a query of messages ends where the assistant begins to write, and its answer, if kept, as the template ends
    it. What a session is to begin with, a chat or whatever the model expects in front, is given to `open` as a prompt.

    Every call raises a HoldfastError: InvalidRequestError naming `session_id` for a session that is not open,
    ContextLengthError where its history would become too long, OverloadedError where sessions are too many, or their
    cells with those that operations in flight may come to keep. What raises leaves the history as it was.
    """

    _service: Service

    async def open(self, session_id: str, prompt: ChatPrompt | RawPrompt | None = None, *, scope: str = "") -> Usage:
        """Begin a session, with a prompt to start from; returns once that is computed. It is not open if that fails."""
        return await self._feed(SessionTurn(session_id, opens=True), prompt or NO_PROMPT, scope)

    async def append(self, session_id: str, content: str | Sequence[int] | ChatPrompt, *, scope: str = "") -> Usage:
        """Compute text, token ids or messages into a session's cells; returns once that is done.

        Calls may overlap: in order.
        """
        prompt = content if isinstance(content, ChatPrompt) else RawPrompt(content)
        return await self._feed(SessionTurn(session_id), prompt, scope)

    def query(
        self, session_id: str, request: GenerateRequest, *, keep: bool = True
    ) -> AsyncGenerator[tuple[Piece, ...], None]:
        """The reply to a prompt that goes on from the session's history, as `Service.stream` gives it.

        Sees every append made before it. `max_tokens` has to be given. Errors come as the last piece.
        """
        if request.sampling.max_tokens < 0:
            raise InvalidRequestError("a query of a session says how many tokens it may have", "max_tokens")
        return self._service.stream(replace(request, session=SessionTurn(session_id, keep)))

    async def fork(
        self, session_id: str, child_id: str, *, scope: str = "", life: str = "", child_life: str = ""
    ) -> None:
        """Open `child_id` with the history that `session_id` has after the operations made before. Copies nothing.

        Standing questions stay where they are.
        """
        await self.run(
            ForkSession(scope, session_id, child_id, life=life, child_life=child_life, request_id=self.request_id())
        )

    async def close(self, session_id: str, *, scope: str = "", life: str = "") -> None:
        """Let a session go; operations that are not over are aborted."""
        await self.run(CloseSession(scope, session_id, life=life, request_id=self.request_id()))

    async def call(self, call: SessionCall) -> SessionState:
        """Do what is asked of a session besides generating."""
        questions, scope, session_id = self._service.questions, call.scope, call.session_id
        facts, start = self._found(scope, session_id, call.life), None
        if isinstance(call, ForkSession):
            child = self._service.engine.session(scope, call.child_id)
            if child is None or not call.child_life or child.life != call.child_life:
                lives = {"life": call.life, "child_life": call.child_life}
                await self.fork(session_id, call.child_id, scope=scope, **lives)
            facts, start = self._found(scope, call.child_id, call.child_life), 0
        elif isinstance(call, ReadHistory):
            start = call.start
        elif isinstance(call, CloseSession):
            await self.close(session_id, scope=scope, life=call.life)
        elif isinstance(call, AddQuestion):
            questions.add(facts, scope, call.question)
        elif isinstance(call, RemoveQuestion):
            questions.remove(facts, scope, call.question_id)
        elif isinstance(call, ReadQuestion):
            questions.read(facts, scope, call.question_id)
        state = self._state(facts, scope)
        return state if start is None else replace(state, history=self._history(facts.past, start))

    def of(self, scope: str) -> list[SessionState]:
        """A tenant's open sessions."""
        return [self._state(facts, scope) for facts in self._service.engine.sessions(scope)]

    async def run(self, request: Request) -> Finished:
        """Execute a command on a session."""
        with self._service.questions.others():
            ended = await _ran(self._service._bridge, request)
        return _expect_finished(ended, "the session was closed meanwhile", "session_id")

    def request_id(self) -> str:
        return f"session-operation-{next(self._service._session_operations)}"

    # ---- for the service: its requests that are operations ----

    async def opening(self, request: GenerateRequest) -> AsyncGenerator[tuple[Piece, ...], None]:
        """The reply to a request that opens its session, which is open once that has completed, or not at all."""
        assert request.session is not None
        name, scope, completed = request.session.session_id, request.scope, False
        life, behind, done = request.session.life, request.session.appends, request.session.done
        try:
            there = self._service.engine.session(scope, name)
            if there is not None and there.life == life:
                if not life:
                    raise SessionExistsError(f"session {name!r} is open already", "session_id")
                completed = True  # by another attempt
            try:
                if not completed:
                    await self.run(OpenSession(scope, name, behind, done, life=life, request_id=self.request_id()))
                if _is_empty(request.prompt):
                    now, completed = time.monotonic(), True
                    history = self._history(SessionLog(life, appends=behind, done=done), 0)
                    yield (Completed("stop", Usage(), Timing(now, finished=now), history=history),)
                    return
                async with aclosing(self._service._stream(request)) as stream:
                    async for pieces in stream:
                        completed = completed or isinstance(pieces[-1], Completed)
                        yield pieces
            except SessionExistsError:
                completed = True  # another's
                raise
            finally:
                if not completed:
                    self._service._bridge.thread.send(
                        CloseSession(scope, name, life=life, request_id=self.request_id())
                    )
        except HoldfastError as error:
            yield (_errored(request, error.info),)

    async def part(self, request: GenerateRequest, turn: SessionTurn) -> tuple[Encoded, TokenIds]:
        """What a session's operation adds to its history, and what closes a reply that stays in it."""
        prompt, asks = request.prompt, request.sampling.max_tokens > 0
        if turn.opens and isinstance(prompt, RawPrompt):
            return await self._service._text.encoded(prompt, request.scope), NO_TOKENS
        facts = self._service.engine.session(request.scope, turn.session_id)
        begins = facts is not None and not facts.tokens and (turn.opens or not facts.busy)
        closing = self._service._text.closing(prompt) if turn.keep and asks else NO_TOKENS
        part = await self._service._text.part(prompt, begins=begins, reply=asks, scope=request.scope)
        return Encoded(part), closing

    def begun_at(self, request_id: str) -> int | None:
        """Tokens of the history that an operation under way goes on from; None for one that is over."""
        sequence = self._service.engine.live.get(request_id)
        return None if sequence is None else sequence.n_history

    def told(self, ended: Finished) -> History | None:
        """What an operation has added."""
        return None if ended.past is None else self._history(ended.past, ended.start)

    # ---- parts ----

    def _history(self, past: SessionLog, start: int) -> History:
        tokens = past.tokens[start:].astype("<i4").tobytes()
        done = tuple(each for each in past.done if each.end > start)
        return History(past.life, start, tokens, past.appends, done, self._service.engine.session_idle_s)

    async def _feed(self, turn: SessionTurn, prompt: ChatPrompt | RawPrompt, scope: str) -> Usage:
        request = GenerateRequest(self.request_id(), prompt, Sampling(max_tokens=0), scope=scope, session=turn)
        reply = await self._service.generate(request)
        if isinstance(reply, Errored):
            raise error_of(reply.error)
        return reply.usage

    def _found(self, scope: str, session_id: str, life: str) -> SessionFacts:
        facts = self._service.engine.session(scope, session_id)
        if facts is None or life not in ("", facts.life):
            raise UnknownSessionError(f"session {session_id!r} is not open", "session_id")
        return facts

    def _state(self, facts: SessionFacts, scope: str) -> SessionState:
        now, idle_s = time.monotonic(), self._service.engine.session_idle_s
        return SessionState(
            facts.session_id,
            facts.tokens,
            facts.appends,
            now - facts.opened,
            idle_s if facts.busy else max(facts.used + idle_s - now, 0.0),
            facts.busy,
            self._service.questions.of(facts, scope),
        )


def freeze_heap() -> None:
    """What this process has made so far stays, so collections of garbage need not look through it, from now on.

    With a model and its libraries a whole collection takes a tenth of a second, in which no stream goes on.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def _load_in_passing_thread(config: EngineConfig) -> LoadedRunner:
    """Load in a thread that is gone afterwards, and with it the team of OpenMP threads that torch gave it.

    While more such threads live than there are cores, those of the engine sleep wherever they wait for each other, and
    its steps took up to 1.7 times as long.
    """
    loaded: Future[LoadedRunner] = Future()

    def work() -> None:
        try:
            loaded.set_result(load_runner(config))
        except BaseException as error:
            loaded.set_exception(error)

    thread = threading.Thread(target=work, name="loading", daemon=True)  # Ctrl-C need not wait for it
    thread.start()
    result = loaded.result()
    thread.join()
    return result


def read_preambles(path: str) -> list[ChatPrompt]:
    """What prompts may begin with: a list of objects with `messages`, and `tools` where there are any.

    Raises ConfigError.
    """
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"shared preambles cannot be read: {error}", "shared_preambles") from error
    if not isinstance(found, list):
        raise ConfigError(f"{path} holds no list", "shared_preambles")
    prompts = []
    for i, each in enumerate(found):
        known = isinstance(each, dict) and each.get("messages") and set(each) <= {"messages", "tools"}
        if not known or not all(isinstance(value, list) for value in each.values()):
            told = f"number {i} in {path} is no object of `messages`, and maybe `tools`, which are lists"
            raise ConfigError(told, "shared_preambles")
        prompts.append(ChatPrompt(each["messages"], each.get("tools", ())))
    return prompts


def _sampling(request: GenerateRequest, engine: Engine, eos: frozenset[int]) -> Sampling:
    """The request's sampling with what it left open: its length, a seed where none is derived, its ends."""
    sampling, config = request.sampling, engine.config
    if sampling.min_tokens:
        sampling = replace(sampling, ends=eos | sampling.stop_token_ids)
    if sampling.max_tokens == -1:
        sampling = replace(sampling, max_tokens=config.context_length)  # the engine reduces it to what there is
    if sampling.seed is None and sampling.temperature > 0 and not config.prompt_seed:
        sampling = replace(sampling, seed=secrets.randbits(64))  # here, so that a second attempt goes on with it
    return sampling


def _labels(request: GenerateRequest, encoded: Encoded) -> Labels:
    """What the tokens of a prompt are: as the request says, else by the roles of its messages."""
    prompt, ahead = request.prompt, request.background
    roles = [message["role"] for message in prompt.messages] if isinstance(prompt, ChatPrompt) else []
    if ahead is None:
        return labels_of(roles[: len(encoded.starts)], encoded.starts, len(encoded.tokens), request.hints)
    # Above all else, until the client comes for it.
    system = [role for role in roles[: len(encoded.starts)] if role in SYSTEM_ROLES]
    label = Label(AHEAD, PRIORITIES[AHEAD], ahead.keep_s)
    length = encoded.starts[len(system)] if len(system) < len(encoded.starts) else 0
    return labels_of(system, encoded.starts[: len(system)], length, rest=label)


def _with_echo(pieces: tuple[Piece, ...], echo: TextDelta, *, begun: bool) -> tuple[Piece, ...]:
    """Pieces of a reply that begins with `echo`: its first ones, unless they say that it failed, behind it.

    Of a prompt whose log probabilities were asked for nothing counts as cached: all of it was computed for them.
    """
    last = pieces[-1]
    if isinstance(last, Completed) and echo.logprobs:
        pieces = (*pieces[:-1], replace(last, usage=replace(last.usage, cached=0)))
    return pieces if begun or isinstance(last, Errored) else (echo, *pieces)


def _errored(request: GenerateRequest, error: ErrorInfo, used: Usage = NOTHING_USED) -> Errored:
    """The end of a failed reply. The engine calls every input a prompt; a chat's client knows it as messages."""
    if error.field != "prompt":
        return Errored(error, used)
    if isinstance(request.prompt, ChatPrompt):
        return Errored(replace(error, field="messages"), used)
    if request.session is None:
        return Errored(error, used)
    return Errored(replace(error, field="text" if isinstance(request.prompt.content, str) else "tokens"), used)


def _is_empty(prompt: ChatPrompt | RawPrompt) -> bool:
    return isinstance(prompt, RawPrompt) and not len(prompt.content)


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
