"""Standing questions on a scripted engine: when they are asked, cancelled and reported."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.replicas import questions
from holdfast.replicas.errors import EngineError, InvalidRequestError, OverloadedError, UnknownQuestionError
from holdfast.replicas.plan import Sampling
from holdfast.replicas.questions import Questions
from holdfast.replicas.requests import (
    Answer,
    Errored,
    GenerateRequest,
    Question,
    QuestionState,
    RawPrompt,
    SessionLog,
    Timing,
    Usage,
)
from holdfast.replicas.sessions import SessionFacts


class World:
    """An engine that answers with the session's appends, once `go_on` is set. `asked`: the questions it received."""

    def __init__(self) -> None:
        self.now = 0.0
        past = SessionLog(tokens=np.zeros(10, np.int32), appends=1)
        self.sessions = {("t", name): SessionFacts(name, 1.0, 1.0, past, busy=False) for name in ("s", "other")}
        self.asked: list[str] = []
        self.go_on = asyncio.Event()
        self.fails = False
        self.questions = Questions(self.ask, lambda *key: self.sessions.get(key), self.drawn, lambda: self.now)

    async def ask(self, request: GenerateRequest) -> Answer | Errored:
        assert request.session is not None
        assert (request.session.keep, request.session.standing) == (False, True)
        assert isinstance(request.prompt, RawPrompt)
        self.asked.append(str(request.prompt.content))
        seen = self.sessions[request.scope, request.session.session_id].past.appends
        await self.go_on.wait()
        if self.asked[-1] == "bug":
            raise ValueError("bug")
        if self.fails:
            return Errored(EngineError("broke").info, Usage(12, 10, 1))
        return Answer(f"after {seen}", (), (), "stop", Usage(12, 10, 3), Timing(0.0))

    async def drawn(self, request_id: str) -> Usage | None:
        return Usage(12, 10, 2)

    def add(self, name: str, session: str = "s") -> None:
        self.questions.add(self.sessions["t", session], "t", Question(name, RawPrompt(name), Sampling(4)))

    def append(self, session: str = "s") -> None:
        facts = self.sessions["t", session]
        self.sessions["t", session] = replace(facts, past=replace(facts.past, appends=facts.past.appends + 1))

    def of(self, session: str = "s") -> tuple[QuestionState, ...]:
        return self.questions.of(self.sessions["t", session], "t")


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def asking(*added: str) -> AsyncIterator[World]:
    """A world with these questions."""
    world = World()
    for name in added:
        world.add(name)
    yield world
    await world.questions.close()


async def test_no_question_is_asked_while_a_client_request_runs() -> None:
    async with asking() as world:
        with world.questions.client_request():
            with world.questions.client_request():
                world.add("q")
            await turns()
            assert world.asked == []
        await turns()
        assert world.asked == ["q"]


async def test_a_client_request_cancels_the_question_which_is_asked_again_later() -> None:
    async with asking("q") as world:
        await turns()
        with world.questions.client_request():
            await turns()
            assert world.questions.stats.asked["given_up"] == 1
            assert world.questions.stats.tokens["given_up"] == 4  # two of the question, two drawn
            world.append()
        world.go_on.set()
        await turns()
        (state,) = world.of()
        assert (world.asked, state.seen) == (["q", "q"], 2)
        assert state.answer is not None
        assert state.answer.text == "after 2"


@given(bursts=st.lists(st.integers(1, 5), max_size=6))
def test_several_appends_are_answered_once(bursts: list[int]) -> None:
    async def main() -> None:
        async with asking("q") as world:
            world.go_on.set()
            await turns()
            for n in bursts:
                with world.questions.client_request():
                    for _ in range(n):
                        world.append()
                await turns()
            assert world.asked == ["q"] * (1 + len(bursts))
            (state,) = world.of()
            assert state.seen == 1 + sum(bursts)

    asyncio.run(main())


async def test_the_question_asked_longest_ago_is_next() -> None:
    async with asking(*"ab") as world:
        await turns()
        for _ in range(3):
            with world.questions.client_request():
                await turns()
            await turns()
        assert world.asked == ["a", "b", "a", "b"]


async def test_a_failed_question_keeps_its_last_answer_and_is_retried_after_the_next_append() -> None:
    async with asking("q") as world:
        world.go_on.set()
        await turns()
        world.fails = True
        for n in (2, 2):
            with world.questions.client_request():
                if world.sessions["t", "s"].past.appends < n:
                    world.append()
            await turns()
        (state,) = world.of()
        assert (len(world.asked), state.seen) == (2, 1)
        assert state.answer is not None
        assert state.error is not None
        assert world.questions.stats.asked == {"answered": 1, "given_up": 0, "failed": 1}
        world.fails = False
        with world.questions.client_request():
            world.append()
        world.now += 5.0
        await turns()
        world.now += 2.0
        (state,) = world.of()
        assert (state.seen, state.error, state.age_s) == (3, None, 2.0)


async def test_an_unexpected_error_fails_one_question_only(caplog: pytest.LogCaptureFixture) -> None:
    async with asking("bug", "q") as world:
        world.go_on.set()
        await turns()
        one, two = world.of()
        assert (one.answer, one.error is None) == (None, False)
        assert two.answer is not None
    assert "a standing question failed" in caplog.text


async def test_reads_are_counted_as_current_stale_or_none() -> None:
    async with asking("q") as world:
        facts = world.sessions["t", "s"]
        world.questions.read(facts, "t", "q")
        world.go_on.set()
        await turns()
        world.questions.read(facts, "t", "q")
        world.append()
        world.questions.read(world.sessions["t", "s"], "t", "q")
        assert world.questions.stats.reads == {"none": 1, "current": 1, "stale": 1}
        with pytest.raises(UnknownQuestionError):
            world.questions.read(facts, "t", "another")


async def test_questions_are_limited_and_end_with_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "SESSION_QUESTIONS", 4)
    monkeypatch.setattr(questions, "TENANT_QUESTIONS", 6)
    async with asking(*"abcd") as world:
        with pytest.raises(OverloadedError, match="a session"):
            world.add("e")
        for name in "ef":
            world.add(name, "other")
        with pytest.raises(OverloadedError, match="a tenant"):
            world.add("g", "other")
        facts = world.sessions["t", "s"]
        for most in (0, -1, questions.QUESTION_TOKENS + 1):
            with pytest.raises(InvalidRequestError) as raised:
                world.questions.add(facts, "t", Question("q", RawPrompt("q"), Sampling(most)))
            assert raised.value.field == "max_tokens"
        world.sessions["t", "s"] = replace(facts, opened=2.0)  # closed, and another one opened
        assert world.of() == ()
        with pytest.raises(UnknownQuestionError):
            world.questions.remove(world.sessions["t", "s"], "t", "a")
        world.add("g", "other")  # there is room again
        assert world.questions.stats.standing == 3


async def test_a_session_without_a_history_is_not_asked() -> None:
    async with asking() as world:
        world.sessions["t", "s"] = replace(world.sessions["t", "s"], past=SessionLog())
        world.add("q")
        await turns()
        assert world.asked == []
