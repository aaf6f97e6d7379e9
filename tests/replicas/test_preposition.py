"""Pre-positioning with the shipped model: what it moves off the turn, that nothing changes, and that it gives way."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from waiting import go_by, run_virtual, until_async

from holdfast.replicas.config import EngineConfig, RetentionConfig
from holdfast.replicas.events import ProgramEnded
from holdfast.replicas.plan import Sampling
from holdfast.replicas.preposition import PrePositioning
from holdfast.replicas.requests import Answer, ChatPrompt, GenerateRequest, ToolCall
from holdfast.replicas.service import Service
from holdfast.replicas.stats import Occupancy

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CONFIG = EngineConfig(cells=4096, threads=1, retention=RetentionConfig("fixed", fixed_s=60.0, most_s=60.0))


def turn(name: str, messages: list[Any], **more: Any) -> GenerateRequest:
    prompt = ChatPrompt(messages, (TOOL,), "required" if len(messages) == 1 else "auto")
    return GenerateRequest(name, prompt, Sampling(40), program_id="p", **more)


async def conversation(service: Service, turns: int, pauses: bool = True) -> list[Answer]:
    """Turns whose calls are answered at once, or, where the tool `pauses`, when the engine has nothing to do."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    answers = []
    for number in range(turns):
        answer = await service.generate(turn(f"turn {number}", messages, program_turns=number))
        assert isinstance(answer, Answer)
        answers.append(answer)
        made = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
        messages = [*messages, {"role": "assistant", "content": answer.text, "tool_calls": made}]
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in made]
        if not made:
            messages.append({"role": "user", "content": "And in Rome?"})
        if pauses and made:
            await until_async(lambda number=number: service.engine.stats.own_requests["ahead"] > number)
    return answers


def run(config: EngineConfig, turns: int = 2, pauses: bool = True) -> tuple[list[Answer], Any, int]:
    async def main() -> tuple[list[Answer], Any, int]:
        service = Service.load(config)
        try:
            return await conversation(service, turns, pauses), service.engine.stats, service.engine.occupancy().pins
        finally:
            await service.close()

    return asyncio.run(main())


def test_the_turn_after_a_call_finds_what_was_known_of_it() -> None:
    on, stats, _ = run(CONFIG)
    off, plain, _ = run(replace(CONFIG, preposition=False), pauses=False)
    assert [(each.text, [call.arguments for call in each.tool_calls]) for each in on] == [
        (each.text, [call.arguments for call in each.tool_calls]) for each in off
    ]
    assert stats.ahead_used == on[1].usage.cached - off[1].usage.cached > 0
    assert (plain.ahead_computed, stats.pin_hits, plain.pin_hits) == (0, 1, 1)


def test_a_tool_that_returns_at_once_finds_nothing_begun() -> None:
    answers, stats, _ = run(replace(CONFIG, preposition_after_s=30.0), pauses=False)
    assert len(answers) == 2
    assert stats.ahead_computed == 0


def test_its_program_ends_and_nothing_of_it_is_left() -> None:
    async def main() -> None:
        service = Service.load(CONFIG)
        try:
            await conversation(service, 1)
            service.notice(ProgramEnded("", "p"))
            other = GenerateRequest("behind", ChatPrompt([{"role": "user", "content": "Hello"}]), Sampling(1))
            await service.generate(other)
            assert service.engine.occupancy().pins == 0
            assert service.engine.stats.ahead_wasted == service.engine.stats.ahead_computed > 0
        finally:
            await service.close()

    asyncio.run(main())


def test_for_a_program_that_is_over_nothing_begins() -> None:
    async def main() -> None:
        service = Service.load(replace(CONFIG, preposition_after_s=0.02))
        try:
            await conversation(service, 1, pauses=False)
            service.notice(ProgramEnded("", "p"))
            await until_async(lambda: not service._preposition._tasks)
            await service.generate(
                GenerateRequest("behind", ChatPrompt([{"role": "user", "content": "x"}]), Sampling(1))
            )
            assert service.engine.stats.ahead_computed == 0
        finally:
            await service.close()

    asyncio.run(main())


EMPTY = Occupancy(0, 0, 0, 0, 0, 0, 0)
CALLED = Answer(None, (), (), "tool_calls", None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("busy", [False, True])
def test_it_waits_a_moment_and_is_left_where_others_wait(busy: bool) -> None:
    async def main() -> list[str]:
        done: list[str] = []

        async def compute(request: GenerateRequest) -> None:
            done.append(request.request_id)

        ahead = PrePositioning(0.01, lambda: replace(EMPTY, waiting=int(busy)), compute)
        answer = replace(CALLED, tool_calls=(ToolCall("c", "get_weather", "{}"),))
        ahead.turn_ended(turn("one", [{"role": "user", "content": "x"}]), answer)
        ahead.needless(("", "p"))  # the turn was faster
        await go_by(0.05)
        ahead.turn_ended(turn("three", [{"role": "user", "content": "x"}]), answer)
        ahead.turn_ended(turn("last", [{"role": "user", "content": "x"}], program_end=True), answer)
        await go_by(0.05)
        ahead.turn_ended(turn("open", [{"role": "user", "content": "x"}]), answer)
        await ahead.close()
        assert not ahead._tasks
        return done

    assert run_virtual(main()) == ([] if busy else ["three/ahead"])


@pytest.mark.parametrize(
    ("last_reply", "sent"), [(None, True), ({}, False), ({"reasoning_content": "I thought before."}, True)]
)
def test_thoughts_are_part_of_the_next_prompt_where_the_client_sends_them_back(last_reply: Any, sent: bool) -> None:
    """As it did with the last reply; before the first one they are taken to come, which is what has been drawn."""

    async def main() -> list[GenerateRequest]:
        done: list[GenerateRequest] = []

        async def compute(request: GenerateRequest) -> None:
            done.append(request)

        ahead = PrePositioning(0.0, lambda: EMPTY, compute)
        messages: list[Any] = [{"role": "user", "content": "x"}]
        if last_reply is not None:
            messages += [{"role": "assistant", "content": "y", **last_reply}, {"role": "user", "content": "z"}]
        thought = replace(CALLED, reasoning="Rain?", tool_calls=(ToolCall("c", "get_weather", "{}"),))
        ahead.turn_ended(turn("one", messages), thought)
        await asyncio.wait(ahead._tasks.values())
        return done

    (coming,) = asyncio.run(main())
    assert isinstance(coming.prompt, ChatPrompt)
    assert coming.prompt.messages[-1].get("reasoning_content") == ("Rain?" if sent else None)


def test_it_takes_nothing_from_standing_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests give up what is asked ahead; work of the engine's own accord does not."""

    async def main() -> int:
        service = Service.load(CONFIG)
        wanted: list[None] = []
        others = service.questions.others

        def counted() -> Any:
            wanted.append(None)
            return others()

        monkeypatch.setattr(service.questions, "others", counted)
        try:
            await conversation(service, 2)
            assert service.engine.stats.ahead_computed > 0
        finally:
            await service.close()
        return len(wanted)

    assert asyncio.run(main()) == 2
