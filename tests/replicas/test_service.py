"""Text and engine together, over the shipped model: conversations, streams, stops, and freed resources."""

import asyncio
import json
import subprocess
import sys
import threading
import traceback
from contextlib import aclosing
from dataclasses import replace

import pytest
from cycles import left_in_cycles
from kv_audit import check_cache
from serving import serving, tool
from waiting import PATIENCE_S, until_async

from holdfast.replicas.config import EngineConfig
from holdfast.replicas.errors import ErrorKind
from holdfast.replicas.plan import Sampling
from holdfast.replicas.reports import exposition
from holdfast.replicas.requests import (
    Abort,
    Answer,
    ChatPrompt,
    Command,
    Completed,
    Errored,
    GenerateRequest,
    PartialReply,
    RawPrompt,
    Started,
    TextDelta,
    ToolCallDelta,
)
from holdfast.replicas.service import Service

CONFIG = EngineConfig(cells=8192, threads=1, max_sequences=40)
TEXT = {"type": "string"}
TOOLS = [
    tool("get_weather", "Get the current weather in a city.", city=TEXT),
    tool("search_flights", "Search for flights.", origin=TEXT, destination=TEXT),
]


def request(name: str, prompt, max_tokens: int = 40, stop: tuple[str, ...] = (), **sampling) -> GenerateRequest:
    if isinstance(prompt, str):
        prompt = RawPrompt(prompt)
    return GenerateRequest(name, prompt, Sampling(max_tokens=max_tokens, **sampling), stop)


async def test_a_conversation_computes_only_its_new_tokens():
    async with serving(CONFIG) as service:
        messages = [{"role": "user", "content": "What is the weather in Paris?"}]
        known = 0
        for turn in range(6):
            before = service.engine.stats.prompt_computed
            answer = await service.generate(request(f"t{turn}", ChatPrompt(list(messages), TOOLS)))
            computed = service.engine.stats.prompt_computed - before
            assert computed <= answer.usage.prompt - known + CONFIG.page_size
            assert answer.usage.cached == answer.usage.prompt - computed
            known = answer.usage.prompt + answer.usage.completion - 1
            calls = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.tool_calls
            ]
            messages.append({"role": "assistant", "content": answer.text, "tool_calls": calls})
            result = json.dumps({"temperature": 20 + turn})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls]
            if not calls:
                messages.append({"role": "user", "content": f"And in {('Rome', 'Oslo', 'Lima')[turn % 3]}?"})


async def test_a_closed_call_is_sent_at_once_though_steps_share_messages(monkeypatch):
    monkeypatch.setattr("holdfast.replicas.bridge.STREAM_INTERVAL_S", 3600.0)
    async with serving(CONFIG) as service:
        loop, step = asyncio.get_running_loop(), service.engine.step

        async def turns() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        def once_read(*told):
            """A step, once whoever reads the events of the one before has had the time for it."""
            asyncio.run_coroutine_threadsafe(turns(), loop).result(60)
            return step(*told)

        service.engine.step = once_read
        asked = [{"role": "user", "content": "Check the weather in Oslo and check the weather in Rome."}]
        batches = [pieces async for pieces in service.stream(request("a", ChatPrompt(asked, TOOLS), 200))]
        pieces = [(number, piece) for number, batch in enumerate(batches) for piece in batch]
        closing = [number for number, piece in pieces if isinstance(piece, ToolCallDelta) and piece.closed]
        assert len(closing) == len(set(closing)) == 2
        assert closing[-1] < len(batches) - 1


async def test_a_streamed_reply_begins_with_the_tokens_of_its_prompt():
    async with serving(CONFIG) as service:
        asked = replace(request("a", "The list: 1, 2, 3, 4,", 8), begins=True)
        for again in (False, True):
            pieces = [piece async for batch in service.stream(asked) for piece in batch]
            started = [piece for piece in pieces if isinstance(piece, Started)]
            assert started == pieces[:1]
            assert (started[0].prompt, started[0].cached) == (pieces[-1].usage.prompt, pieces[-1].usage.cached)
            assert (started[0].cached > 0) == again
            asked = replace(asked, request_id="b")
        assert not isinstance(await service.generate(replace(asked, request_id="c")), Errored)


async def test_a_call_does_not_wait_for_the_end_of_its_reply():
    """Even if one list of events has both the call and the end."""
    async with serving(CONFIG) as service:
        run = service.bridge.run

        async def at_once(*told):
            yield [event async for events in run(*told) for event in events]

        service.bridge.run = at_once
        asked = [{"role": "user", "content": "Check the weather in Oslo."}]
        drawing = PartialReply()
        stream = service.stream(request("a", ChatPrompt(asked, TOOLS), 200), drawing)
        batches = [(pieces, drawing.take()) async for pieces in stream]
        (told, drawn), (end, nothing) = batches
        assert isinstance(told[-1], ToolCallDelta)
        assert told[-1].closed
        assert isinstance(end[-1], Completed)
        assert drawn.tokens, "who goes on from here has the call and all that it was drawn of"
        assert not nothing.tokens


async def test_32_concurrent_streams_free_everything():
    async with serving(CONFIG) as service:
        asked = [request(f"r{i}", f"Number {i % 16} says", 30, ignore_eos=True) for i in range(32)]
        answers = await asyncio.gather(*map(service.generate, asked))
        texts = [answer.text for answer in answers]
        assert texts[:16] == texts[16:]  # the same prompts, whatever else is in the batch
        assert all(answer.usage.completion == 30 for answer in answers)
        now = service.engine.occupancy()
        assert (now.running, now.waiting, now.rows_taken, now.cells_held) == (0, 0, 0, 0)
        assert now.cells_free + now.cells_tree == now.cells_total
        check_cache(service.engine.cache)


async def test_closing_a_stream_aborts_it_within_two_steps():
    async with serving(CONFIG) as service:
        engine, thread = service.engine, service.bridge.thread
        drawn: list[int] = []  # when the engine was told
        send = thread.send

        def told(command: Command) -> None:
            if isinstance(command, Abort):
                drawn.append(engine.stats.completion)
            send(command)

        thread.send = told
        async with aclosing(service.stream(request("a", "Once", 4000, ignore_eos=True))) as stream:
            async for _ in stream:
                break
        await service.generate(request("b", "x", 1))
        assert engine.stats.ended["aborted"] == 1
        assert engine.stats.completion <= drawn[0] + 2 + 1
        assert engine.occupancy().cells_held == 0
        assert len(service.bridge._live) == 0


async def test_an_unmeetable_deadline_is_refused_during_a_step():
    """Before rendering, without waiting for the step. The estimate counts commands that the engine has not read."""
    async with serving(replace(CONFIG, max_sequences=1, session_rows=0)) as service:
        admission, runner = service.engine.scheduler.admission, service.engine._pipeline._runner
        admission.forecast.answer_s = lambda max_tokens, begins, before: 10.0 * (1 + before)
        held, goes_on, works = threading.Event(), threading.Event(), runner.begin

        def stalled(plan):
            held.set()
            goes_on.wait()
            return works(plan)

        running = asyncio.create_task(service.generate(request("a", "Once", 60, ignore_eos=True)))
        waiting = asyncio.create_task(service.generate(request("b", "x", 1)))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await until_async(lambda: service.engine.occupancy().waiting == 1 and service.engine.stats.completion)
                runner.begin = stalled
                await asyncio.to_thread(held.wait)
                unread = asyncio.create_task(service.generate(request("c", "x", 1)))
                await until_async(lambda: service.bridge.thread.unread == 1)
                late = await service.generate(replace(request("d", "x" * 99, 1), within_s=29.0))
                assert isinstance(late, Errored)
                assert (late.error.kind, late.usage.prompt) == (ErrorKind.DEADLINE, 0)
                assert service.engine.stats.not_begun["foreseen"] == 1
                turn = replace(request("e", "x", 1), within_s=29.0)
                goes_on_too = [
                    asyncio.create_task(service.generate(each))
                    for each in (replace(turn, within_s=99.0), replace(turn, request_id="f", program_turns=1))
                ]
                await until_async(lambda: service.bridge.thread.unread == 3)
        finally:
            runner.begin = works
            goes_on.set()
        await asyncio.gather(running, waiting, unread, *goes_on_too)
        assert service.engine.stats.not_begun["foreseen"] == 1


async def test_shared_preambles_are_cached_for_every_client(tmp_path):
    """The preamble and the client's prompt render to the same tokens."""
    system = [{"role": "system", "content": "You book trips, with great care. " * 20}]
    path = tmp_path / "preambles.json"
    path.write_text(json.dumps([{"messages": system, "tools": TOOLS}]))
    async with serving(replace(CONFIG, shared_preambles=str(path))) as service:
        shared = len(await service.tokenize(ChatPrompt(system, TOOLS)))
        for scope in "ab":
            said = ChatPrompt([*system, {"role": "user", "content": f"Hello, it is {scope}."}], TOOLS)
            answer = await service.generate(replace(request(scope, said, 4), scope=scope))
            assert answer.usage.cached > shared - 2 * CONFIG.page_size


async def test_a_stop_string_ends_the_reply_before_it():
    async with serving(CONFIG) as service:
        free = await service.generate(request("a", "The list: 1, 2, 3, 4,", 30, ignore_eos=True))
        stop = free.text[8:11]
        cut = await service.generate(request("b", "The list: 1, 2, 3, 4,", 30, (stop,), ignore_eos=True))
        assert (cut.reason, cut.stop) == ("stop", stop)
        assert cut.text == free.text[: free.text.index(stop)]
        assert cut.usage.completion <= free.usage.completion
        assert free.stop == ""


async def test_empty_chat_replies_are_counted():
    async with serving(CONFIG) as service:
        chat = ChatPrompt([{"role": "user", "content": "hello"}])
        told = await service.generate(request("a", chat, 5, ignore_eos=True))
        assert told.text.strip()
        assert service.text.stats.empty == 0
        cut = await service.generate(request("b", chat, 5, (told.text[0],), ignore_eos=True))
        assert (cut.text, service.text.stats.empty) == ("", 1)


async def test_logprobs_come_with_the_text_and_count_every_token():
    async with serving(CONFIG) as service:
        answer = await service.generate(request("a", "One two", 12, logprobs=3, ignore_eos=True))
        assert "".join(t.token for t in answer.logprobs) == answer.text
        assert all(len(t.top) == 3 and t.logprob <= 0 for t in answer.logprobs)
        assert all(t.logprob == max(a.logprob for a in t.top) for t in answer.logprobs)  # greedy


async def test_an_impossible_request_names_its_field():
    async with serving(CONFIG) as service:
        for prompt, kind, field in (
            (RawPrompt("a " * 9000), ErrorKind.TOO_LONG, "prompt"),
            (ChatPrompt([{"role": "user", "content": "a " * 9000}]), ErrorKind.TOO_LONG, "messages"),
            (RawPrompt([1, 10**6]), ErrorKind.INVALID, "prompt"),
            (RawPrompt([]), ErrorKind.INVALID, "prompt"),
        ):
            reply = await service.generate(request(field, prompt, 10))
            assert isinstance(reply, Errored)
            assert (reply.error.kind, reply.error.field) == (kind, field)


async def test_without_max_tokens_a_reply_fills_the_context():
    async with serving(EngineConfig(cells=8192, threads=1, context_length=64)) as service:
        reply = await service.generate(request("a", "hello", -1, ignore_eos=True))
        assert reply.reason == "length"
        assert reply.usage.prompt + reply.usage.completion == 64


async def test_a_replica_tells_its_metrics_and_load():
    async with serving(CONFIG) as service:
        async for pieces in service.stream(request("a", "hello", 5, ignore_eos=True)):
            last = pieces[-1]
            assert isinstance(last, TextDelta | Completed)
        text = exposition(service, "r-1")
        assert 'holdfast_completion_tokens_total{model="pocket",replica="r-1"} 5.0' in text
        assert 'outcome="finished"' in text
        assert service.engine.load().running == 0


LOADED_SCRIPT = """
import asyncio, gc, os, torch
from holdfast.replicas.config import EngineConfig
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import GenerateRequest, RawPrompt
from holdfast.replicas.service import Service

async def main():
    service = Service.load(EngineConfig(cells=1024, threads=2))
    await service.generate(GenerateRequest("r", RawPrompt("Hello"), Sampling(4)))
    before = len(os.listdir("/proc/self/task"))
    torch.ones(1 << 22).add_(1)
    print(len(gc.get_objects()), gc.get_freeze_count(), len(os.listdir("/proc/self/task")) - before)
    await service.close()

asyncio.run(main())
"""


def test_loading_leaves_a_small_heap_to_collect_and_no_extra_openmp_threads() -> None:
    """A full collection takes longer with more objects, and stalls every stream.

    OpenMP's threads sleep wherever they wait once there are more of them than cores; steps took 1.7 times as long. The
    loop's thread has no team yet: its first parallel work makes one.
    """
    told = subprocess.run([sys.executable, "-c", LOADED_SCRIPT], capture_output=True, text=True, check=True)
    looked_through, left_alone, new_threads = (int(each) for each in told.stdout.split()[-3:])
    assert left_alone > 100_000
    assert looked_through < left_alone / 10
    assert new_threads == 1


async def test_a_request_admitted_on_arrival_is_not_refused_after_encoding():
    """Its client would have waited in vain. Requests that are being encoded count as waiting."""
    async with serving(replace(CONFIG, max_sequences=1, session_rows=0)) as service:
        admission, encoded = service.engine.scheduler.admission, service.text.encoded
        admission.forecast.answer_s = lambda max_tokens, begins, before: 10.0 * (1 + before)
        goes_on = asyncio.Event()

        async def slowly(*asked):
            await goes_on.wait()
            return await encoded(*asked)

        async with asyncio.timeout(PATIENCE_S):
            running = asyncio.create_task(service.generate(request("a", "Once", 400, ignore_eos=True)))
            await until_async(lambda: service.engine.stats.completion)
            waiting = asyncio.create_task(service.generate(request("b", "x", 1)))
            await until_async(lambda: service.engine.occupancy().waiting == 1)
            service.text.encoded = slowly
            let_in = asyncio.create_task(service.generate(replace(request("c", "x", 1), within_s=25.0)))
            await until_async(lambda: service._n_coming == 1)
            refused = await service.generate(replace(request("d", "x", 1), within_s=25.0))
            assert isinstance(refused, Errored)
            assert refused.error.kind is ErrorKind.DEADLINE
            admission.forecast.answer_s = lambda max_tokens, begins, before: 30.0
            goes_on.set()
            assert isinstance(await let_in, Answer)
            await asyncio.gather(running, waiting)
        assert (service._n_coming, service.engine.stats.not_begun["refused"]) == (0, 0)


async def late(service: Service, name: str) -> None:
    """Refused, because its expected time exceeds its deadline."""
    answer = await service.generate(replace(request(name, "x", 4), within_s=0.0))
    assert isinstance(answer, Errored)
    assert answer.error.kind is ErrorKind.DEADLINE


async def left(service: Service, name: str) -> None:
    """Its client leaves during the reply."""
    answer = asyncio.create_task(service.generate(request(name, "x", 4000, ignore_eos=True)))
    await until_async(lambda: service.engine.occupancy().running)
    answer.cancel()
    await asyncio.wait([answer])
    del answer
    await until_async(lambda: not service.engine.occupancy().running and not len(service.bridge._live))


async def wrong(service: Service, name: str) -> None:
    assert isinstance(await service.generate(request(name, RawPrompt([10**6]), 4)), Errored)


async def whole(service: Service, name: str) -> None:
    await service.generate(request(name, ChatPrompt([{"role": "user", "content": "Weather in Oslo?"}], TOOLS), 20))


async def stream(service: Service, name: str) -> None:
    async for _ in service.stream(request(name, "Once", 20, ignore_eos=True)):
        pass


def stack_of(thread: threading.Thread) -> list[str]:
    """Names of the functions on a thread's stack."""
    frame = sys._current_frames().get(thread.ident)
    return [each.name for each in traceback.extract_stack(frame)]


@pytest.mark.parametrize("serve", [whole, stream, late, wrong, left])
def test_served_requests_leave_no_reference_cycles(serve):
    """Cycles need the collector, and a collection stalls every stream."""

    async def main():
        async with serving(replace(CONFIG)) as service:
            admission = service.engine.scheduler.admission
            admission.forecast.answer_s = lambda max_tokens, begins, before: 10.0
            admission._waiting.up_to = lambda rank: 1  # as if somebody waited
            for number in range(3):  # the first ones make what stays
                await serve(service, f"before {number}")
            with left_in_cycles() as found:
                for number in range(3):
                    await serve(service, str(number))
                thread = service.bridge.thread
                await until_async(lambda: "_waiting" in stack_of(thread))  # it has let go of its last step
            return found

    assert asyncio.run(main()) == {}


async def test_the_text_side_shares_nothing_between_salts():
    async with serving(CONFIG) as service:
        prompt = ChatPrompt([{"role": "user", "content": "What is the weather in Oslo?"}], tools=TOOLS)

        def known() -> tuple[int, int]:
            text = service.text
            return text.cache.reused, text._rule.cache_info().currsize

        for number, salt in enumerate(("", "x", "y"), 1):
            asked = GenerateRequest(f"r{number}", prompt, Sampling(max_tokens=4), scope="t", cache_salt=salt)
            assert isinstance(await service.generate(asked), Answer)
            assert known() == (0, number)
        assert isinstance(await service.generate(replace(asked, request_id="again")), Answer)
        assert known()[0] > 0
        assert known()[1] == 3


async def test_what_early_stop_saves_is_counted_by_replies_that_go_on_unseen(monkeypatch):
    """By those of a model that says more than one call: told to make one, it is stopped behind that."""
    monkeypatch.setattr("holdfast.replicas.service.SAVED_EVERY", 2)
    ask = [{"role": "user", "content": "What is the weather in Oslo and in Rome?"}]
    async with serving(CONFIG) as service:
        whole = await service.generate(request("whole", ChatPrompt(ask, TOOLS), temperature=0))
        alone = ChatPrompt(ask, TOOLS, parallel_tool_calls=False)
        one, _ = [await service.generate(request(name, alone, temperature=0)) for name in ("one", "other")]
        assert (len(one.tool_calls), one.tool_calls[0].arguments) == (1, whole.tool_calls[0].arguments)
        saved = whole.usage.completion - one.usage.completion
        assert saved > 0
        await until_async(lambda: service.text.saved)
        assert (service.text.stopped, service.text.saved) == (2, 2 * saved)
        assert service.engine.stats.own_requests["early_stop"] == 1
        told = exposition(service, "r-1")
        assert f'holdfast_early_stop_tokens_saved_total{{model="pocket",replica="r-1"}} {2 * saved}.0' in told
