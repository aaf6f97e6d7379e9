"""An agent's loop: when its tools begin, what goes ahead of a turn, and that nothing is left when it ends.

Laws on a client that is told what to answer, moment by moment; what a server does, on the router itself.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest
from calls_heard import weather
from fake_backend import CALL, DONE, FakeBackend, World
from hypothesis import given
from hypothesis import strategies as st
from service_backend import ServiceBackend, engine_served
from stub_server import DONE as END
from stub_server import Answer, Asked, chunk, stub_server
from waiting import go_by, run_virtual

from holdfast.loadgen.chat import ChatClient, Exchange, Failure, Gathered, OnPieces
from holdfast.loadgen.orchestrator import CallClosed, Orchestrator, Run, TextHeard, TurnFailedError
from holdfast.loadgen.toolbox import Toolbox
from holdfast.loadgen.workloads.words import filler
from holdfast.replicas.errors import ConfigError, UnavailableError
from holdfast.replicas.requests import Completed, GenerateRequest, Piece, TextDelta, ToolCallDelta
from holdfast.router.backend import ANYWHERE, Batch, RoutingHint

PATIENT = 60.0  # seconds a slow machine may take
Wait = Callable[[], Coroutine[Any, Any, None]]


def event(delta: dict[str, Any], reason: str | None = None) -> str:
    return json.dumps({"choices": [{"delta": delta, "finish_reason": reason}]})


def call_events(n: int) -> list[str]:
    """Data of events that call the tool `work` so many times, each in one piece, and end."""
    made = [{"name": "work", "arguments": json.dumps({"number": i})} for i in range(n)]
    calls = [{"index": i, "id": f"c{i}", "function": function} for i, function in enumerate(made)]
    return [*(event({"tool_calls": [call]}) for call in calls), event({}, "tool_calls"), "[DONE]"]


def marked(events: Sequence[str]) -> list[str]:
    """The same from Holdfast, which says that each call has closed."""
    return [
        event[:-1] + f', "holdfast": {{"tool_call_closed": {i}}}}}' if '"index"' in event else event
        for i, event in enumerate(events)
    ]


TEXT = [event({"content": "done"}, "stop"), "[DONE]"]
CUT_OFF = [event({}, "length"), "[DONE]"]


class FakeClient:
    """Answers turn by turn with events, or waits between them; a failure or an exception ends an answer.

    Keeps the requests and what they say. `prefill` gives status and answer of what is sent ahead.
    """

    def __init__(self, *turns: Sequence[str | Wait | Failure], holdfast: bool = False) -> None:
        self.turns = list(turns)
        self.holdfast = holdfast
        self.sent: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.calls: list[tuple[str, str, Any]] = []
        self.ended: list[int] = []  # statuses of deletes to come

    async def prefill(self, path: str, body: Any) -> tuple[int, Any]:
        return 404, None

    async def send(self, content: bytes, headers: Mapping[str, str], on_pieces: OnPieces) -> Exchange:
        self.sent.append(json.loads(content))
        self.headers.append(headers)
        answer, failure = Gathered(marked=self.holdfast), None
        for event in self.turns[len(self.sent) - 1]:
            if isinstance(event, Failure):
                failure = event
            elif isinstance(event, str):
                on_pieces(answer, answer.take(event))
            else:
                await event()
        return Exchange(0.0, 1.0, 1.0, 2.0, answer, failure)

    async def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        self.calls.append((method, path, json.loads(json.dumps(body))))
        if path.endswith("/heartbeat"):
            return 200, {}
        if method == "POST":
            return await self.prefill(path, body)
        return (self.ended.pop(0) if self.ended else 200), {}


def agent(client: Any, work: Callable[..., Any], **options: Any) -> Orchestrator:
    tools = Toolbox()
    tools.tool(name="work", **options.pop("limits", {}))(work)
    return Orchestrator(client, "m", tools, **{"split_after_s": 0.0, **options})


def finished(run: Coroutine[Any, Any, Run], virtual: bool = True) -> Run:
    """The run's end; it leaves no task. `virtual`: its time costs none, for there is no server."""

    async def alone() -> Run:
        try:
            async with asyncio.timeout(PATIENT):
                return await run
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return run_virtual(alone()) if virtual else asyncio.run(alone())


async def until(true: Callable[[], bool]) -> None:
    """Let the loop go on until this is so."""
    while not true():  # noqa: ASYNC110 (what is waited for has no event)
        await asyncio.sleep(0)


async def number(number: int) -> int:
    return number


def slow(seconds: float, each: float = 0.0) -> Callable[[int], Coroutine[Any, Any, int]]:
    """A tool that takes so long, and `each` longer for every call before."""

    async def work(number: int) -> int:
        await go_by(seconds + each * number)
        return number

    return work


def endless(cancelled: list[int], began: asyncio.Event) -> Callable[[int], Coroutine[Any, Any, None]]:
    """A tool that ends when it is cancelled."""

    async def work(number: int) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    return work


# ---- when tools begin ----


@pytest.mark.parametrize("holdfast", [False, True])
def test_a_tool_runs_while_the_answer_goes_on(holdfast: bool) -> None:
    ran = {i: asyncio.Event() for i in range(3)}

    async def work(number: int) -> None:
        ran[number].set()

    events: list[Any] = marked(call_events(3)) if holdfast else call_events(3)
    # Where nothing says so, a call is known to have closed by what follows it. The answer does not go on before.
    for at, event in ((3, 2), (2, 1), (1, 0)):
        events.insert(at if holdfast else at + 1, ran[event].wait)
    run = finished(agent(FakeClient(events, TEXT, holdfast=holdfast), work).run("go"))
    assert (run.text, run.reason, len(run.turns)) == ("done", "stop", 2)
    assert [outcome.call.call_id for outcome in run.outcomes] == ["c0", "c1", "c2"]


def test_without_dispatch_tools_wait_for_the_end_of_the_answer() -> None:
    began: list[int] = []

    async def work(number: int) -> None:
        began.append(number)

    async def look() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        assert began == []

    events = marked(call_events(2))
    client = FakeClient([*events[:2], look, *events[2:], look], TEXT, holdfast=True)
    run = finished(agent(client, work, dispatch=False).run("go"))
    assert began == [0, 1]
    assert len(run.outcomes) == 2


def test_callbacks_hear_text_and_calls_and_hurt_nobody() -> None:
    heard: list[Any] = []

    def fails(told: Any) -> None:
        raise OSError("mine")

    loop = agent(FakeClient(call_events(2), TEXT), number)
    loop.register_streaming_callback(fails)
    loop.register_streaming_callback(heard.append)
    run = finished(loop.run("go", "p"))
    assert [each.call.call_id for each in heard if isinstance(each, CallClosed)] == ["c0", "c1"]
    assert heard[-1] == TextHeard("p", "done")
    assert run.text == "done"


def test_a_call_that_is_cut_is_not_run_and_an_empty_answer_ends_the_run() -> None:
    client = FakeClient([*call_events(2)[:2], *CUT_OFF], TEXT)
    run = finished(agent(client, number).run("go"))
    assert [outcome.content for outcome in run.outcomes] == ["0"]
    assert [call["id"] for call in client.sent[1]["messages"][1]["tool_calls"]] == ["c0"]
    run = finished(agent(FakeClient(CUT_OFF), number).run("go"))
    assert (run.text, run.reason, run.messages[-1]) == ("", "length", {"role": "assistant", "content": ""})


def test_a_call_without_id_or_arguments_that_can_be_read_has_a_result() -> None:
    told = {"index": 0, "function": {"name": "work", "arguments": "{oops"}}
    client = FakeClient([event({"tool_calls": [told]}, "tool_calls"), "[DONE]"], TEXT)
    finished(agent(client, number).run("go"))
    _, said, result = client.sent[1]["messages"]
    assert said["tool_calls"][0]["function"] == {"name": "work", "arguments": "{}"}
    assert result["tool_call_id"] == said["tool_calls"][0]["id"] != ""
    assert "{oops" in result["content"]


def test_what_a_model_thought_goes_back_to_holdfast_only() -> None:
    for holdfast in (False, True):
        events = marked(call_events(1)) if holdfast else call_events(1)
        client = FakeClient([event({"reasoning_content": "hm"}), *events], TEXT, holdfast=holdfast)
        finished(agent(client, number).run("go"))
        assert client.sent[1]["messages"][1].get("reasoning_content") == ("hm" if holdfast else None)


def test_a_run_that_would_never_end_ends() -> None:
    client = FakeClient(*[marked(call_events(1))] * 3, holdfast=True)
    run = finished(agent(client, number, max_turns=3).run("go"))
    assert (run.reason, len(run.turns), len(run.outcomes)) == ("max_turns", 3, 2)
    assert [body.get("program_end", False) for body in client.sent] == [False, False, True]
    assert [method for method, _, _ in client.calls if method == "DELETE"] == []
    with pytest.raises(ConfigError):
        agent(client, number, max_turns=0)


# ---- what goes ahead ----


class TakesPrefills(FakeClient):
    """The API of prefills as it is agreed: what each handle has, by what came."""

    def __init__(self, *turns: Sequence[str | Wait | Failure], **more: Any) -> None:
        super().__init__(*turns, holdfast=True, **more)
        self.handles: dict[str, list[Any]] = {}
        self.at_once = 0

    async def prefill(self, path: str, body: Any) -> tuple[int, Any]:
        self.at_once += 1
        assert self.at_once == 1  # one after the other
        await asyncio.sleep(0)
        self.at_once -= 1
        if path == "/v1/prefills":
            assert body["model"] == "m"
            assert body["program_id"]
            handle = f"prefill_{len(self.handles)}"
            self.handles[handle] = list(body["messages"])
        else:
            handle = path.split("/")[3]
            assert body["messages"]
            self.handles[handle] += body["messages"]
        return 200, {"id": handle, "object": "prefill"}


@given(st.permutations(range(4)), st.lists(st.integers(0, 12), min_size=4, max_size=4))
def test_what_goes_ahead_is_the_beginning_of_the_next_turn_however_tools_come_back(
    order: list[int], rests: list[int]
) -> None:
    """It grows by results in the order of their calls; `rests` are moments of the loop before each result."""

    async def both() -> Run:
        may_end = [asyncio.Event() for _ in order]
        began = []

        async def work(number: int) -> str:
            began.append(number)
            await may_end[number].wait()
            return f"result {number}"

        run = asyncio.create_task(agent(client, work).run("go", "p"))
        await until(lambda: len(began) == len(order))
        for each, moments in zip(order, rests, strict=True):
            for _ in range(moments):
                await asyncio.sleep(0)
            may_end[each].set()
        return await run

    client = TakesPrefills(marked(call_events(4)), TEXT)
    run = asyncio.run(both())
    assert run.text == "done"
    before, asked = (body["messages"] for body in client.sent)
    assert [message["content"] for message in asked[len(before) + 1 :]] == [f"result {i}" for i in range(4)]
    assert len(client.handles) <= 1 <= sum(method == "POST" for method, _, _ in client.calls)
    for ahead in client.handles.values():
        assert len(ahead) > len(before)  # with the answer and its calls
        assert asked[: len(ahead)] == ahead
    assert run.ahead <= len(client.calls)


def test_a_server_that_knows_no_prefills_is_asked_once() -> None:
    client = FakeClient(call_events(1), call_events(1), TEXT, call_events(1), TEXT)
    loop = agent(client, slow(0.01))

    async def twice() -> Run:
        await loop.run("go")
        return await loop.run("go")

    assert finished(twice()).ahead == 0
    assert [path for _, path, _ in client.calls] == ["/v1/prefills"]
    assert loop.split is False


@pytest.mark.parametrize("fails", ["hangs", "away", "500", "expired", "no object"])
def test_a_prefill_that_fails_never_hurts(fails: str) -> None:
    class Fails(FakeClient):
        async def prefill(self, path: str, body: Any) -> tuple[int, Any]:
            if fails == "hangs":
                await asyncio.Event().wait()
            if fails == "away":
                raise UnavailableError("gone")
            if fails == "expired":
                return (404, {}) if path.endswith("extend") else (200, {"id": "prefill_1"})
            return (500, None) if fails == "500" else (200, "what")

    client = Fails(call_events(3), call_events(3), TEXT)
    loop = agent(client, slow(0.005, each=0.005))
    run = finished(loop.run("go"))
    assert run.text == "done"
    assert [json.loads(outcome.content) for outcome in run.outcomes] == [0, 1, 2] * 2
    assert loop.split
    assert [method for method, _, _ in client.calls].count("POST") >= 2  # tried again in the next pause


def test_a_server_that_keeps_nothing_for_so_long_is_asked_to_keep_it_as_it_likes() -> None:
    class Strict(TakesPrefills):
        async def prefill(self, path: str, body: Any) -> tuple[int, Any]:
            if body.get("keep_s", 0) > 600:
                return 400, {"error": {"param": "keep_s"}}
            return await super().prefill(path, body)

    client = Strict(marked(call_events(1)), TEXT)
    fields = {"temperature": 0, "chat_template_kwargs": {"a": 1}}
    assert finished(agent(client, slow(0.01), limits={"timeout_s": 900.0}, fields=fields).run("go")).ahead == 1
    first, second = (body for method, _, body in client.calls if method == "POST")
    assert first.pop("keep_s") > 900
    assert first == second
    assert second["chat_template_kwargs"] == {"a": 1}
    assert "temperature" not in second


def test_a_prompt_that_changes_with_the_conversation_is_sent_ahead_as_it_will_be() -> None:
    def prompt(messages: Sequence[Any]) -> Sequence[Any]:
        return [{"role": "system", "content": f"{sum(m['role'] == 'assistant' for m in messages)} answers"}, *messages]

    client = TakesPrefills(marked(call_events(1)), TEXT)
    finished(agent(client, slow(0.01), prompt=prompt).run("go"))
    (ahead,) = client.handles.values()
    assert client.sent[1]["messages"][: len(ahead)] == ahead
    assert ahead[0]["content"] == "1 answers"
    assert client.sent[0]["messages"][0]["content"] == "0 answers"


def test_nothing_goes_ahead_without_split_or_for_a_tool_that_is_soon_back() -> None:
    for options, ahead in (({"split": False}, 0), ({"split_after_s": PATIENT}, 0), ({"split_after_s": 0.0}, 1)):
        client = TakesPrefills(marked(call_events(1)), TEXT)
        assert finished(agent(client, slow(0.01), **options).run("go")).ahead == ahead, options


# ---- ends ----


@pytest.mark.parametrize("when", ["in the answer", "in the pause"])
def test_cancelling_a_run_cancels_its_tools_and_ends_its_program(when: str) -> None:
    began, cancelled = asyncio.Event(), []
    stuck = [asyncio.Event().wait] if when == "in the answer" else []
    client = TakesPrefills([*marked(call_events(2)), *stuck])

    async def run() -> Run:
        task = asyncio.create_task(agent(client, endless(cancelled, began)).run("go", "p/1"))
        await began.wait()
        if when == "in the pause":
            await until(lambda: bool(client.handles))
        await go_by(0.01)
        task.cancel()
        return await task

    with pytest.raises(asyncio.CancelledError):
        finished(run())
    assert sorted(cancelled) == [0, 1]
    deleted = [path for method, path, _ in client.calls if method == "DELETE"]
    assert deleted == (["/v1/prefills/prefill_0"] if when == "in the pause" else []) + ["/v1/programs/p%2F1"]


def test_a_turn_that_fails_ends_the_run_with_its_tools() -> None:
    began, cancelled = asyncio.Event(), []
    client = FakeClient([*marked(call_events(1))[:1], began.wait, Failure.CUT], holdfast=True)
    with pytest.raises(TurnFailedError) as failed:
        finished(agent(client, endless(cancelled, began)).run("go", "p"))
    assert failed.value.exchange.failure is Failure.CUT
    assert cancelled == [0]
    assert client.calls == [("DELETE", "/v1/programs/p", None)]


def test_a_program_is_ended_with_its_run_unless_it_is_kept() -> None:
    for holdfast, keep, deletes in ((True, False, 1), (True, True, 0), (False, False, 0)):
        client = FakeClient(TEXT, holdfast=holdfast)
        finished(agent(client, number).run("go", keep=keep))
        assert len(client.calls) == deletes
        assert client.headers[0]["x-session-id"]


def test_the_server_hears_that_a_run_goes_on_and_no_more_once_it_is_over() -> None:
    async def work(number: int) -> None:
        while len(client.calls) < 2:
            await go_by(0.01)

    client = FakeClient(marked(call_events(1)), TEXT, holdfast=True)
    finished(agent(client, work, split=False, heartbeat_s=0.01).run("go", "p"))
    *beats, (last, _, _) = client.calls
    assert beats == [("POST", "/v1/programs/p/heartbeat", {"within_s": 0.03})] * len(beats)
    assert (len(beats) >= 2, last) == (True, "DELETE")

    client = FakeClient(marked(call_events(1)), TEXT, holdfast=True)
    finished(agent(client, slow(0.1), split=False, heartbeat_s=0.01).run("go", "p", keep=True))
    assert client.calls == []


def test_a_replica_that_does_not_answer_is_told_again_that_a_program_is_over() -> None:
    client = FakeClient(TEXT, holdfast=True)
    client.ended = [503, 404]
    finished(agent(client, number).run("go"))
    assert len(client.calls) == 2


def test_a_tool_that_will_not_stop_does_not_hold_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.loadgen.orchestrator.END_S", 0.01)
    began, let_go = asyncio.Event(), asyncio.Event()

    async def work(number: int) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await let_go.wait()

    async def run() -> Run:
        client = FakeClient([*call_events(1)[:2], began.wait, Failure.CUT])
        try:
            return await agent(client, work).run("go")
        finally:
            let_go.set()
            await go_by(0.01)

    with pytest.raises(TurnFailedError):
        finished(run())


# ---- on the router ----


class Conversing(FakeBackend):
    """Answers each request with the next script; a step that is an event is waited for."""

    def __init__(self, *scripts: Sequence[Any]) -> None:
        super().__init__()
        self.scripts = list(scripts)

    async def stream(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> AsyncGenerator[Batch, None]:
        turns = sum(each.background is None for each in self.requests)
        self.script = [(DONE,)] if request.background is not None else self.scripts[turns]
        async for batch in super().stream(request, place):
            yield batch


TOLD: tuple[tuple[Piece, ...], ...] = ((TextDelta("It is "), TextDelta("sunny.")), (DONE,))
TWO: tuple[tuple[Piece, ...], ...] = (
    (ToolCallDelta(0, "call_1", "get_weather", '{"city":"Oslo"}', closed=True),),
    (ToolCallDelta(1, "call_2", "get_weather"), ToolCallDelta(1, arguments='{"city":')),
    (ToolCallDelta(1, arguments='"Rome"}', closed=True),),
    (Completed("tool_calls", DONE.usage, DONE.timing),),
)


def served(backend: FakeBackend, **options: Any) -> Run:
    async def run(url: str) -> Run:
        async with ChatClient(url, PATIENT) as client:
            return await Orchestrator(client, "pocket", weather(), **options).run("What is the weather?", "p")

    with World(backend).served() as address:
        return finished(run(address), virtual=False)


def test_a_run_on_the_router() -> None:
    backend = Conversing(TWO, CALL, TOLD)
    run = served(backend, fields={"temperature": 0.5})
    assert (run.text, run.reason, len(run.turns)) == ("It is sunny.", "stop", 3)
    assert {request.program_id for request in backend.requests} == {"default/p"}
    last = backend.requests[-1].prompt.messages
    assert [message["role"] for message in last] == ["user", "assistant", "tool", "tool", "assistant", "tool"]
    results = [message["content"] for message in last if message["role"] == "tool"]
    assert results == ["sunny in Oslo", "sunny in Rome", "sunny in Oslo"]
    assert backend.ended_programs == [("default", "default/p")]


def test_a_client_that_is_cancelled_in_an_answer_aborts_it_and_ends_the_program() -> None:
    backend = Conversing(TWO)
    backend.stall = 2

    async def run(url: str) -> None:
        async with ChatClient(url, PATIENT) as client:
            loop = Orchestrator(client, "pocket", weather())
            closed = asyncio.Event()
            loop.register_streaming_callback(lambda told: closed.set())
            task = asyncio.create_task(loop.run("What is the weather?", "p"))
            await closed.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with World(backend).served() as address:
        asyncio.run(run(address))
        assert backend.aborted.wait(PATIENT)
    assert backend.ended_programs == [("default", "default/p")]


def test_what_was_sent_ahead_is_found_by_the_next_turn() -> None:
    """The answer with its calls, and the first result, which came while the second tool ran."""

    class Ahead(ServiceBackend):
        computed = 0

        async def stream(self, request: GenerateRequest, place: RoutingHint = ANYWHERE) -> AsyncGenerator[Batch, None]:
            async for batch in super().stream(request, place):
                yield batch
            self.computed += request.sampling.max_tokens == 0

    async def tell(backend: Ahead, url: str, split: bool) -> Run:
        tools = Toolbox()

        @tools.tool
        async def get_weather(city: str) -> str:
            if split:
                wanted = 1 if city == "Oslo" else 2
                await until(lambda: backend.computed >= wanted)
            return f"{filler(city, 100)} in {city}"

        async with ChatClient(url, PATIENT) as client:
            fields = {"temperature": 0, "max_tokens": 200}
            loop = Orchestrator(client, "pocket", tools, fields, {"cache-control": "no-cache"}, split=split)
            return await loop.run("Check the weather in Oslo and check the weather in Rome.")

    cached, runs = {}, {}
    for split in (True, False):
        backend = Ahead()
        with engine_served(backend) as address:
            runs[split] = finished(tell(backend, address, split), virtual=False)
        called = [json.loads(outcome.call.arguments) for outcome in runs[split].outcomes]
        assert called == [{"city": "Oslo"}, {"city": "Rome"}]
        cached[split] = runs[split].turns[1].answer.cached_tokens
    assert (runs[True].ahead, runs[False].ahead) == (2, 0)
    assert runs[True].text == runs[False].text
    assert cached[True] > cached[False] + 100


# ---- on other servers ----


def test_a_run_on_a_server_that_knows_nothing_of_programs() -> None:
    def answer(asked: Asked) -> Answer:
        if asked.path != "/v1/chat/completions":
            return Answer.of(b"<html>", 404)
        if len(asked.body["messages"]) > 1:
            return Answer(((0.0, chunk({"content": "sunny"}) + END),))
        arguments = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        told = chunk({"tool_calls": [{"index": 0, "id": "a", "function": arguments}]})
        end = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}\n\n'
        return Answer(((0.0, told + end + END),))

    async def run(url: str) -> Run:
        async with ChatClient(url, PATIENT) as client:
            return await Orchestrator(client, "m", weather()).run("What is the weather?")

    with stub_server(answer) as stub:
        assert finished(run(stub.url), virtual=False).text == "sunny"
    turns = [asked for asked in stub.asked if asked.path == "/v1/chat/completions"]
    known = {"model", "messages", "tools", "stream", "stream_options"}
    assert all(set(asked.body) == known for asked in turns)
    assert not any(asked.method == "DELETE" for asked in stub.asked)
