"""Standing questions: registered with a session, answered ahead while the engine has nothing else to do.

    append --> [stale] --engine idle--> asked (kept nowhere) --> [answered, up to this append]
                  ^                        |
                  '----- somebody came ----'  given up, at once

Flash Queries of "Attention Once Is All You Need". An answer costs the question's own tokens, as any query of a session,
and a client reads it from memory. After several appends a question is asked once, of the history at that time.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import count

from holdfast.replicas.errors import EngineError, ErrorInfo, InvalidRequestError, OverloadedError, UnknownQuestionError
from holdfast.replicas.requests import (
    Answer,
    AnswerBuilder,
    GenerateRequest,
    Piece,
    Question,
    QuestionState,
    SessionTurn,
    Usage,
)
from holdfast.replicas.sessions import SessionFacts
from holdfast.replicas.stats import QuestionStats
from holdfast.replicas.types import Origin

log = logging.getLogger(__name__)

# Questions are asked one at a time on an idle engine: more of them, or longer answers, would never all be up to date.
SESSION_QUESTIONS = 8
TENANT_QUESTIONS = 64  # of all sessions of a tenant
QUESTION_TOKENS = 256  # most tokens of an answer

Ask = Callable[[GenerateRequest], AsyncGenerator[tuple[Piece, ...], None]]
Find = Callable[[str, str], SessionFacts | None]
UsageOf = Callable[[str], Awaitable[Usage | None]]


@dataclass(slots=True)
class StandingQuestion:
    """A question and its latest answer. `seen`: the last append it covers; `tried`: the last append asked for."""

    question: Question
    answer: Answer | None = None
    seen: int = 0
    answered: float = 0.0
    error: ErrorInfo | None = None
    tried: int = 0
    turn: int = 0  # when it was asked last: of stale questions the one that waited longest is next


@dataclass(slots=True)
class Board:
    """The questions of the session that was opened at `opened`; a later session of the same id has its own."""

    scope: str
    session_id: str
    opened: float
    standing: dict[str, StandingQuestion] = field(default_factory=dict)


class Questions:
    """All standing questions of a replica. Used on one event loop.

    `ask` runs a request, `find` finds an open session, and `usage_of` tells the cost of a cancelled request.
    """

    def __init__(self, ask: Ask, find: Find, usage_of: UsageOf, clock: Callable[[], float] = time.monotonic) -> None:
        self.stats = QuestionStats()
        self._ask = ask
        self._find = find
        self._usage_of = usage_of
        self._clock = clock
        self._boards: dict[tuple[str, str], Board] = {}
        self._others = 0  # clients' requests that run
        self._numbers = count(1)
        self._due = asyncio.Event()
        self._asking: asyncio.Task[AnswerBuilder] | None = None
        self._worker: asyncio.Task[None] | None = None

    @contextmanager
    def others(self) -> Iterator[None]:
        """A client's request runs: cancel the question that is being asked, and ask none until the request ends."""
        self._others += 1
        if self._asking is not None:
            self._asking.cancel()
        try:
            yield
        finally:
            self._others -= 1
            if not self._others and self._boards:
                self._due.set()

    def add(self, facts: SessionFacts, scope: str, question: Question) -> None:
        """Register a question, unless the session has it.

        Raises OverloadedError for one too many, InvalidRequestError for an answer that may be too long.
        """
        most = question.sampling.max_tokens
        if not 0 < most <= QUESTION_TOKENS:
            told = f"an answer to a standing question has 1 to {QUESTION_TOKENS} tokens, not {most}"
            raise InvalidRequestError(told, "max_tokens")
        self._sweep()
        board = self._boards.get((scope, facts.session_id))
        if board is not None and question.question_id in board.standing:
            return
        n_session = len(board.standing) if board else 0
        n_tenant = sum(len(each.standing) for each in self._boards.values() if each.scope == scope)
        if n_session >= SESSION_QUESTIONS:
            raise OverloadedError(f"a session has at most {SESSION_QUESTIONS} standing questions", "session_id")
        if n_tenant >= TENANT_QUESTIONS:
            raise OverloadedError(f"a tenant has at most {TENANT_QUESTIONS} standing questions", "session_id")
        if board is None:
            board = self._boards[scope, facts.session_id] = Board(scope, facts.session_id, facts.opened)
        board.standing[question.question_id] = StandingQuestion(question)
        self._counted()
        self._due.set()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._work())

    def remove(self, facts: SessionFacts, scope: str, question_id: str) -> None:
        """Raises UnknownQuestionError."""
        board = self._board(facts, scope)
        if board is None or board.standing.pop(question_id, None) is None:
            raise unknown_question(question_id)
        if not board.standing:
            del self._boards[scope, facts.session_id]
        self._counted()

    def read(self, facts: SessionFacts, scope: str, question_id: str) -> None:
        """A client reads the answer. Raises UnknownQuestionError."""
        board = self._board(facts, scope)
        standing = board.standing.get(question_id) if board else None
        if standing is None:
            raise unknown_question(question_id)
        current = standing.seen == facts.appends
        self.stats.reads["none" if standing.answer is None else "current" if current else "stale"] += 1

    def of(self, facts: SessionFacts, scope: str) -> tuple[QuestionState, ...]:
        """The questions of an open session, the oldest first."""
        board, now = self._board(facts, scope), self._clock()
        return tuple(
            QuestionState(
                each.question, each.answer, each.seen, now - each.answered if each.answer else 0.0, each.error
            )
            for each in (board.standing.values() if board else ())
        )

    async def close(self) -> None:
        for task in (self._worker, self._asking):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})

    # ---- asking ----

    async def _work(self) -> None:
        while self._boards:
            await self._due.wait()
            self._due.clear()
            try:
                self._sweep()
                while not self._others and (found := self._stalest()) is not None:
                    await self._answer(*found)
            except Exception:  # the supervisor of this task
                log.exception("standing questions could not be asked; they are asked again when something changes")

    def _stalest(self) -> tuple[Board, StandingQuestion, SessionFacts] | None:
        """The question to ask next; None: all answers cover the latest append of their sessions."""
        stale = []
        for board in self._boards.values():
            facts = self._find(board.scope, board.session_id)
            if facts is not None and facts.opened == board.opened and not facts.busy:
                stale += [(board, each, facts) for each in board.standing.values() if each.tried < facts.appends]
        return min(stale, key=lambda found: found[1].turn, default=None)

    async def _answer(self, board: Board, standing: StandingQuestion, facts: SessionFacts) -> None:
        question = standing.question
        standing.turn = number = next(self._numbers)
        request = GenerateRequest(
            f"question-{number}",
            question.prompt,
            question.sampling,
            question.stop,
            board.scope,
            session=SessionTurn(board.session_id, keep=False, standing=True),
            origin=Origin.QUESTION,
        )
        self._asking = asyncio.ensure_future(self._collected(request))
        await asyncio.wait({self._asking})
        asking, self._asking = self._asking, None
        if asking.cancelled():
            used = await self._usage_of(request.request_id)
            self._count("given_up", used or Usage())
            return
        standing.tried = facts.appends
        if (bug := asking.exception()) is not None:  # this worker supervises the questions that it asks
            log.error("a standing question failed", exc_info=bug)
            standing.error = EngineError("the question could not be asked").info
            self._count("failed", Usage())
            return
        built = asking.result()
        answer = built.answer()
        if answer is None:
            failed = built.error()
            standing.error = failed.error
            self._count("failed", failed.usage)
        else:
            standing.answer, standing.seen, standing.answered = answer, facts.appends, self._clock()
            standing.error = None
            self._count("answered", answer.usage)

    async def _collected(self, request: GenerateRequest) -> AnswerBuilder:
        built = AnswerBuilder()
        async with aclosing(self._ask(request)) as stream:
            async for pieces in stream:
                built.add(pieces)
        return built

    # ---- books ----

    def _board(self, facts: SessionFacts, scope: str) -> Board | None:
        board = self._boards.get((scope, facts.session_id))
        return board if board is not None and board.opened == facts.opened else None

    def _sweep(self) -> None:
        """Forget the questions of sessions that are closed."""
        for key, board in list(self._boards.items()):
            facts = self._find(*key)
            if facts is None or facts.opened != board.opened:
                del self._boards[key]
        self._counted()

    def _counted(self) -> None:
        self.stats.standing = sum(len(each.standing) for each in self._boards.values())

    def _count(self, outcome: str, usage: Usage) -> None:
        self.stats.asked[outcome] += 1
        self.stats.tokens[outcome] += usage.prompt - usage.cached + usage.completion


def unknown_question(question_id: str) -> UnknownQuestionError:
    return UnknownQuestionError(f"the session has no question {question_id!r}", "question_id")
