"""One replica as an asyncio service: text in, text out, without Ray.

    GenerateRequest -> render, encode -> Submit -> Bridge -> events -> Reply (text, calls) -> pieces

`Service.stream` serves a request, `Generation` is its state. A second command to the engine follows if the model wrote
a call of an undeclared tool. Operations on sessions use the same path: an append is a request that draws nothing.
"""

from __future__ import annotations

import asyncio
import gc
import json
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
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
from holdfast.replicas.constraints.matcher import ForcedTokens, Matcher
from holdfast.replicas.engine import Engine
from holdfast.replicas.errors import (
    ConfigError,
    ErrorInfo,
    HoldfastError,
    InvalidRequestError,
    OverloadedError,
    SessionExistsError,
    UnavailableError,
    UnknownSessionError,
    error_of,
)
from holdfast.replicas.kv.pages import SHARED
from holdfast.replicas.kv.tags import AHEAD, PRIORITIES, SYSTEM_ROLES, Hint, Label, Labels, labels_of
from holdfast.replicas.model.progress import Tell
from holdfast.replicas.model.startup import LoadedRunner, load_runner
from holdfast.replicas.plan import Sampling, TokenLogprobs, prompt_seed
from holdfast.replicas.questions import Questions
from holdfast.replicas.requests import (
    NO_PROMPT,
    NO_WORK,
    NOTHING_USED,
    Aborted,
    AddQuestion,
    Answer,
    AnswerBuilder,
    ChatPrompt,
    CloseSession,
    Completed,
    Errored,
    Event,
    Finished,
    ForkSession,
    GenerateRequest,
    History,
    ModelCard,
    Notice,
    OpenSession,
    PartialReply,
    Piece,
    RawPrompt,
    RemoveQuestion,
    ReplyTokens,
    Request,
    SessionCall,
    SessionLog,
    SessionState,
    SessionTurn,
    Started,
    Stop,
    Submit,
    Terminal,
    TextDelta,
    Timing,
    Tokens,
    ToolCallDelta,
    TurnEnded,
    Usage,
    Work,
)
from holdfast.replicas.retention.latency import Called, called
from holdfast.replicas.sessions import SessionFacts
from holdfast.replicas.text.conversation import Constraints, Encoded, TextSide
from holdfast.replicas.text.reply import Reply
from holdfast.replicas.types import NO_TOKENS, Origin, Priority, TokenIds

SAVED_EVERY, SAVED_TOKENS = 64, 256  # one in 64 stopped replies continues unseen, for 256 tokens at most


class Service:
    """Text side and engine of one model, joined. Create it on the event loop that uses it."""

    def __init__(self, engine: Engine, text: TextSide, card: ModelCard) -> None:
        self.engine = engine
        self.card = card
        self.text = text
        self.bridge = Bridge(engine)
        self._compiling = CompilerThreads()
        self._going_on: set[asyncio.Task[None]] = set()  # replies after their early stop
        self._session_operations = count()
        self._n_coming = 0  # requests that are being rendered and encoded
        self.questions = Questions(lambda request: _collected(self._stream(request)), engine.session, self.used)

    @classmethod
    def load(cls, config: EngineConfig, tell: Tell | None = None) -> Self:
        """Load the model and start the engine's thread. Takes seconds. Raises ConfigError.

        `tell`: called in another thread with the progress of reading the weights.
        """
        loaded = _load_in_passing_thread(config, tell)
        text = TextSide(loaded.tokenizer, loaded.config, loaded.config.tool_format, loaded.eos)
        engine = Engine(
            loaded.config, loaded.runner, text.eos, loaded.vocabulary, cost=loaded.cost, window=loaded.window
        )
        text.prepare()
        if loaded.config.shared_preambles:
            engine.share([text.preamble(prompt, SHARED) for prompt in read_preambles(loaded.config.shared_preambles)])
        card = ModelCard(
            loaded.config.served_name,
            loaded.config.context_length,
            loaded.vocabulary,
            longest_token=text.longest_token,
            defaults=loaded.defaults,
            tools_as_text=text.renderer.tools_as_text,
            prompt_seed=loaded.config.prompt_seed,
        )
        freeze_heap()
        return cls(engine, text, card)

    @property
    def sessions(self) -> SessionService:
        return SessionService(self)

    async def close(self) -> None:
        self._compiling.close()
        self.text.close()
        for task in self._going_on:
            task.cancel()
        await self.questions.close()
        await self.bridge.close()

    async def used(self, request_id: str) -> Usage | None:
        """The usage of a request whose client has left. None: this replica does not know it."""
        used = await self.bridge.used(request_id)
        echoed = await self.bridge.used(_echo_id(request_id))  # the client left while the prompt was computed
        return echoed if used is None else used

    def notice(self, notice: Notice) -> None:
        """Pass a notice about programs or tools to the engine."""
        self.bridge.thread.send(notice)

    async def tokenize(self, prompt: ChatPrompt | RawPrompt, scope: str = "") -> list[int]:
        """The prompt's token ids, as `generate` would compute them in this scope. Raises InvalidRequestError."""
        tokens: list[int] = (await self.text.encoded(prompt, scope)).tokens.tolist()
        return tokens

    async def generate(self, request: GenerateRequest) -> Answer | Errored:
        """The complete reply. Cancelling the call aborts the request."""
        return await _collected(self.stream(request))

    async def stream(
        self, request: GenerateRequest, partial_reply: PartialReply | None = None
    ) -> AsyncGenerator[tuple[Piece, ...], None]:
        """The reply in pieces, step by step. The last piece is `Completed` or `Errored`.

        Closing the generator early aborts the request. `partial_reply` receives the tokens of the pieces.
        """
        opens = request.session is not None and request.session.opens
        source = self.sessions.opening(request) if opens else self._stream(request, partial_reply)
        with self.questions.client_request():
            async with aclosing(source) as stream:
                async for pieces in stream:
                    yield pieces

    async def _stream(
        self, request: GenerateRequest, partial_reply: PartialReply | None = None
    ) -> AsyncGenerator[tuple[Piece, ...], None]:
        generation = Generation(request, partial_reply or PartialReply())
        try:
            if request.background is not None:
                yield (await self._prefill(request),)
                return
            foreseen = self._check_deadline(request)
            self._n_coming += 1
            try:
                await self._prepare(generation, foreseen)
            finally:
                self._n_coming -= 1
            goes_on = True
            while goes_on:
                events_of = self.bridge.run(generation.submit, generation.work, generation.reply.may_close)
                async with aclosing(events_of) as steps:
                    async for events in steps:
                        if request.session is not None and generation.partial.at is None:
                            live = self.engine.live.get(request.request_id)
                            generation.partial.at = None if live is None else live.n_history
                        for pieces in self._batches(generation, events):
                            yield pieces
                goes_on = self._rewrites(generation, events[-1])
        except HoldfastError as error:
            yield (_errored(request, error.info, Usage(work=generation.work)),)

    # ---- before the engine ----

    def _check_deadline(self, request: GenerateRequest) -> bool:
        """Whether the deadline was checked already. Raises DeadlineError for a request that the engine would refuse
        after its current step.
        """
        if not request.foretellable:
            return False
        coming = self.bridge.thread.unread + self._n_coming
        return self.engine.scheduler.admission.check_deadline_early(request, request.most_tokens, coming)

    async def _prepare(self, generation: Generation, foreseen: bool) -> None:
        """Encode the prompt, and make the engine's command and the reader of the reply."""
        request, drawn, closing, began = generation.request, generation.request.drawn, NO_TOKENS, time.perf_counter()
        if request.session is None:
            encoded = await self.text.encoded(request.prompt, request.cache_scope, request.program_id)
        else:
            encoded, closing = await self.sessions.part(request, request.session)
        generation.encoded, generation.render_s = encoded, time.perf_counter() - began
        if isinstance(request.prompt, RawPrompt) and request.prompt.echo and drawn is None:
            generation.echo = await self._echo(generation, request.prompt)
        if request.session is not None:
            # `encoded` has the prompt's tokens already, the answer is text, and the session is the program.
            request = replace(request, prompt=NO_PROMPT, program_id="", program_arrival=0.0)
        limits = await _limits(self.text, self._compiling, request)
        matcher = self.text.after_thinking(request, encoded, limits.matcher)
        before = drawn.tokens if drawn is not None else ()
        if matcher is not None and before and matcher.advance(before) < len(before):
            # The other replica drew without the grammar: it was not compiled in time.
            matcher, limits = None, replace(limits, matcher=None)
        generation.reply = self.text.reply(request, encoded, limits)
        generation.submit = replace(
            Submit.of(request),
            tokens=encoded.tokens,
            sampling=_sampling(request, self.engine, self.text.eos),
            within_s=request.within_s if drawn is None else inf,  # a reply that has begun is finished
            matcher=matcher,
            closing=closing,
            labels=_labels(request, encoded),
            foreseen=foreseen,
        )
        if drawn is not None:
            generation.resume(drawn)
        generation.partial.seed = generation.submit.sampling.seed

    async def _echo(self, generation: Generation, prompt: RawPrompt) -> TextDelta:
        """The prompt, for a reply that starts with it.

        Its log probabilities come from a reply in which every token is forced. A step verifies many tokens, and the
        request itself then finds the cells in the tree.
        """
        request, tokens = generation.request, generation.encoded.tokens
        n_logprobs = request.sampling.logprobs
        logprobs: list[TokenLogprobs] = []
        if n_logprobs is not None and len(tokens) > 1:
            forced = ForcedTokens(tokens[1:], self.card.vocabulary)
            submit = Submit(
                _echo_id(request.request_id),
                tokens=tokens[:1],
                sampling=Sampling(max_tokens=len(forced), logprobs=n_logprobs, ignore_eos=True),
                scope=request.scope,
                program_arrival=request.program_arrival,
                matcher=forced,
                weight=request.weight,
                cells=request.cells,
                priority=request.priority,
                root=request.root or request.program_id,
                cache_salt=request.cache_salt,
            )
            ended, logprobs = await _run_to_end(self.bridge, submit)
            generation.work += ended.usage.work
            if not isinstance(ended, Finished):
                raise error_of(ended.error)
        return self.text.echoed(prompt, generation.encoded, None if n_logprobs is None else logprobs)

    async def _prefill(self, request: GenerateRequest) -> Completed | Errored:
        """Compute the beginning of a program's next prompt, without drawing anything."""
        if not isinstance(request.prompt, ChatPrompt):
            raise InvalidRequestError("background prefill needs chat messages", "prompt")
        encoded = await self.text.beginning(request.prompt, request.cache_scope, request.program_id)
        sampling, labels = Sampling(max_tokens=0), _labels(request, encoded)
        submit = replace(Submit.of(request), tokens=encoded.tokens, sampling=sampling, labels=labels)
        ended, _ = await _run_to_end(self.bridge, submit)
        if isinstance(ended, Finished):
            return Completed(ended.reason, ended.usage, ended.timing)
        return _errored(request, ended.error, ended.usage)

    # ---- after the engine ----

    def _batches(self, generation: Generation, events: Sequence[Event]) -> Iterator[tuple[Piece, ...]]:
        """The pieces of `events`, in one batch. A closed call alone goes out before the reply's end.

        The client can run the call from then on, without waiting for the work at the reply's end.
        """
        pieces: list[Piece] = []
        for event in events:
            if isinstance(event, Finished) and any(isinstance(each, ToolCallDelta) and each.closed for each in pieces):
                generation.partial.over = event.reason == "stop"
                yield generation.after_echo(pieces)
                pieces = []
            if isinstance(event, Started):
                pieces.append(event)
            elif isinstance(event, Tokens):
                pieces += self._read(generation, event)
            elif isinstance(event, Finished):
                pieces += self._complete(generation, event)
            else:
                pieces.append(_errored(generation.request, event.error, generation.usage(event)))
        if pieces:
            yield generation.after_echo(pieces)

    def _read(self, generation: Generation, drawn: Tokens) -> Sequence[Piece]:
        """The text of drawn tokens. If it ends the reply, stop the engine."""
        reply = generation.reply
        if reply.done:
            return ()  # drawn before the engine received the stop
        began = time.perf_counter()
        generation.partial.add(drawn.tokens, drawn.logprobs)
        pieces = reply.feed(drawn.tokens, drawn.logprobs)
        generation.validate_s += time.perf_counter() - began
        if reply.done:
            self.text.stopped += reply.calls_done
            self.bridge.thread.send(Stop(drawn.request_id, reply.completion_tokens - generation.submit.n_generated))
        return pieces

    def _complete(self, generation: Generation, ended: Finished) -> Sequence[Piece]:
        """The end of the reply, or nothing if a call in it has to be rewritten."""
        request, reply = generation.request, generation.reply
        if reply.rewrite is not None:
            return ()
        tail, reason = reply.finish("stop" if generation.over else ended.reason)
        reply.remember()
        waits_for, history = Called(), None
        if request.session is not None:
            history = None if ended.past is None else self.sessions.history(ended.past, ended.start)
        else:
            chat = request.prompt if isinstance(request.prompt, ChatPrompt) else None
            self.text.empty += reply.empty and chat is not None
            tools, cut = chat is not None and bool(chat.tools), reason == "length" or reply.unfinished
            text = "" if tools else reply.content
            waits_for = called(reply.calls, text, interface=tools, cut=cut, ends=request.program_end)
            if request.program_id:
                ids, turn = (request.request_id, request.scope, request.program_id), request.program_turns + 1
                self.notice(TurnEnded(*ids, waits_for.tools, waits_for.last, turn, request.answered_turns))
        usage, timing = generation.usage(ended), generation.timing(ended)
        if reply.calls_done and request.session is None and self.text.stopped % SAVED_EVERY == 0:
            task = asyncio.get_running_loop().create_task(self._count_saved(generation))
            self._going_on.add(task)
            task.add_done_callback(self._going_on.discard)
        return (*tail, Completed(reason, usage, timing, waits_for, reply.stop, history))

    async def _count_saved(self, generation: Generation) -> None:
        """Draw the tokens that a stopped reply would have had. No client sees or awaits them; all requests go first."""
        generation.go_on(generation.reply.tokens, None)
        submit, sampling = generation.submit, generation.submit.sampling
        submit = replace(
            submit,
            request_id=f"{submit.request_id}/saved",
            sampling=replace(sampling, max_tokens=min(sampling.max_tokens, SAVED_TOKENS)),
            program_id="",
            priority=Priority.BATCH,
            origin=Origin.EARLY_STOP,
            within_s=inf,
            begins=False,
        )
        ended, _ = await _run_to_end(self.bridge, submit)
        if isinstance(ended, Finished):
            self.text.saved += SAVED_EVERY * (ended.usage.completion - submit.n_generated)

    def _rewrites(self, generation: Generation, ended: Event) -> bool:
        """Prepare a second command if a call has to be rewritten. Returns whether there is one.

        There is no third command: the second one allows only declared tools.
        """
        rewrite = generation.reply.rewrite
        if rewrite is None or not isinstance(ended, Finished):
            return False
        self.text.rewritten += 1
        reply = self.text.reply(generation.request, generation.encoded, Constraints(rewrite.matcher))
        reply.feed(rewrite.tokens, rewrite.logprobs)  # the client has these pieces
        generation.partial.withdraw(len(rewrite.tokens))
        generation.reply, generation.first = reply, generation.first or ended
        generation.work += ended.usage.work
        generation.go_on(rewrite.tokens, rewrite.matcher)
        return True


@dataclass(slots=True)
class Generation:
    """The state of one request in the service."""

    request: GenerateRequest
    partial: PartialReply
    encoded: Encoded = field(init=False)
    submit: Submit = field(init=False)  # the engine's command
    reply: Reply = field(init=False)  # the reader of its tokens
    echo: TextDelta | None = None  # the prompt, if the reply starts with it
    begun: bool = False  # pieces were sent
    work: Work = NO_WORK  # of earlier commands: for the prompt's log probabilities, for a reply to be rewritten
    first: Finished | None = None  # end of the first command, if a second one follows
    over: bool = False  # another replica has drawn the whole reply
    render_s: float = 0.0
    validate_s: float = 0.0

    def resume(self, drawn: ReplyTokens) -> None:
        """Continue after the tokens that another replica has drawn. The matcher has consumed them."""
        self.reply.feed(drawn.tokens, drawn.logprobs)  # the client has these pieces
        self.go_on(drawn.tokens, self.submit.matcher)
        sampling = self.submit.sampling
        if drawn.seed is not None:
            sampling = replace(sampling, seed=drawn.seed)
        self.over = drawn.over or self.reply.done  # only the event of its end was lost
        self.submit = replace(self.submit, sampling=replace(sampling, max_tokens=0) if self.over else sampling)

    def go_on(self, drawn: Sequence[int], matcher: Matcher | None) -> None:
        """Make the command that continues after these tokens of the reply.

        Noise and penalties stay the same, so it draws the tokens that the previous command would have drawn, unless
        the grammar forbids them.
        """
        submit, sampling = self.submit, self.submit.sampling
        prompt = submit.tokens[: len(submit.tokens) - submit.n_generated]
        if sampling.seed is None and sampling.temperature > 0 and submit.session is None:
            sampling = replace(sampling, seed=prompt_seed(prompt))  # for a session the engine knows the whole prompt
        self.submit = replace(
            submit,
            tokens=np.concatenate((prompt, np.array(drawn, np.int32))),
            sampling=replace(sampling, max_tokens=sampling.max_tokens + submit.n_generated - len(drawn)),
            matcher=matcher,
            n_generated=len(drawn),
        )

    def after_echo(self, pieces: list[Piece]) -> tuple[Piece, ...]:
        """`pieces`, the first of them after the echoed prompt, unless the reply failed."""
        begun, self.begun = self.begun, True
        return tuple(pieces) if begun or self.echo is None or isinstance(pieces[-1], Errored) else (self.echo, *pieces)

    def usage(self, ended: Terminal) -> Usage:
        """Usage of the reply as the client has it, without withdrawn tokens.

        With log probabilities of an echoed prompt all of the prompt was computed, so none counts as cached.
        """
        first, reply = (self.first or ended).usage, self.reply
        cached = 0 if self.echo is not None and self.echo.logprobs else first.cached
        return Usage(
            first.prompt, cached, reply.completion_tokens, reply.reasoning_tokens, ended.usage.work + self.work
        )

    def timing(self, ended: Finished) -> Timing:
        """From the arrival of the first command to the end of the last one."""
        first = (self.first or ended).timing
        return replace(first, finished=ended.timing.finished, render_s=self.render_s, validate_s=self.validate_s)


async def _collected(stream: AsyncGenerator[tuple[Piece, ...], None]) -> Answer | Errored:
    builder = AnswerBuilder()
    async with aclosing(stream):
        async for pieces in stream:
            builder.add(pieces)
    return builder.answer() or builder.error()


async def _limits(text: TextSide, compiling: CompilerThreads, request: GenerateRequest) -> Constraints:
    """The constraints on the reply. A guarantee that the client did not ask for is dropped if it would have to wait."""
    try:
        limits = await compiling.run(partial(text.constraints, request.prompt, request.cache_scope), request.scope)
        text.unguarded += limits.loose
        return limits
    except OverloadedError as error:
        if error.info.field != GUARANTEE:
            raise
    text.unguarded += 1
    return Constraints()


async def _run_to_end(bridge: Bridge, command: Request) -> tuple[Terminal, list[TokenLogprobs]]:
    """Run a command to its end. Returns its terminal event and the log probabilities of its tokens."""
    logprobs: list[TokenLogprobs] = []
    async with aclosing(bridge.run(command)) as steps:
        async for events in steps:
            logprobs += [each for event in events if isinstance(event, Tokens) for each in event.logprobs]
    ended = events[-1]
    assert isinstance(ended, Terminal)
    return ended, logprobs


def _echo_id(request_id: str) -> str:
    """The id of the command that computes the log probabilities of a request's prompt."""
    return f"{request_id}/prompt"


@dataclass(frozen=True, slots=True)
class SessionService:
    """The sessions of a service, by id within a scope (a tenant). `Service.stream` runs their operations.

    Text is tokenized piece by piece, unchanged; its special tokens count. Messages are rendered so that the history
    stays a prefix. A query of messages ends where the assistant's message starts, and a kept answer as the template
    ends it. A failed operation leaves the history unchanged.
    """

    _service: Service

    async def call(self, call: SessionCall) -> SessionState:
        """Execute a call. Raises InvalidRequestError for an unknown session, OverloadedError beyond a limit."""
        engine, questions, scope = self._service.engine, self._service.questions, call.scope
        facts, start = self._find(scope, call.session_id, call.life), None
        if isinstance(call, ForkSession):
            child = engine.session(scope, call.child_id)
            repeated = child is not None and child.past.life == call.child_life != ""
            if not repeated:
                await self._run(call)
            facts, start = self._find(scope, call.child_id, call.child_life), 0
        elif isinstance(call, CloseSession):
            await self._run(call)
        elif isinstance(call, AddQuestion):
            questions.add(facts, scope, call.question)
        elif isinstance(call, RemoveQuestion):
            questions.remove(facts, scope, call.question_id)
        else:
            start = call.start
            if call.question_id:
                questions.read(facts, scope, call.question_id)
        state = self._state(facts, scope)
        return state if start is None else replace(state, history=self.history(facts.past, start))

    def of(self, scope: str) -> list[SessionState]:
        """A tenant's open sessions."""
        return [self._state(facts, scope) for facts in self._service.engine.sessions(scope)]

    # ---- for the service: requests that operate on sessions ----

    async def opening(self, request: GenerateRequest) -> AsyncGenerator[tuple[Piece, ...], None]:
        """The reply to a request that opens its session. If the request fails, the session stays closed."""
        assert request.session is not None
        turn, scope, closes = request.session, request.scope, False
        try:
            try:
                facts = self._service.engine.session(scope, turn.session_id)
                if facts is None or facts.past.life != turn.life:
                    closes = True
                    await self._run(OpenSession(scope, turn.session_id, turn.appends, turn.done, life=turn.life))
                elif not turn.life:  # else opened by an earlier attempt
                    raise SessionExistsError(f"session {turn.session_id!r} is open already", "session_id")
                if isinstance(request.prompt, RawPrompt) and not len(request.prompt.content):
                    now, closes = time.monotonic(), False
                    history = self.history(SessionLog(turn.life, appends=turn.appends, done=turn.done), 0)
                    yield (Completed("stop", Usage(), Timing(now, finished=now), history=history),)
                    return
                async with aclosing(self._service._stream(request)) as stream:
                    async for pieces in stream:
                        closes = closes and not isinstance(pieces[-1], Completed)
                        yield pieces
            except SessionExistsError:
                closes = False  # another request opened the session
                raise
            finally:
                if closes:
                    command = CloseSession(scope, turn.session_id, life=turn.life, request_id=self._command_id())
                    self._service.bridge.thread.send(command)
        except HoldfastError as error:
            yield (_errored(request, error.info),)

    async def part(self, request: GenerateRequest, turn: SessionTurn) -> tuple[Encoded, TokenIds]:
        """The tokens that an operation adds to its history, and those that close a reply kept in it."""
        text, prompt, asks = self._service.text, request.prompt, request.sampling.max_tokens > 0
        if turn.opens and isinstance(prompt, RawPrompt):
            return await text.encoded(prompt, request.scope), NO_TOKENS
        facts = self._service.engine.session(request.scope, turn.session_id)
        begins = facts is not None and not len(facts.past.tokens) and (turn.opens or not facts.busy)
        closing = text.closing(prompt) if turn.keep and asks else NO_TOKENS
        return Encoded(await text.part(prompt, begins=begins, reply=asks, scope=request.scope)), closing

    def history(self, past: SessionLog, start: int) -> History:
        """A session's history from token `start` on."""
        tokens = past.tokens[start:].astype("<i4").tobytes()
        done = tuple(each for each in past.done if each.end > start)
        return History(past.life, start, tokens, past.appends, done, self._service.engine.session_idle_s)

    # ---- parts ----

    def _command_id(self) -> str:
        return f"session-operation-{next(self._service._session_operations)}"

    async def _run(self, command: OpenSession | ForkSession | CloseSession) -> None:
        with self._service.questions.client_request():
            ended, _ = await _run_to_end(self._service.bridge, replace(command, request_id=self._command_id()))
        if isinstance(ended, Aborted):
            raise UnavailableError("the session was closed meanwhile", "session_id")
        if not isinstance(ended, Finished):
            raise error_of(ended.error)

    def _find(self, scope: str, session_id: str, life: str) -> SessionFacts:
        facts = self._service.engine.session(scope, session_id)
        if facts is None or life not in ("", facts.past.life):
            raise UnknownSessionError(f"session {session_id!r} is not open", "session_id")
        return facts

    def _state(self, facts: SessionFacts, scope: str) -> SessionState:
        now, idle_s = time.monotonic(), self._service.engine.session_idle_s
        return SessionState(
            facts.session_id,
            len(facts.past.tokens),
            facts.past.appends,
            now - facts.opened,
            idle_s if facts.busy else max(facts.used + idle_s - now, 0.0),
            facts.busy,
            self._service.questions.of(facts, scope),
        )


def freeze_heap() -> None:
    """Exclude all present objects from garbage collection.

    With a model and its libraries a full collection takes a tenth of a second, in which every stream stalls.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def _load_in_passing_thread(config: EngineConfig, tell: Tell | None) -> LoadedRunner:
    """Load in a thread that ends afterwards, together with the team of OpenMP threads that torch gave it.

    With more such threads than cores the engine's own threads sleep when they wait for each other. Steps then took up
    to 1.7 times as long.
    """
    loaded: Future[LoadedRunner] = Future()

    def work() -> None:
        try:
            loaded.set_result(load_runner(config, tell))
        except BaseException as error:
            loaded.set_exception(error)

    thread = threading.Thread(target=work, name="loading", daemon=True)  # Ctrl-C need not wait for it
    thread.start()
    result = loaded.result()
    thread.join()
    return result


def read_preambles(path: str) -> list[ChatPrompt]:
    """Read shared prompt beginnings: a JSON list of objects with `messages` and maybe `tools`. Raises ConfigError."""
    try:
        items = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"shared preambles cannot be read: {error}", "shared_preambles") from error
    if not isinstance(items, list):
        raise ConfigError(f"{path} must hold a list", "shared_preambles")
    prompts = []
    for i, item in enumerate(items):
        known = isinstance(item, dict) and item.get("messages") and set(item) <= {"messages", "tools"}
        if not known or not all(isinstance(value, list) for value in item.values()):
            message = f"item {i} of {path} must be an object with the list `messages` and the optional list `tools`"
            raise ConfigError(message, "shared_preambles")
        prompts.append(ChatPrompt(item["messages"], item.get("tools", ())))
    return prompts


def _sampling(request: GenerateRequest, engine: Engine, eos: frozenset[int]) -> Sampling:
    """The request's sampling, completed: its length, its ends, and a random seed if prompts give none."""
    sampling, config = request.sampling, engine.config
    if sampling.min_tokens:
        sampling = replace(sampling, ends=eos | sampling.stop_token_ids)
    if sampling.max_tokens == -1:
        sampling = replace(sampling, max_tokens=config.context_length)  # the engine reduces it to the room left
    if sampling.seed is None and sampling.temperature > 0 and not config.prompt_seed:
        sampling = replace(sampling, seed=secrets.randbits(64))  # here, so that a second command uses the same
    return sampling


def _labels(request: GenerateRequest, encoded: Encoded) -> Labels:
    """Cache priorities of a prompt's tokens: from the request's hints, else from the roles of its messages."""
    prompt, ahead, starts, hints = request.prompt, request.background, encoded.starts, request.hints
    roles = [message["role"] for message in prompt.messages] if isinstance(prompt, ChatPrompt) else []
    roles = roles[: len(starts)]
    if ahead is not None:  # tokens without a hint are evicted last until the client uses them
        system = sum(role in SYSTEM_ROLES for role in roles)
        begin = starts[system] if system < len(starts) else 0
        hints = (Hint("tokens", Label(AHEAD, PRIORITIES[AHEAD], ahead.keep_s), begin), *hints)
    return labels_of(roles, starts, len(encoded.tokens), hints)


def _errored(request: GenerateRequest, error: ErrorInfo, used: Usage = NOTHING_USED) -> Errored:
    """The end of a failed reply. An error in the engine's `prompt` names the client's field instead."""
    if error.field == "prompt":
        if isinstance(request.prompt, ChatPrompt):
            error = replace(error, field="messages")
        elif request.session is not None:
            error = replace(error, field="text" if isinstance(request.prompt.content, str) else "tokens")
    return Errored(error, used)
