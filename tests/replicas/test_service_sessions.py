"""Sessions over the shipped model: append, query, fork, close. Answers equal those to the whole prompt."""

import asyncio
from itertools import count

import pytest
from serving import serving

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import (
    ContextLengthError,
    InvalidRequestError,
    OverloadedError,
    SessionExistsError,
    UnavailableError,
    UnknownSessionError,
    error_of,
)
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import (
    NO_PROMPT,
    Answer,
    ChatPrompt,
    CloseSession,
    Errored,
    ForkSession,
    GenerateRequest,
    RawPrompt,
    SessionTurn,
    Usage,
)
from holdfast.replicas.service import Service

CONFIG = EngineConfig(cells=4096, threads=1, max_sequences=8, session_rows=2, context_length=512)
TWELVE = Sampling(max_tokens=12, ignore_eos=True)


class Client:
    """Appends to, asks, forks and closes sessions of a service. Raises their errors."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.numbers = count()

    async def generate(
        self, content, sampling: Sampling, session: SessionTurn | None = None, scope: str = ""
    ) -> Answer:
        prompt = content if isinstance(content, ChatPrompt | RawPrompt) else RawPrompt(content)
        request = GenerateRequest(f"r{next(self.numbers)}", prompt, sampling, scope=scope, session=session)
        reply = await self.service.generate(request)
        if isinstance(reply, Errored):
            raise error_of(reply.error)
        return reply

    async def append(self, session: str, content, scope: str = "", opens: bool = False) -> Usage:
        return (await self.generate(content, Sampling(max_tokens=0), SessionTurn(session, opens=opens), scope)).usage

    async def open(self, session: str, prompt=NO_PROMPT, scope: str = "") -> Usage:
        return await self.append(session, prompt, scope, opens=True)

    async def ask(self, session: str, question: str, keep: bool = True) -> Answer:
        return await self.generate(question, TWELVE, SessionTurn(session, keep))

    async def fork(self, session: str, child: str) -> None:
        await self.service.sessions.call(ForkSession("", session, child))

    async def close(self, session: str) -> None:
        await self.service.sessions.call(CloseSession("", session))


async def test_append_query_fork_and_close():
    async with serving(CONFIG) as service:
        sessions, stats = Client(service), service.engine.stats
        chat = ChatPrompt([{"role": "user", "content": "Here is a log, line by line."}])
        usage = await sessions.open("s", chat)
        known = (await service.text.part(chat, begins=True, reply=False)).tolist()
        asked_for = await service.tokenize(chat)
        assert usage.prompt == len(known)
        assert known == asked_for[: len(known)] != asked_for  # a reply begins where it is asked for
        lines = [f"\nline {i}: the temperature is {20 + i}." for i in range(6)]
        await asyncio.gather(*(sessions.append("s", line) for line in lines))
        encode = service.text.tokenizer.backend_tokenizer.encode
        known += [token for line in lines for token in encode(line, add_special_tokens=False).ids]
        question = encode("\nLast?", add_special_tokens=False).ids
        await sessions.fork("s", "copy")

        before = stats.prompt_computed
        first = await sessions.ask("s", "\nLast?", keep=False)
        assert stats.prompt_computed - before <= len(question) + CONFIG.page_size
        assert first.usage.prompt == len(known) + len(question)

        whole = await sessions.generate(known + question, TWELVE)
        others = [await sessions.ask(session, "\nLast?") for session in ("copy", "s")]
        assert first.text == whole.text == others[0].text == others[1].text

        await sessions.close("s")
        await sessions.close("copy")
        now = service.engine.occupancy()
        assert (now.sessions, now.rows_taken, now.cells_held, len(service.bridge._live)) == (0, 0, 0, 0)
        assert service.engine.cache.cells.in_use == 0


async def test_an_impossible_operation_raises_and_names_its_field():
    async with serving(CONFIG) as service:
        sessions = Client(service)
        await sessions.open("s", scope="tenant")
        for call, kind, field in (
            (sessions.append("s", "x"), UnknownSessionError, "session_id"),  # another tenant's
            (sessions.open("s", scope="tenant"), SessionExistsError, "session_id"),
            (sessions.append("s", "word " * 600, scope="tenant"), ContextLengthError, "text"),
            (sessions.ask("never", "hello"), UnknownSessionError, "session_id"),
            (sessions.close("never"), UnknownSessionError, "session_id"),
        ):
            with pytest.raises(kind) as raised:
                await call
            assert raised.value.field == field
        with pytest.raises(ContextLengthError):
            await sessions.open("too long", RawPrompt("word " * 600))
        with pytest.raises(UnknownSessionError):  # it is open as a whole or not at all
            await sessions.append("too long", "x")
        await sessions.open("t")
        with pytest.raises(OverloadedError):
            await sessions.open("u")
        appends = [asyncio.create_task(sessions.append("t", [5, 6, 7])) for _ in range(3)]
        await asyncio.sleep(0)
        await sessions.close("t")
        for outcome in await asyncio.gather(*appends, return_exceptions=True):
            assert not isinstance(outcome, Exception) or isinstance(outcome, InvalidRequestError | UnavailableError)


@pytest.mark.parametrize("kind", [InvalidRequestError, ContextLengthError, OverloadedError, UnavailableError])
def test_an_error_survives_as_data(kind):
    back = error_of(kind("message", "field").info)
    assert (type(back), back.message, back.field) == (kind, "message", "field")
