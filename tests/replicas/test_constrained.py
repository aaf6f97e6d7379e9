"""Constrained replies over the real engine: they follow their schemas, however the engine computes them."""

import asyncio
import json
import sys
import threading
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from serving import serving

from holdfast.loadgen.bench.calls import is_whole
from holdfast.replicas.config import DraftConfig, EngineConfig
from holdfast.replicas.constraints import compiler
from holdfast.replicas.constraints.guidance import GuidedMatcher
from holdfast.replicas.errors import ErrorKind
from holdfast.replicas.plan import Sampling
from holdfast.replicas.requests import (
    Answer,
    AnswerBuilder,
    ChatPrompt,
    Completed,
    Errored,
    GenerateRequest,
    JsonOutput,
    ToolCallDelta,
)
from holdfast.replicas.service import Service, _limits
from holdfast.replicas.speculation import drafter

DRAFTS, NO_DRAFTS = DraftConfig(), DraftConfig(enabled=False)
CONFIG = EngineConfig(cells=8192, threads=1, speculation=NO_DRAFTS)


def tool(name: str, strict: bool = False, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


# Strings have an end here: a small model that may not say what it would may go on for ever.
WEATHER = tool(
    "get_weather", strict=True, city={"type": "string", "maxLength": 20}, unit={"enum": ["celsius", "fahrenheit"]}
)
FLIGHTS = tool(
    "search_flights", origin={"type": "string", "maxLength": 20}, seats={"type": "integer", "minimum": 1, "maximum": 9}
)
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 12},
        "sure": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["answer", "sure", "tags"],
    "additionalProperties": False,
}
USER = [{"role": "user", "content": "What is the weather in Paris?"}]
REQUIRED = ChatPrompt(USER, [WEATHER, FLIGHTS], "required")
NAMED = replace(REQUIRED, forced_tool="search_flights")
ANSWER = ChatPrompt(USER, output=JsonOutput(SCHEMA, strict=True))
AUTO = ChatPrompt(USER, [WEATHER, FLIGHTS])
PROMPTS = [REQUIRED, NAMED, ANSWER, AUTO]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.2},
    {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logprobs": 1},
]


def constrained(**settings: Any) -> AbstractAsyncContextManager[Service]:
    return serving(replace(CONFIG, **settings))


def request(name: str, prompt: ChatPrompt, max_tokens: int = 160, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(name, prompt, Sampling(max_tokens=max_tokens, **sampling))


async def answers(service: Service) -> list[Answer]:
    """Every prompt under every setting, all at once."""
    commands = [request(f"{i}.{j}", p, **s) for i, p in enumerate(PROMPTS) for j, s in enumerate(SETTINGS)]
    replies: list[Answer] = await asyncio.gather(*map(service.generate, commands))
    return replies


def said(replies: list[Answer]) -> list[Any]:
    return [(r.text, [(c.name, c.arguments) for c in r.tool_calls], r.reason, r.usage.completion) for r in replies]


def check(replies: list[Answer]) -> None:
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in (WEATHER, FLIGHTS)}
    for index, reply in enumerate(replies):
        prompt = PROMPTS[index // len(SETTINGS)]
        for call in reply.tool_calls:
            Draft202012Validator(schemas[call.name]).validate(json.loads(call.arguments))
        if prompt is ANSWER:
            assert reply.reason == "stop"
            Draft202012Validator(SCHEMA).validate(json.loads(reply.text))
        elif prompt in (NAMED, REQUIRED):
            assert (reply.text, reply.reason) == (None, "tool_calls")
            assert reply.tool_calls
            assert prompt is REQUIRED or [call.name for call in reply.tool_calls] == ["search_flights"]


ROOM = {"cells": 336, "context_length": 330, "page_size": 4, "admission_ceiling": 1.0, "completion_reserve": 1}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {  # the most forced tokens of a step, and settings
    "forced tokens one by one, narrow chunks": (0, {"step_tokens": 16, "speculation": DRAFTS}),
    "no drafts at all, the transformers model": (0, {"decoder": "transformers", "without": ("prefix_cache",)}),
    "little room": (3, ROOM),
}


async def test_replies_follow_their_schemas_and_do_not_depend_on_how_they_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with constrained(speculation=DRAFTS) as service:
        expected = await answers(service)
        check(expected)
        assert said(await answers(service)) == said(expected)
        assert service.engine.occupancy().cells_held == 0
    preempted = 0
    for way, (most_forced, settings) in WAYS.items():
        monkeypatch.setattr(drafter, "MOST_FORCED", most_forced)
        async with constrained(**settings) as service:
            assert said(await answers(service)) == said(expected), way
            preempted += service.engine.stats.preemptions
    assert preempted > 0


async def test_forced_tokens_take_no_steps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {}
    for forced in (0, 32):
        monkeypatch.setattr(drafter, "MOST_FORCED", forced)
        async with constrained() as service:
            reply = await service.generate(request("a", NAMED))
            steps[forced] = service.engine.stats.steps
            assert reply.usage.completion == steps[0]
    assert steps[32] < steps[0] * 0.7  # what a call consists of beside its values is forced


async def test_a_stream_says_what_the_whole_reply_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.replicas.bridge.STREAM_INTERVAL_S", 0.0)
    async with constrained() as service:
        for prompt in (REQUIRED, NAMED, ANSWER):
            whole = await service.generate(request("a", prompt))
            built, kinds = AnswerBuilder(), []
            async for pieces in service.stream(request("b", prompt)):
                built.add(pieces)
                kinds += map(type, pieces)
            assert said([built.answer()]) == said([whole])
            assert kinds[-1] is Completed
            assert (ToolCallDelta in kinds) is (prompt is not ANSWER)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (ChatPrompt(USER, output=JsonOutput({"type": "nothing"}, True)), "response_format.json_schema.schema"),
        (ChatPrompt(USER, [WEATHER, tool("f", True, a={"not": {"type": "string"}})]), "tools.1.function.parameters"),
    ],
)
async def test_a_schema_that_cannot_be_followed_is_an_error_with_its_field(prompt: ChatPrompt, field: str) -> None:
    async with constrained() as service:
        reply = await service.generate(request("a", prompt))
        assert isinstance(reply, Errored)
        assert (reply.error.kind, reply.error.field) == (ErrorKind.INVALID, field)
        assert len(service.bridge._live) == 0


FIRST = ("one", *(f"one-{i}" for i in range(1, compiler._THREADS)))


class Held:
    """Grammars that `service` compiles from here on, each held until all are released."""

    def __init__(self, service: Service) -> None:
        self._begun: asyncio.Queue[None] = asyncio.Queue()
        self._release = threading.Event()
        self._tasks: list[asyncio.Task[Any]] = []
        self._service = service
        self.compiler = service.text._compiler
        loop, compile = asyncio.get_running_loop(), self.compiler._compile

        def held(rule: Any) -> Any:
            loop.call_soon_threadsafe(self._begun.put_nowait, None)
            self._release.wait()
            return compile(rule)

        self.compiler._compile = held

    def ask(self, name: str) -> asyncio.Task[Any]:
        """A reply whose grammar nobody has asked for, of a tenant of its own: one tenant's are compiled one by one."""
        schema = tool(name, **{name: {"type": "boolean"}})["function"]["parameters"]
        prompt = ChatPrompt(USER, output=JsonOutput(schema, strict=True))
        return asyncio.create_task(self._service.generate(replace(request(name, prompt), scope=name)))

    async def fill(self) -> list[asyncio.Task[Any]]:
        """As many as are compiled at the same time."""
        asked = [self.ask(name) for name in FIRST]
        for _ in asked:
            await self._begun.get()
        return asked

    def release(self) -> None:
        self._release.set()


async def test_a_grammar_in_the_making_holds_up_nobody_else() -> None:
    async with constrained() as service:
        await service.generate(request("a", ANSWER))
        held = Held(service)
        try:
            waiting = [*await held.fill(), held.ask("three")]
            others = [request("b", ANSWER), request("d", ChatPrompt(USER))]
            replies = await asyncio.gather(*map(service.generate, others))
            assert all(isinstance(reply, Answer) for reply in replies)
            assert not any(task.done() for task in waiting)
        finally:
            held.release()
        for name, reply in zip((*FIRST, "three"), await asyncio.gather(*waiting), strict=True):
            assert list(json.loads(reply.text)) == [name]


def with_all_tools(service: Service) -> None:
    """Let the model see both tools, whatever a request declares: then it calls the one that is not."""
    encoded = service.text.encoded
    service.text.encoded = lambda prompt, *owner: encoded(replace(prompt, tools=AUTO.tools), *owner)


LOOSE = tool("search_flights", origin={"type": "string", "maxLength": 20})
SEEN = ChatPrompt(USER, [LOOSE])


COMPUTED: list[dict[str, Any]] = [
    {},
    {"overlap_steps": "on", "speculation": DRAFTS},  # a step is in flight behind the token that is refused
]


@pytest.mark.parametrize("settings", SETTINGS)
async def test_a_call_has_a_declared_name_and_arguments_of_its_schema(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the model would say, and however that is computed."""
    monkeypatch.setattr("holdfast.replicas.bridge.STREAM_INTERVAL_S", 0.0)
    replies = []
    for computed in COMPUTED:
        async with constrained(**computed) as service:
            with_all_tools(service)
            built = AnswerBuilder()
            async for pieces in service.stream(request("a", SEEN, **settings)):
                built.add(pieces)
            reply = built.answer()
            replies.append(reply)
            stats = service.engine.stats
            assert stats.refused > 0
            assert ([c.name for c in reply.tool_calls], reply.text) == (["search_flights"], None)
            assert list(json.loads(reply.tool_calls[0].arguments)) == ["origin"]
            assert reply.reason == "tool_calls"
            assert service.engine.occupancy().cells_held == len(service.bridge._live) == 0
            again = await service.generate(request("b", SEEN, **settings))
            assert said([again]) == said([reply])
    assert said(replies[:1]) * (len(COMPUTED) - 1) == said(replies[1:])


async def test_undeclared_calls_are_text_where_nothing_is_guaranteed() -> None:
    async with constrained(tools_guarantee="off") as service:
        with_all_tools(service)
        reply = await service.generate(request("a", SEEN))
        assert (reply.tool_calls, reply.reason) == ((), "stop")
        assert '"name": "get_weather"' in reply.text
        assert service.text.rewritten == 0


async def test_names_alone_leave_the_arguments_to_the_model() -> None:
    """A number where the city is meant is written under `schema` only."""
    prompt = ChatPrompt(USER, [tool("search_flights", origin={"type": "integer", "maximum": 99})])
    found = {}
    for guarantee in ("names", "schema"):
        async with constrained(tools_guarantee=guarantee) as service:
            with_all_tools(service)
            reply = await service.generate(request("a", prompt))
            assert [c.name for c in reply.tool_calls] == ["search_flights"]
            found[guarantee] = type(next(iter(json.loads(reply.tool_calls[0].arguments).values())))
    assert found == {"names": str, "schema": int}


async def test_text_and_whole_calls_are_as_they_were() -> None:
    tools = [tool("get_weather", city={"type": "string"})]
    asked = ["What is the weather in Paris?", "Hi!", "Thanks, bye.", "Is it warm in Rome?"]
    expected = []
    for guarantee in ("off", "schema"):
        async with constrained(tools_guarantee=guarantee, speculation=DRAFTS) as service:
            prompts = [ChatPrompt([{"role": "user", "content": text}], tools) for text in asked]
            commands = [request(f"{i}.{t}", p, temperature=t) for i, p in enumerate(prompts) for t in (0, 1)]
            expected.append(said(await asyncio.gather(*map(service.generate, commands))))
    whole = [(off, on) for off, on in zip(*expected, strict=True) if all(is_whole(*call, tools) for call in off[1])]
    assert all(off == on for off, on in whole)
    assert {bool(off[1]) for off, _ in whole} == {True, False}


TWO = [{"role": "user", "content": "What is the weather in Paris, and in Rome?"}]


async def test_allowed_tools_and_one_call_at_a_time_are_held_to_in_free_text() -> None:
    """The model sees both tools, and would call the weather for both cities."""
    both = ChatPrompt(TWO, [tool("get_weather", city={"type": "string", "maxLength": 20}), LOOSE])
    one, allowed = {"parallel_tool_calls": False}, {"allowed_tools": ("search_flights",)}
    async with constrained(speculation=DRAFTS) as service:
        prompts = [both, replace(both, **one), replace(both, **allowed), replace(both, **one, **allowed)]
        asked = [service.generate(request(f"{i}", p, temperature=1.2)) for i, p in enumerate(prompts)]
        free, single, other, neither = await asyncio.gather(*asked)
        assert [c.name for c in free.tool_calls] == ["get_weather"] * 2
        assert said([single])[0][1] == said([free])[0][1][:1]
        assert {c.name for c in other.tool_calls} == {"search_flights"}
        assert [c.name for c in neither.tool_calls] == ["search_flights"]
        assert service.engine.stats.refused > 0
        for reply in (other, neither):
            assert all(is_whole(c.name, c.arguments, [LOOSE]) for c in reply.tool_calls if c.closed)
            assert "get_weather" not in (reply.text or "")


async def test_replies_whose_calls_are_not_held_to_their_schemas_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema that no grammar can be made of, one that is too long, and a grammar that fails in the middle."""
    never = {"allOf": [{"type": "string"}, {"type": "null"}]}
    long = {"enum": ["Paris", "x" * 500]}
    monkeypatch.setattr("holdfast.replicas.constraints.compiler._LONGEST_KEY", 400)
    async with constrained() as service:
        for number, schema in enumerate((never, long)):
            prompt = ChatPrompt(USER, [tool("get_weather", city=schema)])
            reply = await service.generate(request(f"{number}", prompt))
            assert [c.name for c in reply.tool_calls] == ["get_weather"], "names are held to"
            assert service.text.stats.unguarded == number + 1
        take, taken = GuidedMatcher.take, []

        def breaks(matcher: GuidedMatcher, tokens: Any) -> int:
            taken.append(tokens)
            if len(taken) == 4:
                matcher.advance([0])  # nothing that a call may have: as if it had grown beyond its limits
            return take(matcher, tokens)

        monkeypatch.setattr(GuidedMatcher, "take", breaks)
        weather = tool("get_weather", city={"type": "string"})
        reply = await service.generate(request("breaks", ChatPrompt(USER, [weather])))
        assert isinstance(reply, Answer)
        assert (service.text.stats.unguarded, service.engine.stats.unguarded) == (2, 1)


class Work:
    """How much is done at most between two steps of the event loop: calls of functions, whoever is slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = self._calls = 0
        run = asyncio.Handle._run

        def counted(handle: asyncio.Handle) -> None:
            self._calls = 0
            run(handle)
            self.most = max(self.most, self._calls)

        def count(*_: Any) -> None:
            self._calls += 1

        monkeypatch.setattr(asyncio.Handle, "_run", counted)
        sys.setprofile(count)


def many_tools(n: int, said: str) -> list[dict[str, Any]]:
    words = {"type": "string", "maxLength": 9, "description": said * 60}
    return [tool(f"tool_{said}_{index}", **{f"{key}_{index}": words for key in "abcdef"}) for index in range(n)]


async def test_a_new_set_of_many_tools_holds_up_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the event loop does for it at a time does not grow with what the tools say, and hardly with their number."""
    monkeypatch.setattr("holdfast.replicas.constraints.compiler._PATIENCE_S", 600.0)  # counted, not timed
    async with constrained() as service:
        await service.generate(request("warm", REQUIRED))
        text, work = service.text, Work(monkeypatch)
        try:
            most = {}
            for choice in ("required", "auto"):
                for n in (10, 200):
                    work.most = 0
                    prompt = ChatPrompt(USER, many_tools(n, choice[0]), choice)
                    asked = request(f"{choice} {n}", prompt)
                    encoded = await text.encoded(prompt)
                    limits = await _limits(text, service._compiling, asked)
                    assert limits.matcher is not None
                    text.reply(asked, encoded)
                    await asyncio.sleep(0)
                    most[choice, n] = work.most
        finally:
            sys.setprofile(None)
        for choice in ("required", "auto"):
            assert most[choice, 200] < most[choice, 10] + 20 * 200, most


async def test_a_guarantee_whose_grammar_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has asked for it: no request fails or waits for long."""
    monkeypatch.setattr("holdfast.replicas.constraints.compiler._PATIENCE_S", 0.01)
    async with constrained() as service:
        held = Held(service)
        try:
            reply = await service.generate(request("a", SEEN))
            assert isinstance(reply, Answer)
            assert service.text.stats.unguarded == 1
        finally:
            held.release()
