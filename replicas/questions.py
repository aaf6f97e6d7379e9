"""Standing questions: registered with a session, answered ahead while the engine has nothing else to do.

    append --> [stale] --engine idle--> asked (kept nowhere) --> [answered, up to this append]
                  ^                        |
                  '--- a client arrives ---'  given up, at once

Flash Queries of "Attention Once Is All You Need". An answer costs the question's own tokens, as any query of a session,
and a client reads it from memory. After several appends a question is asked once, of the history at that time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeAlias

from holdfast.replicas.errors import EngineError, InvalidRequestError, OverloadedError, UnknownQuestionError
from holdfast.replicas.requests import Answer, Errored, GenerateRequest, Question, QuestionState, SessionTurn, Usage
from holdfast.replicas.sessions import SessionFacts
from holdfast.replicas.stats import QuestionStats
from holdfast.replicas.types import Origin

log = logging.getLogger(__name__)

# Questions are asked one at a time on an idle engine: more of them, or longer answers, would never all be up to date.
SESSION_QUESTIONS = 8
TENANT_QUESTIONS = 64  # of all sessions of a tenant
QUESTION_TOKENS = 256  # most tokens of an answer

# Scope, id and opening time of a session. A later session of the same id has its own questions.
_Key: TypeAlias = tuple[str, str, float]


@dataclass(slots=True)
class StandingQuestion:
    """A question, its latest answer, and when it was asked. Of the stale questions, the one asked longest ago is next.

    `tried` is the number of the last append that it was asked for, `turn` grows with each time that it is asked.
    """

    state: QuestionState
    answered: float = 0.0
    tried: int = 0
    turn: int = 0


class Questions:
    """All standing questions of a replica. Used on one event loop.

    `ask` runs a request, `find` finds an open session, and `usage_of` tells the cost of a cancelled request.
    """

    def __init__(
        self,
        ask: Callable[[GenerateRequest], Awaitable[Answer | Errored]],
        find: Callable[[str, str], SessionFacts | None],
        usage_of: Callable[[str], Awaitable[Usage | None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = QuestionStats()
        self._ask = ask
        self._find = find
        self._usage_of = usage_of
        self._clock = clock
        self._standing: dict[_Key, dict[str, StandingQuestion]] = {}
        self._client_requests = 0  # clients' requests that run
        self._numbers = count(1)
        self._asking: asyncio.Future[Answer | Errored] | None = None
        self._worker: asyncio.Task[None] | None = None

    @contextmanager
    def client_request(self) -> Iterator[None]:
        """A client's request runs: cancel the question that is being asked, and ask none until the request ends."""
        self._client_requests += 1
        if self._asking is not None:
            self._asking.cancel()
        try:
            yield
        finally:
            self._client_requests -= 1
            self._wake()

    def add(self, facts: SessionFacts, scope: str, question: Question) -> None:
        """Register a question, unless the session has it.

        Raises OverloadedError for one too many, InvalidRequestError for an answer that may be too long.
        """
        most = question.sampling.max_tokens
        if not 0 < most <= QUESTION_TOKENS:
            message = f"an answer to a standing question has 1 to {QUESTION_TOKENS} tokens, not {most}"
            raise InvalidRequestError(message, "max_tokens")
        self._sweep()
        key, of_session = (scope, facts.session_id, facts.opened), self._of(facts, scope)
        if question.question_id in of_session:
            return
        if len(of_session) >= SESSION_QUESTIONS:
            raise OverloadedError(f"a session has at most {SESSION_QUESTIONS} standing questions", "session_id")
        if sum(len(each) for (owner, *_), each in self._standing.items() if owner == scope) >= TENANT_QUESTIONS:
            raise OverloadedError(f"a tenant has at most {TENANT_QUESTIONS} standing questions", "session_id")
        self._standing[key] = of_session | {question.question_id: StandingQuestion(QuestionState(question))}
        self.stats.standing += 1
        self._wake()

    def remove(self, facts: SessionFacts, scope: str, question_id: str) -> None:
        """Raises UnknownQuestionError."""
        self._one(facts, scope, question_id)
        del self._of(facts, scope)[question_id]
        self.stats.standing -= 1

    def read(self, facts: SessionFacts, scope: str, question_id: str) -> None:
        """A client reads the answer. Raises UnknownQuestionError."""
        state = self._one(facts, scope, question_id).state
        freshness = "none" if state.answer is None else "current" if state.seen == facts.past.appends else "stale"
        self.stats.reads[freshness] += 1

    def of(self, facts: SessionFacts, scope: str) -> tuple[QuestionState, ...]:
        """The questions of an open session, the oldest first."""
        now = self._clock()
        return tuple(
            replace(each.state, age_s=now - each.answered if each.state.answer else 0.0)
            for each in self._of(facts, scope).values()
        )

    async def close(self) -> None:
        for task in (self._worker, self._asking):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})

    # ---- asking ----

    def _wake(self) -> None:
        """Ask the stale questions, unless clients' requests run or it is done already."""
        if self._standing and not self._client_requests and (self._worker is None or self._worker.done()):
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        self._sweep()
        while not self._client_requests and (stale := self._stale()):
            await self._answer(*min(stale, key=lambda each: each[1].turn))

    def _stale(self) -> list[tuple[str, StandingQuestion, SessionFacts]]:
        """The questions of idle sessions that were not asked since the latest append, with scope and session."""
        stale = []
        for key, questions in self._standing.items():
            facts = self._session(key)
            if facts is not None and not facts.busy:
                stale += [(key[0], each, facts) for each in questions.values() if each.tried < facts.past.appends]
        return stale

    async def _answer(self, scope: str, standing: StandingQuestion, facts: SessionFacts) -> None:
        question = standing.state.question
        standing.turn = next(self._numbers)
        request = GenerateRequest(
            f"question-{standing.turn}",
            question.prompt,
            question.sampling,
            question.stop,
            scope,
            session=SessionTurn(facts.session_id, keep=False, standing=True),
            origin=Origin.QUESTION,
        )
        self._asking = asking = asyncio.ensure_future(self._ask(request))
        await asyncio.wait({asking})
        self._asking = None
        if asking.cancelled():
            self._count("given_up", await self._usage_of(request.request_id) or Usage())
            return
        standing.tried = facts.past.appends
        reply: Answer | Errored
        if (bug := asking.exception()) is None:
            reply = asking.result()
        else:  # this worker supervises the questions that it asks
            log.error("a standing question failed", exc_info=bug)
            reply = Errored(EngineError("the question could not be asked").info)
        if isinstance(reply, Errored):
            standing.state = replace(standing.state, error=reply.error)
        else:
            standing.state, standing.answered = QuestionState(question, reply, facts.past.appends), self._clock()
        self._count("failed" if isinstance(reply, Errored) else "answered", reply.usage)

    # ---- books ----

    def _session(self, key: _Key) -> SessionFacts | None:
        """The session of these questions; None if it is closed."""
        facts = self._find(*key[:2])
        return facts if facts is not None and facts.opened == key[2] else None

    def _of(self, facts: SessionFacts, scope: str) -> dict[str, StandingQuestion]:
        return self._standing.get((scope, facts.session_id, facts.opened), {})

    def _one(self, facts: SessionFacts, scope: str, question_id: str) -> StandingQuestion:
        question = self._of(facts, scope).get(question_id)
        if question is None:
            raise UnknownQuestionError(f"the session has no question {question_id!r}", "question_id")
        return question

    def _sweep(self) -> None:
        """Forget the questions of sessions that are closed."""
        self._standing = {key: each for key, each in self._standing.items() if each and self._session(key) is not None}
        self.stats.standing = sum(map(len, self._standing.values()))

    def _count(self, outcome: str, usage: Usage) -> None:
        self.stats.asked[outcome] += 1
        self.stats.tokens[outcome] += usage.prompt - usage.cached + usage.completion
