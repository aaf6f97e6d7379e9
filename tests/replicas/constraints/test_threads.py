"""A grammar that takes long to compile holds up its own tenant and nobody else, and no one for ever."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from holdfast.replicas.constraints.compiler import Compiler, CompilerThreads
from holdfast.replicas.constraints.grammar import ReplyRule, Schema
from holdfast.replicas.constraints.guidance import Grammars, Vocabulary
from holdfast.replicas.constraints.matcher import Matcher
from holdfast.replicas.errors import OverloadedError, UnavailableError
from holdfast.replicas.text.calls.formats import ToolFormat

PATIENT = 20.0


def about(name: str) -> ReplyRule:
    return ReplyRule(json=Schema({"type": "object", "title": name}, True, "response_format"))


class Slow:
    """A compiler whose grammars with "slow" in their title are not ready before `release`."""

    def __init__(self, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiler = Compiler(lambda: Vocabulary(tokenizer, frozenset(), frozenset({2})), ToolFormat.HERMES, 16)
        self.begun, self.release = threading.Semaphore(0), threading.Event()
        compile = Grammars.compile

        def held(grammars: Grammars, lark: str) -> Any:
            if "slow" in lark:
                self.begun.release()
                assert self.release.wait(PATIENT)
            return compile(grammars, lark)

        monkeypatch.setattr(Grammars, "compile", held)

    def run(self, threads: CompilerThreads, name: str, scope: str | None) -> Coroutine[Any, Any, Matcher]:
        return threads.run(partial(self.compiler.matcher, about(name)), scope)

    def runs(self, scenario: Callable[["Slow"], Awaitable[None]]) -> None:
        async def all_of_it() -> None:
            try:
                async with asyncio.timeout(PATIENT):
                    await scenario(self)
            finally:
                self.release.set()

        asyncio.run(all_of_it())


@pytest.fixture
def slow(qwen_like: Any, monkeypatch: pytest.MonkeyPatch) -> Slow:
    return Slow(qwen_like, monkeypatch)


async def begun(slow: Slow) -> None:
    assert await asyncio.to_thread(slow.begun.acquire, timeout=PATIENT)


def test_those_who_ask_for_one_grammar_take_one_thread(slow: Slow) -> None:
    async def scenario(slow: Slow) -> None:
        threads = CompilerThreads()
        making = [asyncio.create_task(slow.run(threads, "slow", scope)) for scope in "abcd"]
        await begun(slow)
        making += [asyncio.create_task(slow.run(threads, "slow", scope)) for scope in "aa"]
        assert not (await slow.run(threads, "other", "e")).failed
        assert not (await slow.run(threads, "another", "b")).failed
        assert not any(task.done() for task in making)
        slow.release.set()
        assert len({id(matcher) for matcher in await asyncio.gather(*making)}) == 6

    slow.runs(scenario)
    assert slow.compiler.compiled == 3


def test_a_tenant_has_one_thread_at_most(slow: Slow) -> None:
    async def scenario(slow: Slow) -> None:
        threads = CompilerThreads()
        own = [asyncio.create_task(slow.run(threads, f"slow {number}", "a")) for number in range(4)]
        await begun(slow)
        for number in range(3):
            assert not (await slow.run(threads, f"other {number}", "b")).failed
        assert not slow.begun.acquire(blocking=False)
        slow.release.set()
        await asyncio.gather(*own)

    slow.runs(scenario)
    assert slow.compiler.compiled == 7


def test_nobody_waits_for_ever_for_a_thread_or_a_grammar(slow: Slow) -> None:
    async def scenario(slow: Slow) -> None:
        threads = CompilerThreads(0.05)
        asked = [("slow", "a"), ("behind it", "a"), ("slow too", "b"), ("no place", "c"), ("slow", "d")]
        tasks = [asyncio.create_task(slow.run(threads, *each)) for each in asked]
        await asyncio.wait(tasks)
        for task in tasks:
            error = task.exception()
            assert isinstance(error, OverloadedError)
            assert error.field == "response_format"
            assert "too long to compile" in error.message
        for _ in range(2):
            await begun(slow)

        patient = CompilerThreads()
        waits = asyncio.create_task(slow.run(patient, "slow", "a"))
        slow.release.set()
        assert not (await waits).failed, "what was begun has gone on"

    slow.runs(scenario)
    assert slow.compiler.compiled == 2


def test_who_goes_leaves_the_queue_and_a_thread_that_is_done_its_place(slow: Slow) -> None:
    async def scenario(slow: Slow) -> None:
        threads = CompilerThreads()
        gone = [asyncio.create_task(slow.run(threads, f"slow {scope}", scope)) for scope in "ab"]
        for _ in gone:
            await begun(slow)
        gone += [asyncio.create_task(slow.run(threads, f"slow {scope}, later", scope)) for scope in "abc"]
        waits = asyncio.create_task(slow.run(threads, "other", "a"))
        await asyncio.sleep(0)  # each is in its queue
        for task in gone:
            task.cancel()
        await asyncio.wait(gone)
        assert all(task.cancelled() for task in gone)
        assert not waits.done()
        slow.release.set()
        assert not (await waits).failed
        await asyncio.gather(*(slow.run(threads, f"other {scope}", scope) for scope in "abcde"))

    slow.runs(scenario)
    assert slow.compiler.compiled == 8


def test_what_waits_for_a_place_when_it_closes_is_refused(slow: Slow) -> None:
    async def scenario(slow: Slow) -> None:
        threads = CompilerThreads()
        running = asyncio.create_task(slow.run(threads, "slow", "a"))
        await begun(slow)
        waits = asyncio.create_task(slow.run(threads, "other", "a"))
        await asyncio.sleep(0)
        threads.close()
        with pytest.raises(UnavailableError):
            await slow.run(threads, "another", "b")
        slow.release.set()
        assert not (await running).failed
        with pytest.raises(UnavailableError):
            await waits

    slow.runs(scenario)


def test_the_process_ends_beside_a_grammar_that_is_never_ready() -> None:
    script = """
import asyncio, threading
from holdfast.replicas.constraints import compiler as threads
from holdfast.replicas.constraints.compiler import NotCompiledError
threads._GRACE_S = 0.01
begun = threading.Event()
def ask():
    if threading.current_thread() is threading.main_thread():
        raise NotCompiledError("tools", None)
    begun.set()
    threading.Event().wait()
async def main():
    task = asyncio.create_task(threads.CompilerThreads().run(ask, "a"))
    await asyncio.to_thread(begun.wait)
    task.cancel()
asyncio.run(main())
print("over")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("over\n", "")
